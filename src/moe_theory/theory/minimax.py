"""Why the norms of the cosine router's vectors cannot be estimated (Nguyen et al. 2025, Theorems 2 and 5).

Two measures with one regression function give data of one law, so no estimator is near both: what it
loses against the one and against the other adds up to at least `two_point_bound`, whatever the
sample size. The pairs the paper builds (for Eq. 22 and 24) are of this kind.
"""

import math

import torch
from jaxtyping import Float, Int
from scipy.optimize import linprog
from torch import Tensor
from torch.nn.functional import one_hot

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure


def rescaled(G: MixingMeasure, factors: Float[Tensor, " k"]) -> MixingMeasure:
    """G with its router vectors multiplied by positive numbers: the cosine router has the same scores."""
    if factors.shape != G.beta0.shape or not ((factors > 0) & torch.isfinite(factors)).all():
        raise ValueError(f"factors: expected {len(G)} finite numbers > 0, got {factors.tolist()}")
    return G.with_(beta1=G.beta1 * factors[:, None])


def radial_sequence(G: MixingMeasure, n: int) -> MixingMeasure:
    """G_n below Eq. 22 (exact-specified): the first router vector is `1 + 1/n` times that of G."""
    factors = torch.ones_like(G.beta0)
    factors[0] += 1 / check.integer("n", n, 1)
    return rescaled(G, factors)


def split_sequence(G: MixingMeasure, n: int) -> MixingMeasure:
    """G_n below Eq. 24 (over-specified): two halves of the first atom, with `1 - 1/n` and `1 + 1/n` times its router.

    n is at least 2: at 1 the first half would have a zero router vector, where the cosine is not defined.
    """
    check.integer("n", n, 2)
    twice = torch.tensor([0, *range(len(G))], device=G.beta0.device)
    halves = MixingMeasure(G.beta0[twice], G.beta1[twice], G.eta[twice])
    shift, factors = torch.zeros_like(halves.beta0), torch.ones_like(halves.beta0)
    shift[:2] = math.log(2)
    factors[0] -= 1 / n
    factors[1] += 1 / n
    return rescaled(halves.with_(beta0=halves.beta0 - shift), factors)


def two_point_bound(G: MixingMeasure, other: MixingMeasure, r: float = 1) -> float:
    """`2 sum_j exp(beta0_j) min(1, (delta_j / 2)^r)`, `delta_j^r = |beta1_j - beta1'_j|^r + |eta_j - eta'_j|^r`.

    The least value of `L_1r(H, G) + L_1r(H, other)` over all measures H with finitely many atoms; so
    the larger of the two expected losses of an estimator is at least half of it where the data have
    the same law. The two losses of the minimizer are equal, so half of it is also attained.

    Args:
        G, other: measures with distinct atoms and the same weights. Each atom of the one must be at least
            `max(1, 2^(1/2 - 1/r)) max(delta_j, delta_l)` away from every other atom of the other; no smaller
            factor will do. ValueError otherwise: the bound is not proved (and, where atoms crowd, not true).
        r: power in L_1r, at least 1.
    """
    if not (math.isfinite(r) and r >= 1):
        raise ValueError(f"r: expected a finite number >= 1, got {r!r}")
    if (G.d, len(G)) != (other.d, len(other)):
        raise ValueError(f"other: expected {len(G)} atoms in d = {G.d}, got {len(other)} in d = {other.d}")
    if not torch.equal(G.beta0, other.beta0):
        raise ValueError("other: expected the beta0 of G, got another")
    delta = _prices(G.atoms(), other, torch.arange(len(G)), r) ** (1 / r)
    factor = max(1.0, 2 ** (0.5 - 1 / r))
    # not by torch.cdist, which takes distances of more than 25 atoms from rounded squares
    apart = (G.atoms()[:, None] - other.atoms()).norm(dim=2).fill_diagonal_(torch.inf)
    short = apart - factor * torch.maximum(delta[:, None], delta)
    if (short < 0).any():
        j, m = divmod(int(short.argmin()), len(G))
        raise ValueError(
            f"other: expected atoms {j} of G and {m} of it at least {float(apart[j, m] - short[j, m]):.4g} "
            f"apart, {factor:.4g} times the larger move, got {float(apart[j, m]):.4g}"
        )
    if (apart == 0).any():  # two atoms that do not move, at one place: their cells are not determined
        raise ValueError("G: expected distinct atoms, got two that are equal")
    return float(2 * (G.beta0.exp() * (delta / 2).pow(r).clamp_max(1)).sum())


