"""Two Gaussians at z and -z, routed by a sigmoid and answered by u and -u: dikkala2023, Appendix F, in exact form.

The input is `z + g` with label v or `-(z + g)` with label -v; g has a law without a preferred direction, |z| = |v| = 1.
With `q(x) = 2 p(x) - 1 = tanh(<w, x> / 2)` the loss is `L(u, w) = 2 E |q(z + g) u - v|^2`. A router w counts by two
numbers only, `m = <w, z>` and the length s of its part across z: on the inputs its logit is `m + |w| tau`, tau the part
of g along w. So every mean is an integral over one dimension.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.integrate import cumulative_trapezoid, solve_ivp
from scipy.special import expit, gammainc, roots_gegenbauer, roots_hermitenorm, roots_legendre

from moe_theory import _validate as check


class Law(NamedTuple):
    """Quadrature for the law of `<g, e>`, e a unit vector: `E f(tau)` is `p @ f(tau)`."""

    tau: Float[ndarray, " N"]
    p: Float[ndarray, " N"]


class Drift(NamedTuple):
    """`-dL/dw = a w + b z` where u is at its optimum `rho v`."""

    a: Float[ndarray, "*n"]
    b: Float[ndarray, "*n"]
    rho: Float[ndarray, "*n"]


def noise_law(d: int, r: float, *, sigma: float = 1.0, nodes: int = 300) -> Law:
    """The law of one coordinate of `N(0, sigma^2 I_d)` truncated to the ball of radius r.

    Its density is `e^(-tau^2 / 2 sigma^2)` times the mass of the ball of radius `sqrt(r^2 - tau^2)` under the other
    d - 1 coordinates, which is `(r^2 - tau^2)^((d - 1) / 2)` times an analytic function: Gauss-Gegenbauer nodes. With
    the radius `float("inf")` nothing is truncated.
    """
    half, sigma = (check.integer("d", d, 1) - 1) / 2, check.positive("sigma", sigma)
    check.integer("nodes", nodes, 1)
    if r == np.inf:
        tau, p = roots_hermitenorm(nodes)
        return Law(sigma * tau, p / p.sum())
    tau, p = roots_gegenbauer(nodes, d / 2)
    tau = check.positive("r", r) * tau
    y = (r**2 - tau**2) / (2 * sigma**2)
    p = p * np.exp(-(tau**2) / (2 * sigma**2)) * (gammainc(half, y) / y**half if half else 1.0)
    return Law(tau, p / p.sum())


def ball_cubature(r: float, *, nodes: int = 40) -> tuple[Float[ndarray, "n 3"], Float[ndarray, " n"]]:
    """Points and weights for `N(0, I_3)` truncated to the ball of radius r: `E f(g)` is `p @ f(g)`.

    A product rule in radius, height and azimuth, with `nodes` of each. It does not use that the law has no preferred
    direction, and is there to check what does.

    Raises:
        ValueError: for a radius that is not > 0, or a number of nodes below 1.
    """
    node, weight = roots_legendre(check.integer("nodes", nodes, 1))
    radii, azimuth = check.positive("r", r) * (node + 1) / 2, np.arange(nodes) * 2 * np.pi / nodes
    R, H, T = np.meshgrid(radii, node, azimuth, indexing="ij")
    g = R * np.stack([H, np.sqrt(1 - H**2) * np.cos(T), np.sqrt(1 - H**2) * np.sin(T)])
    p = weight[:, None, None] * weight[:, None] * R**2 * np.exp(-(R**2) / 2)
    return g.reshape(3, -1).T, p.ravel() / p.sum()


def logits(law: Law, m: Float[ndarray, "*n"], s: Float[ndarray, "*n"]) -> Float[ndarray, "*n N"]:
    """`<w, z + g>` at the nodes, for routers with `<w, z> = m` and a part of length s across z."""
    return m[..., None] + np.hypot(m, s)[..., None] * law.tau


def _means(law, m, s):
    """q', 1 - q, and the means of q, q^2 and q (1 - q)."""
    h = logits(law, m, s)
    q, off = np.tanh(h / 2), 2 * expit(-h)
    return 2 * expit(h) * expit(-h), off, q @ law.p, q**2 @ law.p, (q * off) @ law.p


def reduced_loss(law: Law, m: Float[ndarray, "*n"], s: Float[ndarray, "*n"]) -> Float[ndarray, "*n"]:
    """`L(u*(w), w) = 2 (1 - (E q)^2 / E q^2)`, written as a variance so that small losses keep their digits."""
    _, off, _, square, _ = _means(law, m, s)
    mean = (off @ law.p)[..., None]
    return 2 * ((off - mean) ** 2 @ law.p) / square


