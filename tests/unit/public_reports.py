"""Public reports on wrong routing, each as a tiny pair, fixed and broken, with the names that it should be found under.

The expected names were written down before any of these was run. `missed` says what would have to be asked where the
answer is another one; `python tests/unit/public_reports.py` prints the answers to all.
"""

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from moe_theory import diagnose as instruments
from moe_theory.diagnose import tiny
from moe_theory.models.rules import topk_set


class Case(NamedTuple):
    """A report.

    Attributes:
        link: the report; says: what was wrong, and what was seen of it.
        kind: what is handed over: "model", "layer", "logits", "choices" or "compare"; "none" where nothing can be.
        fixed, broken: make it; None where nothing can be.
        expected: what is to be found in the broken one beyond `own`, which the fixed one has, too.
        missed: the question that would have to be asked, where the answer is another one, or there is none.
    """

    link: str
    says: str
    kind: str
    fixed: Callable[[], Any] | None
    broken: Callable[[], Any] | None
    expected: frozenset[str]
    own: frozenset[str] = frozenset()
    missed: str = ""

    @property
    def name(self) -> str:
        owner, repository, _, number = self.link.removeprefix("https://github.com/").split("/")
        return f"{owner}/{repository}#{number}"


def names(*found: str) -> frozenset[str]:
    return frozenset(found)


#: What each kind is handed to.
ENTRIES = {
    "model": "diagnose",
    "layer": "diagnose_layer",
    "logits": "diagnose_router",
    "choices": "diagnose_choices",
    "compare": "compare",
}


def asked(kind: str, subject: tuple[tuple, dict]) -> set[str] | None:
    """The names found in it, "refused" for a ValueError; None where the instrument is not there."""
    ask = getattr(instruments, ENTRIES[kind], None)
    if not callable(ask):
        return None
    args, keywords = subject
    try:
        report = ask(*args, **keywords)
    except ValueError:
        return {"refused"}
    return set(report.named) if hasattr(report, "named") else {found.name for found in report.findings}


# Models. The balancing loss is switched on where it can be, for a model that leaves it out is another case.


def of(family: str, *breaks: Callable[[nn.Module], None], batches: Callable = lambda b: b, **config):
    """A tiny model of a family, broken in turn, with two batches."""

    def made():
        switched_on = {} if family == "Switch" else {"output_router_logits": True}
        model = tiny.tiny(family, **switched_on | config)
        for change in breaks:
            change(model)
        return (model, batches(tiny.batches(family, 2))), {}

    return made


def drawn(name: str, *breaks: Callable[[nn.Module], None], **config):
    """A model of another family with its own names for sizes, whose weights and biases are drawn."""
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    rest = dict(num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0)

    def made():
        transformers = tiny.library("5.19")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind = getattr(transformers, f"{name}Config")(**sizes | rest | config)
            model = getattr(transformers, f"{name}ForCausalLM")(kind)
            for at, p in model.named_parameters():
                if p.ndim > 1 or at.endswith("bias"):
                    nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        for change in breaks:
            change(model.eval())
        return (model, tiny.batches("Mixtral", 2)), {}

    return made


LATENT = dict(
    **dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16),
    **dict(moe_intermediate_size=48, num_hidden_layers=2, first_k_dense_replace=1, n_shared_experts=1),
    **dict(n_routed_experts=8, n_group=1, topk_group=1),
)


def v3(*breaks: Callable[[nn.Module], None], bias: tuple[float, float] = (0.0, 0.0), **config):
    """A model of the family of DeepSeek-V3: sigmoids, divided by their sum, times 2.5; bias: its mean and deviation."""

    def biased(model: nn.Module) -> None:
        for layer in tiny.layers_of(model):
            own = layer.router.e_score_correction_bias
            own.copy_(bias[0] + bias[1] * torch.randn(len(own), generator=torch.Generator().manual_seed(1)))

    return drawn("DeepseekV3", biased, *breaks, **LATENT | config)


GPT_OSS = dict(num_local_experts=8, head_dim=16, output_router_logits=True)
PHIMOE = dict(num_local_experts=8, max_position_embeddings=64)


def pair(a: Callable, b: Callable):
    """Two models for a comparison, with the batches of the first."""

    def made():
        ((before, batches), _), ((after, _), _) = a(), b()
        return (before, after, batches), {}

    return made


