"""Small models of transformers with random weights, and ways to break their routers on purpose."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.diagnose.families import COMMON, EXPERTS, HIDDEN, SWITCH, SYMBOLS, draw_weights, library, serves
from moe_theory.diagnose.traces import Layer, layers_of
from moe_theory.models.rules import topk_set
from moe_theory.streams import torch_stream


class Family(NamedTuple):
    """A family of models.

    Attributes:
        name: of its classes in transformers; head: what follows it in the name of the model's class.
        count: its name for the number of experts; config: its other arguments.
        least: the first version of transformers that returns the logits of its routers. Before, four families
            returned probabilities in their place, and Switch those of the experts selected.
    """

    name: str
    head: str
    count: str
    config: dict
    least: str = "5.6"


FAMILIES = {
    "Mixtral": Family("Mixtral", "ForCausalLM", "num_local_experts", COMMON | dict(intermediate_size=HIDDEN)),
    "Qwen2-MoE": Family(
        *("Qwen2Moe", "ForCausalLM", "num_experts"),
        COMMON | dict(moe_intermediate_size=HIDDEN, shared_expert_intermediate_size=HIDDEN, norm_topk_prob=False),
    ),
    "Qwen3-MoE": Family(
        *("Qwen3Moe", "ForCausalLM", "num_experts"),
        COMMON | dict(moe_intermediate_size=HIDDEN, head_dim=16, norm_topk_prob=True),
    ),
    "OLMoE": Family(
        *("Olmoe", "ForCausalLM", "num_experts"), COMMON | dict(intermediate_size=HIDDEN, norm_topk_prob=False)
    ),
    "Switch": Family("SwitchTransformers", "ForConditionalGeneration", "num_experts", SWITCH, "5.18"),
}

#: Stacks of Switch Transformers with several layers of experts each, which a loss may pool.
STACKS = dict(num_layers=4, num_decoder_layers=4, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2)

#: Another size for each family: three times as wide, twelve experts, more layers. Three of the experts are selected
#: there, where two are at the first size.
OTHER = {
    name: STACKS | dict(d_model=96, num_experts=12)
    if name == "Switch"
    else {"hidden_size": 96, "num_hidden_layers": 3, family.count: 12}
    for name, family in FAMILIES.items()
}


def families() -> list[str]:
    """The names in `FAMILIES` that the installed transformers serves; a warning names those that need a newer one.

    Raises:
        ImportError: as `library`.
    """
    transformers = library()
    for name, family in FAMILIES.items():
        if not serves(transformers, family.least):
            warnings.warn(
                f"{name} is left out: it needs transformers {family.least}, here is {transformers.__version__}",
                stacklevel=2,
            )
    return [name for name, family in FAMILIES.items() if serves(transformers, family.least)]


def tiny(family: str, *, k: int = 2, seed: int = 0, **config) -> nn.Module:
    """A model of a family with two blocks and eight experts, whose weights are drawn, `N(0, 1/n)` for n inputs.

    Args:
        family: one of `FAMILIES`; k: experts selected, for Switch always one.
        seed: draws the weights.
        config: further arguments of the family's configuration.

    Raises:
        ValueError: for an unknown family, or an argument that its configuration does not know.
        ImportError: as `library`.
    """
    of = FAMILIES[check.choice("family", family, FAMILIES)]
    transformers = library(of.least)
    own = {of.count: EXPERTS} | ({} if family == "Switch" else {"num_experts_per_tok": k})
    with torch.random.fork_rng(devices=[]):  # the library draws weights of its own first
        kind = getattr(transformers, f"{of.name}Config")  # which takes any name, and forgets what it does not know
        known = {*of.config, *dir(kind()), *kind.attribute_map}
        if unknown := config.keys() - known:
            raise ValueError(f"config: expected arguments of {kind.__name__}, got {sorted(unknown)}")
        made = kind(**of.config | own | config)
        model = getattr(transformers, of.name + of.head)(made)
    draw_weights(model, seed)
    return model.eval()


def batches(family: str, number: int, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Batches of 8 random texts of 32 symbols, as arguments of a model of the family."""
    drawn = torch.randint(3, SYMBOLS, (number, 2, 8, 32), generator=torch_stream(seed, "inputs"))
    second = ("decoder_input_ids",) if family == "Switch" else ()
    return [dict(zip(("input_ids", *second), pair, strict=False)) for pair in drawn]


#: Changes what a router returns: logits (n, M), gates and experts, these as numbers (n, k) or as a mask (n, M).
Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Fault(NamedTuple):
    """A way to break a router.

    Attributes:
        says: what is wrong.
        breaks: does it to a model, in place.
        found: names of what is to be found.
        families: in which it can be done; k: experts selected.
    """

    says: str
    breaks: Callable[[nn.Module], None]
    found: frozenset[str]
    families: tuple[str, ...] = tuple(FAMILIES)
    k: int = 2