def drift(law: Law, m: Float[ndarray, "*n"], s: Float[ndarray, "*n"]) -> Drift:
    """The two coefficients of the router's drive, with `u = rho v`, `rho = E q / E q^2`.

    `b = 4 rho E psi` and `a = 4 rho E[tau psi] / |w|` with `psi = q' (1 - rho q)`; the factor 4 is kept.
    """
    slope, off, mean, square, mixed = _means(law, m, s)
    rho, length = mean / square, np.hypot(m, s)
    psi = slope * (off * mean[..., None] - mixed[..., None]) / square[..., None]  # 1 - rho q, free of cancellation
    return Drift(4 * rho * (psi @ (law.tau * law.p)) / length, 4 * rho * (psi @ law.p), rho)


def by_pairs(
    law: Law, m: Float[ndarray, ""], s: Float[ndarray, ""], weight: Float[ndarray, " N"]
) -> Float[np.float64, ""]:
    """`E[k psi]` with `psi = q' (1 - rho q)` as a mean over pairs of independent copies; `weight` is k at the nodes.

    `E[k psi] E q^2 = E[(q~ - q)(q~ q' k - q q~' k~)] / 2`.
    """
    q = np.tanh(logits(law, m, s) / 2)
    one = np.outer((1 - q**2) / 2 * weight, q)
    both = (q - q[:, None]) * (one - one.T) / 2
    return law.p @ both @ law.p / (q**2 @ law.p)


def router_path(law: Law, m: Float[ndarray, " T"], s: float) -> Float[ndarray, "2 T"]:
    """The flow `dw/dt = -dL/dw` with u at its optimum: s and the time t at which `<w, z>` has grown to each m.

    `<w, z>` never falls, where the noise has a radius below 1, so it serves as the clock: `ds/dm = a s / (a m + b)`,
    `dt/dm = 1 / (a m + b)`. The m increase; the flow starts at the first of them and at s.
    """

    def slope(at, state):
        a, b, _ = drift(law, np.asarray(at), np.asarray(np.exp(state[0])))
        return np.array([a, 1.0]) / (a * at + b)

    found = solve_ivp(slope, (m[0], m[-1]), [np.log(s), 0.0], "LSODA", m, rtol=1e-9, atol=1e-12)
    return np.stack([np.exp(found.y[0]), found.y[1]])


def reduced_flow(law: Law, start: Float[ndarray, " 2"], times: Float[ndarray, " T"]) -> Float[ndarray, "2 T"]:
    """The same flow for any law, where `<w, z>` may fall: m and s at the increasing times, both > 0 at the first."""

    def drive(_, state):
        m = np.asarray(state[0])
        a, b, _ = drift(law, m, np.asarray(np.exp(state[1])))
        return np.array([a * m + b, a])

    start = start[0], np.log(start[1])
    m, log_s = solve_ivp(drive, (times[0], times[-1]), start, "LSODA", times, rtol=1e-8, atol=1e-10).y
    return np.stack([m, np.exp(log_s)])


def _least_speed(h, kappa, C):
    """Q of `decay_bounds` for the smallest logit h, the largest `C h`, and `kappa = cos theta - r`."""
    slope = (h - np.tanh(h)) / (h * (1 - 1 / np.cosh(h)))
    return 2 * kappa * slope * np.tanh(h / 2) ** 2 / np.tanh(C * h / 2)


def _smallest_logit(m, s, r):
    """`m - r |w|`, with `kappa` and `C` of `_least_speed`; a ValueError unless it is positive."""
    n = np.hypot(m, s)
    h = m - check.positive("r", r) * n
    if not (h > 0).all():
        raise ValueError(f"m: expected routers with m > r |w|, got a smallest logit of {np.min(h):.3g}")
    return h, h / n, (m + r * n) / h


def decay_bounds(m: Float[ndarray, "*n"], s: Float[ndarray, "*n"], r: float) -> Float[ndarray, "2 *n"]:
    """Q and K with `Q^2 <= -(dL/dt) / L^2 <= K^2` along the flow with u at its optimum, from this router on.

    They hold for all rotation-invariant noise of length at most r, where the smallest logit
    `h = m - r |w|` of an input is positive: `K = 2 / tanh(h / 2)` and
    `Q = 2 (cos theta - r) G(h) tanh(h / 2)^2 / tanh(H / 2)` with the largest logit `H = m + r |w|` and
    `G(h) = (h cosh h - sinh h) / (h (cosh h - 1))`.

    Args:
        m, s: `<w, z>` and the length of the part of w across z.
        r: radius of the noise, below 1.

    Raises:
        ValueError: if an input of the cluster may be on the wrong side of the router.
    """
    h, kappa, C = _smallest_logit(m, s, r)
    return np.stack([_least_speed(h, kappa, C), 2 / np.tanh(h / 2)])


