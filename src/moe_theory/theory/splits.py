"""One atom in two: how little of it a function shows (Nguyen et al. 2025, the over-specified case)."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models.mixture import MixingMeasure, gates, jacobian, regression_function
from moe_theory.models.routers import Router
from moe_theory.streams import torch_stream

CELLS, LAYERS = 80, 160  # of the quadrature: along each side of the plane, and across it


def split(
    G: MixingMeasure, moves: dict[int, Float[Tensor, "2 p"]], router: Router, *, share: float = 0.5
) -> MixingMeasure:
    """The measure in which some atoms are two each: `(s_j, eta_j) + moves[j][0]` and `... + moves[j][1]`.

    p = 2 d + 1, and the first of the two has the share, between 0 and 1, of the weight. ValueError for an s that is not
    an embedding.
    """
    if not set(moves) <= set(range(len(G))) or not 0 < share < 1:
        raise ValueError(f"moves, share: expected atoms below {len(G)} and 0 < share < 1, got {sorted(moves)}, {share}")
    atoms = []
    for j in range(len(G)):
        beta0, beta1, eta = G.beta0[j : j + 1], G.beta1[j : j + 1], G.eta[j : j + 1]
        if j in moves:
            beta0 = beta0 + beta0.new_tensor([share, 1 - share]).log()
            beta1 = router.preimage(router.embedding(beta1) + moves[j][:, : G.d])
            eta = eta + moves[j][:, G.d :]
        atoms.append((beta0, beta1, eta))
    return MixingMeasure(*(torch.cat(parts) for parts in zip(*atoms, strict=True)))


def scaled(G: MixingMeasure, scale: float, router: Router, *, degree: int = 1, share: float = 0.5) -> MixingMeasure:
    """Atom 1 in two, with `scale eta` and `other eta`, `share scale^p + (1 - share) other^p = 1`: the same function.

    The experts are homogeneous of the degree p, `phi(c z) = c^p phi(z)` for c > 0, and the scale is between 0 and
    `share^(-1/p)`.
    """
    rest = (1 - share * scale**degree) / (1 - share)
    if not (scale > 0 and rest > 0):
        raise ValueError(f"scale: expected a number between 0 and share^(-1/degree), got {scale}")
    step = G.eta.new_zeros(2, 2 * G.d + 1)
    step[0, G.d :] = (scale - 1) * G.eta[0]
    step[1, G.d :] = (rest ** (1 / degree) - 1) * G.eta[0]
    return split(G, {0: step}, router, share=share)


def searched_sum(
    G: MixingMeasure, other: MixingMeasure, kind: str, r: float, *, starts: int = 10, steps: int = 100, seed: int = 0
) -> float:
    """The smallest sum of the losses of one measure against G and `other` that a search finds.

    From measures about random places between the atoms of the two, nearer and nearer, by random steps of a size that
    grows with success.
    """
    rng = torch_stream(seed, "start")

    def draw(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=rng, dtype=t.dtype)

    def both(H: MixingMeasure) -> float:
        return voronoi_loss(H, G, kind, r) + voronoi_loss(H, other, kind, r)

    least = float("inf")
    for size in 0.2 * 0.5 ** torch.arange(starts):
        at = torch.rand(len(G), 1, generator=rng, dtype=G.eta.dtype)
        H = G.with_(beta0=G.beta0 + size * draw(G.beta0), eta=G.eta + at * (other.eta - G.eta) + size * draw(G.eta))
        value = both(H)
        for _ in range(steps):
            move = {name: getattr(H, name) + size * draw(getattr(H, name)) for name in ("beta0", "beta1", "eta")}
            there = both(H.with_(**move))
            H, value, size = (H.with_(**move), there, 1.3 * size) if there < value else (H, value, 0.93 * size)
        least = min(least, value)
    return least


def bump_square(G: MixingMeasure, e: Float[Tensor, " q"], t: float, router: Router) -> tuple[float, float]:
    """`|f_G' - f_G|^2` for ReLU experts, d = 3, inputs uniform on the cube, G' with eta_1 split into `eta_1 +- t e`.

    Returns:
        By quadrature over a strip about the hyperplane of the first expert, and by the law for small t,
        `t^3 / 6` times the integral over the hyperplane of `pi_1^2 |e.(x, 1)|^3` times the density over |a_1|.
    """
    if G.d != 3:
        raise ValueError(f"G: expected inputs of dimension 3, got {G.d}")
    a, b = G.eta[0, :3], G.eta[0, 3]
    i = int(a.abs().argmax())
    rest = [j for j in range(3) if j != i]
    middle = (torch.arange(CELLS) + 0.5).double() / CELLS * 2 - 1
    plane = torch.zeros(CELLS**2, 3, dtype=torch.float64)
    plane[:, rest] = torch.cartesian_prod(middle, middle)
    plane[:, i] = -(plane[:, rest] @ a[rest] + b) / a[i]
    size, area = (plane @ e[:3] + e[3]).abs(), (2 / CELLS) ** 2 / 8
    on_plane = gates(G, plane, router)[:, 0] ** 2 * size**3 * (plane[:, i].abs() <= 1)
    width = 3 * t * float(size.max() / a[i].abs())
    strip = plane.repeat(LAYERS, 1)
    strip[:, i] += (((torch.arange(LAYERS) + 0.5).double() / LAYERS - 0.5) * width).repeat_interleave(CELLS**2)
    step = torch.cat([e.new_zeros(3), t * e])
    bump = regression_function(split(G, {0: torch.stack([step, -step])}, router), strip, router)
    square = (bump - regression_function(G, strip, router)) ** 2 * (strip[:, i].abs() <= 1)
    return float(square.sum()) * width / LAYERS * area, t**3 / 6 * float(on_plane.sum() / a[i].abs()) * area


def left_over(
    G: MixingMeasure, e: Float[Tensor, " q"], t: float, router: Router, x: Float[Tensor, "n 3"]
) -> tuple[float, float]:
    """`|(1 - P) b|`, b the change of f by a split of eta_1 as in `bump_square`, e made a unit vector across eta_1.

    P is the projection on the columns of the Jacobian of f. `|b|` is a quadrature, `|P b|` a mean over inputs x. The
    law for `|b|` at small t comes with it.
    """
    e = e - (e @ G.eta[0]) / (G.eta[0] @ G.eta[0]) * G.eta[0]
    e = e / e.norm()
    step = torch.cat([e.new_zeros(3), t * e])
    bump = regression_function(split(G, {0: torch.stack([step, -step])}, router), x, router)
    J, bump = jacobian(G, x, router), bump - regression_function(G, x, router)
    g, H_plus = J.T @ bump, torch.linalg.pinv(J.T @ J, hermitian=True, rtol=1e-10)
    whole, law = bump_square(G, e, t, router)
    return (whole - float(g @ H_plus @ g) / len(x)) ** 0.5, law**0.5
