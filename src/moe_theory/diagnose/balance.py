"""What a balancing loss reads: its gradient in the routers against that of its formula at the same logits."""

import inspect
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_theory.diagnose.arrays import roundings
from moe_theory.diagnose.batches import arguments_of, real_tokens
from moe_theory.diagnose.findings import Finding
from moe_theory.diagnose.traces import TINY, Layer, Trace, shifted
from moe_theory.models.rules import topk_set

#: What a loss may pool before it multiplies loads by probabilities: tokens of one sequence or of all, in one layer or
#: in all. The dimensions are those of (layers, sequences, tokens).
POOLS = {
    "each layer": (1, 2),
    "all layers pooled": (0, 1, 2),
    "each layer and sequence": (2,),
    "each sequence, all layers pooled": (0, 2),
}


LOADS = "loads of the largest logits, "

#: What a loss may do otherwise than its formula, and the finding that it is.
SLIPS = {
    "softmax twice, ": "balance",
    "probabilities of the selected only, ": "balance",
    LOADS: "loads",
    "padding counted, ": "padding",
    f"{LOADS}padding counted, ": "padding",
}


@dataclass(frozen=True)
class BalanceReport:
    """What a balancing loss reads.

    Attributes:
        where: its name in the model's output.
        reads: the pool in `POOLS` whose loss has its gradient, before one what it does otherwise, of `SLIPS`; "nothing"
            where it is 0, "unknown" where it is none of these nor a multiple of one, "undecided" where rounding does
            not tell right from wrong; an error where the library cannot compute it.
        off: for each candidate the distance of the gradients in the logits of a token over the limit of rounding, at
            the farthest token.
        scale: coefficient of the gradient on that of the nearest candidate.
        blind: distance of its gradient from that of "each layer", relative to the latter.
        coefficient: what it is multiplied by in the loss of a training step, where the model is called with the
            arguments of the batch and labels; 0 where it is not added, nan where the model gives no such loss.
        configured: the coefficient that the configuration names; nan where it names none.
        asked: whether what the model was called with is a training step.
    """

    where: str
    reads: str
    off: dict[str, float]
    scale: float
    blind: float
    coefficient: float
    configured: float = math.nan
    asked: bool = False

    @property
    def findings(self) -> list[Finding]:
        return self._of_gradient() + self._of_coefficient()

    def _of_gradient(self) -> list[Finding]:
        if not self.off:
            return [Finding("balance", self.where, math.nan, 1, f"it cannot be computed: {self.reads}")]
        if self.reads in POOLS or self.reads == "undecided":
            added = self.coefficient * self.scale
            detail = "times its formula in the loss of a training step: it drives the load apart"
            return [Finding("balance", self.where, added, 0, detail)] if added < 0 else []
        if self.reads == "nothing":
            return [Finding("balance", self.where, 0, 0, "its gradient; it reads nothing")]
        off = min(self.off[name] for name in POOLS)
        name = next((SLIPS[slip] for slip in reversed(SLIPS) if self.reads.startswith(slip)), "balance")
        return [Finding(name, self.where, off, 1, f"off its formula by so many limits; it reads {self.reads}")]

    def _of_coefficient(self) -> list[Finding]:
        if not self.asked or self.coefficient != 0 or not self.configured > 0:
            return []
        return [Finding("unused", self.where, 0, self.configured, "its coefficient in a training step")]


def balance_loss(
    h: Float[Tensor, "l s t M"],
    sent: Bool[Tensor, "l s t M"],
    pool: tuple[int, ...],
    *,
    twice: bool = False,
    selected: bool = False,
    real: Bool[Tensor, "s t"] | None = None,
) -> Float[Tensor, ""]:
    """`M sum_m rho_m q_m`, the chapter on load, with loads and mean probabilities over a pool, averaged over pools.

    Args:
        h: logits of the tokens of some sequences in some layers; sent: the experts that they are sent to.
        pool: the dimensions of (layers, sequences, tokens) that belong to one pool.
        twice, selected: whether the logits are put through a softmax before, or only the probabilities of the experts
            selected count, by mistake.
        real: tokens that count; by default all.
    """
    h = h.softmax(-1) if twice else h
    count = (torch.ones_like(h[0, ..., 0]) if real is None else real.to(h)).expand(h.shape[:-1])[..., None]
    tokens = count.sum(pool).clamp(min=1)
    pi = h.softmax(-1) * (sent if selected else 1)
    rho, q = (sent * count).sum(pool) / tokens, (pi * count).sum(pool) / tokens
    return h.shape[-1] * (rho * q).sum(-1).mean()