def time_bounds(m: float, s: float, r: float, loss: float, target: float) -> tuple[float, float, float]:
    """Between which times the flow with u at its optimum brings a loss down to a target.

    With Q and K of `decay_bounds` the time is at least `(1 / target - 1 / loss) / K^2`, at most that with Q for K,
    and at most `(int dh / (kappa Q(h)) + 1 / Q(h1)^2) / target`, the integral from the smallest logit to any h1, which
    is the better bound of a small router.

    Args:
        m, s, r: as in `decay_bounds`.
        loss: of this router; target: below it.

    Returns:
        These three bounds, the last with the best h1.

    Raises:
        ValueError: for a target that is not below the loss, or a router as in `decay_bounds`.
    """
    if not 0 < target < loss:
        raise ValueError(f"target: expected a number between 0 and the loss {loss:.3g}, got {target:.3g}")
    Q, K = decay_bounds(np.asarray(m), np.asarray(s), r)
    h0, kappa, C = _smallest_logit(np.asarray(m), np.asarray(s), r)
    h = h0 * np.geomspace(1, max(2, 60 / h0), 2000)
    later = _least_speed(h, kappa, C)
    waiting = cumulative_trapezoid(1 / later, h, initial=0) / kappa
    due = 1 / target - 1 / loss
    return float(due / K**2), float(due / Q**2), float(((waiting + 1 / later**2) / target).min())


def joint_loss(law: Law, state: Float[ndarray, " 4"]) -> float:
    """`L(u, w) = 2 E |q u - v|^2` at m, s, beta, gamma, the state of `joint_drive`."""
    m, s, beta, gamma = map(np.asarray, state)
    q = np.tanh(logits(law, m, s) / 2)
    return float(2 * law.p @ ((q * beta - 1) ** 2 + (q * gamma) ** 2))


def joint_drive(law: Law, state: Float[ndarray, " 4"], *, ratio: float) -> Float[ndarray, " 4"]:
    """`-dL/dw` along and across z, and `-ratio dL/du` along and across v, ratio being `eta_u / eta_w`.

    The state is m, s, beta, gamma: `u = beta v + ` a vector of length gamma across v; nothing else of u counts.
    """
    m, s, beta, gamma = map(np.asarray, state)
    slope, _, mean, square, _ = _means(law, m, s)
    psi = slope * (beta - (beta**2 + gamma**2) * np.tanh(logits(law, m, s) / 2))
    along, across = psi @ law.p, psi @ (law.tau * law.p) / np.hypot(m, s)
    u = ratio * mean - ratio * square * beta, -ratio * square * gamma
    return 4 * np.array([along + across * m, across * s, *u])


def joint_flow(
    law: Law, start: Float[ndarray, " 4"], times: Float[ndarray, " T"], *, ratio: float
) -> Float[ndarray, "4 T"]:
    """Gradient flow of both, u `ratio` times as fast as w: rows m, s, beta, gamma at the increasing times."""
    check.positive("ratio", ratio)
    drive = lambda _, state: joint_drive(law, state, ratio=ratio)  # noqa: E731
    return solve_ivp(drive, (times[0], times[-1]), start, "LSODA", times, rtol=1e-8, atol=1e-12).y


def valley_rate(law: Law) -> float:
    """c of the valley, in which a long u shrinks by `d|u|^2 / dt = -c R / |u|^2`, so that `|u|^4` takes `1 / (2 c R)`.

    `c = 2/3 (2 / (1 + t2))^3 (2 t2 + t4 - 3 t2^2) / (1 + t2)` with the moments `tk = E tau^k` of the law.
    """
    t2, t4 = law.p @ law.tau**2, law.p @ law.tau**4
    return float(2 / 3 * (2 / (1 + t2)) ** 3 * (2 * t2 + t4 - 3 * t2**2) / (1 + t2))


def saddle_exit(law: Law, start: Float[ndarray, " 4"], *, ratio: float) -> float:
    """`tan theta` where the joint flow from a small start has left the saddle: `<w, z>` passes 1/5 going up.

    The start m, s, beta, gamma is on the side of z: `m + beta / sqrt(ratio) > 0`. ValueError if the flow has not left
    by the time `12 / sqrt(ratio)`.
    """
    times = np.linspace(0, 12, 900) / check.positive("ratio", ratio) ** 0.5
    m, s, *_ = joint_flow(law, start, times, ratio=ratio)
    out = np.flatnonzero((m[1:] > 0.2) & (m[:-1] <= 0.2))
    if not out.size:
        raise ValueError(f"start: expected one that leaves the saddle towards z by 12 / sqrt(ratio), got {start}")
    return float(s[out[0] + 1] / m[out[0] + 1])
