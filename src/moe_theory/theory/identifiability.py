"""Which parameters of the regression MoE its function determines (Nguyen et al. 2025, Eq. 4, 8, Proposition 1).

Tangents are flat vectors of length `k (2 d + 2)`, ordered beta0 (k), beta1 (k d), eta (k (d + 1)).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure, draw_measure, expert_profile, gates, preactivations
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


def jacobian(G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu") -> Float[Tensor, "n p"]:
    """Derivatives of the regression function at n inputs in all its parameters, beta_0 included.

    With `f = sum_i pi_i h_i`: `df/dbeta0_i = pi_i (h_i - f)`, `df/dbeta1_i = pi_i (h_i - f) s'(beta1_i)^T u(x)`,
    `df/deta_i = pi_i phi'(a_i.x + b_i) (x, 1)`.
    """
    phi, z, pi, u = expert_profile(expert), preactivations(G, x), gates(G, x, router), router.feature(x)
    h = phi.value(z)
    weight = pi * (h - (pi * h).sum(-1, keepdim=True))
    by_beta1 = torch.einsum("ni,nd,ide->nie", weight, u, embedding_slope(G.beta1, router))
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    by_eta = (pi * phi.slope(z))[:, :, None] * inputs[:, None, :]
    return torch.cat([weight, by_beta1.flatten(1), by_eta.flatten(1)], 1)


def numerical_nullity(J: Float[Tensor, "n p"], gap: float = 1e3) -> int:
    """Columns of J less its rank, decided by the widest gap of the singular values around rounding.

    Columns are scaled to norm 1 first. Singular values below `n eps` of the largest count as zero.

    Raises:
        ValueError: where the smallest counted value is not `gap` times the largest not counted: the
            sample does not decide.
    """
    scale = J.norm(dim=0)
    sigma = torch.linalg.svdvals(J / torch.where(scale > 0, scale, 1.0))
    cut = len(J) * torch.finfo(J.dtype).eps * sigma[0]
    kept, dropped = sigma[sigma > cut], sigma[sigma <= cut]
    if len(dropped) and kept[-1] < gap * dropped[0]:
        raise ValueError(f"J: no gap in its singular values: {float(kept[-1]):.2g} above {float(dropped[0]):.2g}")
    return J.shape[1] - len(kept)


def nullity(router: str, k: int, d: int, expert: str = "tanh", tau: float = 0.1, seed: int = 0) -> int:
    """Dimension of the null space of the Jacobian of the regression function in all its parameters.

    Formula, for a random truth: d + 1 for the linear and the perturbed router, `k + max(d - k, 0) + 1`
    for the cosine router; the 1 is the common shift of beta_0.

    Args:
        router: "linear", "cosine" or "perturbed".
        k, d: atoms and dimension of the inputs, both at least 2.
        expert: a key of `moe_theory.models.mixture.EXPERTS`.
        seed: draws the truth and the inputs, three for each parameter.
    """
    check.choice("router", router, ROUTERS)
    check.integer("k", k, 2), check.integer("d", d, 2)
    G = draw_measure(k, d, seed, router_scale=d**0.5, expert_scale=2.0)
    x = uniform_inputs(3 * k * (2 * d + 2), d, seed + 1)
    return numerical_nullity(jacobian(G, x, Router(router, tau), expert))


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


def cosine_shift(G: MixingMeasure, direction: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """A finite c for which all `s_i + c` have norm 1, where all s_i do.

    The s_i lie in an affine space whose point nearest to the origin is p, orthogonal to it. Any vector
    q that is orthogonal to the differences of the s_i and as long as p may take its place: c = q - p.

    Args:
        G: a measure for the cosine router, k at most d, directions linearly independent.
        direction: projected on that orthogonal complement to give the direction of q.

    Raises:
        ValueError: for k above d, or a direction without a part in the complement.
    """
    s = Router("cosine").embedding(G.beta1)
    k, d = s.shape
    if k > d:
        raise ValueError(f"G: expected at most d = {d} atoms, got {k}: no shift keeps the norms")
    m = torch.linalg.lstsq(s, torch.ones(k, 1, dtype=s.dtype)).solution[:, 0]
    p = m / m.dot(m)
    differences = s[:-1] - s[-1]
    q = direction - torch.linalg.pinv(differences) @ (differences @ direction)
    if q.norm() <= 1e-9 * direction.norm():
        raise ValueError("direction: expected a part orthogonal to the differences of the embeddings, got none")
    return q * (p.norm() / q.norm()) - p


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
    J: Float[Tensor, "n p"], blocks: list[tuple[list[int], float]], starts: int = 50, steps: int = 300
) -> Constant:
    """`min |J delta| / (sqrt(n) N(delta))` for the norm `N(delta) = sum_blocks weight |delta_block|`.

    On the ellipsoid `|J delta| <= sqrt(n)`, `delta = R^-1 y` with `|y| <= 1`. N is convex, so it climbs when
    y is replaced by the maximizer of N's linearization; the best of several starts is kept. The certificate:
    N is at most the sum of the blocks' spectral norms, and at most `sqrt(number of blocks)` times the
    spectral norm of all blocks together, each block of R^-1 with its weight.

    Raises:
        ValueError: if the blocks do not name every column once, or J has not full rank.
    """
    if sorted(i for block, _ in blocks for i in block) != list(range(J.shape[1])):
        raise ValueError(f"blocks: expected each of the {J.shape[1]} columns once")
    if numerical_nullity(J):
        raise ValueError("J: expected full rank, got a null direction, where the constant is 0")
    inverse = torch.linalg.inv(torch.linalg.qr(J / len(J) ** 0.5).R)
    parts = [weight * inverse[block] for block, weight in blocks]
    together = float(torch.linalg.matrix_norm(torch.cat(parts), 2)) * len(parts) ** 0.5
    apart = sum(float(torch.linalg.matrix_norm(part, 2)) for part in parts)
    draws = torch.randn(starts, len(inverse), generator=torch.Generator().manual_seed(0), dtype=J.dtype)
    y = torch.cat([torch.linalg.svd(torch.cat(parts)).Vh[:10], draws])
    for _ in range(check.integer("steps", steps, 1)):
        y = y / y.norm(dim=1, keepdim=True)
        y = sum(torch.nn.functional.normalize(y @ part.T) @ part for part in parts)
    y = y / y.norm(dim=1, keepdim=True)
    reached = sum((y @ part.T).norm(dim=1) for part in parts)
    best = int(reached.argmax())
    return Constant(1 / float(reached[best]), 1 / min(apart, together), inverse @ y[best])


def loss_blocks(G: MixingMeasure, held: int) -> tuple[list[int], list[tuple[list[int], float]]]:
    """The blocks of L_3 (Eq. 12) near G, with the router of atom `held` left out.

    To first order `L_3 = sum_j exp(beta0_j) (|dbeta0_j| + |dbeta1_j| + |deta_j|)`.

    Returns:
        Columns of `jacobian` that remain, and for `lower_bound_constant` the blocks within them.

    Raises:
        ValueError: for an atom that is not there.
    """
    k, d = len(G), G.d
    if held not in range(k):
        raise ValueError(f"held: expected an atom below {k}, got {held!r}")
    columns, blocks = [], []
    for j in range(k):
        beta1 = list(range(k + j * d, k + (j + 1) * d))
        eta = list(range(k + k * d + j * (d + 1), k + k * d + (j + 1) * (d + 1)))
        for block in [eta] if j == held else [[j], beta1, eta]:
            blocks.append((list(range(len(columns), len(columns) + len(block))), float(G.beta0[j].exp())))
            columns += block
    return columns, blocks


def moved(G: MixingMeasure, delta: Float[Tensor, " p"]) -> MixingMeasure:
    """G with the tangent `delta` added to its parameters."""
    beta0, beta1, eta = delta.split([G.beta0.numel(), G.beta1.numel(), G.eta.numel()])
    return MixingMeasure(G.beta0 + beta0, G.beta1 + beta1.view_as(G.beta1), G.eta + eta.view_as(G.eta))
