"""The families of mixtures of experts in transformers, each built small and with random weights.

A family has the name of its folder in the library. What its configuration offers for the routing are its variants:
groups, selection biases, factors, normalized gates, capacities and so on.
"""

import warnings
from dataclasses import dataclass, field, fields
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.streams import torch_stream

#: Sizes that all of them share: symbols, width, hidden units of an expert, experts M.
SYMBOLS, WIDTH, HIDDEN, EXPERTS = 64, 32, 48, 8

COMMON = dict(
    **dict(vocab_size=SYMBOLS, hidden_size=WIDTH, num_hidden_layers=2, max_position_embeddings=64),
    **dict(num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0),
)

#: The numbers of experts and of those selected, and the factor on the gates, under all of their names.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SELECTED = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
FACTORS = (
    *("routed_scaling_factor", "route_scale", "router_scaling_factor"),
    *("moe_routed_scaling_factor", "moe_router_scaling_factor"),
)

#: Of these a configuration takes the arguments that it knows.
USUAL: dict[str, Any] = COMMON | dict(
    **dict(head_dim=16, intermediate_size=HIDDEN, moe_intermediate_size=HIDDEN, dense_intermediate_size=HIDDEN),
    **dict(shared_expert_intermediate_size=HIDDEN, shared_intermediate_size=HIDDEN, share_expert_dim=HIDDEN),
    **dict(shared_experts_intermediate_size=HIDDEN, moe_shared_expert_intermediate_size=HIDDEN),
    **dict(n_shared_experts=1, mlp_layer_types=["sparse"] * 2, first_k_dense_replace=0, num_dense_layers=0),
    **dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
    **dict(index_topk=8, index_head_dim=16, index_n_heads=2, n_group=1, topk_group=1),
    **dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16),
    **dict.fromkeys(COUNTS, EXPERTS),
    **dict.fromkeys(SELECTED, 2),
    **dict.fromkeys(FACTORS, 1.0),
)

#: Variants of every family whose configuration knows one of their arguments and has another value for it.
VARIANTS: dict[str, dict[str, Any]] = {
    "K = 1": dict.fromkeys(SELECTED, 1),
    "two of four groups": dict(n_group=4, topk_group=2, topk_method="group_limited_greedy"),
    "one of two groups": dict(n_group=2, topk_group=1, topk_method="group_limited_greedy"),
    "factor": dict.fromkeys(FACTORS, 2.5),
    "normalized": dict(norm_topk_prob=True),
    "not normalized": dict(norm_topk_prob=False),
}

PLAIN = "as it is"

#: The version of the library that has all of these families.
LEAST = "5.23"


@dataclass(frozen=True)
class Built:
    """How a family is built small.

    Attributes:
        config, model: names of its classes.
        own: arguments of the configuration that `USUAL` does not have, or has otherwise.
        drawn: what is drawn in a variant, N(0, 0.2^2) on top of its start: what the names of the tensors end with.
        variants: arguments of its own variants, beside `VARIANTS`.
    """

    config: str
    model: str
    own: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)


def _language(name: str, own: dict[str, Any] | None = None, *, text: str = "", **parts) -> Built:
    """A family that has a language model of its name; `text` where its configuration is one among several."""
    return Built(f"{name}{text}Config", f"{name}ForCausalLM", own or {}, **parts)


def _text(name: str, own: dict[str, Any] | None = None, **parts) -> Built:
    """A family of models of images and texts, of which only the stack of the texts is built."""
    return Built(f"{name}TextConfig", f"{name}TextModel", own or {}, **parts)


def _dbrx(**own) -> dict[str, Any]:
    """What DBRX's configuration says of its experts."""
    return dict(hidden_size=WIDTH, ffn_hidden_size=HIDDEN, moe_num_experts=EXPERTS, moe_top_k=2) | own


