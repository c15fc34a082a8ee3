"""Two models that should be one: what was done to the second is named, where it was done, and sound pairs are equal."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moe_theory.diagnose import compare

pytest.importorskip("transformers")
from moe_theory.diagnose import tiny
from moe_theory.diagnose.traces import layers_of

SQUARE = {"Mixtral": dict(intermediate_size=32), "Switch": dict(d_ff=32), "OLMoE": dict(intermediate_size=16)}


@pytest.fixture(autouse=True)
def what_an_older_library_does_not_serve_is_skipped(monkeypatch):
    def library(least="5.6", asked=tiny.library):
        try:
            return asked(least)
        except ImportError as error:
            pytest.skip(str(error))

    monkeypatch.setattr(tiny, "library", library)


def sigmoid_model(seed=0, **config):
    """A model of the family of DeepSeek-V3 with random weights and biases, three layers, two of them with experts."""
    transformers = tiny.library("5.19")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=3)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16)
    parts = dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1)
    groups = dict(n_group=1, topk_group=1) | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**sizes, **heads, **parts, **experts, **groups)
        )
        for p in model.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        for layer in layers_of(model):
            layer.router.e_score_correction_bias.copy_(0.2 * torch.randn(8))
    return model.eval()


def made(family: str, **config) -> nn.Module:
    return sigmoid_model(**config) if family == "DeepSeek-V3" else tiny.tiny(family, **config)


def texts(family: str, number: int = 1, seed: int = 0):
    return tiny.batches("Mixtral" if family == "DeepSeek-V3" else family, number, seed=seed)


def at(number: int, change: Callable) -> Callable:
    """A change of one layer."""
    return lambda model: change(layers_of(model)[number])


def renumbered(part: str, order: Callable) -> Callable:
    """Experts, or the router, in another order."""

    def change(layer):
        if part == "router":
            layer.W.copy_(order(layer.W))
        else:
            for group in tiny._of_experts(layer):
                for p, value in zip(group, order(torch.stack(group)).unbind(), strict=True):
                    p.copy_(value)

    return change


def roll(p):
    return p.roll(1, 0)


def exchange(p):
    return p[[0, 1, 5, 3, 4, 2, 6, 7]]


def randomized(*experts: int) -> Callable:
    def change(layer):
        for group in tiny._of_experts(layer):
            for m in experts or range(len(group)):
                group[m].copy_(torch.randn(group[m].shape, generator=torch.Generator().manual_seed(m)) * 0.2)

    return change


def matrices(name: str, change: Callable, *experts: int) -> Callable:
    """One kind of the experts' matrices, changed."""

    def changes(layer):
        for number, p in layer.experts.named_parameters():
            if name in number:
                for m in experts or range(len(layer.W)):
                    if p.ndim == 3:
                        p[m] = change(p[m].clone())
                    elif f"_{m}." in number:
                        p.copy_(change(p.clone()))

    return changes


def shared_lost(layer):
    for name, p in layer.block.named_parameters():
        if "shared_expert" in name and "down_proj" in name:
            p.zero_()


def shared_gate_ignored(layer):
    layer.block.shared_expert_gate = nn.Linear(32, 1)
    layer.block.shared_expert_gate.weight.zero_()
    layer.block.shared_expert_gate.bias.fill_(100.0)


def shared_gate_constant(layer):
    layer.block.shared_expert_gate.weight.zero_()


def shared_other(layer):
    for name, p in layer.block.named_parameters():
        if "shared_expert." in name or "shared_experts." in name:
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))


def gates_changed(change: Callable) -> Callable:
    """What a router returns, changed: logits, gates and numbers."""
    return lambda layer: layer.router.register_forward_hook(lambda _, __, out: change(*out))


def biases(change: Callable) -> Callable:
    def changes(layer):
        bias = layer.router.e_score_correction_bias
        bias.copy_(change(bias.clone()))

    return changes


def set_router(**values) -> Callable:
    return lambda layer: [setattr(layer.router, name, value) for name, value in values.items()]


def router_of_other(model):
    first, second = layers_of(model)
    second.W.copy_(first.W)


def layers_exchanged(model):
    one, other = (list(layer.block.parameters()) for layer in layers_of(model))
    for p, q in zip(one, other, strict=True):
        kept = p.clone()
        p.copy_(q)
        q.copy_(kept)


def block_silent(layer):
    layer.block.register_forward_hook(lambda _, __, out: 0 * out)


def block_louder(layer):
    layer.block.register_forward_hook(lambda _, __, out: 1.001 * out)