def least_sum(G: MixingMeasure, other: MixingMeasure, places: Float[Tensor, "m p"], r: float) -> float:
    """Least `L_1r(H, G) + L_1r(H, other)` over all measures H with atoms at the given places, whatever their weights.

    A linear program: an atom costs its weight times its distances to the two nearest atoms, and each cell
    what its weight lacks or has too much, from 2 k slack variables either way. ValueError if the solver fails.

    Args:
        G, other: two measures over inputs of one dimension d.
        places: m atoms `(beta1, eta)`, p = 2 d + 1; r: power in L_1r, at least 1.
    """
    cost, held = torch.zeros_like(places[:, 0]), []
    for target in (G, other):
        cell = (places[:, None] - target.atoms()).norm(dim=2).argmin(1)
        cost = cost + _prices(places, target, cell, r)
        held.append(one_hot(cell, len(target)).T)
    weights = torch.cat([G.beta0.exp(), other.beta0.exp()])
    lack = torch.eye(len(weights), dtype=weights.dtype)
    prices, rows = torch.cat([cost, torch.ones_like(lack[0]).repeat(2)]), torch.cat([torch.cat(held), lack, -lack], 1)
    found = linprog(prices.numpy(), A_eq=rows.numpy(), b_eq=weights.numpy())
    if not found.success:
        raise ValueError(f"places: expected a linear program that can be solved, got {found.message}")
    return float(found.fun)


def likely_places(G: MixingMeasure, other: MixingMeasure, count: int, rng: torch.Generator) -> Float[Tensor, "m p"]:
    """Where the atoms of a measure near to both may be: `places` for `least_sum`.

    All midpoints of an atom of G and one of other, the atoms, and `count` points on and about the segments
    between them, at all distances.
    """
    first, last = G.atoms(), other.atoms()
    middle = ((first[:, None] + last) / 2).flatten(0, 1)
    j, m = torch.randint(len(first), (count,), generator=rng), torch.randint(len(last), (count,), generator=rng)
    t = 1.6 * torch.rand(count, 1, generator=rng, dtype=first.dtype) - 0.3
    distance = 10 ** (-4 * torch.rand(count, 1, generator=rng, dtype=first.dtype))
    about = distance * torch.randn(count, first.shape[1], generator=rng, dtype=first.dtype)
    return torch.cat([middle, first, last, (1 - t) * first[j] + t * last[m] + about])


def exchange(share: float, r: float) -> tuple[MixingMeasure, MixingMeasure]:
    """Two measures in the plane: two atoms of weight 1 whose router vectors trade places, a move of 1 each.

    They are `share` times as far apart as `two_point_bound` asks for, in the direction that costs least. For
    share at most 1 the least sum of the losses is `share^r` times what its formula says, so its separation is sharp.
    """
    check.positive("share", share)
    sideways, across = (0.0, share) if r <= 2 else (share * 2 ** (-1 / r),) * 2
    G = MixingMeasure(
        beta0=torch.zeros(2, dtype=torch.float64),
        beta1=torch.tensor([[1, 0], [2, sideways]], dtype=torch.float64),
        eta=torch.tensor([[0, 0, 0], [0, 0, across]], dtype=torch.float64),
    )
    return G, G.with_(beta1=torch.tensor([[2, 0], [1, sideways]], dtype=torch.float64))


def _prices(places: Float[Tensor, "m p"], target: MixingMeasure, cell: Int[Tensor, " m"], r: float) -> Tensor:
    """`|beta1 - beta1_j|^r + |eta - eta_j|^r` for atoms at places, atom i in cell j = cell[i]."""
    router, expert = (places - target.atoms()[cell]).split([target.d, target.d + 1], 1)
    return router.norm(dim=1) ** r + expert.norm(dim=1) ** r


def weight_bound(n: int, weight: float, noise: float, largest: float) -> float:
    """`weight noise / (2 largest sqrt(n))`, below which no estimator's risk in L_1r stays: any router, any r >= 1.

    It comes from the weight exp(beta0_1) of one atom alone, which L_1r does not raise to the power r: G and the
    same measure with beta0_1 larger by `2 noise / (largest sqrt(n))`. `noise` is the standard deviation of the Gaussian
    noise, and `largest` bounds the absolute value of the experts.
    """
    check.integer("n", n, 1)
    for name, value in (("weight", weight), ("noise", noise), ("largest", largest)):
        check.positive(name, value)
    return weight * noise / (2 * largest * math.sqrt(n))
