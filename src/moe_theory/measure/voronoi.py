"""Voronoi cells and losses between mixing measures (Nguyen et al. 2025, Eq. 5, 11, 12)."""

from numbers import Real

import torch
from jaxtyping import Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure
from moe_theory.models.routers import Router

SHARES = (0, 0.125, 0.25, 0.5, 0.75, 1)


def voronoi_cells(G: MixingMeasure, G_star: MixingMeasure) -> Int[Tensor, " k"]:
    """For each atom of G the index of the nearest atom of G_star (Eq. 5); ties go to the first.

    Raises:
        ValueError: for what is no measure, or measures over inputs of different dimension or of different types.
    """
    check.instance("G", G, MixingMeasure)
    check.instance("G_star", G_star, MixingMeasure)
    if G.d != G_star.d:
        raise ValueError(f"G: expected inputs of dimension {G_star.d} as in G_star, got {G.d}")
    if G.eta.dtype != G_star.eta.dtype:
        raise ValueError(f"G: expected {G_star.eta.dtype} as in G_star, got {G.eta.dtype}")
    return torch.cdist(G.atoms(), G_star.atoms()).argmin(1)


def voronoi_loss(G: MixingMeasure, G_star: MixingMeasure, kind: str = "L1r", r: float = 1) -> float:
    """L_1r (below Eq. 5), L_2 (Eq. 11) or L_3 (Eq. 12) of G, whose atoms fall into the cells of G_star.

    Every loss adds the cells' errors in weight, `|sum_cell exp(beta0) - exp(beta0*)|`, to the weighted
    errors of router and expert, raised to a power: r for L_1r; for L_2, 1 in cells of one atom and 2
    in cells of several; 1 for L_3. A cell that no atom falls into adds its whole weight.

    Args:
        G, G_star: the fitted measure and the true one.
        kind: "L1r", "L2" or "L3".
        r: the power of L_1r, at least 1; the other kinds do not read it.

    Raises:
        ValueError: for another kind, an r below 1 or not finite, or measures as `voronoi_cells` refuses them.
    """
    check.choice("kind", kind, ("L1r", "L2", "L3"))
    if not (isinstance(r, Real) and 1 <= r < float("inf")):
        raise ValueError(f"r: expected a finite number >= 1, got {r!r}")
    cell, weight = voronoi_cells(G, G_star), G.beta0.exp()
    mass = torch.zeros_like(G_star.beta0).index_add_(0, cell, weight)
    router = (G.beta1 - G_star.beta1[cell]).norm(dim=1)
    expert = (G.eta - G_star.eta[cell]).norm(dim=1)
    shared = torch.bincount(cell, minlength=len(G_star))[cell] > 1
    power = {"L1r": torch.tensor(float(r)), "L2": 1 + shared.double(), "L3": torch.tensor(1.0)}[kind]
    return float((mass - G_star.beta0.exp()).abs().sum() + (weight * (router**power + expert**power)).sum())


def aligned(G: MixingMeasure, G_star: MixingMeasure, router: Router) -> MixingMeasure:
    """A measure with the function of G, near G_star: what the function leaves open is taken from the truth.

    That is the common shift of all embeddings, of which the multiple is taken that brings the beta1 nearest of
    `SHARES` of the one that brings the mean embedding nearest, and on a sphere the norms of the beta1. True
    vectors of length 0, which have no embedding there, do not count. Atom i belongs to atom i of G_star.

    Raises:
        ValueError: for measures of different sizes.
    """
    if len(G) != len(G_star):
        raise ValueError(f"G: expected {len(G_star)} atoms as in G_star, got {len(G)}")
    s, known = router.embedding(G.beta1), (G_star.beta1 != 0).any(1) | (not router.sphere)
    shift = router.gauge(s) @ (router.embedding(G_star.beta1[known]) - s[known]).mean(0)
    norm = G_star.beta1.norm(dim=1, keepdim=True) if router.sphere else 1
    moved = [G.with_(beta1=norm * beta1) for beta1 in _preimages(s, shift, router)]
    return min(moved, key=lambda H: float((H.beta1 - G_star.beta1).norm(dim=1).sum()))


