"""One layer of two models on identical inputs, part by part; see `compare`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.diagnose.traces import TINY, Layer, Trace, _tokens
from moe_theory.streams import torch_stream

#: Roundings from what an expert reads to what it says: of input, first weights, hidden units, their gate, product,
#: second weights, sum and output.
STAGES = 8

#: Tokens of a batch that a layer is put to; of these, tokens at which every expert is asked alone.
KEPT, ASKED = 256, 32

#: Tokens dropped by one model only that are put to it alone, to see which experts they would be sent to.
ALONE = 32

#: Draws of rounded inputs by which it is seen whether a choice of experts holds.
HOLDS = 16

SINGLE = torch.finfo(torch.float32).eps


class Part(NamedTuple):
    """A part of a layer, or of the model around it, in both models.

    Attributes:
        where: the layer; name: of the part.
        value: distance of the two on identical inputs, relative to their size, or a share of the tokens; limit: of
            rounding.
        says: which experts, and what has become of them.
        ran: the same as the models ran, each with its own inputs; nan where that is not asked.
        follows: whether a difference is the consequence of another one.
    """

    where: str
    name: str
    value: float
    limit: float
    says: str = ""
    ran: float = math.nan
    follows: bool = False

    @property
    def differs(self) -> bool:
        """Whether this is a difference that no other one brings about."""
        return self.value > self.limit and not self.follows


class Site(NamedTuple):
    """Where both models have a layer: the first one's, an MLP where it is dense, and the second one's."""

    where: str
    a: Layer | nn.Module
    b: Layer


def named_as(name: str, asked: Callable, *args) -> Any:
    """What a function makes of a model; its errors name the argument that the model came as."""
    try:
        return asked(*args)
    except ValueError as error:
        raise ValueError(str(error).replace("model:", f"{name}:", 1)) from None


# Formats and limits.


def matrices(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that multiply what it reads."""
    return [p for p in module.parameters() if p.is_floating_point() and p.ndim > 1]


def _digits(module: nn.Module, eps: float) -> float:
    """Unit in the last place of the coarsest format that has all matrices of a module, computed in one of `eps`."""
    halves = [half for half in (torch.bfloat16, torch.float16) if torch.finfo(half).eps > eps]
    fits = (half for half in halves if all(torch.equal(p.to(half).to(p.dtype), p) for p in matrices(module)))
    return next((torch.finfo(half).eps for half in fits), eps)


def resolution(a: nn.Module, b: nn.Module) -> float:
    """Unit in the last place of the coarser format of two modules: those they compute in, and, where they differ in
    that, those that their weights have been in."""
    kinds = [{torch.finfo(p.dtype).eps for p in matrices(m)} or {SINGLE} for m in (a, b)]
    digits = [_digits(m, max(eps)) for m, eps in zip((a, b), kinds, strict=True)]
    return max(*kinds[0], *kinds[1], *(digits if digits[0] != digits[1] else ()))


@dataclass(frozen=True)
class Limit:
    """What rounding may do.

    Attributes:
        eps: unit in the last place; terms: of the longest sum; allowed: beyond rounding, relative.
    """

    eps: float
    terms: int
    allowed: float

    def __call__(self, noise: Tensor | float, size: Tensor | float, stages: float = 1.0) -> Tensor:
        """Of a part of some size that moves by `noise` where inputs are rounded; relative to that size."""
        noise, size = torch.as_tensor(noise, dtype=torch.float64), torch.as_tensor(size, dtype=torch.float64)
        own = self.eps / 2 / math.sqrt(3)  # of what is rounded itself, the root mean square
        sums = 1 + math.sqrt(self.terms) * min(self.eps, SINGLE) / self.eps
        return (STAGES * stages * sums * (noise / size.clamp(min=TINY) + own)).clamp(min=self.allowed)


def rounded(x: Float[Tensor, "*n d"], eps: float, draw: int) -> Float[Tensor, "*n d"]:
    """Numbers moved by up to half a unit in the last place."""
    way = 2 * torch.rand(x.shape, generator=torch_stream(draw, "probes"), dtype=torch.float64).to(x.device) - 1
    return (x.double() * (1 + eps / 2 * way)).to(x.dtype)


def terms(site: Site) -> int:
    """Terms of the longest sum in a layer's block."""
    return max((max(p.shape) for p in matrices(site.b.block)), default=1)


