"""What a layer computes, found by moving its router and by differentiating its output, whatever its configuration says.

Every limit is one of rounding: logits of d products in single precision are off by `delta`, see `linear_logits`, a
softmax of them by `2 delta + (M + 8) eps` of each gate. The layer is copied in float64, with the library's loop over
experts in place of a kernel for all at once, so that what else it computes rounds far below that; then the layer as it
runs is held against the copy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_theory.diagnose.arrays import kept_gap, linear_logits
from moe_theory.diagnose.findings import Finding
from moe_theory.diagnose.layers import Layer
from moe_theory.models.rules import RULES, softmax_topk, topk_set, topk_softmax
from moe_theory.streams import torch_stream
from moe_theory.theory.router_gradient import logit_jacobian

#: Tokens at which a layer is probed, one by one.
PROBES = 8

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
class GateReport:
    """What a layer's gates are, and what of the loss reaches its router, at some tokens.

    Attributes:
        where: name of the router; k: experts selected.
        gates: names in `GATES` of those whose output is the layer's; off: how far each is from it, relative, the
            farthest token over its limit; `gates` has those that are at most 1.
        expected: the gates that the configuration allows; none where it names none.
        kept: smallest and largest sum of a token's gates.
        lowered: largest relative change of the output when an unselected logit falls by 1; as_first: what it is if a
            softmax over all comes first; limit: of rounding.
        gradient: largest slope of the output in the logits, relative to the output's size, along a random direction.
        apart: farthest of these slopes from that of the gate, over its limit; nan where no softmax is the gate.
        jump: mean relative jump of the output where the last selected expert gives way to the first rejected one.
        nearest: the two experts most alike, and the distance of their outputs relative to their size.
        alike: limit of that for equal experts.
        drift: farthest output or slope of the layer as it runs from those of its copy, relative to their size.
        coarse: limit of that: of rounding in the gates and in an expert.
    """

    where: str
    k: int
    gates: tuple[str, ...]
    off: dict[str, float]
    expected: tuple[str, ...]
    kept: tuple[float, float]
    lowered: float
    as_first: float
    limit: float
    gradient: float
    apart: float
    jump: float
    nearest: tuple[int, int, float]
    alike: float
    drift: float
    coarse: float

    @property
    def findings(self) -> list[Finding]:
        """What is wrong."""
        found = []
        named = ", ".join(self.gates)
        if self.drift > self.coarse:
            detail = "what runs is not what its experts say one by one"
            found.append(Finding("gate", self.where, self.drift, self.coarse, detail))
        elif not self.gates:
            name, off = min(self.off.items(), key=lambda pair: pair[1])
            found.append(Finding("gate", self.where, off, 1, f"times its limit from the nearest, {name}"))
        elif self.expected and not set(self.expected) & set(self.gates):
            off, configured = min(self.off[name] for name in self.expected), " or ".join(self.expected)
            found.append(Finding("config", self.where, off, 1, f"computed {named}, configured {configured}"))
        if self.gradient <= self.limit:
            found.append(Finding("gradient", self.where, self.gradient, self.limit, f"K = {self.k}: none but rounding"))
        elif self.apart > 1:
            found.append(Finding("gradient", self.where, self.apart, 1, f"times its limit from that of {named}"))
        one, other, distance = self.nearest
        if distance <= self.alike:
            found.append(Finding("twins", self.where, distance, self.alike, f"experts {one} and {other}"))
        return found


def probe_gates(
    layer: Layer, x: Float[Tensor, "n d"], k: int, *, expected: tuple[str, ...], factor: float, seed: int
) -> GateReport:
    """Asks a layer what its gates are, at the first of n tokens whose selection is decided.

    Args:
        layer: the layer, in its own precision; x: what its router reads; k: experts selected.
        expected: the gates that the configuration allows; factor: the constant by which it multiplies them.
        seed: draws the directions of the slopes.
    """
    running, layer = layer, layer.double()
    h, rounding = linear_logits(x.float(), layer.W, layer.b)
    some = (kept_gap(h, k) > 2 * rounding).nonzero()[:PROBES, 0]
    some = some if len(some) else torch.arange(min(PROBES, len(x)), device=x.device)
    x, h = x[some].double(), linear_logits(x[some].double(), layer.W, layer.b)[0]
    limit = 2 * rounding[some] + (h.shape[1] + 8) * torch.finfo(torch.float32).eps
    with torch.no_grad():
        traces = [layer(token[None]) for token in x]
        f = layer.answers(x, traces[0].masks)
        chosen, gates, F = (torch.cat([getattr(t, name) for t in traces]) for name in ("chosen", "gates", "F"))
        off = {name: float((_off(F, factor * gate(h, chosen), f) / limit).max()) for name, gate in GATES.items()}
        lowered, as_first = lower_one(layer, x, h, chosen, F)
    c = torch.randn(F.shape, generator=torch_stream(seed, "probes"), dtype=torch.float64).to(F.device)
    # The root mean square of <c, gate f> over directions c: that of the one c drawn may be near 0 by chance.
    size = (gates.double() * f.norm(dim=-1)).sum(1)
    slopes = torch.stack([slope(layer, *pair) for pair in zip(x, c, strict=True)])
    named = tuple(name for name, value in off.items() if value <= 1)
    return GateReport(
        where=layer.name,
        k=k,
        gates=named,
        off=off,
        expected=expected,
        kept=(float(gates.sum(1).min()), float(gates.sum(1).max())),
        lowered=lowered,
        as_first=as_first,
        limit=float(limit.max()),
        gradient=float((slopes.norm(dim=1) / size).max()),
        apart=_apart(named, slopes, h, factor * f, c, k, chosen, 4 * limit * size),
        jump=jump_at_tie(h, f, F, chosen, gates, k),
        nearest=nearest_experts(f),
        alike=4 * layer.hidden * torch.finfo(f.dtype).eps,
        drift=_drift(running, x, c, F, slopes, torch.einsum("nm,nmd->nd", gates.double(), f.abs()).norm(dim=1), size),
        coarse=float(limit.max()) + 4 * layer.hidden * torch.finfo(torch.float32).eps,
    )


def _off(F: Float[Tensor, "n d"], gates: Float[Tensor, "n M"], f: Float[Tensor, "n M d"]) -> Float[Tensor, " n"]:
    """Distance of the output from the mixture with some gates, relative to the sizes in that mixture."""
    size = (gates * f.norm(dim=-1)).sum(1)
    return (F - torch.einsum("nm,nmd->nd", gates, f)).norm(dim=1) / size.clamp(min=torch.finfo(size.dtype).tiny)


def _drift(running: Layer, x, c, F, slopes, output_size, slope_size) -> float:
    """Farthest output or slope of a layer, in its own precision and by its own kernel, from those of its copy."""
    low, c = x.to(running.W.dtype), c.to(running.W.dtype)
    with torch.no_grad():
        ran = torch.cat([running(token[None]).F for token in low]).double()
    felt = torch.stack([slope(running, *pair) for pair in zip(low, c, strict=True)]).double()
    off = (ran - F).norm(dim=1) / output_size, (felt - slopes).norm(dim=1) / slope_size
    return float(torch.stack(off).max())


def lower_one(
    layer: Layer, x: Float[Tensor, "n d"], h: Float[Tensor, "n M"], chosen: Bool[Tensor, "n M"], F: Float[Tensor, "n d"]
) -> tuple[float, float]:
    """Largest relative change of the output when the best unselected logit of a token falls by 1, and that predicted.

    With the selection first it is 0; with a softmax over all first, the output grows by `1/(1 - pi_j (1 - 1/e))`.
    """
    if bool(chosen.all()):
        return 0.0, 0.0
    best = h.masked_fill(chosen, -torch.inf).max(1).indices
    pi = h.softmax(1).gather(1, best[:, None])[:, 0]
    drop = pi * -torch.expm1(torch.tensor(-1.0, dtype=h.dtype))
    changes, kept = [], layer.W.detach().clone()
    for token, j, before in zip(x, best, F, strict=True):
        layer.W[j] -= token / token.square().sum()
        changes.append(float((layer(token[None]).F - before).norm() / before.norm()))
        layer.W.copy_(kept)
    return max(changes), float((drop / (1 - drop)).max())


def slope(layer: Layer, x: Float[Tensor, " d"], c: Float[Tensor, " d"]) -> Float[Tensor, " M"]:
    """`d <c, F> / dh` at one token, by automatic differentiation: its gradient in the router is `dh x^T`."""
    with torch.enable_grad():
        F = layer(x[None]).F[0]
        W = torch.autograd.grad(c @ F, layer.W, allow_unused=True)[0] if F.requires_grad else None
    return x.new_zeros(len(layer.W)) if W is None else W.to(x) @ x / x.square().sum()


def _apart(named, slopes, h, f, c, k: int, chosen, limit) -> float:
    """Farthest slope from that of the gate, which chapter 14 has in closed form, over its limit."""
    rules = [RULES[name] for name in named if name in RULES]
    if not rules or bool((chosen != topk_set(h, k)).any()):
        return float("nan")
    exact = torch.einsum("nmd,nd->nm", logit_jacobian(h, f, k, rules[0]), c)
    return float(((slopes - exact).norm(dim=1) / limit).max())


def jump_at_tie(h, f, F, chosen, gates, k: int) -> float:
    """Mean of `g |f_j - f_i| / |F|` over tokens, i the last selected expert, g its gate, j the first rejected one."""
    if bool(chosen.all()):
        return 0.0
    i = h.masked_fill(~chosen, torch.inf).min(1).indices[:, None]
    j = h.masked_fill(chosen, -torch.inf).max(1).indices[:, None]
    both = (f.gather(1, index[..., None].expand(-1, -1, f.shape[2]))[:, 0] for index in (i, j))
    last, first = both
    return float((gates.gather(1, i)[:, 0] * (first - last).norm(dim=1) / F.norm(dim=1)).mean())


def nearest_experts(f: Float[Tensor, "n M d"]) -> tuple[int, int, float]:
    """The two of M experts whose outputs are nearest, and their distance, relative to the root mean square size."""
    flat = f.transpose(0, 1).flatten(1)
    size = flat.square().sum(1)
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    scale = ((size[:, None] + size) / 2).sqrt()
    relative = torch.where(scale > 0, apart / scale, 0.0).fill_diagonal_(torch.inf)
    one, other = divmod(int(relative.argmin()), len(size))
    return one, other, float(relative[one, other])
