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
from torch import Tensor, nn

from moe_theory.diagnose.findings import Finding
from moe_theory.diagnose.selection import SCORES, Rule, half_precision, rule_of
from moe_theory.diagnose.traces import INPUTS, TINY, Layer, Trace
from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.streams import torch_stream
from moe_theory.theory.kept_sets import kept_gap

#: Tokens at which a layer is probed, one by one.
PROBES = 8

#: How often a token is put to a layer again, to see whether its output is drawn.
AGAIN = 2

#: Largest relative change of the experts' output by which what lies behind it is differentiated, and how near to that
#: quotient the gradient has to be.
STEP, NEAR = 0.03, 0.01

Gates = Callable[[Float[Tensor, "n M"], Bool[Tensor, "n M"]], Float[Tensor, "n M"]]


def _topk(score: Callable[[Tensor], Tensor]) -> Gates:
    return lambda h, chosen: score(h) * chosen


def _moved(score: Callable[[Tensor], Tensor], bias: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda h: score(h) + bias.to(h)


def _divided(score: Callable[[Tensor], Tensor]) -> Gates:
    return lambda h, chosen: score(h) * chosen / (score(h) * chosen).sum(-1, keepdim=True)


#: Gates of the selected experts, by name: those of chapter 14, without what is random in some of them, and those of
#: other scores than a softmax.
GATES: dict[str, Gates] = {
    softmax_topk.name: lambda h, chosen: softmax_topk.shares(h, chosen) * chosen,
    topk_softmax.name: lambda h, chosen: topk_softmax.shares(h, chosen) * chosen,
    "sigmoid_topk": _topk(torch.sigmoid),
    "sigmoid_divided": _divided(torch.sigmoid),
    "sqrtsoftplus_topk": _topk(SCORES["sqrtsoftplus"][0]),
    "sqrtsoftplus_divided": _divided(SCORES["sqrtsoftplus"][0]),
}

#: Gates that jump where a logit leaves the neighbourhood of the largest; their gradient is made up in training.
MIXER = "sparsemixer"

#: What the name of a gate ends in where the bias that selects is in it, by mistake, and where experts have a factor.
BIASED, SCALED = ", biased", ", scaled"


def is_divided(gate: str) -> bool:
    """Whether the gates of a name sum to one."""
    return "divided" in gate or gate.startswith(topk_softmax.name)


def gates_of(layer: Layer) -> dict[str, Gates]:
    """All gates that a layer may have, from what its router has."""
    found, scale = dict(GATES), layer.scale
    norm = getattr(layer.block, "moe_normalize_expert_weights", None)
    if norm not in (None, 1):
        found[f"softmax_topk, norm {norm:g}"] = lambda h, chosen: nn.functional.normalize(
            GATES[softmax_topk.name](h, chosen), p=norm
        )
    if (jitter := getattr(layer.router, "router_jitter_noise", None)) is not None:
        found[MIXER] = lambda h, chosen: sparse_mixer(h, chosen, float(jitter))
    if (bias := layer.bias) is not None:
        for name, (score, _) in SCORES.items():
            moved = _moved(score, bias)
            found |= {f"{name}_topk{BIASED}": _topk(moved), f"{name}_divided{BIASED}": _divided(moved)}
        shifted = _moved(lambda h: h, bias)
        for name, gate in GATES.items():
            found[f"{name} of logits{BIASED}"] = lambda h, chosen, gate=gate: gate(shifted(h), chosen)
    if scale is not None and bool((scale != 1).any()):
        found |= {
            name + SCALED: lambda h, chosen, gate=gate, by=scale: gate(h, chosen) * by.to(h)
            for name, gate in found.items()
        }
    return found


def sparse_mixer(h: Float[Tensor, "n M"], chosen: Bool[Tensor, "n M"], jitter: float) -> Float[Tensor, "n M"]:
    """The gates of PhiMoE when it does not train: expert after expert a softmax over those near the best that is left.

    Near are those whose logit is at most `2 jitter` below the best one, relative to the larger of the two sizes.
    """
    gates, left = torch.zeros_like(h), h
    for _ in range(int(chosen.sum(1).max())):
        best, at = left.max(1, keepdim=True)
        far = (best - h) / torch.maximum(h.abs(), best) > 2 * jitter
        share = left.masked_fill(far, -torch.inf).softmax(1)
        gates = gates.scatter(1, at, share.gather(1, at))
        left = left.scatter(1, at, -torch.inf)
    return gates


@dataclass(frozen=True)
class Configured:
    """What the configuration says of the gates.

    Attributes:
        divided: whether kept gates are divided by their sum; None where it does not say.
        score: key of `SCORES`; None where it names none.
        factors: the constants by which it multiplies every gate.
        k: experts selected; None where it names no number.
    """

    divided: bool | None = None
    score: str | None = None
    factors: tuple[float, ...] = (1.0,)
    k: int | None = None

    def allows(self, gate: str) -> bool:
        """Whether a gate, by its name, is what it says."""
        if gate == MIXER:
            return True
        divided = is_divided(gate)
        score = "softmax" if "softmax" in gate else gate.partition("_")[0]
        return self.divided in (None, divided) and self.score in (None, score)

    def __str__(self) -> str:
        divided = {None: "", True: "divided by their sum", False: "not divided"}[self.divided]
        return ", ".join(filter(None, (self.score, divided)))


@dataclass(frozen=True)
class GateReport:
    """What a layer's gates are, and what of the loss reaches its router, at some tokens.

    Attributes:
        where: name of the router; k: experts selected; learns: whether its vectors were handed over to be trained.
        rule: how experts are selected; slip: the finding that it is where no rule of what the router has explains the
            tokens, else nothing; rounded: the half precision in which its bias was kept, if it was.
        gates: names in `gates_of` of those whose output is the layer's, up to a constant factor; off: how far each is
            from it, relative, the farthest token over its limit; `gates` has those that are at most 1.
        factor: that constant, times the one behind the experts, where there is one; of several gates those with a
            configured one are taken.
        configured: what the configuration says of both.
        drawn: how far what a token gives is from what it gave before, relative, the farthest of `AGAIN` times.
        handed: how far the gates handed to the experts are from that gate, the farthest of all tokens over its limit;
            nan where what is handed on are no gates.
        lowered: largest relative change of the output when an unselected logit falls by 1; as_first: what it is if a
            softmax over all comes first; limit: of rounding.
        gradient: largest slope of the block's output in the logits, relative to the size of what its experts say, along
            a random direction.
        apart: farthest slope of the experts' output from that of the gate, over its limit; nan where no gate is it.
        ignored: parts of the block, beside router and experts, that have no effect; unbiased: whether the biases of
            the router's matrix have none.
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
    rule: Rule
    slip: str
    rounded: torch.dtype | None
    gates: tuple[str, ...]
    off: dict[str, float]
    factor: float
    configured: Configured
    drawn: float
    handed: float
    lowered: float
    as_first: float
    limit: float
    gradient: float
    apart: float
    ignored: tuple[str, ...]
    unbiased: bool
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
    def gate(self) -> str:
        """Its gates in words; with one expert all those that are divided by their sum are one."""
        if self.k == 1 and all(is_divided(name) for name in self.gates):
            return "divided by itself" if self.gates else "none known"
        return ", ".join(self.gates) or "none known"

    @property
    def findings(self) -> list[Finding]:
        found = [*self._of_gates(), *self._of_gradient()]
        if self.rounded:
            detail = f"its digits are those of {str(self.rounded).removeprefix('torch.')}"
            found.append(Finding("bias rounded", self.where, torch.finfo(self.rounded).eps, 0, detail))
        if self.unbiased:
            found.append(Finding("bias lost", self.where, 0, 0, "what the biases of the router's matrix change"))
        if self.ignored:
            found.append(Finding("shared gate", self.where, len(self.ignored), 0, ", ".join(self.ignored)))
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
        named, allowed = self.gate, [name for name in self.gates if self.configured.allows(name)]
        if self.drawn > self.coarse:
            return [Finding("gate", self.where, self.drawn, self.coarse, "one and the same token gives other outputs")]
        if self.drift > self.coarse:
            detail = "what runs is not what its experts say one by one"
            return [Finding("gate", self.where, self.drift, self.coarse, detail)]
        if not self.gates:
            name, off = min(self.off.items(), key=lambda pair: pair[1])
            return [Finding("gate", self.where, off, 1, f"no known gate fits; {name} is off by so many limits")]
        if self.handed > 1:
            detail = f"handed on, they are off {named} by so many limits"
            return [Finding("gate", self.where, self.handed, 1, detail)]
        if self.mixed > self.coarse:
            detail = "in a batch tokens get another output than alone"
            return [Finding("gate", self.where, self.mixed, self.coarse, detail)]
        if all(BIASED in name for name in self.gates):
            off = min(off for name, off in self.off.items() if BIASED not in name)
            detail = f"off a gate without the bias by so many limits; it is {named}"
            return [Finding("bias in gate", self.where, off, 1, detail)]
        if not allowed:
            off = min((off for name, off in self.off.items() if self.configured.allows(name)), default=math.inf)
            return [Finding("config", self.where, off, 1, f"computed {named}, configured {self.configured}")]
        if not _among(self.factor, self.configured.factors, self.limit):
            configured = " or ".join(f"{factor:g}" for factor in self.configured.factors)
            twice = any(_among(self.factor, (one * one,), self.limit) for one in self.configured.factors)
            computed = f"{named} times {self.factor:.6g}" + " (twice)" * twice
            detail = f"computed {computed}, configured times {configured}"
            return [Finding("factor", self.where, self.factor, self.configured.factors[0], detail)]
        return []

    def _of_gradient(self) -> list[Finding]:
        value, gradient = self.passed
        if not self.heard:  # no gradient is what follows; the silent experts are found as dead
            return []
        if self.drawn > self.coarse:  # slopes of an output that is drawn say nothing
            return []
        if self.gates == (MIXER,):  # in training it has another one, of its own
            return []
        if self.gradient <= self.limit:
            detail = f"K = {self.k}: none but rounding"
            return [Finding("gradient", self.where, self.gradient, self.limit, detail)]
        if self.felt > self.coarse >= self.drift:
            detail = "the one that runs from the one of its copy"
            return [Finding("gradient", self.where, self.felt, self.coarse, detail)]
        if self.apart > 1:
            detail = f"off that of {self.gate} by so many limits"
            return [Finding("gradient", self.where, self.apart, 1, detail)]
        if abs(gradient - value) > NEAR * abs(value):
            detail = f"of a change of its experts' output; its own changes by {value:.4g}"
            return [Finding("gradient", self.where, gradient, value, detail)]
        return []


class Asked(NamedTuple):
    """What a layer's copy in float64 says at some tokens.

    Attributes:
        tokens: their numbers among those that the layer was watched at.
        u: what its block reads; x: what its router multiplies by its vectors; y: what its experts read.
        z: the products; h: its logits; limit: of the rounding of a gate, relative.
        chosen: the experts selected; gates: what is handed to the experts; handed: how, see `Trace`.
        f: what each expert says alone; F: all together; out: what the block makes of it.
        c: a random direction for each token.
    """

    tokens: Int[Tensor, " n"]
    u: Float[Tensor, "n e"]
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n l"]
    z: Float[Tensor, "n M"]
    h: Float[Tensor, "n M"]
    limit: Float[Tensor, " n"]
    chosen: Bool[Tensor, "n M"]
    gates: Float[Tensor, "n M"]
    handed: str
    f: Float[Tensor, "n M l"]
    F: Float[Tensor, "n l"]
    out: Float[Tensor, "n o"]
    c: Float[Tensor, "n l"]

    def parts(self, layer: Layer, gates: Float[Tensor, "n M"]) -> Float[Tensor, "n M l"]:
        """What each expert contributes with some gates."""
        return layer.says(self.y, gates, INPUTS) if self.handed == INPUTS else gates[..., None] * self.f


def probe_gates(layer: Layer, trace: Trace, k: int, *, configured: Configured, learns: bool, seed: int) -> GateReport:
    """Asks a layer what its gates are, at some tokens whose selection is decided.

    Args:
        layer: the layer, in its own precision; trace: what it did with some tokens, without padding.
        k: experts selected; configured: what the configuration says; learns: whether the router is to be trained.
        seed: draws the directions of the slopes.

    Raises:
        ValueError: where the router reads nothing but zeros, an expert answers NaN, or the copy is none.
    """
    running = layer
    scores = tuple(SCORES) if configured.score is None else (configured.score, "logits")
    sent = (trace.exact, trace.rounding, trace.chosen)
    rule, slip = rule_of(*sent, bias=running.bias, groups=running.groups, scores=scores)
    layer, at = _copy(running, trace, k, rule, seed)
    known = gates_of(running)
    value, gradient, bent = _passed(layer, at)
    behind = _constant(value, float(at.limit.max()))
    off, named, factor = _named(layer, at, known, behind, configured)
    lowered, as_first = lower_one(layer, at)
    # The root mean square of <c, gate f> over directions c: that of the one c drawn may be near 0 by chance.
    size = at.parts(layer, at.gates.double()).norm(dim=-1).sum(1).clamp(min=TINY)
    slopes = torch.stack([slope(layer, *asked) for asked in zip(at.u, at.x, at.c, strict=True)])
    worst, largest = int((value - gradient).abs().argmax()), float(at.limit.max())
    drift, felt, mixed = _drift(running, trace, at, slopes, size)
    says = at.f.any(2).any(0)
    eps, fine = torch.finfo(running.dtype).eps, torch.finfo(torch.float32).eps
    return GateReport(
        where=layer.name,
        k=k,
        learns=learns,
        rule=rule,
        slip=slip,
        rounded=None if running.bias is None else half_precision(running.bias),
        gates=named,
        off=off,
        factor=factor * behind,
        configured=configured,
        drawn=_drawn(layer, at, size),
        handed=_handed_on(trace, at, known, named),
        lowered=lowered,
        as_first=as_first,
        limit=largest,
        gradient=float(((slopes * gradient[:, None]).norm(dim=1) / size).max()),
        apart=_apart(layer, at, known, named, slopes, factor, 4 * at.limit * size),
        ignored=_ignored(layer, at) if value.any() else (),
        unbiased=bool(running.b is not None and running.b.any() and running.unbiased(trace)),
        passed=(float(value[worst]), float(gradient[worst])),
        bent=bent,
        jump=jump_at_tie(at),
        silent=tuple((~says).nonzero()[:, 0].tolist()),
        heard=bool((at.chosen & says).any()),
        nearest=nearest_experts(at.f[:, : layer.experts_there]),  # others compute nothing
        alike=4 * layer.hidden * torch.finfo(at.f.dtype).eps,
        drift=drift,
        felt=felt,
        mixed=mixed,
        # Products are added in single precision; in half precision an expert rounds some six times more.
        coarse=float(_limit(trace)[at.tokens].max()) + 4 * layer.hidden * fine + 16 * eps * (eps > fine),
    )


def _copy(running: Layer, trace: Trace, k: int, rule: Rule, seed: int) -> tuple[Layer, Asked]:
    """A copy of a layer in float64 and what it says; of its router in float32 where that is written into its code.

    Raises:
        ValueError: for a layer that runs in neither.
    """
    error = None
    for precision in (torch.float64, torch.float32):
        try:
            layer = running.double(precision)
            return layer, _ask(layer, trace, k, rule, seed)
        except (RuntimeError, TypeError, IndexError, AttributeError) as kept:
            error = error or kept
    put = [kind for kind, module in running.block.named_modules() if "forward" in vars(module)]
    why = f"; forward is replaced in {put}" if put else ""
    raise ValueError(
        f"model: expected layers that run in torch.float64, too, got {error} in {running.name}{why}"
    ) from error


@torch.no_grad()
def _ask(layer: Layer, trace: Trace, k: int, rule: Rule, seed: int) -> Asked:
    """Tokens here and there whose selection is decided, or any where none is; no token that is 0."""
    some = trace.x.any(1)
    if not some.any():
        raise ValueError(f"batches: expected tokens at which {layer.name} reads something other than 0, got none")
    scores, off = rule.of(trace.exact, trace.rounding)
    decided = some & (kept_gap(scores, k) > 2 * off)
    some = (decided if decided.any() else some).nonzero()[:, 0]
    some = some[torch.linspace(0, len(some) - 1, min(PROBES, len(some))).long()]
    u = trace.u[some].double()
    traces = _copied(layer, u)
    x, y, h, chosen, gates, F, out, rounding = (
        torch.cat([getattr(t, name) for t in traces])
        for name in ("x", "y", "exact", "chosen", "gates", "F", "out", "rounding")
    )
    c = torch.randn(F.shape, generator=torch_stream(seed, "probes"), dtype=torch.float64).to(F.device)
    z = layer.products(x, h)
    limit = 2 * rounding + (h.shape[1] + 8) * torch.finfo(torch.float32).eps
    handed = traces[0].handed
    return Asked(some, u, x, y, z, h, limit, chosen, gates, handed, layer.answers(y, handed), F, out, c)


def _copied(layer: Layer, u: Float[Tensor, "n e"]) -> list[Trace]:
    """What a copy does with each token; ValueError if it is none, for a method put into a module stays the original's.

    A copy's logits change with its own router.
    """
    W, follows, traces = layer.W, True, [layer(token[None]) for token in u]
    if isinstance(W, nn.Parameter):
        kept, x = W.detach().clone(), traces[0].x[0]
        W[0] += x / x.square().sum()
        follows = not torch.equal(layer(u[:1]).recorded, traces[0].recorded)
        W.copy_(kept)
    if not follows:
        raise ValueError(
            f"model: expected layers that can be copied, got one whose copy calls the original: {layer.name}"
        )
    return traces


def _limit(trace: Trace) -> Float[Tensor, " n"]:
    """The share of itself by which a gate may be off in the precision in which it is handed on."""
    eps, fine = torch.finfo(trace.gates.dtype).eps, torch.finfo(torch.float32).eps
    return 2 * trace.rounding + (trace.exact.shape[1] + 8) * fine + eps * (eps > fine)


def _named(
    layer: Layer, at: Asked, known: dict[str, Gates], behind: float, configured: Configured
) -> tuple[dict[str, float], tuple[str, ...], float]:
    """How far every gate is over its limit, the names of those that are not, and the factor of these.

    Where few tokens are asked, several gates may fit with a factor each; those are taken that have a configured one
    together with the one behind the experts, and of these those without a bias.
    """
    with torch.no_grad():
        fits = {name: _fit(at.F, at.parts(layer, gate(at.h, at.chosen))) for name, gate in known.items()}
    off = {name: float((distance / at.limit).max()) for name, (_, distance) in fits.items()}
    factors = {name: fits[name][0] for name, value in off.items() if value <= 1}
    limit = float(at.limit.max())
    said = [name for name, factor in factors.items() if _among(factor * behind, configured.factors, limit)]
    named = said or [*factors]
    named = tuple([name for name in named if BIASED not in name] or named)
    return off, named, factors[named[0]] if named else 1.0


def _fit(F: Float[Tensor, "n l"], parts: Float[Tensor, "n M l"]) -> tuple[float, Float[Tensor, " n"]]:
    """The factor with which a mixture is nearest to the output, and its distance, relative to sizes.

    Infinite where the factor would not be positive.
    """
    mixed = parts.sum(1)
    factor = float((F * mixed).sum() / mixed.square().sum()) if mixed.any() else 1.0
    size = factor * parts.norm(dim=-1).sum(1)
    off = (F - factor * mixed).norm(dim=1) / size.clamp(min=TINY)
    return factor, off if factor > 0 else torch.full_like(off, torch.inf)


def _constant(value: Float[Tensor, " n"], limit: float) -> float:
    """What tokens have in common; 1 where they differ, as behind a norm, or where nothing comes through."""
    mean = float(value.mean())
    return mean if mean and float((value - mean).abs().max()) <= limit * abs(mean) else 1.0


def _among(factor: float, configured: tuple[float, ...], limit: float) -> bool:
    return any(abs(factor - one) <= limit * abs(one) for one in configured)


def _handed_on(trace: Trace, at: Asked, known: dict[str, Gates], named: tuple[str, ...]) -> float:
    """How far the gates handed to the experts are from the nearest of those named, at the farthest of all tokens.

    Up to a constant, which the tokens asked give. What is handed on may be no gates; then these tokens are off, too.
    """

    def distance(gates, exact):
        return (gates - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=TINY)

    sent, found = trace.of(trace.chosen.any(1)), [math.nan]
    for name in (name for name in named if name != MIXER):
        exact = known[name](at.h, at.chosen)
        factor = at.gates.double().sum() / exact.sum()
        if bool((distance(at.gates, factor * exact) <= at.limit).all()):
            every = distance(sent.gates.double(), factor * known[name](sent.exact, sent.chosen))
            found.append(float((every / _limit(sent)).max()))
    return min(found, key=lambda value: (math.isnan(value), value))


def _passed(layer: Layer, at: Asked) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"], float]:
    """What the block's output has of a small change of its experts' output, and what its gradient has of it.

    Both along the change c and relative to it, or along what becomes of it where block and experts have another width:
    a difference quotient, and by automatic differentiation. They are one and the same constant where the block adds
    something to the experts' output or multiplies it, and the change is that constant times c; last, how far it is
    from that, relative.
    """
    values, gradients, bent = [], [], 0.0
    for u, F, c in zip(at.u[:, None], at.F[:, None], at.c[:, None], strict=True):
        step = STEP * (float(F.norm()) or 1.0) / float(c.norm())
        with torch.no_grad():
            change = (layer.passed(u, F + step * c) - layer.passed(u, F - step * c)) / (2 * step)
        along = c if change.shape == c.shape else change
        values.append((change * along).sum() / c.square().sum())
        rest = change - values[-1] * c if change.shape == c.shape else change
        bent = max(bent, float(rest.norm() / change.norm().clamp(min=TINY)))
        with torch.enable_grad():
            F = F.detach().requires_grad_()
            out = layer.passed(u, F)
            dF = torch.autograd.grad((out * along).sum(), F, allow_unused=True)[0] if out.requires_grad else None
        gradients.append(out.new_zeros(()) if dF is None else (dF * c).sum() / c.square().sum())
    return torch.stack(values), torch.stack(gradients), bent


def _drift(
    running: Layer, trace: Trace, at: Asked, slopes: Float[Tensor, "n M"], size: Float[Tensor, " n"]
) -> tuple[float, float, float]:
    """Farthest output, slope, and output in the batch of a layer as it runs from those of its copy; see `GateReport`.

    In the batch tokens count that were sent to the same experts there, and where a token is alone.
    """
    low, c = at.u.to(trace.u.dtype), at.c.to(trace.F.dtype)
    with torch.no_grad():
        alone = [running(token[None]) for token in low]
    ran, there = torch.cat([t.F for t in alone]).double(), torch.cat([t.chosen for t in alone])
    kept = (there == at.chosen).all(1)
    felt = torch.stack([slope(running, *asked) for asked in zip(low, at.x, c, strict=True)]).double()
    summed = size.clamp(min=TINY)
    off, same = trace.out[at.tokens].double() - at.out, (trace.chosen[at.tokens] == at.chosen).all(1)
    mixed = same * off.norm(dim=1) / (summed + at.out.norm(dim=1))
    return (
        float((kept * (ran - at.F).norm(dim=1) / summed).max()),
        float((kept * (felt - slopes).norm(dim=1) / size).max()),
        float(mixed.max()),
    )


@torch.no_grad()
def _drawn(layer: Layer, at: Asked, size: Float[Tensor, " n"]) -> float:
    """Farthest output of the experts from what they said of the same token before, relative to its size."""
    again = torch.stack([torch.cat([layer(token[None]).F for token in at.u]) for _ in range(AGAIN)])
    return float(((again - at.F).norm(dim=-1) / size.clamp(min=TINY)).max())


@torch.no_grad()
def lower_one(layer: Layer, at: Asked) -> tuple[float, float]:
    """Largest relative change of the output when the best unselected logit of a token falls by 1, and that predicted.

    With the renormalized gate it is 0; with the full-softmax gate the output grows by `1/(1 - pi_j (1 - 1/e))`.
    """
    if bool(at.chosen.all()):
        return 0.0, 0.0
    best = at.h.masked_fill(at.chosen, -torch.inf).max(1).indices[:, None]
    down = torch.zeros_like(at.z).scatter(1, best, -1.0)
    pi, fallen = at.h.softmax(1).gather(1, best), (layer.squash(at.z + down) - at.h).gather(1, best)
    drop = pi * -torch.expm1(fallen)
    changes = []
    for u, shift, before in zip(at.u, down, at.F, strict=True):
        with layer.shifted(shift):
            changes.append(float((layer(u[None]).F - before).norm() / before.norm().clamp(min=TINY)))
    return max(changes), float((drop / (1 - drop)).max())


def slope(layer: Layer, u: Float[Tensor, " e"], x: Float[Tensor, " d"], c: Float[Tensor, " l"]) -> Float[Tensor, " M"]:
    """`d <c, F> / dz` at one token, by automatic differentiation: the gradient in a router's vectors is `dz x^T`.

    Asked of these vectors; where an adapter makes them of others, of the products z.
    """
    W, z = layer.W, torch.zeros(layer.M, dtype=c.dtype, device=c.device)
    with torch.enable_grad():
        asked = W if isinstance(W, nn.Parameter) and W.requires_grad else z.requires_grad_()
        with layer.shifted(z):
            F = layer(u[None]).F[0]
        found = torch.autograd.grad(c @ F, asked, allow_unused=True)[0] if F.requires_grad else None
    if found is None:
        return z.detach()
    return found if found.ndim == 1 else found.to(x) @ x / x.square().sum()


def _apart(
    layer: Layer, at: Asked, known: dict[str, Gates], named: tuple[str, ...], slopes, factor: float, limit
) -> float:
    """Farthest slope from that of the gate's formula, over its limit."""
    if not named:
        return math.nan
    with torch.enable_grad():
        z = at.z.detach().requires_grad_()
        parts = at.parts(layer, factor * known[named[0]](layer.squash(z), at.chosen))
        exact = torch.autograd.grad(torch.einsum("nml,nl->", parts, at.c), z)[0]
    return float(((slopes - exact).norm(dim=1) / limit).max())


@torch.no_grad()
def _ignored(layer: Layer, at: Asked) -> tuple[str, ...]:
    """Parts of the block beside router and experts without which it would return the same."""
    inside = {id(p) for part in (layer.router, layer.experts) for p in part.parameters()}
    beside = {name: p for name, p in layer.block.named_parameters() if id(p) not in inside and p.is_floating_point()}
    beside = {name: p for name, p in beside.items() if p.numel() not in (layer.M, layer.experts_there)}
    found = []
    for name, p in beside.items():
        kept = p.clone()
        p.mul_(1.5).add_(0.1)
        if torch.equal(torch.cat([layer(token[None]).out for token in at.u]), at.out):
            found.append(name)
        p.copy_(kept)
    return tuple(found)


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
