"""What a layer computes, found by moving its router and by differentiating its output, whatever its configuration says.

Every limit is one of rounding: logits of d products in single precision are off by `delta`, see `linear_logits`, a
softmax of them by `2 delta + (M + 8) eps` of each gate. The layer is copied in float64, with the library's loop over
experts in place of a kernel for all at once, so that what else it computes rounds far below that; then the layer as it
runs is held against the copy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory.diagnose.arrays import kept_gap
from moe_theory.diagnose.findings import Finding
from moe_theory.diagnose.traces import Layer, Trace
from moe_theory.models.rules import RULES, softmax_topk, topk_set, topk_softmax
from moe_theory.streams import torch_stream
from moe_theory.theory.router_gradient import logit_jacobian

#: Tokens at which a layer is probed, one by one.
PROBES = 8

#: Largest relative change of the experts' output by which what lies behind it is differentiated, and how near to that
#: quotient the gradient has to be.
STEP, NEAR = 0.03, 0.01

#: What a size is divided by at the least, so that nothing over nothing is 0.
TINY = torch.finfo(torch.float64).tiny

#: Gates of the selected experts, by name: those of chapter 14, without what is random in some of them.
GATES: dict[str, Callable[[Float[Tensor, "n M"], Bool[Tensor, "n M"]], Float[Tensor, "n M"]]] = {
    softmax_topk.name: lambda h, chosen: softmax_topk.shares(h, chosen) * chosen,
    topk_softmax.name: lambda h, chosen: topk_softmax.shares(h, chosen) * chosen,
    "sigmoid_topk": lambda h, chosen: torch.sigmoid(h) * chosen,
    "sigmoid_divided": lambda h, chosen: torch.sigmoid(h) * chosen / (torch.sigmoid(h) * chosen).sum(-1, keepdim=True),
}

#: Those that a configuration names by saying that kept gates are divided by their sum, or that they are not.
DIVIDED, DENIED = (topk_softmax.name, "sigmoid_divided"), (softmax_topk.name, "sigmoid_topk")


@dataclass(frozen=True)
class Configured:
    """What the configuration says of the gates.

    Attributes:
        gates: names in `GATES` of those that it allows; none where it names none.
        factors: the constants by which it multiplies every gate.
        k: experts selected; None where it names no number.
    """

    gates: tuple[str, ...] = ()
    factors: tuple[float, ...] = (1.0,)
    k: int | None = None


@dataclass(frozen=True)
class GateReport:
    """What a layer's gates are, and what of the loss reaches its router, at some tokens.

    Attributes:
        where: name of the router; k: experts selected; learns: whether its vectors were handed over to be trained.
        gates: names in `GATES` of those whose output is the layer's, up to a constant factor; off: how far each is
            from it, relative, the farthest token over its limit; `gates` has those that are at most 1.
        factor: that constant, times the one behind the experts, where there is one; of several gates those with a
            configured one are taken.
        configured: what the configuration says of both.
        handed: how far the gates handed to the experts are from that gate, the farthest of all tokens over its limit;
            nan where what is handed on are no gates.
        lowered: largest relative change of the output when an unselected logit falls by 1; as_first: what it is if a
            softmax over all comes first; limit: of rounding.
        gradient: largest slope of the block's output in the logits, relative to the size of what its experts say, along
            a random direction.
        apart: farthest slope of the experts' output from that of the gate, over its limit; nan where no softmax is it.
        passed: what the block's output has of a small change of its experts' output, and what the gradient has of it.
        bent: the rest of what the block makes of that change, relative: 0 where it is a constant times it.
        jump: mean relative jump of the output where the last selected expert gives way to the first rejected one.
        silent: experts that answer 0 at all of the tokens; heard: whether any other expert is selected at one of them.
        nearest: of the others the two most alike, and the distance of their outputs relative to their size.
        alike: limit of that for equal experts.
        drift: farthest output of the experts as they run from that of their copy, relative to its size; felt: the same
            of their slope; mixed: of the block's output in the batch, where its copy has one token at a time.
        coarse: limit of these: of rounding in the gates and in an expert.
    """

    where: str
    k: int
    learns: bool
    gates: tuple[str, ...]
    off: dict[str, float]
    factor: float
    configured: Configured
    handed: float
    lowered: float
    as_first: float
    limit: float
    gradient: float
    apart: float
    passed: tuple[float, float]
    bent: float
    jump: float
    silent: tuple[int, ...]
    heard: bool
    nearest: tuple[int, int, float]
    alike: float
    drift: float
    felt: float
    mixed: float
    coarse: float

    @property
    def findings(self) -> list[Finding]:
        found = [*self._of_gates(), *self._of_gradient()]
        if self.configured.k not in (None, self.k):
            detail = f"experts for a token, configured {self.configured.k}"
            found.append(Finding("config", self.where, self.k, self.configured.k, detail))
        if self.silent:
            found.append(Finding("dead", self.where, len(self.silent), 0, f"experts {list(self.silent)} answer 0"))
        one, other, distance = self.nearest
        if distance <= self.alike:
            found.append(Finding("twins", self.where, distance, self.alike, f"experts {one} and {other}"))
        return found

    def _of_gates(self) -> list[Finding]:
        named, expected = ", ".join(self.gates), self.configured.gates
        if self.drift > self.coarse:
            detail = "what runs is not what its experts say one by one"
            return [Finding("gate", self.where, self.drift, self.coarse, detail)]
        if not self.gates:
            name, off = min(self.off.items(), key=lambda pair: pair[1])
            return [Finding("gate", self.where, off, 1, f"times its limit from the nearest, {name}")]
        if self.handed > 1:
            return [Finding("gate", self.where, self.handed, 1, f"times its limit from {named}, as they are handed on")]
        if self.mixed > self.coarse:
            detail = "in a batch tokens get another output than alone"
            return [Finding("gate", self.where, self.mixed, self.coarse, detail)]
        if expected and not set(expected) & set(self.gates):
            off, configured = min(self.off[name] for name in expected), " or ".join(expected)
            return [Finding("config", self.where, off, 1, f"computed {named}, configured {configured}")]
        if not _among(self.factor, self.configured.factors, self.limit):
            configured = " or ".join(f"{factor:g}" for factor in self.configured.factors)
            detail = f"computed {named} times {self.factor:.6g}, configured times {configured}"
            return [Finding("factor", self.where, self.factor, self.configured.factors[0], detail)]
        return []

    def _of_gradient(self) -> list[Finding]:
        value, gradient = self.passed
        if not self.heard:  # no gradient is what follows; the silent experts are found as dead
            return []
        if self.gradient <= self.limit:
            detail = f"K = {self.k}: none but rounding"
            return [Finding("gradient", self.where, self.gradient, self.limit, detail)]
        if self.felt > self.coarse >= self.drift:
            detail = "the one that runs from the one of its copy"
            return [Finding("gradient", self.where, self.felt, self.coarse, detail)]
        if self.apart > 1:
            detail = f"times its limit from that of {', '.join(self.gates)}"
            return [Finding("gradient", self.where, self.apart, 1, detail)]
        if abs(gradient - value) > NEAR * abs(value):
            detail = f"of a change of its experts' output; its own changes by {value:.4g}"
            return [Finding("gradient", self.where, gradient, value, detail)]
        return []


class Asked(NamedTuple):
    """What a layer's copy in float64 says at some tokens.

    Attributes:
        tokens: their numbers among those that the layer was watched at.
        u: what its block reads; x: what its router reads; h: its logits; limit: of the rounding of a gate, relative.
        chosen: the experts selected; gates: what is handed to the experts.
        f: what each expert says alone; F: all together; out: what the block makes of it.
        c: a random direction for each token.
    """

    tokens: Int[Tensor, " n"]
    u: Float[Tensor, "n d"]
    x: Float[Tensor, "n d"]
    h: Float[Tensor, "n M"]
    limit: Float[Tensor, " n"]
    chosen: Bool[Tensor, "n M"]
    gates: Float[Tensor, "n M"]
    f: Float[Tensor, "n M d"]
    F: Float[Tensor, "n d"]
    out: Float[Tensor, "n d"]
    c: Float[Tensor, "n d"]


def probe_gates(layer: Layer, trace: Trace, k: int, *, configured: Configured, learns: bool, seed: int) -> GateReport:
    """Asks a layer what its gates are, at some tokens whose selection is decided.

    Args:
        layer: the layer, in its own precision; trace: what it did with some tokens, without padding.
        k: experts selected; configured: what the configuration says; learns: whether the router is to be trained.
        seed: draws the directions of the slopes.

    Raises:
        ValueError: where the router reads nothing but zeros, an expert answers NaN, or the copy is none.
    """
    running, layer = layer, layer.double()
    at = _ask(layer, trace, k, seed)
    value, gradient, bent = _passed(layer, at)
    behind = _constant(value, float(at.limit.max()))
    off, named, factor = _named(at, behind, configured)
    lowered, as_first = lower_one(layer, at)
    # The root mean square of <c, gate f> over directions c: that of the one c drawn may be near 0 by chance.
    size = (at.gates.double() * at.f.norm(dim=-1)).sum(1).clamp(min=TINY)
    slopes = torch.stack([slope(layer, *pair) for pair in zip(at.u, at.c, strict=True)])
    worst, largest = int((value - gradient).abs().argmax()), float(at.limit.max())
    drift, felt, mixed = _drift(running, trace, at, slopes, size)
    says = at.f.any(2).any(0)
    return GateReport(
        where=layer.name,
        k=k,
        learns=learns,
        gates=named,
        off=off,
        factor=factor * behind,
        configured=configured,
        handed=_handed_on(trace, at, named),
        lowered=lowered,
        as_first=as_first,
        limit=largest,
        gradient=float(((slopes * gradient[:, None]).norm(dim=1) / size).max()),
        apart=_apart(at, named, slopes, factor, k, 4 * at.limit * size),
        passed=(float(value[worst]), float(gradient[worst])),
        bent=bent,
        jump=jump_at_tie(at),
        silent=tuple((~says).nonzero()[:, 0].tolist()),
        heard=bool((at.chosen & says).any()),
        nearest=nearest_experts(at.f),
        alike=4 * layer.hidden * torch.finfo(at.f.dtype).eps,
        drift=drift,
        felt=felt,
        mixed=mixed,
        coarse=largest + 4 * layer.hidden * torch.finfo(torch.float32).eps,
    )


@torch.no_grad()
def _ask(layer: Layer, trace: Trace, k: int, seed: int) -> Asked:
    """Tokens here and there whose selection is decided, or any where none is; no token that is 0."""
    some = trace.x.any(1)
    if not some.any():
        raise ValueError(f"batches: expected tokens at which {layer.name} reads something other than 0, got none")
    decided = some & (kept_gap(trace.exact, k) > 2 * trace.rounding)
    some = (decided if decided.any() else some).nonzero()[:, 0]
    some = some[torch.linspace(0, len(some) - 1, min(PROBES, len(some))).long()]
    u = trace.u[some].double()
    traces = _copied(layer, u)
    x, y, h, chosen, gates, F, out = (
        torch.cat([getattr(t, name) for t in traces]) for name in ("x", "y", "exact", "chosen", "gates", "F", "out")
    )
    c = torch.randn(F.shape, generator=torch_stream(seed, "probes"), dtype=torch.float64).to(F.device)
    return Asked(some, u, x, h, _limit(trace)[some], chosen, gates, layer.answers(y, trace.masks), F, out, c)


def _copied(layer: Layer, u: Float[Tensor, "n d"]) -> list[Trace]:
    """What a copy does with each token; ValueError if it is none, for a method put into a module stays the original's.

    A copy's logits change with its own router.
    """
    try:
        traces = [layer(token[None]) for token in u]
        kept, x = layer.W.detach().clone(), traces[0].x[0]
        layer.W[0] += x / x.square().sum()
        follows = not torch.equal(layer(u[:1]).recorded, traces[0].recorded)
        layer.W.copy_(kept)
    except RuntimeError as error:  # a type written into its code, or a method of the original
        put = [kind for kind, module in layer.block.named_modules() if "forward" in vars(module)]
        why = f"; forward is replaced in {put}" if put else ""
        raise ValueError(
            f"model: expected layers that run in torch.float64, too, got {error} in {layer.name}{why}"
        ) from error
    if not follows:
        raise ValueError(
            f"model: expected layers that can be copied, got one whose copy calls the original: {layer.name}"
        )
    return traces


def _limit(trace: Trace) -> Float[Tensor, " n"]:
    """The share of itself by which a gate in single precision may be off."""
    return 2 * trace.rounding + (trace.exact.shape[1] + 8) * torch.finfo(torch.float32).eps


def _named(at: Asked, behind: float, configured: Configured) -> tuple[dict[str, float], tuple[str, ...], float]:
    """How far every gate is over its limit, the names of those that are not, and the factor of these.

    Where few tokens are asked, several gates may fit with a factor each; those are taken that have a configured one
    together with the one behind the experts.
    """
    fits = {name: _fit(at.F, gate(at.h, at.chosen), at.f) for name, gate in GATES.items()}
    off = {name: float((distance / at.limit).max()) for name, (_, distance) in fits.items()}
    factors = {name: fits[name][0] for name, value in off.items() if value <= 1}
    limit = float(at.limit.max())
    said = [name for name, factor in factors.items() if _among(factor * behind, configured.factors, limit)]
    named = tuple(said or factors)
    return off, named, factors[named[0]] if named else 1.0


def _fit(
    F: Float[Tensor, "n d"], gates: Float[Tensor, "n M"], f: Float[Tensor, "n M d"]
) -> tuple[float, Float[Tensor, " n"]]:
    """The factor with which the mixture with some gates is nearest to the output, and its distance, relative to sizes.

    Infinite where the factor would not be positive.
    """
    mixed = torch.einsum("nm,nmd->nd", gates, f)
    factor = float((F * mixed).sum() / mixed.square().sum()) if mixed.any() else 1.0
    size = factor * (gates * f.norm(dim=-1)).sum(1)
    off = (F - factor * mixed).norm(dim=1) / size.clamp(min=TINY)
    return factor, off if factor > 0 else torch.full_like(off, torch.inf)


def _constant(value: Float[Tensor, " n"], limit: float) -> float:
    """What tokens have in common; 1 where they differ, as behind a norm, or where nothing comes through."""
    mean = float(value.mean())
    return mean if mean and float((value - mean).abs().max()) <= limit * abs(mean) else 1.0


def _among(factor: float, configured: tuple[float, ...], limit: float) -> bool:
    return any(abs(factor - one) <= limit * abs(one) for one in configured)


def _handed_on(trace: Trace, at: Asked, named: tuple[str, ...]) -> float:
    """How far the gates handed to the experts are from the nearest of those named, at the farthest of all tokens.

    Up to a constant, which the tokens asked give. What is handed on may be no gates; then these tokens are off, too.
    """

    def distance(gates, exact):
        return (gates - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=TINY)

    sent, found = trace.of(trace.chosen.any(1)), [math.nan]
    for name in named:
        exact = GATES[name](at.h, at.chosen)
        factor = at.gates.double().sum() / exact.sum()
        if bool((distance(at.gates, factor * exact) <= at.limit).all()):
            every = distance(sent.gates, factor * GATES[name](sent.exact, sent.chosen))
            found.append(float((every / _limit(sent)).max()))
    return min(found, key=lambda value: (math.isnan(value), value))


def _passed(layer: Layer, at: Asked) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], float]:
    """What the block's output has of a small change of its experts' output, and what its gradient has of it.

    Both along c and relative to it: a difference quotient, and by automatic differentiation. They are one and the same
    constant where the block adds something to the experts' output or multiplies it, and the change is that constant
    times c; last, how far it is from that, relative.
    """
    values, gradients, bent = [], [], 0.0
    for u, F, c in zip(at.u[:, None], at.F[:, None], at.c[:, None], strict=True):
        step = STEP * (float(F.norm()) or 1.0) / float(c.norm())
        with torch.no_grad():
            change = (layer.passed(u, F + step * c) - layer.passed(u, F - step * c)) / (2 * step)
        values.append((change * c).sum() / c.square().sum())
        bent = max(bent, float((change - values[-1] * c).norm() / change.norm().clamp(min=TINY)))
        with torch.enable_grad():
            F = F.detach().requires_grad_()
            out = layer.passed(u, F)
            dF = torch.autograd.grad((out * c).sum(), F, allow_unused=True)[0] if out.requires_grad else None
        gradients.append(out.new_zeros(()) if dF is None else (dF * c).sum() / c.square().sum())
    return torch.stack(values), torch.stack(gradients), bent


def _drift(
    running: Layer, trace: Trace, at: Asked, slopes: Float[Tensor, "n M"], size: Float[Tensor, " n"]
) -> tuple[float, float, float]:
    """Farthest output, slope, and output in the batch of a layer as it runs from those of its copy; see `GateReport`.

    In the batch tokens count that were sent to the same experts there.
    """
    low, c = at.u.to(running.W.dtype), at.c.to(running.W.dtype)
    with torch.no_grad():
        ran = torch.cat([running(token[None]).F for token in low]).double()
    felt = torch.stack([slope(running, *pair) for pair in zip(low, c, strict=True)]).double()
    summed = torch.einsum("nm,nmd->nd", at.gates.double(), at.f.abs()).norm(dim=1).clamp(min=TINY)
    off, same = trace.out[at.tokens].double() - at.out, (trace.chosen[at.tokens] == at.chosen).all(1)
    mixed = same * off.norm(dim=1) / (summed + at.out.norm(dim=1))
    return (
        float(((ran - at.F).norm(dim=1) / summed).max()),
        float(((felt - slopes).norm(dim=1) / size).max()),
        float(mixed.max()),
    )


@torch.no_grad()
def lower_one(layer: Layer, at: Asked) -> tuple[float, float]:
    """Largest relative change of the output when the best unselected logit of a token falls by 1, and that predicted.

    With the selection first it is 0; with a softmax over all first, the output grows by `1/(1 - pi_j (1 - 1/e))`.
    """
    if bool(at.chosen.all()):
        return 0.0, 0.0
    best = at.h.masked_fill(at.chosen, -torch.inf).max(1).indices
    pi = at.h.softmax(1).gather(1, best[:, None])[:, 0]
    drop = pi * -torch.expm1(torch.tensor(-1.0, dtype=at.h.dtype))
    changes, kept = [], layer.W.detach().clone()
    for u, x, j, before in zip(at.u, at.x, best, at.F, strict=True):
        layer.W[j] -= x / x.square().sum()
        changes.append(float((layer(u[None]).F - before).norm() / before.norm().clamp(min=TINY)))
        layer.W.copy_(kept)
    return max(changes), float((drop / (1 - drop)).max())


def slope(layer: Layer, u: Float[Tensor, " d"], c: Float[Tensor, " d"]) -> Float[Tensor, " M"]:
    """`d <c, F> / dh` at one token, by automatic differentiation: its gradient in the router is `dh x^T`."""
    with torch.enable_grad():
        trace = layer(u[None])
        x, F = trace.x[0].detach(), trace.F[0]
        W = torch.autograd.grad(c @ F, layer.W, allow_unused=True)[0] if F.requires_grad else None
    return x.new_zeros(len(layer.W)) if W is None else W.to(x) @ x / x.square().sum()


def _apart(at: Asked, named: tuple[str, ...], slopes, factor: float, k: int, limit: Float[Tensor, " n"]) -> float:
    """Farthest slope from that of the gate, which chapter 14 has in closed form, over its limit."""
    rules = [RULES[name] for name in named if name in RULES]
    if not rules or bool((at.chosen != topk_set(at.h, k)).any()):
        return float("nan")
    exact = torch.einsum("nmd,nd->nm", logit_jacobian(at.h, factor * at.f, k, rules[0]), at.c)
    return float(((slopes - exact).norm(dim=1) / limit).max())


def jump_at_tie(at: Asked) -> float:
    """Mean of `g |f_j - f_i| / |F|` over tokens, i the last selected expert, g its gate, j the first rejected one."""
    chosen, h, f, gates = at.chosen, at.h, at.f, at.gates
    if bool(chosen.all()):
        return 0.0
    i = h.masked_fill(~chosen, torch.inf).min(1).indices[:, None]
    j = h.masked_fill(chosen, -torch.inf).max(1).indices[:, None]
    both = (f.gather(1, index[..., None].expand(-1, -1, f.shape[2]))[:, 0] for index in (i, j))
    last, first = both
    size = at.F.norm(dim=1)
    return float((gates.gather(1, i)[:, 0] * (first - last).norm(dim=1) / size)[size > 0].mean())


def nearest_experts(f: Float[Tensor, "n M d"]) -> tuple[int, int, float]:
    """The two of M experts whose outputs are nearest, and their distance, relative to the root mean square size.

    Infinite where no two of them say anything but 0.
    """
    flat = f.transpose(0, 1).flatten(1)
    size = flat.square().sum(1)
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    scale = ((size[:, None] + size) / 2).sqrt()
    relative = torch.where(scale > 0, apart / scale, torch.inf).fill_diagonal_(torch.inf)
    one, other = divmod(int(relative.argmin()), len(size))
    return one, other, float(relative[one, other])
