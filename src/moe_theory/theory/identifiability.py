"""Which parameters of the regression MoE its function determines (Nguyen et al. 2025, Eq. 4, 8, Proposition 1).

Tangents are flat vectors of length `k (2 d + 2)`, ordered beta0 (k), beta1 (k d), eta (k (d + 1)).
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import (
    MixingMeasure,
    draw_measure,
    expert_profile,
    gates,
    preactivations,
    regression_function,
)
from moe_theory.models.routers import ROUTERS, Router
from moe_theory.tasks.regression import uniform_inputs


def embedding_slope(beta1: Float[Tensor, "k d"], router: Router) -> Float[Tensor, "k d d"]:
    """`d s / d beta1 = (I - beta beta^T / (|beta| (|beta| + tau))) / (|beta| + tau)`; tau = 0 for the cosine."""
    k, d = beta1.shape
    eye = torch.eye(d, dtype=beta1.dtype)
    if router.kind == "linear":
        return eye.expand(k, d, d)
    s, norm = router.embedding(beta1), beta1.norm(dim=1)[:, None, None]
    tau = router.tau if router.kind == "perturbed" else 0.0
    direction = beta1[:, :, None] / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return (eye - s[:, None, :] * direction) / (norm + tau)


def jacobian(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu", in_s: bool = False
) -> Float[Tensor, "n p"]:
    """Derivatives of the regression function at n inputs in all its parameters, beta_0 included.

    With `in_s` the embeddings `s_i` are the parameters, free in R^d, in place of the `beta1_i`.

    With `f = sum_i pi_i h_i`: `df/dbeta0_i = pi_i (h_i - f)`, `df/dbeta1_i = pi_i (h_i - f) s'(beta1_i)^T u(x)`,
    `df/deta_i = pi_i phi'(a_i.x + b_i) (x, 1)`.
    """
    phi, z, pi, u = expert_profile(expert), preactivations(G, x), gates(G, x, router), router.feature(x)
    h = phi.value(z)
    weight = pi * (h - (pi * h).sum(-1, keepdim=True))
    by_beta1 = torch.einsum("ni,nd->nid", weight, u)
    if not in_s:
        by_beta1 = torch.einsum("nid,ide->nie", by_beta1, embedding_slope(G.beta1, router))
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    by_eta = (pi * phi.slope(z))[:, :, None] * inputs[:, None, :]
    return torch.cat([weight, by_beta1.flatten(1), by_eta.flatten(1)], 1)


class Gap(NamedTuple):
    """Singular values about the limit below which they count as zero, all relative to the largest.

    Attributes:
        nullity: how many count as zero.
        zero: the largest of these, 0 if there are none.
        kept: the smallest of the others.
        cut: the limit.
    """

    nullity: int
    zero: float
    kept: float
    cut: float


def singular_gap(J: Float[Tensor, "n p"], gap: float = 1e3) -> Gap:
    """Columns of J less its rank. Columns are scaled to norm 1 first; the limit is `n eps` of the largest value.

    Raises:
        ValueError: for J = 0, and where the smallest value above the limit is not `gap` times the largest
            below: the sample does not decide.
    """
    scale = J.norm(dim=0)
    sigma = torch.linalg.svdvals(J / torch.where(scale > 0, scale, 1.0))
    if not sigma[0] > 0:
        raise ValueError("J: expected a matrix that is not 0, and finite numbers")
    sigma, cut = sigma / sigma[0], len(J) * torch.finfo(J.dtype).eps
    kept, dropped = sigma[sigma > cut], sigma[sigma <= cut]
    if len(dropped) and kept[-1] < gap * dropped[0]:
        raise ValueError(f"J: no gap in its singular values: {float(kept[-1]):.2g} above {float(dropped[0]):.2g}")
    return Gap(J.shape[1] - len(kept), float(dropped[0]) if len(dropped) else 0.0, float(kept[-1]), cut)


def numerical_nullity(J: Float[Tensor, "n p"]) -> int:
    """Columns of J less its rank, see `singular_gap`."""
    return singular_gap(J).nullity


def jacobian_at_random(
    router: str, k: int, d: int, expert: str = "tanh", tau: float = 0.1, seed: int = 0
) -> Float[Tensor, "n p"]:
    """`jacobian` at a random truth and random inputs, three for each parameter.

    Args:
        router: "linear", "cosine" or "perturbed".
        k, d: atoms and dimension of the inputs, both at least 2.
        expert: a key of `moe_theory.models.mixture.EXPERTS`.
        seed: draws the truth and the inputs.
    """
    check.choice("router", router, ROUTERS)
    check.integer("k", k, 2), check.integer("d", d, 2)
    G = draw_measure(k, d, seed, router_scale=d**0.5, expert_scale=2.0)
    x = uniform_inputs(3 * k * (2 * d + 2), d, seed + 1)
    return jacobian(G, x, Router(router, tau), expert)


def nullity(router: str, k: int, d: int, expert: str = "tanh", tau: float = 0.1, seed: int = 0) -> int:
    """Dimension of the null space of `jacobian_at_random`.

    Formula: d + 1 for the linear and the perturbed router, `k + max(d - k, 0) + 1` for the cosine router;
    the 1 is the common shift of beta_0.
    """
    return numerical_nullity(jacobian_at_random(router, k, d, expert, tau, seed))


def nullity_formula(router: str, k: int, d: int) -> int:
    """`d + 1` (linear, perturbed) or `k + max(d - k, 0) + 1` (cosine)."""
    check.choice("router", router, ROUTERS)
    return k + max(d - k, 0) + 1 if router == "cosine" else d + 1


def null_vectors(G: MixingMeasure, router: Router) -> dict[str, Float[Tensor, "p m"]]:
    """The named null vectors of `jacobian`, as columns.

    - "shift of beta0": every beta0_i moves by 1;
    - "common shift": every s_i moves by one vector c, any c (linear, perturbed) or, so that norms stay
      1 to first order, any c orthogonal to all s_i (cosine);
    - "radius": beta1_i moves along itself (cosine).
    """
    k, d = G.beta1.shape
    p = k * (2 * d + 2)

    def embed(by_beta1: Float[Tensor, "m k d"]) -> Float[Tensor, "p m"]:
        out = G.beta0.new_zeros(p, len(by_beta1))
        out[k : k + k * d] = by_beta1.flatten(1).T
        return out

    beta0 = G.beta0.new_zeros(p, 1)
    beta0[:k] = 1
    named = {"shift of beta0": beta0}
    if router.kind == "cosine":
        _, sigma, right = torch.linalg.svd(router.embedding(G.beta1))
        c = right[len(sigma) :] if k < d else right[:0]
        named["common shift"] = embed(c[:, None, :] * G.beta1.norm(dim=1)[None, :, None])
        named["radius"] = embed(torch.diag_embed(G.beta1.T).permute(2, 1, 0))
        return named
    undo = torch.linalg.inv(embedding_slope(G.beta1, router))
    named["common shift"] = embed(undo.permute(2, 0, 1))
    return named


def shifted(G: MixingMeasure, c: Float[Tensor, " d"], router: Router) -> MixingMeasure:
    """The measure whose embeddings are `s_i + c`, a different parameter with the same function.

    Raises:
        ValueError: where some `s_i + c` is not an embedding: norm 1 or more (perturbed), not 1 (cosine).
    """
    return G.with_(beta1=router.preimage(router.embedding(G.beta1) + c))


def admissible_shifts(
    s: Float[Tensor, "k d"], starts: int = 100, seed: int = 0, steps: int = 100
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m r"]]:
    """Solutions c of `|s_i + c| = 1` for all i, by Gauss-Newton steps from normal random c.

    Nothing is assumed about the solutions: each step solves the linearized equations in the least squares
    sense, and the starts that do not arrive (squared norms 1e-12 from 1) are dropped. A double root, as
    c = 0 for `s_2 = -s_1`, is found to about 1e-7 only.

    Returns:
        The solutions, and the singular values of the constraints' Jacobian `2 (s_i + c)` at each.

    Raises:
        ValueError: if the s_i are not unit vectors.
    """
    if (s.norm(dim=1) - 1).abs().max() > 1e-9:
        raise ValueError("s: expected unit vectors")
    c = torch.randn(starts, s.shape[1], generator=torch.Generator().manual_seed(seed), dtype=s.dtype)
    for _ in range(check.integer("steps", steps, 1)):
        A = 2 * (s + c[:, None])
        c = c - (torch.linalg.pinv(A, rtol=1e-12) @ (A.square().sum(2, keepdim=True) / 4 - 1))[..., 0]
    arrived = ((s + c[:, None]).square().sum(2) - 1).abs().amax(1) < 1e-12
    return c[arrived], torch.linalg.svdvals(2 * (s + c[arrived, None]))


def split(
    G: MixingMeasure, moves: dict[int, Float[Tensor, "2 p"]], router: Router, share: float = 0.5
) -> MixingMeasure:
    """The measure in which some atoms are two each: `(s_j, eta_j) + moves[j][0]` and `... + moves[j][1]`.

    Args:
        moves: by atom, two displacements of `(s, eta)`, p = 2 d + 1.
        share: of the weight, for the first of the two; between 0 and 1.

    Raises:
        ValueError: for an atom that is not there, another share, or an s that is not an embedding.
    """
    if not set(moves) <= set(range(len(G))) or not 0 < share < 1:
        raise ValueError(f"moves, share: expected atoms below {len(G)} and 0 < share < 1, got {sorted(moves)}, {share}")
    beta0, beta1, eta = [], [], []
    for j in range(len(G)):
        if j not in moves:
            beta0.append(G.beta0[j : j + 1]), beta1.append(G.beta1[j : j + 1]), eta.append(G.eta[j : j + 1])
            continue
        beta0.append(G.beta0[j] + torch.tensor([share, 1 - share], dtype=G.beta0.dtype).log())
        beta1.append(router.preimage(router.embedding(G.beta1[j : j + 1]) + moves[j][:, : G.d]))
        eta.append(G.eta[j] + moves[j][:, G.d :])
    return MixingMeasure(torch.cat(beta0), torch.cat(beta1), torch.cat(eta))


def centred(G: MixingMeasure, router: Router) -> MixingMeasure:
    """G moved by the gauge so that `sum w_i = 1` and `sum w_i s_i = 0`; ValueError if an s_i leaves the ball."""
    weight = torch.softmax(G.beta0, 0)
    return shifted(G.with_(beta0=weight.log()), -weight @ router.embedding(G.beta1), router)


def centred_tangents(G: MixingMeasure, router: Router) -> Float[Tensor, "p m"]:
    """Orthonormal basis of the `(dbeta0, ds, deta)` that keep a centred G centred to first order.

    `sum w_i dbeta0_i = 0` and `sum w_i (dbeta0_i s_i + ds_i) = 0`; m = p - d - 1.
    """
    (k, d), w = G.beta1.shape, G.beta0.exp()
    rows = w.new_zeros(d + 1, k * (2 * d + 2))
    rows[0, :k] = w
    rows[1:, :k] = (w[:, None] * router.embedding(G.beta1)).T
    rows[1:, k : k + k * d] = torch.einsum("j,ab->ajb", w, torch.eye(d, dtype=w.dtype)).flatten(1)
    return torch.linalg.svd(rows).Vh[d + 1 :].T


class Constant(NamedTuple):
    """The smallest ratio of `|J delta|` to a weighted sum of block norms of delta.

    Attributes:
        found: the smallest ratio found, an upper bound on the constant.
        certified: a proved lower bound on it.
        direction: the delta of `found`.
    """

    found: float
    certified: float
    direction: Float[Tensor, " p"]


def lower_bound_constant(
    J: Float[Tensor, "n p"],
    blocks: list[tuple[list[int], float]],
    basis: Float[Tensor, "p m"] | None = None,
    starts: int = 50,
    steps: int = 300,
) -> Constant:
    """`min |J delta| / (sqrt(n) N(delta))` over the span of `basis`, `N(delta) = sum_blocks weight |delta_block|`.

    On the ellipsoid `|J delta| <= sqrt(n)`, `delta = M y` with `|y| <= 1`. N is convex, so it climbs when
    y is replaced by the maximizer of N's linearization; the best of several starts is kept. The certificate:
    N is at most the sum of the blocks' spectral norms, and at most `sqrt(number of blocks)` times the
    spectral norm of all blocks together, each block of rows of M with its weight.

    Raises:
        ValueError: if the blocks do not name every column once, or J has not full rank on the span.
    """
    if sorted(i for block, _ in blocks for i in block) != list(range(J.shape[1])):
        raise ValueError(f"blocks: expected each of the {J.shape[1]} columns once")
    M = whitened(J, torch.eye(J.shape[1], dtype=J.dtype) if basis is None else basis)
    parts = [weight * M[block] for block, weight in blocks]
    together = float(torch.linalg.matrix_norm(torch.cat(parts), 2)) * len(parts) ** 0.5
    apart = sum(float(torch.linalg.matrix_norm(part, 2)) for part in parts)
    draws = torch.randn(starts, M.shape[1], generator=torch.Generator().manual_seed(0), dtype=J.dtype)
    y = torch.cat([torch.linalg.svd(torch.cat(parts)).Vh[:10], draws])
    for _ in range(check.integer("steps", steps, 1)):
        y = y / y.norm(dim=1, keepdim=True)
        y = sum(torch.nn.functional.normalize(y @ part.T) @ part for part in parts)
    y = y / y.norm(dim=1, keepdim=True)
    reached = sum((y @ part.T).norm(dim=1) for part in parts)
    best = int(reached.argmax())
    return Constant(1 / float(reached[best]), 1 / min(apart, together), M @ y[best])


def whitened(J: Float[Tensor, "n p"], basis: Float[Tensor, "p m"]) -> Float[Tensor, "p m"]:
    """M with the span of `basis` and `|J M y| = sqrt(n) |y|`; ValueError if J has not full rank there."""
    A = J @ basis
    if numerical_nullity(A):
        raise ValueError("J: expected full rank, got a null direction, where the constant is 0")
    return basis @ torch.linalg.inv(torch.linalg.qr(A / len(J) ** 0.5).R)


def loss_blocks(G: MixingMeasure) -> list[tuple[list[int], float]]:
    """The blocks of L_3 (Eq. 12) near G for `lower_bound_constant`, columns as in `jacobian`.

    To first order `L_3 = sum_j exp(beta0_j) (|dbeta0_j| + |dbeta1_j| + |deta_j|)`, or with ds_j for dbeta1_j.
    """
    k, d = len(G), G.d
    blocks = []
    for j in range(k):
        beta1 = list(range(k + j * d, k + (j + 1) * d))
        eta = list(range(k + k * d + j * (d + 1), k + k * d + (j + 1) * (d + 1)))
        blocks += [(block, float(G.beta0[j].exp())) for block in ([j], beta1, eta)]
    return blocks


def centred_ratio(
    G_star: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str, delta: Float[Tensor, " p"]
) -> tuple[Tensor, Tensor]:
    """`(|f_G - f_*|, L_3(G, G_*))` for G = G_* + delta in `(beta0, s, eta)`, centred; both differentiable in delta.

    G_star is centred. The norm is the root mean square over x. L_3 is taken with s for beta1, every atom in
    the cell of its own atom of G_star.
    """
    k, d = G_star.beta1.shape
    by_beta0, by_s, by_eta = delta.split([k, k * d, k * (d + 1)])
    s_star, w_star = router.embedding(G_star.beta1), G_star.beta0.exp()
    beta0, s, eta = G_star.beta0 + by_beta0, s_star + by_s.view(k, d), G_star.eta + by_eta.view(k, d + 1)
    w = torch.softmax(beta0, 0)
    s = s - w @ s
    h, u = expert_profile(expert).value, router.feature(x)
    f = (torch.softmax(u @ s.T + beta0, 1) * h(preactivations(G_star.with_(eta=eta), x))).sum(1)
    f_star = (gates(G_star, x, router) * h(preactivations(G_star, x))).sum(1)
    loss = (w - w_star).abs().sum() + w @ ((s - s_star).norm(dim=1) + by_eta.view(k, d + 1).norm(dim=1))
    return (f - f_star).square().mean().sqrt(), loss


def smallest_ratio(
    G_star: MixingMeasure,
    x: Float[Tensor, "n d"],
    router: Router,
    expert: str,
    radius: float,
    M: Float[Tensor, "p m"],
    starts: Float[Tensor, "a m"],
) -> Float[np.ndarray, "a 2"]:
    """Local minima of `|f_G - f_*| / L_3` over `G = G_* + delta`, centred, delta in the span of M, `|delta| = radius`.

    By BFGS in y, `delta = radius M y / |M y|`; M from `whitened` makes the function's change about `|y|`.

    Returns:
        For each start, L_3 and the ratio at the end.
    """
    check.positive("radius", radius)
    ends = []

    def at(y: Tensor) -> tuple[Tensor, Tensor]:
        delta = M @ y
        return centred_ratio(G_star, x, router, expert, radius * delta / delta.norm())

    def logarithm(y: np.ndarray) -> tuple[float, np.ndarray]:
        y = torch.from_numpy(y).requires_grad_()
        change, loss = at(y)
        value = change.log() - loss.log()
        value.backward()
        return value.item(), y.grad.numpy()

    for y in starts:
        found = minimize(logarithm, (y / y.norm()).numpy(), jac=True, method="L-BFGS-B", options={"maxiter": 200})
        change, loss = at(torch.from_numpy(found.x))
        ends.append((float(loss), float(change / loss)))
    return np.array(ends)


def bump_square(
    G: MixingMeasure, e: Float[Tensor, " q"], t: float, router: Router, cells: int = 80, layers: int = 160
) -> tuple[float, float]:
    """`|f_G' - f_G|^2` for ReLU experts, d = 3, inputs uniform on the cube, G' with eta_1 split into `eta_1 +- t e`.

    Returns:
        By quadrature over a strip about the hyperplane of the first expert, and by the law for small t,
        `t^3 / 6` times the integral over the hyperplane of `pi_1^2 |e.(x, 1)|^3` times the density over |a_1|.

    Raises:
        ValueError: for inputs of another dimension.
    """
    if G.d != 3:
        raise ValueError(f"G: expected inputs of dimension 3, got {G.d}")
    a, b = G.eta[0, :3], G.eta[0, 3]
    i = int(a.abs().argmax())
    rest = [j for j in range(3) if j != i]
    middle = (torch.arange(cells) + 0.5).double() / cells * 2 - 1
    plane = torch.zeros(cells**2, 3, dtype=torch.float64)
    plane[:, rest] = torch.cartesian_prod(middle, middle)
    plane[:, i] = -(plane[:, rest] @ a[rest] + b) / a[i]
    size, area = (plane @ e[:3] + e[3]).abs(), (2 / cells) ** 2 / 8
    on_plane = gates(G, plane, router)[:, 0] ** 2 * size**3 * (plane[:, i].abs() <= 1)
    width = 3 * t * float(size.max() / a[i].abs())
    strip = plane.repeat(layers, 1)
    strip[:, i] += (((torch.arange(layers) + 0.5).double() / layers - 0.5) * width).repeat_interleave(cells**2)
    step = torch.cat([e.new_zeros(3), t * e])
    bump = regression_function(split(G, {0: torch.stack([step, -step])}, router), strip, router)
    square = (bump - regression_function(G, strip, router)) ** 2 * (strip[:, i].abs() <= 1)
    return float(square.sum()) * width / layers * area, t**3 / 6 * float(on_plane.sum() / a[i].abs()) * area