def experts_shuffled(layer):
    layer.experts.register_forward_hook(lambda _, args, out: out.flip(0) if len(out) > 100 else out)


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))


def embeddings(model):
    model.get_input_embeddings().weight[5] *= 1.01


def attention(number):
    def change(model):
        weight = model.model.layers[number].self_attn.o_proj.weight
        weight.copy_(weight.flip(0))

    return change


def both(*changes):
    return lambda model: [change(model) for change in changes]


def skipped(model):
    del model.model.layers[1].mlp
    model.model.layers[1].mlp = nn.Identity()


DECODERS = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE")
ALL = (*DECODERS, "Switch", "DeepSeek-V3")
V3 = ("DeepSeek-V3",)

#: What is done to the second model: families, the change, parts that are to be named, the layer, what is said.
FAULTS: dict[str, tuple[tuple[str, ...], Callable, set[str], int, str]] = {
    "experts rolled": (ALL, at(1, renumbered("experts", roll)), {"order"}, 1, "experts renumbered against the router"),
    "two experts exchanged": (ALL, at(0, renumbered("experts", exchange)), {"order"}, 0, "[0, 1, 5, 3, 4, 2, 6, 7]"),
    "router rolled": (
        *(ALL[:5], at(1, renumbered("router", roll)), {"order"}, 1),
        "router renumbered against the experts, [1, 2, 3, 4, 5, 6, 7, 0]",
    ),
    "rolled, one random": (
        *(DECODERS, both(at(1, renumbered("experts", roll)), at(1, randomized(3))), {"order", "experts"}, 1),
        "experts renumbered against the router",
    ),
    "one expert random": (ALL, at(1, randomized(3)), {"experts"}, 1, "experts [3]"),
    "all experts random": (ALL, at(0, randomized()), {"experts"}, 0, "experts [0..7]"),
    "one expert zero": (("Mixtral", "DeepSeek-V3"), at(1, matrices("down_proj", lambda p: 0 * p, 2)), {"experts"}, 1, "experts [2] (answer 0)"),
    "one expert another's": (("Mixtral",), at(1, lambda layer: [p.__setitem__(3, p[6]) for p in layer.experts.parameters()]), {"experts"}, 1, "experts [3] (as those of a numbered [6])"),
    "down transposed": (("Mixtral",), at(1, matrices("down_proj", lambda p: p.T)), {"transposed"}, 1, "experts [0..7] (down_proj transposed)"),
    "one down transposed": (("Mixtral",), at(1, matrices("down_proj", lambda p: p.T, 3)), {"transposed"}, 1, "experts [3] (down_proj transposed)"),
    "up transposed": (("OLMoE",), at(1, matrices("gate_up_proj", lambda p: p.T)), {"transposed"}, 1, "experts [0..7] (gate_up_proj transposed)"),
    "halves transposed": (("Mixtral",), at(0, matrices("gate_up_proj", lambda p: torch.cat([h.T for h in p.chunk(2)]))), {"transposed"}, 0, "experts [0..7] (gate_up_proj each half transposed)"),
    "wo transposed": (("Switch",), at(0, matrices("wo", lambda p: p.T, 1, 4)), {"transposed"}, 0, "experts [1, 4] (wo transposed)"),
    "both transposed": (("Switch",), at(1, matrices("w", lambda p: p.T)), {"transposed"}, 1, "experts [0..7] (wi, wo transposed)"),
    "gate and up swapped": (DECODERS, at(1, matrices("gate_up_proj", lambda p: p.roll(len(p) // 2, 0))), {"experts"}, 1, "experts [0..7] (gate_up_proj halves exchanged)"),
    "gate and up in turn": (DECODERS, at(1, matrices("gate_up_proj", lambda p: torch.stack(p.chunk(2), 1).flatten(0, 1))), {"experts"}, 1, "(gate_up_proj rows of the halves in turn)"),
    "shared lost": (("Qwen2-MoE", "DeepSeek-V3"), at(1, shared_lost), {"shared"}, 1, "lost"),
    "shared other": (("Qwen2-MoE", "DeepSeek-V3"), at(0, shared_other), {"shared"}, 0, "another"),
    "shared gate ignored": (("Qwen2-MoE",), at(0, shared_gate_ignored), {"shared gate"}, 0, "by token"),
    "shared gate constant": (("Qwen2-MoE",), at(1, shared_gate_constant), {"shared gate"}, 1, "by token"),
    "bias lost": (V3, at(1, biases(torch.zeros_like)), {"bias"}, 1, "lost"),
    "bias rolled": (V3, at(0, biases(roll)), {"bias"}, 0, "renumbered"),
    "bias rounded": (V3, at(1, biases(lambda b: b.bfloat16().float())), {"bias"}, 1, "rounded to bfloat16"),
    "bias other": (V3, at(1, biases(lambda b: 1.1 * b)), {"bias"}, 1, "another"),
    "groups ignored": (V3, at(1, set_router(num_group=1, topk_group=1)), {"choices"}, 1, "of the tokens go to other experts"),
    "factor lost": (V3, at(1, set_router(routed_scaling_factor=1.0)), {"gates"}, 1, "times 0.4"),
    "factor twice": (V3, at(0, set_router(routed_scaling_factor=6.25)), {"gates"}, 0, "times 2.5"),
    "no longer normalized": (V3, at(0, set_router(norm_topk_prob=False)), {"gates"}, 0, "no longer divided by their sum"),
    "normalized": (("Qwen2-MoE", "OLMoE"), at(1, gates_changed(tiny._normalized)), {"gates"}, 1, "now divided by their sum"),
    "gates of biased scores": (V3, at(1, lambda layer: layer.router.register_forward_hook(lambda _, __, out: (out[0], 2.5 * (g := (out[0].sigmoid() + layer.router.e_score_correction_bias).gather(1, out[2])) / g.sum(1, keepdim=True), out[2]))), {"gates"}, 1, "others on the same logits"),
    "gates exchanged": (DECODERS, at(1, gates_changed(lambda h, g, m: (h, g.flip(-1), m))), {"gates"}, 1, "others"),
    "experts after those selected": (DECODERS, at(1, gates_changed(tiny._next_experts)), {"choices"}, 1, "1 of the tokens"),
    "one router row": (ALL, at(1, lambda layer: layer.W[2].mul_(1.01)), {"logits"}, 1, "of experts [2]"),
    "router shifted": (V3, at(0, lambda layer: layer.W.add_(torch.linspace(-1, 1, 32))), {"logits"}, 0, "shifted"),
    "router of another layer": (DECODERS, router_of_other, {"logits"}, 1, "those of model.layers.0.mlp"),
    "layers exchanged": (DECODERS, layers_exchanged, {"logits", "experts"}, 0, "those of model.layers.1.mlp"),
    "one expert for two": (DECODERS, at(1, set_router(top_k=1)), {"choices"}, 1, "1 experts for a token, 2 before"),
    "no room": (("Switch",), at(0, set_router(expert_capacity=1)), {"dropped"}, 0, "of the tokens"),
    "block silent": (ALL[:5], at(0, block_silent), {"block"}, 0, "what it makes of its experts"),
    "block louder": (ALL[:5], at(1, block_louder), {"block"}, 1, "what it makes of its experts"),
    "experts together": (ALL, at(1, experts_shuffled), {"experts"}, 1, "together, though each alone agrees"),
    "head": (DECODERS, untied, {"model"}, 1, "what is made of what it says"),
    "embeddings": (ALL, embeddings, {"model"}, 0, "what it reads"),
    "attention": ((*DECODERS, *V3), attention(1), {"model"}, -1, "what it reads"),
    "layer left out": (DECODERS, lambda m: m.model.layers[1].register_forward_hook(lambda _, args, out: args[0]), {"model"}, 1, "what is made"),
}  # fmt: skip

CASES = [(family, name) for name, (families, *_) in FAULTS.items() for family in families]
OTHERS = {
    "groups ignored": dict(n_group=4, topk_group=2),
    "normalized": dict(norm_topk_prob=False),
    "head": dict(tie_word_embeddings=False),
}


def config_of(family: str, name: str) -> dict:
    square = SQUARE.get(family, {}) if "transposed" in name else {}
    return square | OTHERS.get(name, {})


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_was_done_is_named_where_it_was_done(family, name):
    _, change, named, number, says = FAULTS[name]
    a = made(family, **config_of(family, name))
    b = copy.deepcopy(a)
    with torch.no_grad():
        change(b)
    found = compare(a, b, texts(family))
    where = layers_of(a)[number if number >= 0 or family != "DeepSeek-V3" else 0].name.rpartition(".")[0]
    assert found and found.named == named, found.table().to_string()
    assert {part.where for part in found.differs if part.name != "model"} <= {where} or name == "layers exchanged"
    assert found.first.where == where and says in found.first.says
    assert says in repr(found) and where in repr(found)
