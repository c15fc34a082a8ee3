"""What a balancing loss reads: its gradient in the routers against that of its formula at the same logits."""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_theory.diagnose.arrays import linear_logits, roundings
from moe_theory.diagnose.findings import Finding
from moe_theory.diagnose.traces import Layer, Trace
from moe_theory.models.rules import topk_set

#: What a loss may pool before it multiplies loads by probabilities: tokens of one sequence or of all, in one layer or
#: in all. The dimensions are those of (layers, sequences, tokens).
POOLS = {
    "each layer": (1, 2),
    "all layers pooled": (0, 1, 2),
    "each layer and sequence": (2,),
    "each sequence, all layers pooled": (0, 2),
}


@dataclass(frozen=True)
class BalanceReport:
    """What a balancing loss reads.

    Attributes:
        where: its name in the model's output.
        reads: the pool in `POOLS` whose loss has its gradient, "softmax twice" before one; "nothing" where it is 0,
            "unknown" where it is none of these nor a multiple of one, "undecided" where rounding does not tell the two
            kinds apart; an error where the library cannot compute it.
        off: for each candidate the distance of the gradients over the limit of rounding, in the farthest layer.
        scale: coefficient of the gradient on that of the nearest candidate.
        blind: distance of its gradient from that of "each layer", relative to the latter.
        coefficient: what it is multiplied by in the loss of a training step, where the model is called with the
            arguments of the batch and labels; 0 where it is not added, nan where the model gives no such loss.
    """

    where: str
    reads: str
    off: dict[str, float]
    scale: float
    blind: float
    coefficient: float

    @property
    def findings(self) -> list[Finding]:
        if not self.off:
            return [Finding("balance", self.where, math.nan, 1, f"it cannot be computed: {self.reads}")]
        if self.reads in POOLS or self.reads == "undecided":
            added = self.coefficient * self.scale
            detail = "times its formula in the loss of a training step: it drives the load apart"
            return [Finding("balance", self.where, added, 0, detail)] if added < 0 else []
        if self.reads == "nothing":
            return [Finding("balance", self.where, 0, 0, "its gradient; it reads nothing")]
        off = min(self.off[name] for name in POOLS)
        return [Finding("balance", self.where, off, 1, f"times its limit from its formula; it reads {self.reads}")]


def balance_loss(
    h: Float[Tensor, "l s t M"], sent: Bool[Tensor, "l s t M"], pool: tuple[int, ...], *, twice: bool = False
) -> Float[Tensor, ""]:
    """`M sum_m rho_m q_m`, the chapter on load, with loads and mean probabilities over a pool, averaged over pools.

    Args:
        h: logits of the tokens of some sequences in some layers; sent: the experts that they are sent to.
        pool: the dimensions of (layers, sequences, tokens) that belong to one pool.
        twice: whether the logits are put through a softmax before, by mistake.
    """
    h = h.softmax(-1) if twice else h
    rho, q = sent.to(h).mean(pool), h.softmax(-1).mean(pool)
    return h.shape[-1] * (rho * q).sum(-1).mean()


def probe_balance(model: nn.Module, batch: dict, layers: list[Layer], k: dict[str, int]) -> list[BalanceReport]:
    """Differentiates every balancing loss that a model returns, at one batch, in the routers alone.

    What a router reads is held fixed, so that the gradient is that through its own logits; no other is kept.

    Raises:
        ValueError: for a loss of a stack without layers, or a batch of neither symbols nor their vectors.
    """
    batch = {name: value for name, value in batch.items() if not name.endswith("attention_mask")}  # padding counts here
    sequences = next((len(value) for name, value in batch.items() if name.endswith(("input_ids", "inputs_embeds"))), 0)
    if not sequences:
        raise ValueError(f"batches: expected input_ids or inputs_embeds, got {sorted(batch)}")
    with _cut_off(layers), ExitStack() as stack:
        traces = {layer.name: stack.enter_context(layer.watched()) for layer in layers}
        try:
            output = model(**batch | {"output_router_logits": True, "return_dict": True})
        except RuntimeError as error:  # without the loss the model ran before: layers of other numbers of experts, say
            return [BalanceReport("balancing loss", str(error).partition("\n")[0], {}, *[math.nan] * 3)]
        losses = {name: loss for name, loss in output.items() if name.endswith("aux_loss") and loss is not None}
        before = _coefficients(model, batch, losses)
    found = []
    for name, loss in losses.items():
        stack = name.removesuffix("aux_loss").removesuffix("_")
        own = [layer for layer in layers if not stack or stack in layer.name.split(".")]
        if not own:
            raise ValueError(f"model: expected mixture layers in {stack}, of which it returns {name}, got none")
        found.append(_report(name, loss, before[name], own, [traces[layer.name][0] for layer in own], sequences, k))
    return found


@contextmanager
def _cut_off(layers: list[Layer]):
    """What routers read and experts say is held fixed, and what is differentiated reaches a router by its logits."""
    with ExitStack() as stack, torch.enable_grad():
        for layer in layers:
            hook = layer.router.register_forward_pre_hook(lambda _, args: tuple(a.detach() for a in args))
            stack.callback(hook.remove)
            hook = layer.experts.register_forward_hook(lambda _, __, out: out.detach())
            stack.callback(hook.remove)
        yield


