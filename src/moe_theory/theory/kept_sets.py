"""The probability that noise leaves the set of selected experts as it is: Lemma 5.1 of Chen et al. 2022 for k > 1."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.rules import topk_set
from moe_theory.theory.smoothing import _LAWS, BLOCK, FAR, _one_thread

STEEP = 64.0  # largest ratio of two deviations in one integral; smaller ones change a variance by 1 / STEEP^2 at most


def keep_probability(h: Float[Tensor, "n M"], k: int, *, scale: float | Float[Tensor, "..."]) -> Float[Tensor, " n"]:
    """The exact probability that noise N(0, s_m^2) on every logit leaves the set T of the k largest as it is.

    With m the member of T whose noisy logit is the lowest, all others of T above it and all rejected below,

        P = sum_(m in T) int g(z) prod_(l in T, l != m) (1 - G(z_l)) prod_(j not in T) G(z_j) dz,
        z_l = (h_m + s_m z - h_l) / s_l.

    At k = 1 and one scale it is the largest of `route_probabilities`. Factors are left out where they are 1: of
    logits that are `FAR` / 2 of their own deviations and of each other's from all on the other side of the cut.

    Args:
        h: finite logits; k: experts selected.
        scale: standard deviations of the noise, > 0: a number, or a tensor that broadcasts to h. Deviations of less
            than 1 / `STEEP` of the largest beside them count as that much.

    Raises:
        ValueError: for logits that are not finite, a k outside 1..M, or a scale that is not > 0 or has another shape.
    """
    scale = _scales(scale, h)
    with _one_thread():
        unit = scale.amax(1, keepdim=True)
        h, s = check.finite("h", h.double()) / unit, scale / unit
        stays, chosen = torch.ones_like(h[:, 0]), topk_set(h, k)
        if k == h.shape[1]:
            return stays
        low, high = h - FAR / 2 * s, h + FAR / 2 * s
        last = low.masked_fill(~chosen, torch.inf).amin(1, keepdim=True)
        best = high.masked_fill(chosen, -torch.inf).amax(1, keepdim=True)
        near = torch.where(chosen, low < best, last < high)
        inside, outside = (near & chosen).sum(1), (near & ~chosen).sum(1)
        for members, others in torch.stack([inside, outside], 1).unique(dim=0).tolist():
            if members:  # then some outside are near, too
                of = (inside == members) & (outside == others)
                part = (t[of][near[of]].view(-1, members + others) for t in (h, s, chosen))
                rows = max(1, BLOCK // (members * (members + others)))
                parts = zip(*(t.split(rows) for t in part), strict=True)
                stays[of] = torch.cat([_keeps(*rest, members) for rest in parts])  # pyright: ignore[reportCallIssue]
    return stays


def _scales(scale: float | Float[Tensor, "..."], h: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Standard deviations of the noise on each logit."""
    if not isinstance(scale, Tensor):
        return torch.full_like(h, check.positive("scale", scale), dtype=torch.float64)
    fits = scale.ndim <= 2 and all(a in (1, b) for a, b in zip(scale.shape[::-1], h.shape[::-1], strict=False))
    if not fits or not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise ValueError(f"scale: expected finite numbers > 0 that broadcast to {tuple(h.shape)}, got {scale!r}")
    return scale.to(h.device).double().expand(h.shape)


def _keeps(
    h: Float[Tensor, "n M"], s: Float[Tensor, "n M"], chosen: Bool[Tensor, "n M"], k: int
) -> Float[Tensor, " n"]:
    """The sum of `keep_probability`; node after node, each with (n, k, M) factors."""
    s = torch.maximum(s, s.amax(1, keepdim=True) / STEEP)
    own = h.masked_select(chosen).view(-1, k, 1)
    lead = (own - h[:, None, :]) / s[:, None, :]
    ratio = s.masked_select(chosen).view(-1, k, 1) / s[:, None, :]
    sign = torch.where(chosen, -1.0, 1.0)[:, None, :].to(h)  # 1 - G(z) = G(-z)
    itself = (torch.arange(h.shape[1], device=h.device) == chosen.nonzero()[:, 1].view(-1, k, 1)).to(h)
    # a product of G's is the steeper the more there are, and the less noise they have: nodes as for so many more
    like = round((float(ratio.amax()) * (2 + math.sqrt(h.shape[1])) - 2) ** 2)
    z, w = _LAWS["gaussian"].nodes(h[:1, :1].expand(1, like))
    total = torch.zeros_like(h[:, 0])
    for node, weight in zip(z, w * _LAWS["gaussian"].density(z), strict=True):
        factors = torch.special.ndtr(sign * (node * ratio + lead))
        total += weight * torch.lerp(factors, torch.ones_like(factors), itself).prod(-1).sum(-1)
    return total


def kept_gap(h: Float[Tensor, "n M"], k: int) -> Float[Tensor, " n"]:
    """By how much the last of the k selected logits leads the first rejected one; infinite if none is rejected."""
    return gap_of(h.topk(min(k + 1, h.shape[1]), 1).values, k)


def gap_of(top: Float[Tensor, "n top"], k: int) -> Float[Tensor, " n"]:
    """The same from the k + 1 largest, or the k where there are no more."""
    return top[:, k - 1] - top[:, k] if top.shape[1] > k else torch.full_like(top[:, 0], math.inf)