def gates(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Other gates, from logits, gates and numbers of the experts."""
    return tiny.rewritten(lambda h, g, e: (h, change(h, g, e), e))


def selects(pick: Callable[[nn.Module, Tensor], Tensor], score: Callable[[Tensor], Tensor] = torch.sigmoid):
    """Other experts, numbers from router and logits, with divided scores as gates, times the router's factor."""

    def hook(router, _, out):
        numbers = pick(router, out[0])
        kept = score(out[0]).gather(1, numbers)
        return out[0], router.routed_scaling_factor * kept / kept.sum(1, keepdim=True), numbers

    def breaks(model: nn.Module) -> None:
        for layer in tiny.layers_of(model):
            layer.router.register_forward_hook(hook)

    return breaks


def scores(router: nn.Module, h: Tensor) -> Tensor:
    """By which DeepSeek-V3 selects."""
    return h.sigmoid() + router.e_score_correction_bias


def coarse_bias(router: nn.Module, h: Tensor) -> Tensor:
    """Numbers of the experts selected with the bias in half precision."""
    return (h.sigmoid() + router.e_score_correction_bias.bfloat16()).topk(router.top_k).indices


def grouped(router: nn.Module, h: Tensor, *, value: Callable[[Tensor], Tensor], left_out: float = -torch.inf) -> Tensor:
    """Numbers of the experts selected in the groups of the largest value."""
    groups = scores(router, h).unflatten(1, (router.num_group, -1))
    kept = torch.zeros_like(groups[..., 0]).scatter(1, value(groups).topk(router.topk_group).indices, 1).bool()
    return groups.masked_fill(~kept[..., None], left_out).flatten(1).topk(router.top_k).indices


def best_of_each_group(router: nn.Module, h: Tensor) -> Tensor:
    groups = scores(router, h).unflatten(1, (router.num_group, -1))
    best = groups == groups.amax(-1, keepdim=True)
    return groups.masked_fill(~best, -torch.inf).flatten(1).topk(router.top_k).indices


def hooked(part: str, hook: Callable, *, before: bool = False) -> Callable[[nn.Module], None]:
    """A hook on the same part of every layer's block; the block itself for no name."""

    def breaks(model: nn.Module) -> None:
        for layer in tiny.layers_of(model):
            module = layer.block.get_submodule(part)
            add = module.register_forward_pre_hook if before else module.register_forward_hook
            add(hook, with_kwargs=True)

    return breaks


def weights(change: Callable[[Any], None]) -> Callable[[nn.Module], None]:
    """What changes the weights of every layer in place."""

    @torch.no_grad()
    def breaks(model: nn.Module) -> None:
        for layer in tiny.layers_of(model):
            change(layer)

    return breaks


def copied_halves(layer) -> None:
    for p in layer.experts.parameters():
        p[len(p) // 2 :] = p[: len(p) // 2].clone()


def from_one_source(layer) -> None:
    for p in (layer.W, *layer.experts.parameters()):
        p.copy_(p[:1].expand_as(p))


def sorted_as_words(layer) -> None:
    order = sorted(range(len(layer.W)), key=str)
    for p in layer.experts.parameters():
        p.copy_(p[order].clone())


def other_way_round(layer) -> None:
    layer.experts.gate_up_proj.copy_(layer.experts.gate_up_proj.mT.clone())


def without_bias(layer) -> None:
    layer.router.bias.zero_()


def in_eight_bits(layer) -> None:
    layer.W.copy_(layer.W.to(torch.float8_e4m3fn).to(layer.W))


def frozen_routers(model: nn.Module) -> None:
    for layer in tiny.layers_of(model):
        layer.W.requires_grad_(False)


def noisy(_, args, kwargs):
    return (args[0] * (0.9 + 0.2 * torch.rand_like(args[0])), *args[1:]), kwargs


def bias_unweighted(experts, args, kwargs, out):
    """The last bias of an expert is added whole, where its output is weighted."""
    _, numbers, g = [*args, *kwargs.values()]
    return out + ((1 - g)[..., None] * experts.down_proj_bias[numbers]).sum(1)


def dropped_pass_weighted(_, args, kwargs, out):
    """Tokens without an expert come out as they went in, times the probability of the expert that had no room."""
    x, mask, g = [*args, *kwargs.values()]
    return out + (1 - mask.sum(-1)) * g * x


def loss_of(change: Callable) -> Callable[[nn.Module], None]:
    """Another balancing loss: from the library's own, logits of all layers, M, k and the attention mask."""

    def breaks(model: nn.Module) -> None:
        forward, module = model.forward, sys.modules[type(model).__module__]
        own = module.load_balancing_loss_func

        @wraps(forward)
        def changed(*args, **kwargs):
            with mock.patch.object(module, "load_balancing_loss_func", partial(change, own)):
                return forward(*args, **kwargs)

        model.forward = changed

    return breaks


#: The loss is not handed the attention mask.
padding_counted = loss_of(lambda own, h, M, k, mask=None: own(h, M, k))


def slot_means(_, logits, M, k, mask=None) -> Tensor:
    """Mean probabilities of the first choice, of the second, and so on, in place of those of the experts."""
    p = torch.cat([*logits]).softmax(-1)
    top = p.topk(k)
    loads = nn.functional.one_hot(top.indices, M).float().mean((0, 1))
    return M * (loads[:, None] * top.values.mean(0)).sum()


def loss_unheeded(model: nn.Module) -> None:
    """The model returns the balancing loss, and its loss is without it."""
    forward = model.forward

    @wraps(forward)
    def changed(*args, **kwargs):
        out = forward(*args, **kwargs)
        if out.get("loss") is not None and out.get("aux_loss") is not None:
            out["loss"] = out["loss"] - model.router_aux_loss_coef * out["aux_loss"]
        return out

    model.forward = changed


def training(batches: list[dict]) -> list[dict]:
    return [batch | {"labels": batch["input_ids"]} for batch in batches]


def half_padding(batches: list[dict]) -> list[dict]:
    mask = (torch.arange(32) < 16).long().expand(8, -1)
    return [batch | {"attention_mask": mask} for batch in batches]


# A layer of one's own.


class Plain(nn.Module):
    """A mixture in plain PyTorch, every expert asked, with gates from logits and numbers of the experts."""

    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor], k: int):
        super().__init__()
        self.gate, self.k = gate, k
        self.router = nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.router(x)
        numbers = h.topk(self.k).indices
        said = torch.stack([expert(x) for expert in self.experts], 1)
        kept = said.gather(1, numbers[..., None].expand(-1, -1, said.shape[-1]))
        return (self.gate(h, numbers)[..., None] * kept).sum(1)


