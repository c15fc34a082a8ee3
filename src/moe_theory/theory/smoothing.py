"""Noisy top-1 routing in closed form (Chen et al. 2022, Section 5 and Appendix C).

Expert m is chosen with probability `p_m(h) = P(h_m + r_m >= max_j h_j + r_j)`, r_1..r_M independent
with density g. With u = h_m + r_m, and G the distribution function of g,

    p_m = int g(u - h_m) prod_{j != m} G(u - h_j) du.

For uniform noise the integrand is a polynomial between the points where a factor reaches 1, and
Gauss-Legendre quadrature on those pieces is exact. For Gaussian noise it is analytic and decays at
both ends, where the trapezoidal rule converges faster than any power of its step.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Real
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr
from torch import Tensor

from moe_theory import _validate as check

#: Numbers in one temporary; rows are processed in chunks so that temporaries fit the cache.
CHUNK = 1 << 17

#: Standard deviations around the largest logit that the Gaussian integrals cover; the mass left out
#: is below 256 Phi(-9) < 3e-17.
REACH = 9.0


class _Law(NamedTuple):
    """A noise law at scale 1: its density g, its distribution function G, and nodes for the integrals."""

    density: Callable[[Tensor], Tensor]
    distribution: Callable[[Tensor], Tensor]
    nodes: Callable[[Tensor], tuple[Tensor, Tensor]]


@lru_cache
def _gauss_legendre(q: int) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"]]:
    """The rule of q nodes on [-1, 1], polished by Newton's method in extended precision.

    numpy's and scipy's rules lose up to three digits on u^255, which M = 256 experts need.
    """
    z = np.polynomial.legendre.leggauss(q)[0].astype(np.longdouble)
    for _ in range(3):
        before, P = np.ones_like(z), z
        for n in range(2, q + 1):
            before, P = P, ((2 * n - 1) * z * P - (n - 1) * before) / n
        slope = q * (before - z * P) / (1 - z * z)
        z = z - P / slope
    return torch.from_numpy(z.astype(float)), torch.from_numpy((2 / ((1 - z * z) * slope**2)).astype(float))


def _legendre_nodes(h: Float[Tensor, "n M"]) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q"]]:
    """Gauss-Legendre nodes and weights on the pieces of [0, 1] cut at 1 + h_j; exact to degree M."""
    z, w = (t.to(h.device) for t in _gauss_legendre(h.shape[1] // 2 + 1))
    ends = torch.nn.functional.pad((1 + h).clamp(min=0).sort(1).values, (1, 0))
    left, width = ends[:, :-1, None], ends.diff(dim=1)[:, :, None]
    return (left + width * (1 + z) / 2).flatten(1), (width * w / 2).flatten(1)


def _trapezoid_nodes(h: Float[Tensor, "n M"]) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"]]:
    """Equal steps over [-REACH, REACH], smaller for more experts, whose product of G's is steeper."""
    steps = 2 * math.ceil(REACH * (2 + math.sqrt(h.shape[1])))
    u = torch.linspace(-REACH, REACH, steps + 1, dtype=h.dtype, device=h.device)
    return u, torch.full_like(u, float(u[1] - u[0]))


_LAWS = {
    "uniform": _Law(
        lambda z: ((z >= 0) & (z < 1)).to(z),
        lambda z: z.clamp(0, 1),
        _legendre_nodes,
    ),
    "gaussian": _Law(
        lambda z: torch.exp(-z * z / 2) / math.sqrt(2 * math.pi),
        torch.special.ndtr,
        _trapezoid_nodes,
    ),
}


def kappa(noise: str = "uniform", scale: float = 1.0) -> float:
    """The least upper bound of the noise density (Remark C.2).

    `1 / scale` for Unif[0, scale], `1 / (scale sqrt(2 pi))` for N(0, scale^2).

    Raises:
        ValueError: for an unknown noise or a scale that is not > 0.
    """
    check.choice("noise", noise, _LAWS)
    check.positive("scale", scale)
    return 1 / scale if noise == "uniform" else 1 / (scale * math.sqrt(2 * math.pi))


def route_probabilities(
    h: Real[Tensor, "*batch M"] | np.ndarray | Sequence, noise: str = "uniform", scale: float = 1.0
) -> Float[Tensor, "*batch M"]:
    """The exact probability of each expert under noisy top-1 routing (Lemma 5.1).

    Args:
        h: logits, any number of leading dimensions; anything `torch.as_tensor` takes. Differentiable.
        noise: "uniform" for Unif[0, scale], "gaussian" for N(0, scale^2).
        scale: width of the uniform law or standard deviation of the Gaussian, > 0.

    Returns:
        float64 probabilities of the shape of h; each row sums to 1 within 1e-12.

    Raises:
        ValueError: for NaN or infinite logits, an empty last dimension, an unknown noise, or a scale
            that is not > 0.
    """
    rows, shape = _rows(h, noise, scale)
    return _in_chunks(_probabilities, rows, _LAWS[noise]).reshape(shape)