# One layer, on identical inputs.


@dataclass(frozen=True)
class Asked:
    """A layer that takes and gives float64 on the CPU, whatever it computes in.

    Attributes:
        name: of the model; layer: the layer, or an MLP; like: a number in its format and on its device.
    """

    name: str
    layer: Layer
    like: Tensor

    def __call__(self, u: Float[Tensor, "n d"]) -> Trace:
        trace = Trace(*(_plain(part) for part in named_as(self.name, self.layer, u.to(self.like))))
        beside = trace.recorded.shape[1] - trace.chosen.shape[1]  # logits of shared experts, which are not selected
        pad = nn.functional.pad
        return trace._replace(chosen=pad(trace.chosen, (0, beside)), gates=pad(trace.gates, (0, beside)))

    def answers(self, y: Float[Tensor, "n d"], of: Trace) -> Float[Tensor, "n M d"]:
        """What each expert that can be selected says alone; called as in a trace."""
        return _plain(named_as(self.name, self.layer.answers, y.to(self.like), of[-1]))[:, : of.recorded.shape[1]]

    def passed(self, u: Float[Tensor, "n d"], F: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """What the block says where its experts say F."""
        said = self.layer.passed(u.to(self.like), F.to(self.like))
        return _plain(check.finite(f"{self.name}: what the block of {self.layer.name} returns", said))


def _plain(part):
    if not isinstance(part, Tensor):
        return part
    return part.cpu().double() if part.is_floating_point() else part.cpu()


class Compared(NamedTuple):
    """What was found in a layer; see `ModelComparison`."""

    parts: list[Part]
    orders: tuple[tuple[int, ...], ...]
    shift: float
    eps: float


class Both(NamedTuple):
    """What two layers do with the same tokens u, and what each does with these rounded, `near`.

    Attributes:
        still: both layers at u; moved: both at `near`.
        like: a number in the format and on the device of the first one.
    """

    u: Float[Tensor, "n d"]
    near: Float[Tensor, "n d"]
    still: tuple[Trace, Trace]
    moved: tuple[Trace, Trace]
    like: Tensor

    @property
    def a(self) -> Trace:
        return self.still[0]

    @property
    def b(self) -> Trace:
        return self.still[1]


def layers_alike(
    site: Site, u: Float[Tensor, "n d"], like: tuple[Tensor, Tensor], chosen: list, tolerance: float, sites: list[Site]
) -> Compared:
    """Compares a layer of two models where both read the same.

    Args:
        site: the layers; sites: all of both models; tolerance: as in `compare`.
        u: what the first one's block reads; like: a number in the format and on the device of each.
        chosen: experts selected as both run, pairs of masks.
    """
    A, B = (Asked(*each) for each in zip("ab", (site.a, site.b), like, strict=True))
    eps = resolution(site.a.block if isinstance(site.a, Layer) else site.a, site.b.block)
    limit = Limit(eps, terms(site), tolerance)
    u = u.to(A.like.dtype).double()
    if not isinstance(site.a, Layer):
        return Compared(_from_dense(site, A, B, u, limit), (), 0.0, eps)
    near = rounded(u, eps, 0)
    both = Both(u, near, (A(u), B(u)), (A(near), B(near)), A.like)
    if (M := both.a.chosen.shape[1]) != (other := both.b.chosen.shape[1]):
        raise ValueError(f"b: expected {M} experts in {site.where} as in a, got {other}")
    answers = _answers(A, B, both, eps)
    of_router, of_experts, apart = _orders(both, answers, limit)
    routed, shift = _router_parts(site, A, B, both, of_router, limit, sites)
    parts = [_order_part(site, of_router, of_experts, apart), *_bias_part(site, of_router), *routed]
    parts = [p._replace(ran=_ran_choices(chosen, of_router)) if p.name == "choices" else p for p in parts]
    parts += _experts_parts(site, B, both, answers, of_experts, limit, sites)
    shared, block = _beside_parts(site, A, B, both, limit)
    parts.append(shared)
    if block.value <= block.limit:  # then what is left is what the block says in all
        value, bound = _of_same(both, of_router, "out", limit)
        follows = any(part.value > part.limit for part in parts)
        block = block._replace(value=value, limit=bound, follows=follows)
    orders = tuple(of_router.tolist()), tuple(of_experts.tolist())
    plain = orders == (tuple(range(M)),) * 2
    return Compared([*_follows(parts), block], () if plain else orders, shift, eps)


#: Parts of which others are the consequence.
BEFORE = {"choices": ("bias", "logits"), "dropped": ("bias", "logits", "choices"), "gates": ("logits",)}


def _follows(parts: list[Part]) -> list[Part]:
    """Marks what follows from a part before it."""
    off: set[str] = set()
    marked = []
    for part in parts:
        marked.append(part._replace(follows=part.follows or bool(off.intersection(BEFORE.get(part.name, ())))))
        if part.value > part.limit:
            off.add(part.name)
    return marked


# Numbers of the experts.


class Answers(NamedTuple):
    """What every expert says in both models at the same inputs.

    Attributes:
        y: the inputs; a, b: what is said; moved: by how much in each model, by expert, where the inputs are rounded.
    """

    y: Float[Tensor, "n d"]
    a: Float[Tensor, "n M d"]
    b: Float[Tensor, "n M d"]
    moved: tuple[Float[Tensor, " M"], Float[Tensor, " M"]]


def _sizes(f: Float[Tensor, "n M d"]) -> Float[Tensor, " M"]:
    return f.square().sum((0, 2)).sqrt()


def _answers(A: Asked, B: Asked, both: Both, eps: float) -> Answers:
    some = torch.linspace(0, len(both.a.y) - 1, min(ASKED, len(both.a.y))).long()
    y = both.a.y[some]
    said = [ask.answers(y, t) for ask, t in ((A, both.a), (B, both.b))]
    if said[0].shape != said[1].shape:
        raise ValueError(
            f"b: expected experts that say {tuple(said[0].shape)} numbers as in a, got {tuple(said[1].shape)}"
        )
    near = rounded(y, eps, 0)
    moved = (_sizes(ask.answers(near, t) - f) for ask, t, f in ((A, both.a, said[0]), (B, both.b, said[1])))
    return Answers(y, *said, tuple(moved))  # pyright: ignore[reportCallIssue]


def _distances(a: Float[Tensor, "M n"], b: Float[Tensor, "M n"], near: float) -> Float[Tensor, "M M"]:
    """Of every row from every other; those below `near` exactly, for products of rows lose half the digits."""
    apart = torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist")
    for row, other in (apart <= near).nonzero().tolist():
        apart[row, other] = (a[row] - b[other]).norm()
    return apart


def _alike(answers: Answers, limit: Limit) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M M"]]:
    """How far the experts are apart, relative to the root mean square of their sizes, and the limit of each pair."""
    a, b = (f.transpose(0, 1).flatten(1) for f in (answers.a, answers.b))
    size = ((a.square().sum(1)[:, None] + b.square().sum(1)) / 2).sqrt()
    apart = _distances(a, b, 1e-6 * float(size.max())) / size.clamp(min=TINY)
    return apart, limit(torch.maximum(answers.moved[0][:, None], answers.moved[1]), size)


def _rows_alike(both: Both, limit: Limit) -> Bool[Tensor, "M M"]:
    """Which logits of the first router are which of the second one's: as they are, or less the mean of their token."""
    H = [t.recorded for t in (both.a, both.b)]
    bound = _logits_limit(both, limit)
    found = []
    for mean in (0.0, 1.0):
        a, b = ((h - mean * h.mean(1, keepdim=True)).T for h in H)
        size = _spread(both) / math.sqrt(len(a))
        apart = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist") / max(size, TINY)
        found.append(apart <= bound)
    return max(found, key=lambda ok: -_matched(ok)[1])


def _matched(*alike: Bool[Tensor, "M M"]) -> tuple[Int[Tensor, " M"], int]:
    """The numbers that agree with most, of these with the fewest changes; and how often they do not agree."""
    M = len(alike[0])
    off = sum((~ok).long() for ok in alike)
    order = torch.as_tensor(linear_sum_assignment((M + 1) * off + 1 - torch.eye(M).long())[1])
    return order, int(off[torch.arange(M), order].sum())


def _orders(both: Both, answers: Answers, limit: Limit) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"], bool]:
    """Numbers in the second model of the first one's experts, for router and for experts; and whether they differ.

    One and the same order is looked for first; two, where they explain more.
    """
    apart, bound = _alike(answers, limit)
    rows = _rows_alike(both, limit)
    experts = torch.eye(len(rows)).bool()  # a router may have more numbers than there are experts
    experts[: len(apart), : len(apart)] = apart <= bound
    together, missed = _matched(rows, experts)
    (of_router, of_rows), (of_experts, of_answers) = _matched(rows), _matched(experts)
    if of_rows + of_answers < missed:
        return of_router, of_experts, True
    return together, together, False


def _order_part(site: Site, of_router: Tensor, of_experts: Tensor, apart: bool) -> Part:
    if not apart:
        return Part(site.where, "order", 0, 0)
    plain = torch.arange(len(of_router))
    share = float((of_router != of_experts).double().mean())
    if torch.equal(of_router, plain):
        says = f"experts renumbered against the router, {_order(of_experts)}"
    elif torch.equal(of_experts, plain):
        says = f"router renumbered against the experts, {_order(of_router)}"
    else:
        says = f"router renumbered, {_order(of_router)}, and experts otherwise, {_order(of_experts)}"
    return Part(site.where, "order", share, 0, says)


def _order(of: Int[Tensor, " M"]) -> str:
    """An order in short: by how many all have moved on, or all numbers, or how many are others."""
    M, plain = len(of), torch.arange(len(of))
    on = int(of[0])
    if torch.equal(of, (plain + on) % M):
        return f"by {on}" if 2 * on <= M else f"by {on - M}"
    return str(of.tolist()) if M <= 16 else f"{int((of != plain).sum())} of {M}"


# The router.


def _router_parts(
    site: Site, A: Asked, B: Asked, both: Both, order: Tensor, limit: Limit, sites: list[Site]
) -> tuple[list[Part], float]:
    """Logits, choices, dropped tokens and gates; and a shift of all logits that none of these sees."""
    logits, shift = _logits_part(site, both, order, limit, sites)
    choices = _choices_part(site, A, B, both, order, limit)
    gates = _gates_part(site, both, order, limit)
    if shift and (gates.value > gates.limit or choices.value > choices.limit):
        says = "all of a token shifted by one number"
        logits, shift = logits._replace(value=shift, limit=float(limit.allowed), says=says), 0.0
    return [logits, choices, _dropped_part(site, A, both, choices, limit), gates], shift


def _spread(both: Both) -> float:
    """Size of the logits but for what all of a token have in common."""
    sizes = ((h - h.mean(1, keepdim=True)).square().sum() / 2 for h in (both.a.recorded, both.b.recorded))
    return math.sqrt(sum(map(float, sizes)))


def _logits_limit(both: Both, limit: Limit) -> float:
    """Of the logits of an expert, relative to the root mean square over the experts."""
    size, M = _spread(both), both.a.recorded.shape[1]
    raw = max(float(t.recorded.norm()) for t in (both.a, both.b))
    moved = ((m.recorded - t.recorded).norm(dim=0) for m, t in zip(both.moved, both.still, strict=True))
    noise = max(float(each.max()) for each in moved) * math.sqrt(M)
    return float(limit(noise, raw)) * raw / max(size, TINY)


def _logits_part(site: Site, both: Both, order: Tensor, limit: Limit, sites: list[Site]) -> tuple[Part, float]:
    """How far the logits are apart, and by how much all of a token are shifted together; relative to their size."""
    a, b = both.a.recorded, both.b.recorded[:, order]
    shift = (b - a).median(1, keepdim=True).values
    scale, bound = math.sqrt(a.shape[1]) / max(_spread(both), TINY), _logits_limit(both, limit)
    rows = (b - a - shift).norm(dim=0) * scale
    off = rows > bound
    says = f"of experts {_list(off)}" if off.any() else ""
    if off.all():
        says += _of_other(site, both, sites, bound)
    common = 0.0 if off.any() else float(shift.norm()) * scale
    return Part(site.where, "logits", float(rows.max()), bound, says), common if common > bound else 0.0


def _of_other(site: Site, both: Both, sites: list[Site], bound: float) -> str:
    """Whose logits these are."""
    for other in sites:
        if other.where == site.where or not isinstance(other.a, Layer) or other.a.W.shape != site.b.W.shape:
            continue
        H = Asked("a", other.a, both.like)(both.u).recorded
        if float((H - both.b.recorded).norm()) <= bound * float(H.norm()):
            return f", those of {other.where}"
    return ""


def _bias_part(site: Site, order: Tensor) -> list[Part]:
    """The biases that select, up to a number that is added to all; nothing where there are none."""
    held = [layer.bias for layer in (site.a, site.b)]
    if held[0] is None and held[1] is None:
        return []
    own = next(t for t in held if t is not None)
    a, b = (torch.zeros(len(own), dtype=torch.float64) if t is None else t.cpu().double() for t in held)
    a, b = a[: len(order)], b[order]
    apart, size = b - a, float(torch.maximum(a.abs(), b.abs()).max())
    value = float((apart - apart.median()).abs().max()) / max(size, TINY)
    eps = torch.finfo(own.dtype).eps
    return [Part(site.where, "bias", value, eps, _of_bias(a, b, held[1] is None) if value > eps else "")]


def _of_bias(a: Float[Tensor, " M"], b: Float[Tensor, " M"], missing: bool) -> str:
    """What has become of a bias."""
    if missing or not b.any():
        return "lost"
    for half in (torch.bfloat16, torch.float16):
        if torch.equal(a.float().to(half).double(), b):
            return f"rounded to {half}".replace("torch.", "")
    if torch.equal(a.sort().values, b.sort().values):
        return "renumbered"
    return "another"


def _choices_part(site: Site, A: Asked, B: Asked, both: Both, order: Tensor, limit: Limit) -> Part:
    """Share of the tokens with other experts; the limit is the share of those where rounding may decide."""
    a, b = both.a.chosen, both.b.chosen[:, order]
    k, other = (int(chosen.sum(1).max()) for chosen in (a, b))
    if k != other:
        return Part(site.where, "choices", 1, 0, f"{other} experts for a token, {k} before")
    short = (a != b).any(1) & ((a.sum(1) < k) | (b.sum(1) < k))
    alone = short.nonzero()[:, 0][:ALONE]
    a, b = a.clone(), b.clone()
    a[short], b[short] = False, False
    for token in alone.tolist():  # what it would be sent to, were there room
        a[token], b[token] = (ask(both.u[token : token + 1]).chosen[0] for ask in (A, B))
        b[token] = b[token, order]
    flipped = (a != b).any(1) & (a.sum(1) == k) & (b.sum(1) == k)
    open_ = flipped & _near(both, order, a != b, limit.eps)
    asked = (flipped & ~open_).nonzero()[:, 0][:KEPT]
    open_[asked] = _wavers(A, both.u[asked], limit)
    share = float(flipped.double().mean())
    says = f"{share:.2g} of the tokens go to other experts" if share else ""
    return Part(site.where, "choices", share, float(open_.double().mean()), says)


def _near(both: Both, order: Tensor, other: Bool[Tensor, "n M"], eps: float) -> Bool[Tensor, " n"]:
    """Where experts that are selected in one model only have logits that differ by no more than the models' do.

    That explains every other choice of the largest logits; where a bias selects, see `_wavers`.
    """
    a, b = both.a.recorded, both.b.recorded[:, order]
    gap = a.masked_fill(~other, -math.inf).amax(1) - a.masked_fill(~other, math.inf).amin(1)
    apart = b - a
    moved = (apart - apart.median(1, keepdim=True).values).abs().amax(1)
    return gap <= 2 * moved + 4 * eps * a.abs().amax(1)


def _wavers(A: Asked, u: Float[Tensor, "n d"], limit: Limit) -> Bool[Tensor, " n"]:
    """Where a layer selects other experts if its input is moved by what rounding, or the tolerance, allows."""
    wavers = torch.zeros(len(u), dtype=torch.bool)
    if not len(u):
        return wavers
    chosen, eps = A(u).chosen, max(STAGES * limit.eps, 2 * math.sqrt(3) * limit.allowed)
    for draw in range(HOLDS):
        wavers |= (A(rounded(u, eps, draw)).chosen != chosen).any(1)
    return wavers


def _ran_choices(masks: list, order: Tensor) -> float:
    """Share of the tokens with other experts as the models run."""
    if not masks:
        return math.nan
    M = min(len(order), masks[0][0].shape[1])
    return float(torch.cat([(a[:, :M] != b[:, order[:M]]).any(1) for a, b in masks]).double().mean())


def _dropped_part(site: Site, A: Asked, both: Both, choices: Part, limit: Limit) -> Part:
    """Share of the tokens without all of their experts in one model only.

    The limit is the share of those where rounding may decide, and three for each token that rounding sends elsewhere:
    it may be dropped or no longer be, and make room for another one, and take that of a third.
    """
    short = [t.chosen.sum(1) < t.chosen.sum(1).max() for t in both.still]
    other = short[0] != short[1]
    if not other.any():
        return Part(site.where, "dropped", 0, 0)
    a, b = (float(s.double().mean()) for s in short)
    open_ = float((other & _wavers(A, both.u, limit)).double().mean())
    says = f"{b:.2g} of the tokens, {a:.2g} before"
    return Part(site.where, "dropped", float(other.double().mean()), open_ + 3 * choices.limit, says)


def _same(both: Both, order: Tensor) -> Bool[Tensor, " n"]:
    """Tokens with the same experts in both models."""
    return (both.a.chosen == both.b.chosen[:, order]).all(1) & both.a.chosen.any(1)


def _held(both: Both, same: Bool[Tensor, " n"], part: str) -> tuple[Tensor, Tensor, float]:
    """A part in both models at these tokens, and how far rounding moves it where it changes no choice."""
    pair = [getattr(t, part)[same] for t in both.still]
    noise = 0.0
    for m, t in zip(both.moved, both.still, strict=True):
        keeps = (m.chosen == t.chosen).all(1) & same
        off = getattr(m, part)[keeps] - getattr(t, part)[keeps]
        noise = max(noise, float(off.norm()) * math.sqrt(float(same.sum()) / max(1, int(keeps.sum()))))
    return *pair, noise


def _apart(a: Tensor, b: Tensor, noise: float, limit: Limit) -> tuple[float, float]:
    """Distance of two parts relative to their size, and its limit."""
    size = math.sqrt(float(a.square().sum() + b.square().sum()) / 2)
    return float((a - b).norm()) / max(size, TINY), float(limit(noise, size))


def _of_same(both: Both, order: Tensor, part: str, limit: Limit) -> tuple[float, float]:
    """Distance of a part at tokens with the same experts, and its limit."""
    a, b, noise = _held(both, _same(both, order), part)
    return _apart(a, b, noise, limit)


def _gates_part(site: Site, both: Both, order: Tensor, limit: Limit) -> Part:
    """The gates of tokens with the same experts."""
    a, b, noise = _held(both, _same(both, order), "gates")
    b = b[:, order]
    value, bound = _apart(a, b, noise, limit)
    return Part(site.where, "gates", value, bound, _of_gates(a, b, bound) if value > bound else "")


def _of_gates(a: Float[Tensor, "n M"], b: Float[Tensor, "n M"], bound: float) -> str:
    """What has become of gates: a factor, or a sum that they are divided by."""
    factor = float((a * b).sum() / a.square().sum().clamp(min=TINY))
    if _apart(factor * a, b, 0.0, Limit(bound / STAGES, 1, bound))[0] <= bound:
        return f"times {factor:.4g}"
    sums = [(g.sum(1) - g.sum(1).mean()).abs().max() <= 2 * bound * g.sum(1).mean() for g in (a, b)]
    if sums[0] != sums[1]:
        return "no longer divided by their sum" if sums[0] else "now divided by their sum"
    return "others on the same logits"


# Experts, and what is beside them.


#: What may have been done to a matrix: its name, and what undoes it, None where the shape does not allow it.
REPAIRS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "transposed": lambda p: p.T if len(p) == p.shape[1] else None,
    "each half transposed": lambda p: (
        torch.cat([half.T for half in p.chunk(2)])
        if len(p) == 2 * p.shape[1]
        else torch.cat([half.T for half in p.chunk(2, 1)], 1)
        if 2 * len(p) == p.shape[1]
        else None
    ),
    "halves exchanged": lambda p: None if len(p) % 2 else p.roll(len(p) // 2, 0),
    "halves of rows exchanged": lambda p: None if p.shape[1] % 2 else p.roll(p.shape[1] // 2, 1),
    "rows of the halves in turn": lambda p: None if len(p) % 2 else torch.cat([p[::2], p[1::2]]),
    "columns of the halves in turn": lambda p: None if p.shape[1] % 2 else torch.cat([p[:, ::2], p[:, 1::2]], 1),
    "halves for rows in turn": lambda p: None if len(p) % 2 else torch.stack(p.chunk(2), 1).flatten(0, 1),
    "halves for columns in turn": lambda p: None if p.shape[1] % 2 else torch.stack(p.chunk(2, 1), 2).flatten(1),
}


def _list(of: Tensor) -> str:
    """Numbers at which a mask is true."""
    numbers = of.nonzero()[:, 0].tolist()
    whole = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"[{numbers[0]}..{numbers[-1]}]" if whole else str(numbers)


def _experts_parts(
    site: Site, B: Asked, both: Both, answers: Answers, order: Tensor, limit: Limit, sites: list[Site]
) -> list[Part]:
    """The experts each alone, numbered as in the first model: those that a matrix explains, and the others."""
    apart, bound = _alike(answers, limit)
    whole, order = order, order[: len(apart)]
    number = torch.arange(len(order))
    value, bounds = apart[number, order], bound[number, order]
    off = value > bounds
    if not off.any():
        return [_together(site, both, whole, limit, float(value.max()), float(bounds.max()))]
    parts = []
    for name, what, mended in _repairs(B, both, answers, order, off, limit):
        at = float(value[mended].max()), float(bounds[mended].max())
        parts.append(Part(site.where, name, *at, f"experts {_list(mended)} ({what})"))
        off = off & ~mended
    if off.any():
        at = float(value[off].max()), float(bounds[off].min())
        says = _of_experts(site, both, answers, order, off, limit, sites)
        parts.append(Part(site.where, "experts", *at, f"experts {_list(off)}{says}"))
    return parts


def _together(site: Site, both: Both, order: Tensor, limit: Limit, value: float, bound: float) -> Part:
    """Experts that agree each alone: what they say together at their gates, where these agree."""
    gates = [t.gates[_same(both, order)] for t in (both.a, both.b)]
    sums = _of_same(both, order, "F", limit)
    if sums[0] > sums[1] and _apart(gates[0], gates[1][:, order], 0.0, limit)[0] <= sums[1]:
        return Part(site.where, "experts", *sums, "together, though each alone agrees")
    return Part(site.where, "experts", value, bound)


def _of_experts(
    site: Site, both: Both, answers: Answers, order: Tensor, off: Tensor, limit: Limit, sites: list[Site]
) -> str:
    """What experts are instead."""
    apart, bound = _alike(answers, limit)
    if not answers.b[:, order[off]].any():
        return " (answer 0)"
    as_other = apart[:, order[off]] <= bound[:, order[off]]
    if as_other.any(0).all():
        return f" (as those of a numbered {as_other.long().argmax(0).tolist()})"
    for other in sites:
        if off.all() and other.where != site.where and isinstance(other.a, Layer):
            f = Asked("a", other.a, both.like).answers(answers.y, both.a)
            if f.shape == answers.b.shape and bool(
                _alike(answers._replace(a=f), limit)[0].diag().le(bound.max()).all()
            ):
                return f" (those of {other.where})"
    return ""


def _weights(layer: Layer) -> dict[str, list[Tensor]]:
    """For each kind of weight the matrices of all experts."""
    M, kinds = len(layer.W), {}
    for name, p in layer.experts.named_parameters():
        if p.ndim == 3 and len(p) == M:
            kinds[name] = [*p.unbind()]
        elif p.ndim == 2:
            kinds.setdefault(name.rpartition(".weight")[0].rpartition(".")[2], []).append(p)
    return {name: found for name, found in kinds.items() if len(found) == M}


def _repairs(
    B: Asked, both: Both, answers: Answers, order: Tensor, off: Bool[Tensor, " M"], limit: Limit
) -> list[tuple[str, str, Bool[Tensor, " M"]]]:
    """What a change of a kind of matrices mends: name of the part, what it is, and which experts."""
    kinds, found = _weights(B.layer), []
    number = torch.arange(len(order))
    groups = [[kind] for kind in kinds] + ([[*kinds]] if len(kinds) > 1 else [])
    for (name, mend), group in product(REPAIRS.items(), groups):
        matrices = [kinds[kind][m] for kind in group for m in order[off].tolist()]
        with _mended(matrices, mend) as changed:
            if not changed:
                continue
            said = B.answers(answers.y, both.b)
        apart, bound = _alike(answers._replace(b=said), limit)
        mended = off & (apart <= bound)[number, order]
        if mended.any():
            found.append(("transposed" if "transposed" in name else "experts", f"{', '.join(group)} {name}", mended))
            off = off & ~mended
    return found


@contextmanager
def _mended(matrices: list[Tensor], mend: Callable[[Tensor], Tensor | None]) -> Iterator[bool]:
    """Changes matrices while it is open, if their shape allows it."""
    kept = [p.detach().clone() for p in matrices]
    new = [mend(p) for p in kept]
    try:
        changed = bool(new) and all(p is not None for p in new)
        if changed:
            for p, value in zip(matrices, new, strict=True):
                p.copy_(value)
        yield changed
    finally:
        for p, value in zip(matrices, kept, strict=True):
            p.copy_(value)


def _beside_parts(site: Site, A: Asked, B: Asked, both: Both, limit: Limit) -> tuple[Part, Part]:
    """What the block says where its experts say nothing, and what it makes of those of the first model."""
    F, nothing, asked = both.a.F, torch.zeros_like(both.a.F), (A, B)
    near = rounded(F, limit.eps, 0)
    a, b = (ask.passed(both.u, nothing) for ask in asked)
    moved = [ask.passed(both.near, nothing) for ask in asked]
    made_a, made_b = (ask.passed(both.u, F) - s for ask, s in zip(asked, (a, b), strict=True))
    made_near = [ask.passed(both.near, near) - s for ask, s in zip(asked, moved, strict=True)]
    value, bound = _apart(made_a, made_b, _noise([made_a, made_b], made_near), limit)
    shared = _shared_part(site, a, b, _noise([a, b], moved), limit)
    block = Part(site.where, "block", value, bound, "what it makes of its experts")
    return shared._replace(follows=value > bound), block


def _noise(still: list[Tensor], moved: list[Tensor]) -> float:
    return max(float((m - s).norm()) for m, s in zip(moved, still, strict=True))


def _shared_part(site: Site, a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], noise: float, limit: Limit) -> Part:
    """The shared expert with its gate, which is a number for each token."""
    value, bound = _apart(a, b, noise, limit)
    if value <= bound:
        return Part(site.where, "shared", value, bound)
    if not b.any():
        return Part(site.where, "shared", value, bound, "lost")
    ratio = (a * b).sum(1, keepdim=True) / a.square().sum(1, keepdim=True).clamp(min=TINY)
    factor = float((a * b).sum() / a.square().sum().clamp(min=TINY))
    if _apart(factor * a, b, noise, limit)[0] <= bound:
        return Part(site.where, "shared", value, bound, f"times {factor:.3g}")
    if _apart(ratio * a, b, noise, limit)[0] <= bound:
        says = f"times {float(ratio.min()):.3g} to {float(ratio.max()):.3g}, by token"
        return Part(site.where, "shared gate", value, bound, says)
    return Part(site.where, "shared", value, bound, "another" if a.any() else "none before")


def _from_dense(site: Site, A: Asked, B: Asked, u: Tensor, limit: Limit) -> list[Part]:
    """A layer of a mixture whose experts are to be copies of an MLP."""

    def dense(x: Tensor) -> Float[Tensor, "n d"]:
        return _tokens(A.layer(x.to(A.like)[None])).cpu().double()

    t, near = B(u), rounded(u, limit.eps, 0)
    some = torch.linspace(0, len(u) - 1, min(ASKED, len(u))).long()
    said, f, out = dense(t.y[some]), B.answers(t.y[some], t), dense(u)
    noise = float((dense(near) - out).norm())
    share = math.sqrt(len(some) / len(u))
    each = [_apart(said, f[:, m], share * noise, limit) for m in range(f.shape[1])]
    off = torch.tensor([value > bound for value, bound in each])
    says = f"experts {_list(off)} are no copies" if off.any() else ""
    ones, shared = t.gates.sum(1), B.passed(u, torch.zeros_like(t.F))
    parts = [
        Part(site.where, "gates", *_apart(torch.ones_like(ones), ones, 0.0, limit), "their sum, for 1"),
        Part(site.where, "experts", *max(each, key=lambda pair: pair[0] / pair[1]), says),
        Part(site.where, "shared", float(shared.norm() / out.norm().clamp(min=TINY)), 0, "where a has none"),
    ]
    follows = any(part.value > part.limit for part in parts)
    block = Part(site.where, "block", *_apart(out, t.out, noise, limit), "what it makes of its experts")
    return [*parts, block._replace(follows=follows)]