def plain(gate: Callable[[Tensor, Tensor], Tensor], k: int = 2):
    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer, x = Plain(gate, k), torch.randn(512, 16)
        return (layer, x), dict(logits=layer.router, experts=[*layer.experts])

    return made


def of_all(h: Tensor, numbers: Tensor) -> Tensor:
    return h.softmax(-1).gather(1, numbers)


# Logits and choices.


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits(make: Callable[[], tuple[Tensor, Tensor | None]], k: int):
    """Logits, with a mask of the experts that tokens were sent to, or none."""

    def made():
        h, chosen = make()
        return (h,), dict(k=k, chosen=chosen)

    return made


def sent(shift: Callable[[Tensor], Tensor], experts: int = 8, k: int = 2, n: int = 4000):
    """Tokens sent by other logits than those written down."""
    return logits(lambda: ((h := randn(n, experts)), topk_set(shift(h).double(), k)), k)


def width_512() -> tuple[Tensor, Tensor]:
    return randn(2000, 512), randn(256, 512, seed=1) / 512**0.5


def coarse() -> tuple[Tensor, Tensor]:
    x, W = width_512()
    return x @ W.T, topk_set((x @ W.T).bfloat16().double(), 8)


def fine() -> tuple[Tensor, Tensor]:
    x, W = width_512()
    return x @ W.T, topk_set((x @ W.T).double(), 8)


def half_logits() -> Tensor:
    return randn(2000, 384).bfloat16()


def mask_of(numbers: Tensor, M: int) -> Tensor:
    return torch.zeros(len(numbers), M, dtype=torch.bool).scatter(1, numbers, True)


def choices(change: Callable[[Tensor], Tensor], experts: int, k: int, n: int = 1024):
    """Numbers of the experts, as a server writes them."""
    return lambda: ((change(randn(n, experts).topk(k).indices), experts), {})