def local_lipschitz(
    h: Real[Tensor, "*batch M"] | np.ndarray | Sequence, noise: str = "uniform", scale: float = 1.0
) -> Float[Tensor, "*batch M"]:
    """`sum_j |dp_m / dh_j|`, the sup-norm Lipschitz constant of p_m at h.

    It equals `2 E[g(Z_m - h_m)]` with Z_m the largest noisy logit among the others, hence is at most
    `2 kappa` whatever M is: the sharp form of Lemma 5.1. Arguments and errors are those of
    `route_probabilities`.
    """
    rows, shape = _rows(h, noise, scale)
    slopes = _uniform_slopes if noise == "uniform" else _smooth_slopes
    return _in_chunks(slopes, rows, _LAWS[noise]).reshape(shape) / scale


def _rows(h, noise: str, scale: float) -> tuple[Float[Tensor, "n M"], torch.Size]:
    """Logits in units of the scale with the largest of each row at 0, and the shape to give back."""
    h = h if isinstance(h, Tensor) else torch.as_tensor(h, dtype=torch.float64)
    if h.ndim == 0 or h.shape[-1] == 0:
        raise ValueError(f"h: expected at least one logit along the last dimension, got shape {tuple(h.shape)}")
    check.choice("noise", noise, _LAWS)
    check.positive("scale", scale)
    rows = check.finite("h", h.double()).reshape(-1, h.shape[-1])
    return (rows - rows.amax(1, keepdim=True)) / scale, h.shape


def _in_chunks(
    of_rows: Callable[[Tensor, _Law], Tensor], rows: Float[Tensor, "n M"], law: _Law
) -> Float[Tensor, "n M"]:
    if not len(rows):
        return rows
    nodes = law.nodes(rows[:1])[0].numel()
    return torch.cat([of_rows(part, law) for part in rows.split(max(1, CHUNK // nodes))])


def _products_without(factors: list[Tensor]) -> list[Tensor]:
    """For each factor the product of all the others, without a division."""
    left, right = [torch.ones_like(factors[0])], [torch.ones_like(factors[0])]
    for before, behind in zip(factors[:-1], factors[:0:-1], strict=True):
        left.append(left[-1] * before)
        right.append(right[-1] * behind)
    return [a * b for a, b in zip(left, reversed(right), strict=True)]


def _probabilities(h: Float[Tensor, "n M"], law: _Law) -> Float[Tensor, "n M"]:
    """`p_m = int g(u - h_m) prod_{j != m} G(u - h_j) du`."""
    u, w = law.nodes(h)
    z = [u - h_j[:, None] for h_j in h.T]
    others = _products_without([law.distribution(z_j) for z_j in z])
    return torch.stack([(w * law.density(z_m) * G).sum(1) for z_m, G in zip(z, others, strict=True)], 1)


def _uniform_slopes(h: Float[Tensor, "n M"], law: _Law) -> Float[Tensor, "n M"]:
    """`2 P(h_m <= Z_m <= h_m + 1)`, a difference of two products."""

    def below(t: Float[Tensor, " n"], m: int) -> Float[Tensor, " n"]:
        return law.distribution(t[:, None] - h).index_fill(1, torch.tensor([m], device=h.device), 1).prod(1)

    return torch.stack([2 * (below(h[:, m] + 1, m) - below(h[:, m], m)) for m in range(h.shape[1])], 1)


def _smooth_slopes(h: Float[Tensor, "n M"], law: _Law) -> Float[Tensor, "n M"]:
    """`2 int g(u - h_m) f_m(u) du` with `f_m = sum_{j != m} g_j prod_{l != j, m} G_l`, the density of Z_m.

    Integrated by parts, so that no density is divided by a distribution function that underflows:
    `- int g'(u - h_m) prod_{j != m} G_j du`, with g'(z) = -z g(z).
    """
    u, w = law.nodes(h)
    z = [u - h_j[:, None] for h_j in h.T]
    others = _products_without([law.distribution(z_j) for z_j in z])
    return torch.stack([2 * (w * z_m * law.density(z_m) * G).sum(1) for z_m, G in zip(z, others, strict=True)], 1)


def gaussian_constant(M: int) -> tuple[float, float]:
    """The largest local Lipschitz constant found for N(0, 1) noise: an expert against M - 1 equal ones.

    Args:
        M: number of experts, at least 2; any size, since equal competitors reduce to one integral.

    Returns:
        `(constant, lead)`: the maximum over the lead t of `2 E[g(Z - t)]`, Z the largest of M - 1
        standard normals, and the t that attains it. The constant tends to `2 kappa` as M grows.
    """
    check.integer("M", M, 2)
    u = np.linspace(-REACH, 2 * REACH, 20_001)
    log_below = (M - 1) * log_ndtr(u)

    def negative(t: float) -> float:
        z = u - t
        return -2 * float(np.sum(z * np.exp(log_below - z * z / 2)) * (u[1] - u[0])) / math.sqrt(2 * math.pi)

    best = minimize_scalar(negative, bounds=(-1.0, REACH), method="bounded", options={"xatol": 1e-10})
    return -best.fun, float(best.x)