def _coefficients(model: nn.Module, batch: dict, losses: dict) -> dict[str, float]:
    """For each balancing loss its factor in the loss that the model returns for a training step, by differentiation."""
    labels = next((batch[n] for n in ("labels", "decoder_input_ids", "input_ids") if n in batch), None)
    if not losses or labels is None:
        return dict.fromkeys(losses, math.nan)
    output = model(**batch | {"labels": labels.contiguous(), "return_dict": True})
    found = {}
    for name in losses:
        part, whole = output.get(name), output.get("loss")
        alive = all(isinstance(value, Tensor) and value.requires_grad for value in (part, whole))
        slope = torch.autograd.grad(whole, part, allow_unused=True, retain_graph=True)[0] if alive else None
        found[name] = 0.0 if slope is None else float(slope)
    return found


def _report(
    name: str, loss, coefficient: float, layers: list[Layer], traces: list[Trace], sequences: int, k: dict[str, int]
) -> BalanceReport:
    """Compares the gradients in the vectors of some routers, each against the sizes that it is a sum of."""
    vectors = [layer.W for layer in layers]
    found = [torch.zeros_like(W) for W in vectors]
    if isinstance(loss, Tensor) and loss.requires_grad:
        found = torch.autograd.grad(loss, vectors, allow_unused=True, materialize_grads=True)
    found = torch.stack([g.double() for g in found])
    x = torch.stack([t.x.detach().double().unflatten(0, (sequences, -1)) for t in traces])
    sent = torch.stack(
        [_wanted(t, k[m.name]).unflatten(0, (sequences, -1)) for m, t in zip(layers, traces, strict=True)]
    )
    # Layers that share their vectors have one gradient, the sum of theirs.
    same = torch.tensor([[float(W is V) for V in vectors] for W in vectors], dtype=x.dtype, device=x.device)
    own = _candidates(layers, x, sent)
    candidates = {key: torch.einsum("kl,lmd->kmd", same, g) for key, g in own.items()}
    limit = same @ _rounding(layers, x, sent, traces)
    scales = {key: float((found * g).sum() / g.square().sum()) for key, g in candidates.items()}
    off, scaled = (
        {key: float(((found - by[key] * g).flatten(1).norm(dim=1) / limit).max()) for key, g in candidates.items()}
        for by in (dict.fromkeys(candidates, 1), scales)
    )
    reads, per_layer = _reads(off) if found.any() else "nothing", candidates["each layer"]
    counted = scaled if reads == "unknown" else off
    nearest = min(counted, key=counted.__getitem__)
    if reads == "unknown" and scaled[nearest] <= abs(scales[nearest]):
        reads = f"{scales[nearest]:.4g} times {nearest}"
    return BalanceReport(
        where=name,
        reads=reads,
        off=off,
        scale=scales[nearest],
        blind=float((found - per_layer).norm() / per_layer.norm()),
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
    layers: list[Layer], x: Float[Tensor, "l s t d"], sent: Bool[Tensor, "l s t M"]
) -> dict[str, Float[Tensor, "l M d"]]:
    """The gradients in the routers' vectors of every loss that is known, in float64."""
    W = torch.stack([layer.W.detach().double() for layer in layers]).requires_grad_()
    b = torch.stack([W[i, :, 0].detach() * 0 if m.b is None else m.b.detach().double() for i, m in enumerate(layers)])
    found = {}
    for twice in (False, True):
        for pool, dims in POOLS.items():
            h = torch.einsum("lstd,lmd->lstm", x, W) + b[:, None, None]
            loss = balance_loss(h, sent, dims, twice=twice)
            found["softmax twice, " * twice + pool] = torch.autograd.grad(loss, W)[0]
    return found


def _rounding(
    layers: list[Layer], x: Float[Tensor, "l s t d"], sent: Bool[Tensor, "l s t M"], traces: list[Trace]
) -> Float[Tensor, " l"]:
    """Limit of the rounding of a gradient `M/n sum_i pi_i (rho - <rho, pi_i>) x_i`, in single precision.

    The terms of a layer's tokens are at most `2 max rho |pi_i| |x_i|`; a probability is off by `2 delta + (M + 8) eps`,
    all of them perhaps the same way, their sum by `roundings` of so many tokens. Loads are whole numbers over n.
    """
    eps, M = torch.finfo(torch.float32).eps, sent.shape[-1]
    n, tokens = sent[..., 0].numel(), sent[0, ..., 0].numel()
    largest = sent.double().mean(2).amax()
    limits = []
    for layer, trace, own in zip(layers, traces, x, strict=True):
        h, rounding = linear_logits(own.flatten(0, 1).float(), layer.W, layer.b)
        sizes = 2 * largest * h.softmax(1).norm(dim=1) * trace.x.double().norm(dim=1)
        limits.append(M / n * (sizes * (2 * rounding + (M + 8 + roundings(tokens) / 2) * eps)).sum())
    return torch.stack(limits)