def _preimages(s: Tensor, shift: Tensor, router: Router) -> list[Tensor]:
    """The beta1 behind `s_i + t shift` for t in `SHARES` where that is an embedding.

    On a sphere a shift v has to keep every norm, `2 s_i.v + |v|^2 = 0`: t shift is orthogonal to all s_i, and
    `v = t shift - c u` with `<s_i, u> = 1`, c the smaller root of `|v|^2 = 2 c`.
    """
    if not router.sphere:
        there = [s + t * shift for t in SHARES]
        return [router.preimage(at) for at in there if router.plain or (at.norm(dim=1) < 1).all()]
    u = torch.linalg.pinv(s).sum(1)
    inside = [(t * shift, 1 - u.square().sum() * (t * shift).square().sum()) for t in SHARES]
    return [router.preimage(s + z - z.square().sum() / (1 + q.sqrt()) * u) for z, q in inside if q > 0]


def error_parts(G: MixingMeasure, G_star: MixingMeasure, router: Router, cell: Int[Tensor, " k"]) -> dict[str, float]:
    """The errors of G in what its function depends on, and in what it does not.

    Atom i of G belongs to atom `cell[i]` of G_star; every atom of G_star has at least one. The first
    six are roots of summed squares over the atoms of G_star, the last three over the atoms of G,
    weighted by their share in the weight of their cell; they are 0 where a cell has one atom.

    - `expert`: of the cell's mean of eta, less eta*;
    - `weight`: of the logarithm of the cell's weight, less beta0*, after the common shift is removed;
    - `contribution`: of the cell's mean of eta times the factor by which its weight differs from the true
      one, less eta*: what a homogeneous expert contributes, which does not change when weight is traded for size;
    - `direction`: of the cell's mean of s(beta1), less s(beta1*), after the gauge is removed: the mean
      over cells (linear, perturbed) or its part orthogonal to all s* (cosine, the tangent of the gauge);
    - `shift`: of what was removed there, which the function does not depend on;
    - `radius`: of |beta1| less |beta1*|, on which the cosine router does not depend; cell means;
    - `spread_router`, `spread_along`, `spread_across`: of s(beta1), and of eta along eta* and across it,
      about the means of the cell.

    Raises:
        ValueError: for a `cell` that does not name every atom of G_star.
    """
    count = torch.bincount(cell, minlength=len(G_star))
    if len(cell) != len(G) or len(count) != len(G_star) or (count == 0).any():
        raise ValueError(f"cell: expected {len(G)} indices that name all {len(G_star)} atoms, got {cell.tolist()}")
    mass = torch.zeros_like(G_star.beta0).index_add_(0, cell, G.beta0.exp())
    share = G.beta0.exp() / mass[cell]

    def mean(values: Tensor) -> Tensor:
        weighted = share.view(-1, *[1] * (values.ndim - 1)) * values
        return values.new_zeros(len(G_star), *values.shape[1:]).index_add_(0, cell, weighted)

    s, s_star = router.embedding(G.beta1), router.embedding(G_star.beta1)
    delta, weight = mean(s) - s_star, mass.log() - G_star.beta0
    weight = weight - weight.mean()
    shift = router.gauge(s_star) @ delta.mean(0)
    apart = G.eta - mean(G.eta)[cell]
    unit = G_star.eta[cell] / G_star.eta[cell].norm(dim=1, keepdim=True)
    along = (apart * unit).sum(1, keepdim=True)
    root = share.sqrt()[:, None]
    parts = {
        "expert": mean(G.eta) - G_star.eta,
        "weight": weight,
        "contribution": weight.exp()[:, None] * mean(G.eta) - G_star.eta,
        "direction": delta - shift,
        "shift": shift.expand_as(delta),
        "radius": mean(G.beta1.norm(dim=1)) - G_star.beta1.norm(dim=1),
        "spread_router": root * (s - mean(s)[cell]),
        "spread_along": root * along,
        "spread_across": root * (apart - along * unit),
    }
    return {name: float(part.norm()) for name, part in parts.items()}