BIAS = {"bias": "e_score_correction_bias"}
ATTENTION, INDEXED = dict(layer_types=["full_attention"] * 2), dict(layer_types=["indexed_attention"] * 2)
LOCAL = dict(swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_head_dim=16, rel_extent=64)
LOGIT_BIAS = {"router bias": "router.bias"}
STACKS = dict(vocab_size=SYMBOLS, d_model=WIDTH, num_experts=EXPERTS, decoder_start_token_id=0, pad_token_id=0)
SWITCH = STACKS | dict(
    **dict(d_kv=16, d_ff=HIDDEN, num_heads=2, dropout_rate=0.0),
    **dict(num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
)
NLLB = STACKS | dict(
    **dict(encoder_layers=2, encoder_ffn_dim=HIDDEN, encoder_attention_heads=2, encoder_sparse_step=2),
    **dict(decoder_layers=2, decoder_ffn_dim=HIDDEN, decoder_attention_heads=2, decoder_sparse_step=2),
)

SIZES: dict[str, Built] = {
    "afmoe": _language("Afmoe", drawn={"bias": "expert_bias"}),
    "aria": Built("AriaTextConfig", "AriaTextForCausalLM"),
    "axk1": _language("AXK1", drawn=BIAS),
    "axk2": _language("AXK2", drawn=BIAS),
    "bailing_hybrid": _language("BailingHybrid", ATTENTION, drawn=BIAS),
    "beam": _language("Beam", drawn=BIAS),
    "cohere2_moe": _language(
        "Cohere2Moe",
        variants={
            "sigmoid": dict(expert_selection_fn="sigmoid"),
            "sigmoid, not normalized": dict(expert_selection_fn="sigmoid", norm_topk_prob=False),
            "shared, average": dict(num_shared_experts=1),
            "shared, sum": dict(num_shared_experts=1, shared_expert_combination_strategy="sum"),
        },
    ),
    "dbrx": _language(
        "Dbrx",
        dict(
            **dict(d_model=WIDTH, n_heads=2, n_layers=2, max_seq_len=64, ffn_config=_dbrx()),
            # without these two numbers the library's own configuration gives a model that does not run
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ),
        variants={
            "K = 1": dict(ffn_config=_dbrx(moe_top_k=1)),
            "not normalized": dict(ffn_config=_dbrx(moe_normalize_expert_weights=None)),
            "normalized, squares": dict(ffn_config=_dbrx(moe_normalize_expert_weights=2.0)),
        },
    ),
    "deepseek_ocr2": _text("DeepseekOcr2"),
    "deepseek_v2": _language("DeepseekV2"),
    "deepseek_v3": _language("DeepseekV3", drawn=BIAS),
    "deepseek_v32": _language("DeepseekV32", drawn=BIAS),
    "deepseek_v4": _language(
        "DeepseekV4",
        dict(mlp_layer_types=["moe"] * 2, o_groups=2, o_lora_rank=8, num_key_value_heads=1),
        drawn=BIAS,
        variants={"sigmoid": dict(scoring_func="sigmoid"), "hash": dict(mlp_layer_types=["hash_moe", "moe"])},
    ),
    "diffusion_gemma": Built(
        "DiffusionGemmaTextConfig",
        "DiffusionGemmaEncoderTextModel",
        dict(global_head_dim=16),
        drawn={"scales": ("router.scale", "per_expert_scale")},
    ),
    "doge": _language("Doge", dict(is_moe=True, num_experts=16)),
    "dots1": _language("Dots1", drawn=BIAS),
    "dots3_note": _language("Dots3Note", text="Text", drawn=BIAS),
    "ernie4_5_moe": _language(
        "Ernie4_5_Moe",
        dict(moe_layer_start_index=0),
        drawn=BIAS,
        variants={"none shared": dict(moe_num_shared_experts=0)},
    ),
    "ernie4_5_vl_moe": _text(
        "Ernie4_5_VLMoe",
        dict(moe_intermediate_size=[HIDDEN, HIDDEN])
        | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[3, 3, 2])),
        drawn=BIAS,
        variants={"none shared": dict(moe_num_shared_experts=0)},
    ),
    "exaone_moe": _language("ExaoneMoe", drawn=BIAS),
    "flex_olmo": _language("FlexOlmo"),
    "flint": _language("Flint", dict(mlp_only_layers=[])),
    "gemma4": _language(
        "Gemma4",
        dict(enable_moe_block=True, hidden_size_per_layer_input=0, global_head_dim=16),
        text="Text",
        drawn={"scales": ("router.scale", "per_expert_scale")},
    ),
    "glm4_moe": _language("Glm4Moe", drawn=BIAS),
    "glm4_moe_lite": _language("Glm4MoeLite", drawn=BIAS),
    "glm4v_moe": _text(
        "Glm4vMoe",
        dict(
            rope_parameters=dict(
                rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]
            )
        ),
        drawn=BIAS,
    ),
    "glm5_next": _text("Glm5Next", INDEXED | dict(qk_rope_head_dim=0, index_kpool=2), drawn=BIAS),
    "glm_moe_dsa": _language("GlmMoeDsa", drawn=BIAS),
    "gpt_oss": _language("GptOss", drawn=LOGIT_BIAS),
    "granitemoe": _language("GraniteMoe"),
    "granitemoe_swa": _language("GraniteMoeSWA", variants={"none shared": dict(shared_intermediate_size=0)}),
    "granitemoehybrid": _language(
        "GraniteMoeHybrid",
        ATTENTION | dict(mamba_n_heads=2),
        variants={"none shared": dict(shared_intermediate_size=0)},
    ),
    "granitemoeshared": _language("GraniteMoeShared", variants={"none shared": dict(shared_intermediate_size=0)}),
    "hunyuan_v1_moe": _language("HunYuanMoEV1"),
    "hy_v3": _language("HYV3", drawn=BIAS),
    "hy_v4": _language("HYV4", drawn=BIAS),
    "inkling": _language(
        "Inkling",
        LOCAL | dict(n_shared_experts=2),
        text="Text",
        drawn=BIAS | {"global scale": "global_scale"},
        variants={"one shared": dict(n_shared_experts=1)},
    ),
    "inkling2": _language("Inkling2", LOCAL, text="Text", drawn=BIAS),
    "jamba": _language(
        "Jamba", dict(attn_layer_period=1, attn_layer_offset=0, expert_layer_period=1, expert_layer_offset=0)
    ),
    "jetmoe": _language("JetMoe", dict(kv_channels=16)),
    "kimi_linear": _language("KimiLinear", ATTENTION, drawn=BIAS),
    "kolibri1": _language("Kolibri1", drawn=BIAS),
    "laguna": _language("Laguna", drawn=BIAS, variants={"soft cap": dict(moe_router_logit_softcapping=1.0)}),
    "lfm2_moe": _language(
        "Lfm2Moe", ATTENTION, drawn={"bias": "expert_bias"}, variants={"no bias": dict(use_expert_bias=False)}
    ),
    "llama4": _language("Llama4", text="Text"),
    "longcat_flash": _language(
        "LongcatFlash",
        dict(num_layers=1, head_dim=8, ffn_hidden_size=HIDDEN, expert_ffn_hidden_size=HIDDEN, zero_expert_num=4),
        drawn=BIAS | {"router bias": "classifier.bias"},
        variants={"no zero experts": dict(zero_expert_num=0), "router bias": dict(router_bias=True)},
    ),
    "mellum": _language("Mellum"),
    "mimo_v2_flash": _language("MiMoV2Flash", ATTENTION, drawn=BIAS),
    "minimax": _language("MiniMax"),
    "minimax_m2": _language("MiniMaxM2", drawn=BIAS),
    "minimax_m3_vl": _language("MiniMaxM3VL", text="Text", drawn=BIAS),
    "mistral4": _language("Mistral4"),
    "mistral_large4": _text("MistralLarge4"),
    "mixtral": _language("Mixtral"),
    "muse_spark": _text(
        "MuseSpark", dict(moe_hidden_size=16), drawn=BIAS, variants={"output multiplier": dict(output_multiplier=2.0)}
    ),
    "nemotron_h": _language(
        "NemotronH",
        dict(layers_block_type=["full_attention", "moe", "moe"]),
        drawn=BIAS,
        variants={"latent": dict(moe_latent_size=16)},
    ),
    "nllb_moe": Built(
        "NllbMoeConfig",
        "NllbMoeForConditionalGeneration",
        NLLB,
        drawn={"router bias": "classifier.bias"},
        variants={
            "router bias": dict(router_bias=True),
            "capacity": dict(moe_eval_capacity_token_fraction=0.1),
            "normalized before": dict(normalize_router_prob_before_dropping=True),
            "by priority": dict(batch_prioritized_routing=True, moe_eval_capacity_token_fraction=0.1),
            "second drawn": dict(second_expert_policy="random"),
            "second sampled": dict(second_expert_policy="sampling"),
        },
    ),
    "olmoe": _language("Olmoe"),
    "openai_privacy_filter": Built(
        "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterForTokenClassification", drawn=LOGIT_BIAS
    ),
    "phimoe": _language("Phimoe"),
    "qwen2_moe": _language("Qwen2Moe"),
    "qwen3_5_moe": _language("Qwen3_5Moe", ATTENTION, text="Text"),
    "qwen3_moe": _language("Qwen3Moe"),
    "qwen3_next": _language("Qwen3Next", ATTENTION),
    "qwen3_omni_moe": Built("Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": _text("Qwen3VLMoe"),
    "qwen4_exp": _language(
        "Qwen4Exp",
        INDEXED
        | dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8)
        | dict(indexer_compress_ratio=2, hc_lowrank=8),
        text="Text",
    ),
    "solar_open": _language("SolarOpen", drawn=BIAS),
    "step3p7": _text("Step3p7", ATTENTION | dict(sliding_window=32), drawn=BIAS),
    "switch_transformers": Built(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        SWITCH,
        drawn={"router bias": "classifier.bias"},
        variants={"router bias": dict(router_bias=True), "capacity": dict(expert_capacity=4)},
    ),
    "unlimited_ocr": _text("UnlimitedOcr"),
    "zaya": _language("Zaya", dict(num_experts_per_tok=1, router_hidden_size=16), drawn={"bias": "balancing_biases"}),
}