def probe_balance(
    model: nn.Module, batch: dict, layers: list[Layer], k: dict[str, int], *, asked: bool
) -> list[BalanceReport]:
    """Differentiates every balancing loss that a model returns, at one batch, in the logits of its routers.

    What a router reads is held fixed, so that the gradient is that through its own logits; no other is kept.

    Args:
        model, batch: what is called with what; layers: those of the model; k: experts that each selects, by its name.
        asked: whether what the model is called with is a training step.

    Raises:
        ValueError: for a loss of a stack without layers, or a batch of neither symbols nor their vectors.
    """
    sequences = next((len(value) for name, value in batch.items() if name.endswith(("input_ids", "inputs_embeds"))), 0)
    if not sequences:
        raise ValueError(f"batches: expected input_ids or inputs_embeds, got {sorted(batch)}")
    z: dict[str, Tensor] = {}

    def zero(name: str, products: Tensor) -> Tensor:
        z[name] = torch.zeros_like(products, requires_grad=True)
        return z[name]

    moved = shifted([(layer, lambda out, name=layer.name: zero(name, out)) for layer in layers])
    with _cut_off(layers), moved, ExitStack() as stack:
        traces = {layer.name: stack.enter_context(layer.watched()) for layer in layers}
        try:
            output = model(**_with_labels(model, batch) | {"output_router_logits": True, "return_dict": True})
        except (
            RuntimeError,
            ValueError,
            IndexError,
        ) as error:  # without the loss it ran before: no sparse layer in a stack, say
            return [BalanceReport("balancing loss", str(error).partition("\n")[0], {}, *[math.nan] * 3)]
    losses = {name: loss for name, loss in output.items() if name.endswith("aux_loss") and loss is not None}
    before = _coefficients(model, batch, losses)
    found = []
    for name, loss in losses.items():
        stack = name.removesuffix("aux_loss").removesuffix("_")
        own = [layer for layer in layers if not stack or stack in layer.name.split(".")]
        if not own:
            raise ValueError(f"model: expected mixture layers in {stack}, of which it returns {name}, got none")
        seen, at = [traces[layer.name][0] for layer in own], [z[layer.name] for layer in own]
        real = real_tokens(arguments_of(model, own[0], batch), len(seen[0].x)).view(sequences, -1)
        report = _report(name, loss, before[name], own, seen, at, real, k)
        found.append(replace(report, configured=configured_coefficient(model), asked=asked))
    return found