def rewritten(change: Change) -> Callable[[nn.Module], None]:
    """What routers return goes through a change."""

    def breaks(model: nn.Module) -> None:
        for layer in layers_of(model):
            turn = -1 if layer.logits_at == 2 else 1  # Switch returns experts, gates and logits, the others the reverse
            layer.router.register_forward_hook(lambda _, __, out, turn=turn: change(*out[::turn])[::turn])

    return breaks


def _is_mask(h: Tensor, experts: Tensor) -> bool:
    return experts.shape == h.shape


def _gates(probabilities: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
    """The gates of some experts from other probabilities, normalized if they were before."""
    if _is_mask(probabilities, experts):
        return (probabilities * experts).sum(-1, keepdim=True)
    kept = probabilities.gather(-1, experts)
    normalized = gates.shape[-1] > 1 and bool((gates.sum(-1) - 1).abs().max() < 1e-5)
    return kept / kept.sum(-1, keepdim=True) if normalized else kept


def _normalized(h, gates, experts):
    return h, gates / gates.sum(-1, keepdim=True), experts


def _next_experts(h, gates, experts):
    return h, gates, experts.roll(1, -1) if _is_mask(h, experts) else (experts + 1) % h.shape[-1]


def _larger_at_one(h, gates, experts):
    factor = torch.ones_like(gates)
    factor.view(-1, gates.shape[-1])[1:2] = 1.01  # the second, where there is one
    return h, factor * gates, experts


def _some_detached(out: Tensor, where: Tensor) -> Tensor:
    """No gradient at the tokens, about half of them, at which a number is negative."""
    return torch.where(where[..., :1] < 0, out.detach(), out)


def _masked(h, gates, experts):
    others = torch.cat([torch.full_like(h[..., :1], -torch.inf), h[..., 1:]], -1)
    if _is_mask(h, experts):
        experts = topk_set(others, 1).to(experts.dtype)
    else:
        experts = others.topk(experts.shape[-1], -1).indices
    return h, _gates(h.softmax(-1), gates, experts), experts


@torch.no_grad()
def _copied(model: nn.Module) -> None:
    for layer in layers_of(model):
        parts = list(layer.experts.parameters())
        if parts[0].ndim == 3:
            for p in parts:
                p[1] = p[0]
        else:
            one, other = list(layer.experts.children())[:2]
            other.load_state_dict(one.state_dict())


@torch.no_grad()
def _silenced(model: nn.Module) -> None:
    for layer in layers_of(model):
        for group in _of_experts(layer):
            group[1].zero_()


def _cut(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.block.register_forward_hook(lambda _, __, out: out.detach())


def _cut_at_some(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.block.register_forward_hook(lambda _, __, out: _some_detached(out, out))


def _exchanged(model: nn.Module) -> None:
    def hook(_, __, out):
        return out.flatten(0, -2).flip(0).view_as(out)

    for layer in layers_of(model):
        layer.block.register_forward_hook(hook)


@torch.no_grad()
def _zeroed(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.W.zero_()


def _full(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.router.expert_capacity = 1


def _counts_one(model: nn.Module) -> None:
    model.num_experts_per_tok = 1


DECODERS = tuple(name for name in FAMILIES if name != "Switch")
FIRST = ("Qwen2-MoE", "OLMoE")  # a softmax over all comes first, and the configuration says so

FAULTS = {
    "renormalized top-1": Fault(
        "one expert is selected, and its gate divided by itself",
        rewritten(_normalized),
        frozenset({"gradient", "config"}),
        (*FIRST, "Switch"),
        1,
    ),
    "normalized": Fault(
        "kept gates are divided by their sum, which the configuration denies",
        rewritten(_normalized),
        frozenset({"config"}),
        FIRST,
    ),
    "not normalized": Fault(
        "kept gates are not divided by their sum, as the configuration says",
        rewritten(lambda h, gates, experts: (h, h.softmax(-1).gather(-1, experts), experts)),
        frozenset({"config"}),
        ("Qwen3-MoE",),
    ),
    "detached": Fault(
        "no gradient flows through the gates",
        rewritten(lambda h, gates, experts: (h, gates.detach(), experts)),
        frozenset({"gradient"}),
    ),
    "block detached": Fault("no gradient flows through what a block returns", _cut, frozenset({"gradient"})),
    "some gates detached": Fault(
        "no gradient flows through the gates of about half of the tokens",
        rewritten(lambda h, gates, experts: (h, _some_detached(gates, h), experts)),
        frozenset({"gradient"}),
    ),
    "block detached at some": Fault(
        "no gradient flows through what a block returns at about half of the tokens",
        _cut_at_some,
        frozenset({"gradient"}),
    ),
    "steeper": Fault(
        "the gradient through the gates is 0.2 % larger",
        rewritten(lambda h, gates, experts: (h, 1.002 * gates - 0.002 * gates.detach(), experts)),
        frozenset({"gradient"}),
    ),
    "one token": Fault("the gates of one token are 1 % larger", rewritten(_larger_at_one), frozenset({"gate"})),
    "tokens exchanged": Fault("in a batch tokens get each other's output", _exchanged, frozenset({"gate"})),
    "second softmax": Fault(
        "the balancing loss is handed probabilities for logits",
        rewritten(lambda h, gates, experts: (h.softmax(-1), gates, experts)),
        frozenset({"balance"}),
    ),
    "louder": Fault(
        "the balancing loss is handed logits 2 % larger",
        rewritten(lambda h, gates, experts: (1.02 * h, gates, experts)),
        frozenset({"balance"}),
    ),
    "cut off": Fault(
        "the balancing loss is handed logits without a gradient",
        rewritten(lambda h, gates, experts: (h.detach(), gates, experts)),
        frozenset({"balance"}),
    ),
    "one counted": Fault(
        "two experts are selected, the balancing loss counts one",
        _counts_one,
        frozenset({"balance"}),
        DECODERS,
    ),
    "sharper gates": Fault(
        "the gates are those of logits 5 % larger",
        rewritten(lambda h, gates, experts: (h, _gates((1.05 * h).softmax(-1), gates, experts), experts)),
        frozenset({"gate"}),
    ),
    "gates exchanged": Fault(
        "the two selected experts have each other's gates",
        rewritten(lambda h, gates, experts: (h, gates.flip(-1), experts)),
        frozenset({"gate"}),
        DECODERS,
    ),
    "wrong experts": Fault(
        "tokens go to the experts after those selected",
        rewritten(_next_experts),
        frozenset({"selection", "gate", "loads"}),
    ),
    "masked expert": Fault(
        "one expert is left out of the selection",
        rewritten(_masked),
        frozenset({"selection", "dead", "loads"}),
    ),
    "copied expert": Fault("two experts have the same weights", _copied, frozenset({"twins"})),
    "silent expert": Fault("one expert has weights of 0", _silenced, frozenset({"dead"})),
    "router at zero": Fault("all logits are equal", _zeroed, frozenset({"ties", "dead", "collapse"})),
    "no room": Fault("an expert takes one token of a sequence", _full, frozenset({"dropped"}), ("Switch",), 1),
}


@torch.no_grad()
def _shifted(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.W.add_(torch.linspace(-1, 1, layer.W.shape[1]))


@torch.no_grad()
def _renumbered(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.W.copy_(layer.W.flip(0))
        for group in _of_experts(layer):
            for p, value in zip(group, [p.clone() for p in group][::-1], strict=True):
                p.copy_(value)


def _of_experts(layer: Layer) -> list[list[Tensor]]:
    """For each kind of weight those of all experts, in their order."""
    parts = list(layer.experts.parameters())
    if parts[0].ndim == 3:
        return [list(p.unbind()) for p in parts]
    return [list(group) for group in zip(*(e.parameters() for e in layer.experts.children()), strict=True)]


def _tied(model: nn.Module) -> None:
    first, *others = layers_of(model)
    for layer in others:
        (owner,) = (m for m in layer.router.modules() if any(p is layer.W for p in m.parameters(recurse=False)))
        owner.weight = first.W


#: Models without a fault: nothing is to be found. The first three are one function, up to the numbers of its experts.
CONTROLS = {
    "as it is": Fault("nothing", lambda model: None, frozenset()),
    "moved by the gauge": Fault("all router vectors of a layer move by one vector", _shifted, frozenset()),
    "renumbered": Fault("the experts change their numbers", _renumbered, frozenset()),
    "tied": Fault("all layers have the same router vectors", _tied, frozenset()),
}


@torch.no_grad()
def expected(fault: Fault, model: nn.Module, batches: list[dict[str, Tensor]]) -> frozenset[str]:
    """What is to be found in a broken model.

    A configuration that does not name a gate cannot be contradicted, and a random router may pass an expert by, or
    send most tokens to one, without any fault: both are counted in the largest logits that the model itself returns.
    """
    tenth = 0.1  # written here once more: a limit taken from the instrument would move with it
    silent = getattr(model.config, "norm_topk_prob", None) is None
    found = fault.found - {"config"} if silent else fault.found
    outputs = [model(**batch, output_router_logits=True) for batch in batches]
    names = [name for name in outputs[0] if name.endswith("router_logits")]
    k = 1 if "encoder_router_logits" in names else model.config.num_experts_per_tok  # pyright: ignore
    for name in names:
        for layer in zip(*(output[name] for output in outputs), strict=True):
            chosen = torch.cat([topk_set(h.flatten(0, -2), k) for h in layer])
            loads = chosen.double().sum(0)
            in_use = loads.sum() ** 2 / loads.square().sum()
            if not loads.all():
                found = found | {"dead"}
            if in_use - k < tenth * (len(loads) - k):
                found = found | {"collapse"}
    return found