#: Families that are not built, and why.
CANNOT = {
    "vitpose_backbone": "it has experts and no router: the caller says for each image which expert it goes to",
}


def library(least: str = "5.6") -> ModuleType:
    """The library transformers, silent about what a model of random weights lacks.

    Args:
        least: the version that is needed.

    Raises:
        ImportError: if it is not there, or too old.
    """
    expected = f'pip install "transformers>={least}", and restart Python'
    try:
        with warnings.catch_warnings(action="ignore"):  # that a notebook has no progress bars
            import transformers
    except ImportError as error:
        raise ImportError(f"transformers: expected {least} or later, got {error}; {expected}") from error
    if not serves(transformers, least):
        raise ImportError(f"transformers: expected {least} or later, got {transformers.__version__}; {expected}")
    transformers.logging.set_verbosity_error()
    return transformers


def serves(transformers: ModuleType, least: str) -> bool:
    """Whether the library is of a version or a later one."""
    from packaging.version import Version  # transformers needs it too

    return Version(transformers.__version__) >= Version(least)


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Draws all matrices that a model learns, `N(0, 1/n)` for n inputs; vectors stay as the library makes them."""
    rng = torch_stream(seed, "weights")
    for p in model.parameters():
        if p.ndim > 1 and p.requires_grad:  # selection biases of Ernie are a matrix of one row
            p.copy_(torch.randn(p.shape, generator=rng) / p.shape[-1] ** 0.5)


def variants(name: str) -> list[str]:
    """The variants of a family, the first of them without any change.

    Args:
        name: one of `SIZES`.

    Raises:
        ValueError: for an unknown family.
        ImportError: as `library`.
    """
    of = SIZES[check.choice("name", name, SIZES)]
    known = _fields(of)
    usual = _arguments(of)
    offered = [
        variant
        for variant, changes in VARIANTS.items()
        if any(key in known and usual.get(key, known[key]) != value for key, value in changes.items())
    ]
    return list(dict.fromkeys([PLAIN, *offered, *of.drawn, *of.variants]))


def build(name: str, variant: str = PLAIN, *, seed: int = 0) -> nn.Module:
    """A small model of a family with random weights: width 32, two layers, eight experts, of which two are selected.

    Args:
        name: one of `SIZES`; variant: one of its `variants`.
        seed: draws the weights, and what the variant draws beside them.

    Raises:
        ValueError: for an unknown family or variant.
        ImportError: as `library`.
    """
    check.choice("variant", variant, variants(name))
    of = SIZES[name]
    transformers = library(LEAST)
    arguments = _arguments(of, VARIANTS.get(variant, {})) | of.variants.get(variant, {})
    with torch.random.fork_rng(devices=[]):  # the library draws weights of its own first
        made = getattr(transformers, of.config)(**arguments)
        model = getattr(transformers, of.model)(made)
    draw_weights(model, seed)
    _draw_tables(model, seed)
    if variant in of.drawn:
        _draw_beside(model, of.drawn[variant], seed)
    return model.eval()


def batch(name: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of a model of the family: 8 random texts of 32 symbols, and as many for the decoder if it has one.

    Args:
        name: one of `SIZES`; seed: draws the texts.

    Raises:
        ValueError: for an unknown family.
    """
    of = SIZES[check.choice("name", name, SIZES)]
    texts = torch.randint(3, SYMBOLS, (2, 8, 32), generator=torch_stream(seed, "inputs"))
    second = ("decoder_input_ids",) if "decoder_start_token_id" in of.own else ()
    return dict(zip(("input_ids", *second), texts, strict=False))


def _fields(of: Built) -> dict[str, Any]:
    """What a family's configuration knows, with the library's own values."""
    return {known.name: known.default for known in fields(getattr(library(LEAST), of.config))}


def _arguments(of: Built, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Those of `USUAL` and of the changes that the configuration knows, and the family's own."""
    known = _fields(of)
    usual = {key: value for key, value in USUAL.items() if key in known}
    return usual | of.own | {key: value for key, value in (changes or {}).items() if key in known}


@torch.no_grad()
def _draw_tables(model: nn.Module, seed: int) -> None:
    """Draws which experts a symbol goes to where a table says so; the library has zeros there."""
    rng = torch_stream(seed, "weights", 1)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.rand(len(table), EXPERTS, generator=rng).topk(table.shape[1]).indices)


@torch.no_grad()
def _draw_beside(model: nn.Module, ending: str | tuple[str, ...], seed: int) -> None:
    """Adds N(0, 0.2^2) to all tensors of a model whose name ends so."""
    rng = torch_stream(seed, "weights", 2)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name.endswith(ending):
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=rng))
