"""Linear independence at first and second order (Nguyen et al. 2025, Definitions 1 and 2, Theorem 4).

Definitions 1 and 2 ask that the derivatives of `H = exp(<s(beta1), u(x)>) h(x, eta)` be independent;
`derivatives` computes them and `relations` names the linear relations among them. What Theorem 4 needs
is condition (S), about `Psi(omega; x) = exp(<s, u(x)>) (h(x, eta) - f_*(x))`; `separation` computes it.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import nnls
from torch import Tensor
from torch.func import grad, hessian, vmap

from moe_theory import _validate as check
from moe_theory.models.mixture import EXPERTS, MixingMeasure, expert_profile, gates, preactivations, regression_function
from moe_theory.models.routers import Router
from moe_theory.theory.identifiability import numerical_nullity

DEGREES = {"linear": 1, "relu": 1, "quadratic": 2, "cubic": 3}  # p of profiles with `phi(c z) = c^p phi(z)` for c > 0
STEPS, CLOSED = 2_000, 0.98  # of `separation`: the most it takes, and the certified share at which it ends


def _arguments(expert: str, d: int, order: int) -> None:
    check.choice("expert", expert, (*EXPERTS, "constant"))
    check.choice("order", order, (1, 2))
    check.integer("d", d, 2)


def derivatives(
    router: Router,
    expert: str,
    beta1: Float[Tensor, " d"],
    eta: Float[Tensor, " q"],
    x: Float[Tensor, "n d"],
    order: int,
) -> dict[tuple[int, ...], Float[Tensor, " n"]]:
    """The functions of Definition 2 (order 1) or 1 (order 2) for one atom, by automatic differentiation.

    The expert is a key of `moe_theory.models.mixture.EXPERTS`, or "constant" for `h = b`, whose eta is b alone.

    Returns:
        The derivatives of H in `(beta1, eta)` by sorted tuples of coordinates: `()` is H, `(0,)` its
        derivative in the first of beta1, `(0, d)` the mixed one with the first of eta. ReLU has its formal
        derivatives, the second being 0.
    """
    d = len(beta1)
    _arguments(expert, d, order)
    if len(eta) != (1 if expert == "constant" else d + 1):
        raise ValueError(f"eta: expected d + 1 numbers, or 1 for constant experts, got {len(eta)}")
    rows = torch.cat([beta1, eta]).repeat(len(x), 1).requires_grad_()
    h = rows[:, d] if expert == "constant" else expert_profile(expert).value((rows[:, d:-1] * x).sum(1) + rows[:, -1])
    H = (router.embedding(rows[:, :d]) * router.feature(x)).sum(1).exp() * h
    (first,) = torch.autograd.grad(H.sum(), rows, create_graph=order == 2)
    found = {(): H.detach()} | {(i,): column.detach() for i, column in enumerate(first.unbind(1))}
    for i in range(rows.shape[1]) if order == 2 else ():
        (second,) = torch.autograd.grad(first[:, i].sum(), rows, retain_graph=True)
        found |= {(i, j): second[:, j] for j in range(i, rows.shape[1])}
    return found


def relations(
    router: Router, expert: str, beta1: Float[Tensor, " d"], eta: Float[Tensor, " q"], order: int
) -> dict[str, list[dict[tuple[int, ...], float]]]:
    """The linear relations among `derivatives`, by name: each a sum of coefficients times functions that is 0.

    - "scale": `eta . d_eta H = p H` for experts homogeneous of degree p, and the derivatives of this; where
      `d_eta^2 h = 0` (linear, constant, and ReLU formally), all second derivatives in eta;
    - "radius": `beta1 . d_beta1 H = 0` for the cosine router, and the derivatives of this;
    - "crossed": u is parallel to x, so `D_j d_(a_l) H = D_l d_(a_j) H` where `D = s'(beta1)^-T d_beta1`
      multiplies H by u; for the cosine router in coordinates tangent at s;
    - "shared": u = x for the linear router, so `d_(beta1_j) d_b H = d_(a_j) H`.
    """
    d, q = len(beta1), len(eta)
    _arguments(expert, d, order)
    E, p = range(d, d + q), 1 if expert == "constant" else DEGREES.get(expert)
    found: dict[str, list[dict[tuple[int, ...], float]]] = {}

    def along(v: Tensor, coordinates, *more: int) -> dict[tuple[int, ...], float]:
        return {tuple(sorted((i, *more))): float(c) for i, c in zip(coordinates, v, strict=True)}

    if p is not None:
        found["scale"] = [along(eta, E) | {(): -p}]
        if order == 2:
            found["scale"] += [along(eta, E, i) | {(i,): -p} for i in range(d)]
            if expert in ("linear", "relu", "constant"):
                found["scale"] += [{(i, m): 1.0} for i in E for m in E if i <= m]
            else:
                found["scale"] += [along(eta, E, m) | {(m,): 1 - p} for m in E]
    if router.sphere:
        found["radius"] = [along(beta1, range(d))]
        if order == 2:
            found["radius"] += [along(beta1, range(d), i) | {(i,): 1.0} for i in range(d)]
            found["radius"] += [along(beta1, range(d), m) for m in E]
    if order == 2 and expert != "constant":
        eye = torch.eye(d, dtype=beta1.dtype, device=beta1.device)
        basis = torch.linalg.svd(beta1[None]).Vh[1:] if router.sphere else eye
        D = basis @ torch.linalg.pinv(router.slope(beta1), rtol=1e-9).T
        pairs = [(i, j) for j in range(len(basis)) for i in range(j)]
        moves = [D[i][:, None] * basis[j] - D[j][:, None] * basis[i] for i, j in pairs]
        found["crossed"] = [{(i, d + m): float(C[i, m]) for i in range(d) for m in range(d)} for C in moves]
        if router.plain:
            found["shared"] = [{(j, 2 * d): 1.0, (d + j,): -1.0} for j in range(d)]
    return found


def relations_formula(router: Router, expert: str, d: int, order: int) -> int:
    """Number of linear relations among `derivatives` of one atom, d >= 2; `relations` names them.

    Order 1: 1 for homogeneous and constant experts, plus 1 for the cosine router. Order 2: chapter 22.
    """
    _arguments(expert, d, order)
    sphere, scaled = router.sphere, expert in DEGREES or expert == "constant"
    if order == 1:
        return sphere + scaled
    if expert == "constant":
        return 2 * d + 3 if sphere else d + 2
    flat = expert in ("linear", "relu")
    scale = 1 + d + ((d + 1) * (d + 2) // 2 if flat else d + 1) - sphere if scaled else 0
    radius = 2 * (d + 1) if sphere else 0
    crossed = (d - 1) * (d - 2) // 2 if sphere else d * (d - 1) // 2
    return scale + radius + crossed + (d if router.plain else 0)


class Relations(NamedTuple):
    """Linear relations among `derivatives` of one atom."""

    measured: int  # their number, by singular values
    predicted: int  # by `relations_formula`
    named: int  # the rank of those of `relations`
    smallest: float  # the smallest singular value, columns scaled to norm 1
    residual: float  # the largest value of a named relation over the sample, relative to the largest function value


def count_relations(
    router: Router,
    expert: str,
    beta1: Float[Tensor, " d"],
    eta: Float[Tensor, " q"],
    x: Float[Tensor, "n d"],
    order: int,
) -> Relations:
    """Relations of Definition 2 (order 1) or 1 (order 2) at one atom, counted in three ways."""
    found = derivatives(router, expert, beta1, eta, x, order)
    M = torch.stack(list(found.values()), 1)
    norms = M.norm(dim=0)
    sigma = torch.linalg.svdvals(M / torch.where(norms > 0, norms, 1.0))
    named = [row for rows in relations(router, expert, beta1, eta, order).values() for row in rows]
    rows = [[row.get(key, 0.0) for key in found] for row in named] or [[0.0] * len(found)]
    C = M.new_tensor(rows)
    return Relations(
        numerical_nullity(M),
        relations_formula(router, expert, len(beta1), order),
        int(torch.linalg.matrix_rank(C)),
        float(sigma[-1]),
        float((M @ C.T).abs().max() / M.abs().max()),
    )


def tangent_functions(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str
) -> tuple[Float[Tensor, "n k p"], Float[Tensor, "n k q q"]]:
    """`(Psi_j, grad Psi_j) / D_G` and `grad^2 Psi_j / D_G` at the atoms of G itself, in `omega = (s, eta)`.

    p = 2 d + 2 and q = 2 d + 1. ValueError for ReLU, which is not twice differentiable.
    """
    if expert == "relu":
        raise ValueError("expert: expected a twice differentiable profile, got 'relu'")
    phi, z, pi, u = expert_profile(expert), preactivations(G, x), gates(G, x, router), router.feature(x)
    bent = z.clone().requires_grad_()
    slope = phi.slope(bent)
    curvature = torch.autograd.grad(slope.sum(), bent)[0] if slope.requires_grad else torch.zeros_like(z)
    h, X, share = phi.value(z), torch.cat([x, torch.ones_like(x[:, :1])], 1), pi * (-G.beta0).exp()
    a, b, c = (share * w for w in (h - (pi * h).sum(1, keepdim=True), slope.detach(), curvature))
    first = torch.cat([a[..., None], a[..., None] * u[:, None], b[..., None] * X[:, None]], 2)
    uu, uX, XX = (torch.einsum("nk,ni,nj->nkij", *parts) for parts in ((a, u, u), (b, u, X), (c, X, X)))
    return first, torch.cat([torch.cat([uu, uX], 3), torch.cat([uX.mT, XX], 3)], 2)


class Separation(NamedTuple):
    """How far second-order parts stay from first-order ones."""

    found: float  # root mean square of what remains of `1/2 sum_j <T_j, grad^2 Psi_j> / D_G`, at the best T found
    certified: float  # a lower bound on the smallest such value over all T, from the duality gap; 0 if none
    T: Float[Tensor, "m q q"]  # positive semidefinite, of total trace 1


def remainder(
    first: Float[Tensor, "n k p"], second: Float[Tensor, "n m q q"]
) -> tuple[float, Float[Tensor, "r m q q"]]:
    """What `1/2 sum_j <T_j, second_j>` has off the span of `first`: a scale, and R with as many rows as T has entries.

    The root mean square of it over the n inputs is the scale times the norm of `sum_j <T_j, R_j>`.
    """
    J, n = first.flatten(1), len(first)
    left, sigma, _ = torch.linalg.svd(J / J.norm(dim=0), full_matrices=False)
    left = left[:, sigma > n * torch.finfo(J.dtype).eps * sigma[0]]
    A = 0.5 * second.flatten(1) / n**0.5
    A = A - left @ (left.T @ A)
    scale = float(A.norm(dim=0).max())
    return scale, torch.linalg.qr(A / scale).R.view(-1, *second.shape[1:])


def remainder_by_autodiff(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str, j: int, T: Float[Tensor, "q q"]
) -> float:
    """Root mean square of what `1/2 <T, grad^2 Psi_j> / D_G` has off all `Psi_i, grad Psi_i`, by automatic derivatives.

    An independent route to the value of `separation` at T.
    """
    phi, u, f = expert_profile(expert).value, router.feature(x), regression_function(G, x, router, expert)
    s, d = router.embedding(G.beta1), G.d
    D = (u @ s.T + G.beta0).exp().sum(1)

    def psi(omega: Tensor, x: Tensor, u: Tensor, f: Tensor) -> Tensor:
        return (omega[:d] @ u).exp() * (phi(omega[d:-1] @ x + omega[-1]) - f)

    atoms, over_inputs = torch.cat([s, G.eta], 1), (None, 0, 0, 0)
    first = [vmap(part, over_inputs)(atom, x, u, f).view(len(x), -1) for atom in atoms for part in (psi, grad(psi))]
    J = torch.cat(first, 1) / D[:, None]
    second = 0.5 * (T * vmap(hessian(psi), over_inputs)(atoms[j], x, u, f)).sum((1, 2)) / D
    rest = second - J @ torch.linalg.lstsq(J, second[:, None], rcond=1e-12, driver="gelsd").solution[:, 0]
    return float(rest.square().mean().sqrt())


def hull_weights(F: Float[Tensor, "r c"]) -> Float[Tensor, " c"]:
    """Weights, nonnegative and of sum 1, of the point of least norm in the convex hull of the columns of F.

    By nonnegative least squares, `|F w|^2 + (1 - sum w)^2`, whose solution is a multiple of them.
    """
    rows = torch.cat([F, torch.ones_like(F[:1])]).cpu().numpy()
    w = torch.from_numpy(nnls(rows, np.eye(len(rows))[-1], maxiter=100 * rows.shape[1])[0]).to(F.device)
    return w / w.sum()


def separation(
    G: MixingMeasure,
    x: Float[Tensor, "n d"],
    router: Router,
    expert: str,
    atoms: list[int],
    *,
    tries: tuple[tuple[int, Tensor], ...] = (),
) -> Separation:
    """Condition (S) at the sample x: how small second-order parts at `atoms` can be made modulo first-order ones.

    Minimizes the norm of `1/2 sum_j <T_j, grad^2 Psi_j> / D_G`, projected off all `Psi_j, grad Psi_j`, over
    positive semidefinite T_j of total trace 1: the point of least norm in a convex hull, by the fully
    corrective Frank-Wolfe method. A step adds the matrix `v v^T` with the smallest slope and finds the best
    weights of all those kept. The minimum is 0 if and only if a relation exists, on the sample, with these
    atoms split. It ends when the share `CLOSED` of the distance found is certified, or that distance is rounding.

    Args:
        G, router, expert: the mixture, of twice differentiable experts; x: the sample.
        atoms: those whose T_j may differ from 0.
        tries: positions in `atoms` and vectors v of length 2 d + 1 to begin with, besides the unit vectors.
    """
    if not atoms or not set(atoms) <= set(range(len(G))):
        raise ValueError(f"atoms: expected some below {len(G)}, got {atoms}")
    first, second = tangent_functions(G, x, router, expert)
    scale, root = remainder(first, second[:, atoms])
    _, m, q, _ = root.shape
    units = torch.eye(q, dtype=x.dtype, device=x.device)
    vertices = [(j, v) for j in range(m) for v in units] + [(j, v / v.norm()) for j, v in tries]
    kept, lowest = [], 0.0
    for _ in range(STEPS):
        F = torch.stack([torch.einsum("a,rab,b->r", v, root[:, j], v) for j, v in vertices], 1)
        w = hull_weights(F)
        kept, at = [(*vertex, p) for vertex, p in zip(vertices, w, strict=True) if p > 0], F @ w
        slope = torch.einsum("r,rjab->jab", at, root)
        eigenvalues, vectors = torch.linalg.eigh((slope + slope.mT) / 2)
        j = int(eigenvalues[:, 0].argmin())
        lowest = max(lowest, 2 * float(eigenvalues[j, 0]) - float(at @ at))
        if max(lowest**0.5 / CLOSED, 1e-12) >= float(at.norm()):
            break
        vertices = [(i, u) for i, u, _ in kept] + [(j, vectors[j, :, 0])]
    T = x.new_zeros(m, q, q)
    for i, u, p in kept:
        T[i] += p * torch.outer(u, u)
    return Separation(scale * float(at.norm()), scale * lowest**0.5, T)