def configured_coefficient(model: nn.Module) -> float:
    """The coefficient of a balancing loss in a model's configuration; nan where it names none."""
    config = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    named = (getattr(config, name, None) for name in ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef"))
    return next((float(value) for value in named if isinstance(value, int | float)), math.nan)


@contextmanager
def _cut_off(layers: list[Layer]):
    """What routers read and experts say is held fixed, and what is differentiated reaches a router by its logits."""
    with ExitStack() as stack, torch.enable_grad():
        for layer in layers:
            hook = layer.router.register_forward_pre_hook(
                lambda _, args: tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
            )
            stack.callback(hook.remove)
            hook = layer.experts.register_forward_hook(lambda _, __, out: out.detach())
            stack.callback(hook.remove)
        yield


def _coefficients(model: nn.Module, batch: dict, losses: dict) -> dict[str, float]:
    """For each balancing loss its factor in the loss that the model returns for a training step, by differentiation."""
    if not losses or not has_loss(model):
        return dict.fromkeys(losses, math.nan)
    output = model(**_with_labels(model, batch) | {"return_dict": True})
    found = {}
    for name in losses:
        part, whole = output.get(name), output.get("loss")
        alive = all(isinstance(value, Tensor) and value.requires_grad for value in (part, whole))
        slope = torch.autograd.grad(whole, part, allow_unused=True, retain_graph=True)[0] if alive else None
        found[name] = 0.0 if slope is None else float(slope)
    return found


def has_loss(model: nn.Module) -> bool:
    """Whether a model takes labels, and so has a loss to train it."""
    return "labels" in inspect.signature(model.forward).parameters


def _with_labels(model: nn.Module, batch: dict) -> dict:
    """A batch with labels, its own symbols where it has none."""
    symbols = next((batch[name] for name in ("decoder_input_ids", "input_ids") if name in batch), None)
    speaks = has_loss(model) and model.get_output_embeddings() is not None  # pyright: ignore[reportCallIssue]
    return {"labels": symbols.contiguous()} | batch if symbols is not None and speaks else batch


def _report(
    name: str,
    loss,
    coefficient: float,
    layers: list[Layer],
    traces: list[Trace],
    z: list[Tensor],
    real: Bool[Tensor, "s t"],
    k: dict[str, int],
) -> BalanceReport:
    """Compares the gradients in the logits of some routers, those of each token against its own limit."""
    found = [torch.zeros_like(one) for one in z]
    if isinstance(loss, Tensor) and loss.requires_grad:
        found = torch.autograd.grad(loss, z, allow_unused=True, materialize_grads=True)
    shape = (*real.shape, -1)
    gradient = torch.stack([g.double().view(shape) for g in found])
    sent = torch.stack([_wanted(t, k[m.name]).view(shape) for m, t in zip(layers, traces, strict=True)])
    products = [m.products(t.x.detach(), t.exact) for m, t in zip(layers, traces, strict=True)]
    by_logits = torch.stack([topk_set(t.exact, k[m.name]).view(shape) for m, t in zip(layers, traces, strict=True)])
    at = torch.stack([p.view(shape) for p in products])
    candidates = _candidates(layers, at, sent, by_logits, real.to(at.device))
    limit = _rounding(at, sent, traces)
    scales = {key: float((gradient * g).sum() / g.square().sum().clamp(min=TINY)) for key, g in candidates.items()}
    off, scaled = (
        {key: float(((gradient - by[key] * g).norm(dim=-1) / limit).max()) for key, g in candidates.items()}
        for by in (dict.fromkeys(candidates, 1), scales)
    )
    reads, per_layer = _reads(off) if gradient.any() else "nothing", candidates["each layer"]
    counted = scaled if reads == "unknown" else off
    nearest = min(counted, key=counted.__getitem__)
    if reads == "unknown" and scaled[nearest] <= abs(scales[nearest]):
        reads = f"{scales[nearest]:.4g} times {nearest}"
    return BalanceReport(
        where=name,
        reads=reads,
        off=off,
        scale=scales[nearest],
        blind=float((gradient - per_layer).norm() / per_layer.norm()),
        coefficient=coefficient,
    )


def _reads(off: dict[str, float]) -> str:
    """The nearest candidate if it is within rounding, and those of the other kind, right or wrong, are not."""
    within = [name for name, value in off.items() if value <= 1]
    if len({name in POOLS for name in within}) > 1:
        return "undecided"
    return min(within, key=off.__getitem__, default="unknown")


def _wanted(trace: Trace, k: int) -> Bool[Tensor, "n M"]:
    """The experts a token was sent to, or would have been had there been room."""
    complete = trace.chosen.sum(1, keepdim=True) == k
    return torch.where(complete, trace.chosen, topk_set(trace.exact, k))


def _candidates(
    layers: list[Layer],
    at: Float[Tensor, "l s t M"],
    sent: Bool[Tensor, "l s t M"],
    by_logits: Bool[Tensor, "l s t M"],
    real: Bool[Tensor, "s t"],
) -> dict[str, Float[Tensor, "l s t M"]]:
    """The gradients in the products of the routers of every loss that is known, in float64."""
    ways: dict[str, dict] = {"": {}, "softmax twice, ": {"twice": True}}
    ways["probabilities of the selected only, "] = {"selected": True}
    if not torch.equal(sent, by_logits):
        ways[LOADS] = {"sent": by_logits}
    if not real.all():
        ways |= {f"{name}padding counted, ": way | {"real": None} for name, way in ways.items() if name in ("", LOADS)}
    found, z = {}, at.detach().requires_grad_()
    for name, way in ways.items():
        for pool, dims in POOLS.items():
            h = torch.stack([layer.squash(own) for layer, own in zip(layers, z, strict=True)])
            loss = balance_loss(h, pool=dims, **{"sent": sent, "real": real} | way)
            found[name + pool] = torch.autograd.grad(loss, z)[0]
    return found


def _rounding(
    at: Float[Tensor, "l s t M"], sent: Bool[Tensor, "l s t M"], traces: list[Trace]
) -> Float[Tensor, "l s t"]:
    """Limit of the rounding of a gradient `M/n pi (rho - <rho, pi>)` in the logits of a token.

    It is at most `2 M/n max rho |pi|`; a probability is off by `2 delta + (M + 8) eps`, a mean of so many of them by
    `roundings`. Loads are whole numbers over n.
    """
    eps, M, n = torch.finfo(torch.float32).eps, sent.shape[-1], sent[..., 0].numel()
    coarse = max(torch.finfo(t.recorded.dtype).eps for t in traces)  # in which a gradient comes back
    largest = sent.double().mean(2).amax().clamp(min=1 / M)
    delta = torch.stack([t.rounding for t in traces]).view(at.shape[:-1])
    sizes = 2 * largest * at.softmax(-1).norm(dim=-1)
    return M / n * sizes * (2 * delta + (M + 8 + roundings(n) / 2) * eps + 4 * coarse * (coarse > eps))
