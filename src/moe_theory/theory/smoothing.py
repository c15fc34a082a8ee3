"""Noisy top-1 routing in closed form (Chen et al. 2022, Section 5 and Appendix C).

Expert m is chosen with probability `p_m(h) = P(h_m + r_m >= max_j h_j + r_j)`, r_1..r_M independent
with density g. With u = h_m + r_m, and G the distribution function of g,

    p_m = int g(u - h_m) prod_{j != m} G(u - h_j) du.

For uniform noise the integrand is a polynomial between the points where a factor reaches 1, and
Gauss-Legendre quadrature on those pieces is exact. For Gaussian noise it is analytic and decays at
both ends, where the trapezoidal rule converges faster than any power of its step.

The n q M triples (row, node, expert) are taken in blocks of `BLOCK`, whose temporaries stay in the cache; calls on so
small blocks end before a second thread is worth waiting for.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Real
from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr
from torch import Tensor

from moe_theory import _validate as check

BLOCK = 1 << 16  # triples (row, node, expert) in one temporary, half a megabyte of them
REACH = 9.0  # deviations about the largest logit that Gaussian integrals cover; left out is below 256 Phi(-9) < 3e-17
FAR = 16.0  # deviations between logits that noise leaves in order; it exchanges them with Phi(-16 / sqrt(2)) = 6e-30


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
    "uniform": _Law(lambda z: ((z >= 0) & (z < 1)).to(z), lambda z: z.clamp(0, 1), _legendre_nodes),
    "gaussian": _Law(lambda z: torch.exp(-z * z / 2) / math.sqrt(2 * math.pi), torch.special.ndtr, _trapezoid_nodes),
}


def kappa(noise: str = "uniform", scale: float = 1.0) -> float:
    """The least upper bound of the noise density (Remark C.2).

    `1 / scale` for Unif[0, scale], `1 / (scale sqrt(2 pi))` for N(0, scale^2).
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
        ValueError: for logits that are NaN, infinite, complex or no numbers, an empty last dimension, an unknown
            noise, or a scale that is not > 0.
    """
    rows, shape = _rows(h, noise, scale)
    return _in_blocks(_probabilities, rows, _LAWS[noise]).reshape(shape)


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
    return _in_blocks(slopes, rows, _LAWS[noise]).reshape(shape) / scale


def _rows(h, noise: str, scale: float) -> tuple[Float[Tensor, "n M"], torch.Size]:
    """Logits in units of the scale with the largest of each row at 0, and the shape to give back."""
    h = h if isinstance(h, Tensor) else check.array("h", h, torch.float64)
    if h.is_complex():
        raise ValueError(f"h: expected real logits, got {h.dtype}")
    if h.ndim == 0 or h.shape[-1] == 0:
        raise ValueError(f"h: expected at least one logit along the last dimension, got shape {tuple(h.shape)}")
    check.choice("noise", noise, _LAWS)
    check.positive("scale", scale)
    rows = check.finite("h", h.double()).reshape(-1, h.shape[-1])
    return (rows - rows.amax(1, keepdim=True)) / scale, h.shape


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch runs on the calling thread alone; afterwards, and after an error, as the caller had set it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _in_blocks(
    of_rows: Callable[[Tensor, _Law], Tensor], rows: Float[Tensor, "n M"], law: _Law
) -> Float[Tensor, "n *values"]:
    if not len(rows):
        return rows
    triples = law.nodes(rows[:1])[0].numel() * rows.shape[1]
    with _one_thread():
        return torch.cat([of_rows(part, law) for part in rows.split(max(1, BLOCK // triples))])


def _products_without(G: Float[Tensor, "*n M q"]) -> Float[Tensor, "*n M q"]:
    """`prod_{j != m} G_j` for every m, without a division: 3 M multiplications in 2 log2(M) calls.

    The factors are paired; the product without one of a pair is its partner times the product
    without the pair.
    """
    M = G.shape[-2]
    if M == 1:
        return torch.ones_like(G)
    if M % 2:
        G = torch.nn.functional.pad(G, (0, 0, 0, 1), value=1.0)
    pairs = G.unflatten(-2, (-1, 2))
    partners = pairs.flip(-2)
    if M > 2:
        partners = partners * _products_without(pairs[..., 0, :] * pairs[..., 1, :])[..., None, :]
    return partners.flatten(-3, -2)[..., :M, :]


def _integrals(h: Float[Tensor, "n M"], law: _Law, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "n M"]:
    """`int f(u - h_m) prod_{j != m} G(u - h_j) du` for every m, in blocks of nodes."""
    u, w = law.nodes(h)
    nodes = max(1, BLOCK // h.numel())
    parts = []
    for u_part, w_part in zip(u.split(nodes, -1), w.split(nodes, -1), strict=True):
        z = u_part[..., None, :] - h[:, :, None]
        parts.append((w_part[..., None, :] * f(z) * _products_without(law.distribution(z))).sum(-1))
    return torch.stack(parts).sum(0)


def _probabilities(h: Float[Tensor, "n M"], law: _Law) -> Float[Tensor, "n M"]:
    """`p_m = int g(u - h_m) prod_{j != m} G(u - h_j) du`."""
    return _integrals(h, law, law.density)


def _uniform_slopes(h: Float[Tensor, "n M"], law: _Law) -> Float[Tensor, "n M"]:
    """`2 P(h_m <= Z_m <= h_m + 1)`, a difference of two products."""
    itself = torch.eye(h.shape[1], dtype=torch.bool, device=h.device)

    def below(t: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        return law.distribution(t[:, :, None] - h[:, None, :]).masked_fill(itself, 1).prod(-1)

    return 2 * (below(h + 1) - below(h))


def _smooth_slopes(h: Float[Tensor, "n M"], law: _Law) -> Float[Tensor, "n M"]:
    """`2 int g(u - h_m) f_m(u) du` with `f_m = sum_{j != m} g_j prod_{l != j, m} G_l`, the density of Z_m.

    Integrated by parts, so that no density is divided by a distribution function that underflows:
    `- int g'(u - h_m) prod_{j != m} G_j du`, with g'(z) = -z g(z).
    """
    return _integrals(h, law, lambda z: 2 * z * law.density(z))


def switch_probability(
    h: Real[Tensor, "*batch M"] | np.ndarray | Sequence,
    moved: Real[Tensor, "*batch M"] | np.ndarray | Sequence,
    *,
    noise: str = "uniform",
    scale: float = 1.0,
) -> Float[Tensor, "*batch"]:
    """The exact probability that the winner changes when the logits go from h to `moved` and the noise is kept.

    Expert m wins before and after if it beats every other one by the larger of its two deficits, so that it is
    `1 - sum_m p_m(h^(m))` with `h^(m)_j = max(h_j - h_m, moved_j - moved_m)`.

    Args:
        h, moved: logits, of one shape; noise, scale: as in `route_probabilities`.
    """
    before, after = (x if isinstance(x, Tensor) else check.array("h", x, torch.float64) for x in (h, moved))
    if before.shape != after.shape:
        raise ValueError(f"moved: expected the shape {tuple(before.shape)} of h, got {tuple(after.shape)}")
    worse = torch.maximum(_deficits(before), _deficits(after))
    return 1 - route_probabilities(worse, noise, scale).diagonal(dim1=-2, dim2=-1).sum(-1)


def _deficits(h: Real[Tensor, "*batch M"]) -> Float[Tensor, "*batch M M"]:
    """Row m: by how much every logit exceeds h_m."""
    return (h[..., None, :] - h[..., :, None]).double()


def switching_rate(
    h: Float[Tensor, "*batch M"], rises: Bool[Tensor, " M"], *, noise: str = "uniform", scale: float = 1.0
) -> Float[Tensor, "*batch"]:
    """Rate at which winners change while the logits of `rises` go up and all others go down, each at speed 1.

    It is `2 int F_B'(z) F_C'(z) dz`, F_B and F_C the distribution functions of the best bid of those that rise and of
    those that fall; for uniform noise at most `2 kappa b c / (M - 1)` with b of the one and c of the other.
    """
    rows, shape = _rows(h, noise, scale)
    if rises.shape != shape[-1:]:
        raise ValueError(f"rises: expected one truth for each of {shape[-1]} experts, got shape {tuple(rises.shape)}")
    if rises.all() or not rises.any():
        return torch.zeros(shape[:-1], dtype=torch.float64)
    rates = _in_blocks(lambda part, law: _crossing(part, law, rises), rows, _LAWS[noise])
    return 2 * rates.reshape(shape[:-1]) / scale


def _crossing(h: Float[Tensor, "n M"], law: _Law, rises: Bool[Tensor, " M"]) -> Float[Tensor, " n"]:
    """`int F_B' F_C' dz`, each slope a sum over its experts."""
    u, w = law.nodes(h)
    z = u[..., None, :] - h[:, :, None]
    parts = z[:, rises], z[:, ~rises]
    slopes = [(law.density(part) * _products_without(law.distribution(part))).sum(1) for part in parts]
    return (w * slopes[0] * slopes[1]).sum(-1)


def switch_bound(move: Float[Tensor, "*batch M"], scale: float = 1.0) -> Float[Tensor, "*batch"]:
    """The most, over all logits, that winners change under Unif[0, scale] when the logits move by `move`.

    `kappa / (M - 1) sum_{i<j} |move_i - move_j|`: a bound for every move, attained to first order at a tie.
    """
    M = move.shape[-1]
    if M < 2:
        raise ValueError(f"move: expected at least two logits along the last dimension, got shape {tuple(move.shape)}")
    apart = (move[..., :, None] - move[..., None, :]).abs().sum((-2, -1)) / 2
    return apart / ((M - 1) * check.positive("scale", scale))


def tie_variation(experts: int) -> float:
    """Total variation over `kappa D` for small D, half of M tied logits up by D and half down, uniform noise.

    `2 floor(M/2) ceil(M/2) / (M - 1)`, between half of and all of the `2 floor(M/2)` that no move exceeds.
    """
    M = check.integer("experts", experts, 2)
    return 2 * (M // 2) * (M - M // 2) / (M - 1)


def gaussian_constant(experts: int) -> tuple[float, float]:
    """The largest local Lipschitz constant found for N(0, 1) noise: an expert against M - 1 equal ones, M at least 2.

    It is the maximum over the lead t of `2 E[g(Z - t)]`, Z the largest of M - 1 standard normals; the t that attains
    it is given, too. The constant tends to `2 kappa` as M grows.
    """
    M = check.integer("experts", experts, 2)
    u = np.linspace(-REACH, 2 * REACH, 20_001)
    log_below = (M - 1) * log_ndtr(u)

    def negative(t: float) -> float:
        z = u - t
        return -2 * float(np.sum(z * np.exp(log_below - z * z / 2)) * (u[1] - u[0])) / math.sqrt(2 * math.pi)

    best = minimize_scalar(negative, bounds=(-1.0, REACH), method="bounded", options={"xatol": 1e-10})
    return -best.fun, float(best.x)