def padded(numbers: Tensor) -> Tensor:
    return torch.cat([numbers, numbers[:1].expand(3 * len(numbers), -1)])


def twice_the_first(numbers: Tensor) -> Tensor:
    return torch.where((torch.arange(len(numbers)) < 50)[:, None], 0, numbers)


GITHUB = "https://github.com/"

CASES = [
    # gates
    Case(
        GITHUB + "pytorch/torchtitan/issues/1448",
        "DeepSeek-V3: kept sigmoids are not divided by their sum; weights of the original give huge gradients",
        "model",
        v3(),
        v3(gates(lambda h, g, e: 2.5 * h.sigmoid().gather(1, e))),
        names("config"),
    ),
    Case(
        GITHUB + "databricks/megablocks/pull/87",
        "one expert, its gate loses a dimension, and is divided by the norm over all tokens of the batch",
        "model",
        of("Qwen3-MoE", k=1),
        of("Qwen3-MoE", gates(lambda h, g, e: (p := of_all(h, e)) / p.sum(0)), k=1),
        names("gate"),
        own=names("gradient"),  # divided by itself it is 1, as was meant there
    ),
    Case(
        GITHUB + "edwardcapriolo/deliverance/issues/87",
        "probabilities select, and what the experts say is summed without them",
        "layer",
        plain(of_all),
        plain(lambda h, e: torch.ones_like(e, dtype=h.dtype)),
        names("gate", "gradient"),
    ),
    Case(
        GITHUB + "NVIDIA-NeMo/Automodel/pull/2591",
        "gpt-oss: the last bias of each expert is added whole, not times its gate; the loss starts at 8.2 for 4.5",
        "model",
        drawn("GptOss", **GPT_OSS),
        drawn("GptOss", hooked("experts", bias_unweighted), **GPT_OSS),
        names("gate"),
    ),
    Case(
        GITHUB + "huggingface/transformers/issues/37017",
        "Switch: a dropped token is passed on, times the probability of the expert that had no room for it",
        "model",
        of("Switch", expert_capacity=4),
        of("Switch", hooked("experts", dropped_pass_weighted), expert_capacity=4),
        names("gate"),
        own=names("dropped"),
        missed="do a token's experts add 0 to the block's output where it was dropped in the batch",
    ),
    # factors
    Case(
        GITHUB + "flashinfer-ai/flashinfer/pull/3499",
        "the factor on the gates is written into a kernel as 1, whatever the model's is",
        "model",
        v3(),
        v3(gates(lambda h, g, e: g / 2.5)),
        names("factor"),
    ),
    Case(
        GITHUB + "kvcache-ai/sglang/pull/86",
        "experts on one device are multiplied by the factor twice, those on another once",
        "model",
        v3(),
        v3(gates(lambda h, g, e: torch.where(e < 4, 2.5 * g, g))),
        names("gate"),
    ),
    # biases that select
    Case(
        GITHUB + "tenstorrent/tt-metal/pull/47705",
        "a configuration leaves the bias out, and the selection adds zeros",
        "model",
        v3(bias=(0.0, 0.1)),
        v3(selects(lambda router, h: h.topk(router.top_k).indices), bias=(0.0, 0.1)),
        names("bias lost"),
    ),
    Case(
        GITHUB + "sgl-project/sglang/pull/40149",
        "a bias that is cast to bf16 before it is added reorders the experts, says the code that keeps it from that",
        "model",
        v3(bias=(5.0, 0.02)),
        v3(
            selects(coarse_bias),
            bias=(5.0, 0.02),
        ),
        names("bias rounded"),
    ),
    # groups
    Case(
        GITHUB + "sgl-project/sglang/pull/3705",
        "experts of the groups left out get the score 0, which is the largest where biases make all others negative",
        "model",
        v3(bias=(-2.0, 0.2), n_group=4, topk_group=2),
        v3(
            selects(partial(grouped, value=lambda g: g.topk(2).values.sum(-1), left_out=0.0)),
            bias=(-2.0, 0.2),
            n_group=4,
            topk_group=2,
        ),
        names("groups"),
    ),
    Case(
        GITHUB + "antonellof/ferrox/pull/10",
        "as many experts are taken of every group, and the best of these; no group is left out",
        "model",
        v3(bias=(0.0, 0.2), n_group=4, topk_group=1),
        v3(selects(best_of_each_group), bias=(0.0, 0.2), n_group=4, topk_group=1),
        names("groups"),
        missed="is selection explained by the best experts of each group, with none left out",
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/13474",
        "a group is valued by its largest score, not by the sum of its two largest",
        "model",
        v3(bias=(0.0, 0.2), n_group=2, topk_group=1),
        v3(selects(partial(grouped, value=lambda g: g.amax(-1))), bias=(0.0, 0.2), n_group=2, topk_group=1),
        names("groups"),
    ),
    # selection
    Case(
        GITHUB + "sgl-project/sglang/pull/8125",
        "the shared expert takes the place of the last of an unsorted selection, which may be any of them",
        "model",
        v3(),
        v3(selects(lambda router, h: h.topk(router.top_k + 1).indices[:, [0, 2]])),
        names("selection"),
    ),
    Case(
        GITHUB + "JieShibo/MoLE/issues/7",
        "ten experts are selected where the model has two, left from an experiment",
        "model",
        v3(),
        v3(lambda model: [setattr(layer.router, "top_k", 5) for layer in tiny.layers_of(model)] and None),
        names("config"),
    ),
    Case(
        GITHUB + "sgl-project/sglang/pull/33764",
        "the product of the router is stored in bf16; 5 % of the tokens get other experts",
        "logits",
        logits(fine, 8),
        logits(coarse, 8),
        names("selection"),
    ),
    Case(
        GITHUB + "NovaSky-AI/SkyRL/pull/1908",
        "experts recorded while sampling are replayed in training at tokens shifted by padding",
        "logits",
        sent(lambda h: h),
        sent(lambda h: h.roll(1, 0)),
        names("selection"),
    ),
    Case(
        GITHUB + "eduardzamfir/MoCE-IR/issues/19",
        "noise is added to the logits in evaluation, too; one input goes to other experts every time",
        "logits",
        sent(lambda h: h),
        sent(lambda h: h + 0.1 * randn(*h.shape, seed=1)),
        names("selection"),
    ),
    Case(
        GITHUB + "huggingface/transformers/pull/28077",
        "Switch: hidden states are multiplied by noise in evaluation, too; results are not repeatable",
        "model",
        of("Switch"),
        of("Switch", hooked("", noisy, before=True)),
        names("gate"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/54403",
        "nothing but a reference that leaves the order of equal bf16 scores open: no fault, and none is to be found",
        "logits",
        logits(lambda: ((h := half_logits()), mask_of(h.float().topk(8).indices, 384)), 8),
        logits(lambda: ((h := half_logits()), mask_of((-h.float()).argsort(dim=1, stable=True)[:, :8], 384)), 8),
        names(),
    ),
    # gradients and training
    Case(
        GITHUB + "jingyaogong/minimind/issues/858",
        "one expert, its gate divided by itself: only the balancing loss trains the router; worse than a dense model",
        "model",
        of("Qwen3-MoE", k=1, norm_topk_prob=False),
        of("Qwen3-MoE", k=1, norm_topk_prob=True),
        names("gradient"),
    ),
    Case(
        GITHUB + "hiyouga/LlamaFactory/issues/8075",
        "a balancing loss has a coefficient, and adapters leave the router out, and it trains nothing: how can they",
        "model",
        of("Mixtral"),
        of("Mixtral", frozen_routers),
        names("frozen"),
    ),
    # balancing losses
    Case(
        GITHUB + "deepspeedai/DeepSpeed/pull/2551",
        "two experts are selected, loads and balancing loss count the first; as in GShard, is the answer",
        "model",
        of("Mixtral"),
        of("Mixtral", loss_of(lambda own, h, M, k, mask=None: own(h, M, 1, mask))),
        names("loads"),
        missed="is it the loss with the loads of first choices, or of the first j (found as balance, unknown)",
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/issues/1617",
        "experts are filled with dummy tokens up to their capacity, and the loss counts these: it is always 1",
        "model",
        of("Mixtral"),
        of("Mixtral", loss_of(lambda own, h, M, k, mask=None: torch.cat([*h]).softmax(-1).mean(0).sum())),
        names("balance"),
    ),
    Case(
        GITHUB + "mindspore-ai/hyper-parallel/issues/752",
        "loads of the experts are multiplied by mean scores of the first, second, ... choice: nearly constant",
        "model",
        of("Mixtral"),
        of("Mixtral", loss_of(slot_means)),
        names("balance"),
    ),
    Case(
        GITHUB + "huggingface/trl/pull/7248",
        "a coefficient is configured, and for some families the balancing loss is silently not added",
        "model",
        of("OLMoE", batches=training),
        of("OLMoE", loss_unheeded, batches=training),
        names("unused"),
    ),
    Case(
        GITHUB + "NVIDIA/Megatron-LM/pull/4776",
        "a model around another does not hand the padding mask on: loss, z-loss and bias count padding",
        "model",
        of("Mixtral", batches=half_padding),
        of("Mixtral", padding_counted, batches=half_padding),
        names("padding"),
    ),
    # loads and experts
    Case(
        GITHUB + "KempnerInstitute/KempnerForge/issues/117",
        "one expert selected, and nearly all tokens go to a single one; a larger coefficient does not help",
        "logits",
        logits(lambda: (randn(4000, 8), None), 1),
        logits(lambda: (randn(4000, 8) + 4 * torch.eye(8)[3], None), 1),
        names("collapse"),
    ),
    Case(
        GITHUB + "ml-explore/mlx-examples/issues/394",
        "a router that was never trained sends every token to the same two of four experts, and stays so",
        "logits",
        logits(lambda: (randn(4000, 4), None), 2),
        logits(lambda: (randn(4000, 4) + torch.tensor([9.0, 9.0, -9.0, -9.0]), None), 2),
        names("dead", "collapse"),
    ),
    Case(
        GITHUB + "arcee-ai/mergekit/issues/93",
        "experts from one source with one prompt: equal experts and equal router vectors",
        "model",
        of("Mixtral", num_local_experts=4),
        of("Mixtral", weights(from_one_source), num_local_experts=4),
        names("ties", "dead", "collapse", "twins", "gradient"),
    ),
    Case(
        GITHUB + "KempnerInstitute/KempnerForge/issues/202",
        "a checkpoint of two ranks holds the experts of one: after resuming both have the same",
        "model",
        of("Mixtral"),
        of("Mixtral", weights(copied_halves)),
        names("twins"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/38128",
        "rows that pad a batch are counted in the loads by which experts are placed; all of them choose the same",
        "choices",
        choices(lambda numbers: numbers, 128, 8),
        choices(padded, 128, 8),
        names("collapse"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/39391",
        "NaN in padding rows: the selection writes expert 0 in every place of a token",
        "choices",
        choices(lambda numbers: numbers, 8, 2),
        choices(twice_the_first, 8, 2),
        names("refused"),
    ),
    Case(
        GITHUB + "divyamakkar0/JAXformer/issues/21",
        "a block computes its shared experts, and returns the others' output alone",
        "model",
        of("Qwen2-MoE"),
        of("Qwen2-MoE", hooked("shared_expert", lambda m, a, k, out: 0 * out)),
        names("shared gate"),
    ),
    # two models
    Case(
        GITHUB + "ggml-org/llama.cpp/pull/18980",
        "a file does not name the score function, and sigmoids become softmax; perplexity 11.1 for 9.8",
        "compare",
        pair(v3(bias=(0.0, 0.2)), v3(bias=(0.0, 0.2))),
        pair(
            v3(bias=(0.0, 0.2)),
            v3(
                selects(
                    lambda r, h: (h.softmax(-1) + r.e_score_correction_bias).topk(r.top_k).indices,
                    lambda h: h.softmax(-1),
                ),
                bias=(0.0, 0.2),
            ),
        ),
        names("choices", "gates"),
    ),
    Case(
        GITHUB + "ml-explore/mlx-lm/pull/1354",
        "softmax for sigmoids, the bias added to the gates, too, and no factor",
        "compare",
        pair(v3(bias=(0.0, 0.2)), v3(bias=(0.0, 0.2))),
        pair(
            v3(bias=(0.0, 0.2)),
            v3(
                hooked(
                    "gate",
                    lambda r, a, kw, out: (
                        out[0],
                        *(out[0].softmax(-1) + r.e_score_correction_bias).topk(r.top_k),
                    ),
                ),
                bias=(0.0, 0.2),
            ),
        ),
        names("choices", "gates"),
    ),
    Case(
        GITHUB + "pytorch/torchtitan/pull/2319",
        "gpt-oss: the router has no bias, so that the one of the original is not loaded, and gates are not divided",
        "compare",
        pair(drawn("GptOss", **GPT_OSS), drawn("GptOss", **GPT_OSS)),
        pair(
            drawn("GptOss", **GPT_OSS),
            drawn("GptOss", weights(without_bias), gates(lambda h, g, e: of_all(h, e)), **GPT_OSS),
        ),
        names("logits", "gates"),
        missed="do gates differ at the same logits (seen as no longer divided, and taken for a consequence)",
    ),
    Case(
        GITHUB + "unslothai/unsloth-zoo/issues/849",
        "a layout is told by its shape, and experts with a square matrix are used the other way round; the loss falls",
        "compare",
        pair(of("Mixtral", intermediate_size=16), of("Mixtral", intermediate_size=16)),
        pair(
            of("Mixtral", intermediate_size=16),
            of("Mixtral", weights(other_way_round), intermediate_size=16),
        ),
        names("transposed"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/35499",
        "Phi: a threshold of the gates is written as 0.01 where the configuration has 0",
        "compare",
        pair(drawn("Phimoe", router_jitter_noise=0.0, **PHIMOE), drawn("Phimoe", router_jitter_noise=0.0, **PHIMOE)),
        pair(drawn("Phimoe", router_jitter_noise=0.0, **PHIMOE), drawn("Phimoe", router_jitter_noise=0.01, **PHIMOE)),
        names("gates"),
    ),
    Case(
        GITHUB + "intel/auto-round/issues/1486",
        "the router is left out of a quantization by its name, and under another name is not",
        "compare",
        pair(of("Mixtral"), of("Mixtral")),
        pair(of("Mixtral"), of("Mixtral", weights(in_eight_bits))),
        names("logits"),
    ),
    Case(
        GITHUB + "vllm-project/vllm/pull/49378",
        "Aria on two devices: the shared expert is summed over them twice; one device is right",
        "compare",
        pair(of("Qwen2-MoE"), of("Qwen2-MoE")),
        pair(of("Qwen2-MoE"), of("Qwen2-MoE", hooked("shared_expert", lambda m, a, k, out: 2 * out))),
        names("shared"),
    ),
    Case(
        GITHUB + "pytorch/torchtitan/pull/1918",
        "a converter sorts the numbers of the experts as words: 10 comes before 2",
        "compare",
        pair(of("Mixtral", num_local_experts=12), of("Mixtral", num_local_experts=12)),
        pair(of("Mixtral", num_local_experts=12), of("Mixtral", weights(sorted_as_words), num_local_experts=12)),
        names("order"),
    ),
    # what none of these can show
    Case(
        GITHUB + "huggingface/transformers/issues/33969",
        "Switch: the noise that is meant for the router reaches the experts, in training mode alone",
        "none",
        None,
        None,
        names(),
        missed="a layer is asked in evaluation mode; in training mode: do router and experts read what the block reads",
    ),
    Case(
        GITHUB + "NVIDIA-NeMo/Automodel/pull/3359",
        "the balancing loss enters every micro-batch whole, and counts as often as there are of them",
        "none",
        None,
        None,
        names(),
        missed="visible over the micro-batches of a step: is the router's gradient of it that of one large batch",
    ),
    Case(
        GITHUB + "huggingface/trl/issues/4070",
        "a trainer adds the balancing loss to a loss of the model that has it: it counts twice",
        "none",
        None,
        None,
        names(),
        missed="visible to who has the trainer's loss: its slope in the balancing loss against the coefficient",
    ),
    Case(
        GITHUB + "allenai/OLMoE/issues/39",
        "the z-loss is divided by the number of experts selected, too, and is that much weaker",
        "none",
        None,
        None,
        names(),
        missed="no z-loss is read: is its gradient that of the mean squared logsumexp times a configured coefficient",
    ),
]


def verdicts(case: Case) -> tuple[set[str] | None, set[str] | None]:
    """What is found in the fixed and in the broken one; None where it cannot be asked."""
    if case.fixed is None or case.broken is None:
        return None, None
    return asked(case.kind, case.fixed()), asked(case.kind, case.broken())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        print(case.name, case.kind, sorted(case.own | case.expected), *verdicts(case), sep=" | ", flush=True)
