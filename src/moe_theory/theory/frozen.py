"""What a router that is never trained can do: how it spreads, what it keeps together, what experts make of it."""

import math

import numpy as np
import torch
from jaxtyping import Float
from scipy.integrate import quad
from scipy.special import ndtr, owens_t
from torch import Tensor

from moe_theory import _validate as check


def start_sparsity(v: float, M: int) -> float:
    """`M exp(-v (1 - 1/M) / 2)`: experts in use, `exp H`, if the M logits are independent N(0, v).

    It is exact to first order in v >= 0, and for every v as M grows.
    """
    return check.integer("M", M, 1) * math.exp(-check.not_negative("v", v) * (1 - 1 / M) / 2)


def best_frozen(pi: Float[Tensor, "n M"], x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> float:
    """The least mean squared error of `sum_m pi_m(x) (a_m.x + b_m)` over all a_m, b_m, the gates pi given.

    With fixed gates the mixture is linear in its experts, so this is least squares in the products of gates and
    inputs; the sum of squares is divided by the degrees of freedom that are left, at least one.
    """
    design = torch.einsum("nm,nd->nmd", pi, torch.cat([x, torch.ones_like(x[:, :1])], 1)).flatten(1)
    n, p = design.shape
    if n <= p:
        raise ValueError(f"pi: expected more rows than the {p} unknowns, got {n}")
    A, b = design.T @ design, design.T @ y
    solution = torch.cholesky_solve(b[:, None], torch.linalg.cholesky(A + 1e-9 * A.diagonal().mean() * torch.eye(p)))
    return float((y - design @ solution[:, 0]).square().sum() / (n - p))


def largest_sum(M: int, k: int) -> float:
    """`E S_k`, the mean sum of the k < M largest of M independent standard normal numbers.

    A number z counts if it is above Z, the k-th largest of the others, and `E z 1(z > Z) = phi(Z)`; so this is
    `M E phi(Z)`, with the density `(M - 1) binom(M - 2, k - 1) phi Phi^(M - 1 - k) (1 - Phi)^(k - 1)` of Z.
    """
    if not 1 <= check.integer("k", k, 1) < check.integer("M", M, 2):
        raise ValueError(f"k: expected at most M - 1 = {M - 1}, got {k}")

    def term(z: float) -> float:
        return math.exp(-z * z) / (2 * math.pi) * ndtr(z) ** (M - 1 - k) * ndtr(-z) ** (k - 1)

    return M * (M - 1) * math.comb(M - 2, k - 1) * quad(term, -12, 12, epsabs=1e-13, limit=200)[0]


def change_rate(M: int, k: int) -> float:
    """`E S_k / sqrt(pi)`: how often the selected set changes per radian that an input turns, under random routers."""
    return largest_sum(M, k) / math.sqrt(math.pi)


def first_change(angle: float, M: int, *, nodes: int = 400) -> float:
    """The probability that a random linear router sends two inputs at an angle to different experts, k = 1.

    It is `1 - M E Phi_2(a, b)^(M - 1)`, where a and b are the two logits of one expert, normal with the correlation
    cos(angle), and Phi_2 is their distribution function. The angle is strictly between 0 and pi; the nodes are those of
    a quadrature in each of two dimensions.
    """
    if not 0 < angle < math.pi:
        raise ValueError(f"angle: expected one strictly between 0 and pi, got {angle!r}")
    z, w = np.polynomial.legendre.leggauss(nodes)
    z, w = 8 * z, 8 * w * np.exp(-32 * z * z) / math.sqrt(2 * math.pi)
    a, b = z[:, None], math.cos(angle) * z[:, None] + math.sin(angle) * z
    return 1 - check.integer("M", M, 2) * float(w @ _below(a, b, angle) ** (M - 1) @ w)


def _below(a, b, angle: float):
    """`P(x < a, y < b)` for normal x, y with the correlation cos(angle), by Owen's function."""
    rho, s = math.cos(angle), math.sin(angle)
    parts = owens_t(a, (b - rho * a) / (s * a)) + owens_t(b, (a - rho * b) / (s * b))
    return np.clip((ndtr(a) + ndtr(b)) / 2 - parts - np.where(a * b < 0, 0.5, 0), 0, 1)
