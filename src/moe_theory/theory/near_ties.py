"""What near ties of the start cost an expert on its own cluster, as the initialization shrinks (chapter 05, appendix).

Two signals, J cubic filters, starts `sigma_0 z` with z standard normal, equal rates, and a race that ends after a path
of fixed length. As sigma_0 tends to 0, only starts whose two largest z differ by an order of sigma_0 leave a second
inner product that is not small beside the first, and the chance of such a start is proportional to sigma_0.
"""

import math

from scipy.integrate import quad
from scipy.special import log_ndtr

from moe_theory import _validate as check


def tie_density(J: int) -> float:
    """`lim P(1/z' - 1/z <= e, z' along the other signal) / e` for the two largest z > z' of 2J standard normals.

    `1/z' - 1/z` is about `(z - z') / z^2`, so this is `J/(2J-1) N (N-1) int_0^inf b^2 rho(b)^2 Phi(b)^(N-2) db` with
    N = 2J: of the N - 1 others, J belong to the other signal.
    """
    N = 2 * check.integer("J", J, 1)

    def integrand(b):
        return b * b * math.exp((N - 2) * log_ndtr(b) - b * b) / (2 * math.pi)

    return N * J * quad(integrand, 0, 40, epsabs=0, epsrel=1e-10, limit=400, points=[1, 2, 3, 4, 6])[0]


def leader_at_end(rho: float, path: float) -> float:
    """Where the leader of two racers stands after `path` from 0, if the follower then has come to `rho` times as far.

    `1/x' - 1/x` is constant, so `x' = x / (1 + q x / X)` with `q = 1/rho - 1` and X the end, and the path is
    `X int_0^1 sqrt(1 + (1 + q u)^-4) du`. The ratio is in (0, 1], the path > 0.
    """
    check.positive("path", path)
    if not 0 < rho <= 1:
        raise ValueError(f"rho: expected a number in (0, 1], got {rho!r}")
    q = 1 / rho - 1
    return path / quad(lambda u: math.sqrt(1 + (1 + q * u) ** -4), 0, 1, epsrel=1e-10)[0]


def exposed_limit(J: int, alpha: tuple[float, float], gamma: tuple[float, float], path: float) -> float:
    """`lim P(exposed) / sigma_0`: of starts for which feature noise alone turns some example of the expert's cluster.

    That is a follower of at least `rho = alpha_min / gamma_max` times the leader, hence a start with
    `1/z' - 1/z <= sigma_0 (1/rho - 1) / X`. The strengths alpha and gamma are uniform on (low, high).

    Raises:
        ValueError: if no example is ever turned, because alpha_min >= gamma_max.
    """
    rho = _least_ratio(alpha, gamma)
    return tie_density(J) * (1 / rho - 1) / leader_at_end(rho, path)


def mean_error_limit(J: int, alpha: tuple[float, float], gamma: tuple[float, float], path: float) -> float:
    """`lim E(error of the expert on its cluster) / sigma_0`, the mean over starts; arguments as in `exposed_limit`.

    A follower of rho times the leader turns the examples with `alpha < rho gamma` and the sign against the label, half
    of them. With `D = (1/rho - 1) / X(rho)` the mean is `tie_density(J) int P(alpha < rho gamma)/2 dD`, by parts
    `tie_density(J) int D d/drho P(alpha < rho gamma)/2 drho`.

    Raises:
        ValueError: if no example is ever turned, or for a strength that does not vary.
    """
    least = _least_ratio(alpha, gamma)
    for name, (low, high) in (("alpha", alpha), ("gamma", gamma)):
        if low == high:
            raise ValueError(f"{name}: expected low < high, got a strength that is always {low}")

    def slope(rho):
        return (1 / rho - 1) / leader_at_end(rho, path) * _turned_slope(rho, alpha, gamma) / 2

    return tie_density(J) * quad(slope, least, 1, epsrel=1e-8, limit=200)[0]


def _turned_slope(rho, alpha, gamma) -> float:
    """The derivative of `P(alpha < rho gamma)` in rho: the mean of `gamma / (A - a)` where `a < rho gamma < A`."""
    (a, A), (g, G) = alpha, gamma
    low, high = max(g, a / rho), min(G, A / rho)
    return max(high**2 - low**2, 0) / 2 / (A - a) / (G - g) if high > low else 0.0


def _least_ratio(alpha: tuple[float, float], gamma: tuple[float, float]) -> float:
    rho = check.strength_range("alpha", alpha)[0] / check.strength_range("gamma", gamma)[1]
    if rho >= 1:
        raise ValueError(f"alpha: expected its least strength below the largest gamma, got {alpha} and {gamma}")
    return rho
