"""Which parameters of the regression MoE its function determines (Nguyen et al. 2025, Eq. 4, 8, Proposition 1).

The null directions of the Jacobian, and the gauge behind them: common shifts of the embeddings, and for routers on a
sphere the norms of the router vectors. Tangents are laid out as in `moe_theory.models.mixture`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure, draw_measure, jacobian
from moe_theory.models.routers import Router, as_router
from moe_theory.streams import torch_stream
from moe_theory.tasks.regression import uniform_inputs

DECIDED = 1e3  # ratio of the smallest singular value that is kept to the largest that counts as zero
STEPS = 100  # Gauss-Newton steps of `admissible_shifts`


class Gap(NamedTuple):
    """Singular values that count as zero."""

    nullity: int  # how many
    zero: float  # the largest of them relative to the largest of all, 0 if there are none


def singular_gap(J: Float[Tensor, "n p"]) -> Gap:
    """Columns of J less its rank. Columns are scaled to norm 1 first; the limit is `n eps` of the largest value.

    ValueError for J = 0, and where the smallest value above the limit is not `DECIDED` times the largest below: the
    sample does not decide.
    """
    scale = J.norm(dim=0)
    sigma = torch.linalg.svdvals(J / torch.where(scale > 0, scale, 1.0))
    if not sigma[0] > 0:
        raise ValueError("J: expected a matrix that is not 0, and finite numbers")
    sigma, cut = sigma / sigma[0], len(J) * torch.finfo(J.dtype).eps
    kept, dropped = sigma[sigma > cut], sigma[sigma <= cut]
    if len(dropped) and kept[-1] < DECIDED * dropped[0]:
        raise ValueError(f"J: no gap in its singular values: {float(kept[-1]):.2g} above {float(dropped[0]):.2g}")
    return Gap(J.shape[1] - len(kept), float(dropped[0]) if len(dropped) else 0.0)


def numerical_nullity(J: Float[Tensor, "n p"]) -> int:
    """Columns of J less its rank, see `singular_gap`."""
    return singular_gap(J).nullity


def _random_truth(k: int, d: int, seed: int) -> MixingMeasure:
    check.integer("k", k, 2)
    return draw_measure(k, check.integer("d", d, 2), seed, router_scale=d**0.5, expert_scale=2.0)


def jacobian_at_random(router: Router, k: int, d: int, *, expert: str = "tanh", seed: int) -> Float[Tensor, "n p"]:
    """`jacobian` at a random truth and random inputs, three for each parameter; arguments are those of `nullity`."""
    G = _random_truth(k, d, seed)
    return jacobian(G, uniform_inputs(3 * k * (2 * d + 2), d, seed + 1), router, expert)


def centred_jacobian_at_random(router: Router, k: int, d: int, *, expert: str, seed: int) -> Float[Tensor, "n m"]:
    """`jacobian` in `(beta0, s, eta)` on `centred_tangents`, at a random truth and random inputs, five a parameter.

    Every expert's hyperplane meets the cube of the inputs. Arguments are those of `nullity`.
    """
    G = _random_truth(k, d, seed)
    through = uniform_inputs(k, d, seed) / 2
    G.eta[:, -1] = -(G.eta[:, :-1] * through).sum(1)
    x = uniform_inputs(5 * k * (2 * d + 2), d, seed + 1)
    return jacobian(G, x, router, expert, in_s=True) @ centred_tangents(G, router)


def nullity(router: Router | str, k: int, d: int, *, expert: str = "tanh", seed: int = 0) -> int:
    """Dimension of the null space of `jacobian_at_random`.

    Formula: d + 1 for the linear and the perturbed router, `k + max(d - k, 0) + 1` for the cosine router;
    the 1 is the common shift of beta_0.

    Args:
        router: a `Router`, or the name of one: "linear", "cosine" or "perturbed".
        k, d: atoms and dimension of the inputs, both at least 2.
        expert: a key of `moe_theory.models.mixture.EXPERTS`.
        seed: draws the truth and the inputs.
    """
    return numerical_nullity(jacobian_at_random(as_router(router), k, d, expert=expert, seed=seed))


def nullity_formula(router: Router | str, k: int, d: int) -> int:
    """`d + 1` (in a ball: linear, perturbed) or `k + max(d - k, 0) + 1` (on a sphere: cosine)."""
    sphere = as_router(router).sphere
    return k + max(d - k, 0) + 1 if sphere else d + 1


def null_vectors(G: MixingMeasure, router: Router) -> dict[str, Float[Tensor, "p m"]]:
    """The named null vectors of `jacobian`, as columns.

    - "shift of beta0": every beta0_i moves by 1;
    - "common shift": every s_i moves by one vector c in the gauge: any c (linear, perturbed) or, so that norms
      stay 1 to first order, any c orthogonal to all s_i (cosine);
    - "radius": beta1_i moves along itself (cosine).
    """
    (k, d), beta0 = G.beta1.shape, G.beta0.new_zeros(len(G) * (2 * G.d + 2), 1)
    beta0[:k] = 1

    def embed(by_beta1: Float[Tensor, "m k d"]) -> Float[Tensor, "p m"]:
        out = beta0.new_zeros(len(beta0), len(by_beta1))
        out[k : k + k * d] = by_beta1.flatten(1).T
        return out

    named = {"shift of beta0": beta0, "common shift": embed(common_shifts(G.beta1, router))}
    if router.sphere:
        named["radius"] = embed(torch.diag_embed(G.beta1.T).permute(2, 1, 0))
    return named


def common_shifts(beta1: Float[Tensor, "k d"], router: Router) -> Float[Tensor, "m k d"]:
    """Moves of the router vectors under which all embeddings move by one vector, one move for each in the gauge.

    With `s'(beta1_i)` of full rank these are `s'(beta1_i)^-1 c` for every c.
    """
    _, sigma, right = torch.linalg.svd(router.gauge(router.embedding(beta1)))
    undo = torch.linalg.pinv(router.slope(beta1), rtol=1e-6)
    return torch.einsum("kab,mb->mka", undo, right[sigma > 0.5])


def null_part(beta1: Float[Tensor, "k d"], step: Float[Tensor, "k d"], router: Router) -> Float[Tensor, "k d"]:
    """The part of a step of the router vectors that no function sees, to first order.

    It is the orthogonal projection, in the k d coordinates of the vectors, on the span of the common shifts and, on a
    sphere, of the radii; in float64, and by a factorization that gives the same bits wherever its input lies in memory.
    """
    V = common_shifts(beta1, router)
    if router.sphere:
        V = torch.cat([V, torch.diag_embed(beta1.T).permute(2, 1, 0)])
    Q = torch.linalg.qr(V.flatten(1).T.double()).Q
    return (Q @ (Q.T @ step.reshape(-1, 1).double())).to(step.dtype).view_as(step)


def held(start: Float[Tensor, "k d"], end: Float[Tensor, "k d"], router: Router) -> Float[Tensor, "k d"]:
    """Where a step of the router vectors leads without its null part.

    On a sphere these are the vectors of `end` with the norms of `start`: no function sees the difference at all. In a
    ball the `null_part` is taken from the step.
    """
    if router.sphere:
        return end * (start.norm(dim=1) / end.norm(dim=1))[:, None]
    return end - null_part(start, end - start, router)


class Named(NamedTuple):
    """The named null vectors of one Jacobian."""

    rank: int  # how many of them are independent
    image: float  # the largest entry of their images, relative to the norms of the Jacobian and of the vectors


def named_at_random(router: Router, k: int, d: int, *, seed: int) -> Named:
    """`null_vectors` against `jacobian`, at a random truth with tanh experts and 200 random inputs."""
    G = draw_measure(k, d, seed)
    V = torch.cat(list(null_vectors(G, router).values()), 1)
    J = jacobian(G, uniform_inputs(200, d, seed), router, "tanh")
    return Named(int(torch.linalg.matrix_rank(V)), float((J @ V).abs().max() / (J.norm() * V.norm())))


def shifted(G: MixingMeasure, c: Float[Tensor, " d"], router: Router) -> MixingMeasure:
    """The measure whose embeddings are `s_i + c`, a different parameter with the same function.

    ValueError where some `s_i + c` is not an embedding: norm 1 or more (perturbed), not 1 (cosine).
    """
    return G.with_(beta1=router.preimage(router.embedding(G.beta1) + c))


def admissible_shifts(
    s: Float[Tensor, "k d"], starts: int = 100, seed: int = 0
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m r"]]:
    """Solutions c of `|s_i + c| = 1` for all i, for unit vectors s_i, by Gauss-Newton steps from normal random c.

    Nothing is assumed about the solutions: each step solves the linearized equations in the least squares
    sense, and the starts that do not arrive (squared norms 1e-12 from 1) are dropped. A double root, as
    c = 0 for `s_2 = -s_1`, is found to about 1e-7 only. With each solution come the singular values of the
    constraints' Jacobian `2 (s_i + c)` at it.
    """
    if (s.norm(dim=1) - 1).abs().max() > 1e-9:
        raise ValueError("s: expected unit vectors")
    c = torch.randn(starts, s.shape[1], generator=torch_stream(seed, "start"), dtype=s.dtype).to(s.device)
    for _ in range(STEPS):
        A = 2 * (s + c[:, None])
        c = c - (torch.linalg.pinv(A, rtol=1e-12) @ (A.square().sum(2, keepdim=True) / 4 - 1))[..., 0]
    arrived = ((s + c[:, None]).square().sum(2) - 1).abs().amax(1) < 1e-12
    return c[arrived], torch.linalg.svdvals(2 * (s + c[arrived, None]))


def nearest_point(s: Float[Tensor, "k d"]) -> Float[Tensor, " d"]:
    """The point o nearest to 0 in the affine hull of the rows of s."""
    D = s[1:] - s[0]
    return s[0] - torch.linalg.pinv(D) @ (D @ s[0])


class Fibre(NamedTuple):
    """The common shifts c that `admissible_shifts` finds for a truth, and what theory says of them."""

    shifts: Float[Tensor, "m d"]
    points: int  # how many different ones, to five decimals
    free: set[int]  # the numbers of null shifts at them, d less the rank of the constraints
    off: float  # how far they are from `c orthogonal to s_i - s_l` and `|c + o| = |o|`


def fibre(s: Float[Tensor, "k d"], seed: int) -> Fibre:
    """The shifts c with `|s_i + c| = 1` for unit vectors s_i, from 100 random starts."""
    shifts, sigma = admissible_shifts(s, seed=seed)
    free = {s.shape[1] - int((row > 1e-6 * row[0]).sum()) for row in sigma}
    o = nearest_point(s)
    tilted = (shifts @ (s[1:] - s[0]).T).abs().max()
    away = ((shifts + o).norm(dim=1) - o.norm()).abs().max()
    points = len(torch.unique(shifts.round(decimals=5), dim=0))
    return Fibre(shifts, points, free, float(torch.maximum(tilted, away)))


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
    rows[1:, k : k + k * d] = torch.einsum("j,ab->ajb", w, torch.eye(d, dtype=w.dtype, device=w.device)).flatten(1)
    return torch.linalg.svd(rows).Vh[d + 1 :].T
