"""How experts part: initialization, early growth, runaway (Chen et al. 2022, Appendices D, E.1 and F)."""

import math
from itertools import combinations_with_replacement

import numpy as np
import torch
from jaxtyping import Float
from scipy.integrate import quad
from scipy.special import comb, log_ndtr, ndtr
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import Coefficients, PatchBatch


def _fraction(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name}: expected a number strictly between 0 and 1, got {value!r}")
    return float(value)


def near_tie_probability(N: int, G: float) -> float:
    """Lemma F.1's event, exactly: `P(a2 >= (1 - G) a1)` for the two largest of N standard normals.

    Given the second largest, b > 0, the largest is a normal conditioned to exceed b, so this is
    `N (N-1) int_0^inf rho(b) Phi(b)^(N-2) (Phi(b / (1-G)) - Phi(b)) db`, for N >= 2 and a relative gap 0 < G < 1.
    """
    check.integer("N", N, 2)
    _fraction("G", G)

    def integrand(b):
        rho = math.exp((N - 2) * log_ndtr(b) - b * b / 2) / math.sqrt(2 * math.pi)
        return rho * (ndtr(-b) - ndtr(-b / (1 - G)))

    peak = math.sqrt(2 * math.log(N))  # the second largest lies near it
    points = sorted({b for b in (1, 2, 4, peak - 2, peak - 1, peak, peak + 1) if b > 0})
    return N * (N - 1) * quad(integrand, 0, peak + 11, epsabs=0, epsrel=1e-10, limit=400, points=points)[0]


def near_tie_constant(N: int) -> float:
    """`s_N = N (N-1) int_0^inf b rho(b)^2 Phi(b)^(N-2) db`: the limit of `near_tie_probability(N, G) / G` as G -> 0.

    For N >= 2. It grows like `2 log N`, and is below that from N = 3 on (chapter 04).
    """
    check.integer("N", N, 2)

    def integrand(b):
        return b * math.exp((N - 2) * log_ndtr(b) - b * b) / (2 * math.pi)

    peak = math.sqrt(2 * math.log(N))
    points = sorted({b for b in (1, 2, 4, peak - 2, peak - 1, peak, peak + 1) if b > 0})
    return N * (N - 1) * quad(integrand, 0, peak + 11, epsabs=0, epsrel=1e-10, limit=400, points=points)[0]


def near_tie_bound(N: int, G: float) -> float:
    """`s_N G (1 - G/2) / (1 - G)^2`: chapter 04's bound on `near_tie_probability`; s_N is the best at each N >= 2."""
    return near_tie_constant(N) * _fraction("G", G) * (1 - G / 2) / (1 - G) ** 2


def coverage_probability(K: int, experts: int) -> float:
    """The chance that none of K sets M_k is empty when each of M experts joins one at random (Lemma D.4).

    Inclusion and exclusion: `sum_j (-1)^j binom(K, j) (1 - j/K)^M`.
    """
    check.integer("K", K, 1)
    M = check.integer("experts", experts, 1)
    j = np.arange(K + 1)
    return float(((-1.0) ** j * comb(K, j, exact=False) * (1 - j / K) ** M).sum())


def runaway_bound(y_0: float, G: float, *, jump: float = 0.0, error: float = 0.0) -> float:
    """The repaired Lemma F.2, with errors: `y_t <= y_0 + u (1 + jump) / G` for all t, where `u = |(y_0, error)|`.

    It holds for sequences with `x_{t+1} >= x_t + tau_t (x_t^2 - e^2)`, `y_{t+1} <= y_t + S tau_t (y_t^2 + error^2)`
    and `r >= S (1 + G) u`, `r^2 = x_0^2 - e^2`, if x never steps by more than `jump * r`, for any `e < x_0`. Without an
    error this is `y_0 (1 + G + jump) / G`.

    Args:
        y_0: start of the follower, >= 0, and > 0 if there is no error; G: lead, > 0.
        jump: longest step of the leader over r, >= 0; error: root of the largest error of the follower's square, >= 0.
    """
    check.not_negative("error", error)
    check.not_negative("y_0", y_0) if error else check.positive("y_0", y_0)
    check.positive("G", G)
    check.not_negative("jump", jump)
    return y_0 + math.hypot(y_0, error) * (1 + jump) / G


def race(x_0: Float[Tensor, " N"], c: Float[Tensor, " N"], path: float, *, steps: int = 4000) -> Float[Tensor, " N"]:
    """Where the race `dx = c x^2 dtau` stands when the racers have come `path` together.

    Normalized descent fixes the length of an expert's path, not its time: the race has run until
    `int |dx| = path`, with |.| the Euclidean norm. In tau it is solved by `1/x = 1/x_0 - c tau`.

    Args:
        x_0: starts, one of them positive; those that are negative rise towards 0.
        c: rates, > 0; path: length of the path, > 0.
        steps: points at which the length is summed, closer together towards the blow-up.
    """
    check.positive("path", path)
    if not (x_0 > 0).any():
        raise ValueError(f"x_0: expected at least one positive start, got {x_0}")
    pace = c * x_0
    leader = pace.argmax()
    farthest = 1 + path / x_0[leader]  # by this factor the leader alone would have come `path`
    grown = torch.logspace(0, math.log10(farthest), steps, dtype=torch.float64, device=x_0.device)
    elapsed = (1 - 1 / grown) / pace[leader]
    x = x_0 / (1 - pace * elapsed[:, None])
    length = torch.cat([x.new_zeros(1), (x[1:] - x[:-1]).norm(dim=1).cumsum(0)])
    return x[int((length <= path).sum()) - 1]


def race_in_steps(
    x_0: Float[Tensor, "M N"], c: Float[Tensor, " N"] | Float[Tensor, "M N"], eta: float, steps: int
) -> tuple[Float[Tensor, "M N"], Float[Tensor, "M N"]]:
    """The race as normalized descent runs it: `x <- x + eta c x^2 / |c x^2|`, for M experts at once.

    Args:
        x_0: each expert's starts, of either sign.
        c: rates, > 0, the same for all experts or each expert's own; eta: length of a step, > 0; steps: how many.

    Returns:
        Where the racers stand, and `eta sum_t x_t^3`, of which the router's weights on centers are made.
    """
    check.positive("eta", eta)
    check.integer("steps", steps, 1)
    x, cubes = x_0.clone(), torch.zeros_like(x_0)
    for _ in range(steps):
        cubes += eta * x**3
        pull = c * x**2
        x += eta * pull / pull.norm(dim=1, keepdim=True)
    return x, cubes


def race_of_layer(
    layer: PatchMoE, v: Float[Tensor, "K d"], nu: Float[Tensor, " K"], eta: float, steps: int
) -> tuple[Float[Tensor, "M J K"], Float[Tensor, "M J K"]]:
    """`race_in_steps` among all filters and signals of a layer of cubic experts (Lemmas E.6 to E.8, E.12).

    It starts at the layer, which stays as it is, and has the sample's `growth_rates` nu along the label signals v.

    Returns:
        All `<w_mj, v_k>` after the last step, and `eta sum_t <w_mj, v_k>^3`.
    """
    x_0 = layer.W.data @ v.T
    x, cubes = race_in_steps(x_0.flatten(1), nu.repeat(x_0.shape[1]), eta, steps)
    return x.view_as(x_0), cubes.view_as(x_0)


def growth_rates(batch: Coefficients) -> Float[Tensor, " K"]:
    """The rates nu_k at which a cubic expert learns the signals of a sample (Lemma E.5 without its O's).

    `nu_k = 1/n (sum_{i in Omega_k} alpha_i^3 + sum_{i: k'_i = k} y_i epsilon_i gamma_i^3)`, with
    expectation E[alpha^3]/K: while routing is uniform and the outputs are small, the mean gradient
    along v_k is `-nu_k sigma'(<w, v_k>) / (2 M^2)`, plus what the noise patches add.
    """
    K = int(batch.cluster.max()) + 1
    own = torch.bincount(batch.cluster, batch.alpha**3, minlength=K)
    foreign = torch.bincount(batch.other, batch.y * batch.epsilon * batch.gamma**3, minlength=K)
    return ((own + foreign) / len(batch)).to(batch.alpha)


def center_rates(batch: Coefficients) -> Float[Tensor, " K"]:
    """The same along the centers: `1/n sum_{i in Omega_k} y_i beta_i^3`, with expectation 0 (Lemma E.5)."""
    K = int(batch.cluster.max()) + 1
    return (torch.bincount(batch.cluster, batch.y * batch.beta**3, minlength=K) / len(batch)).to(batch.beta)


def uniform_moments(
    batch: PatchBatch, model: PatchMoE, u: Float[Tensor, "U d"]
) -> tuple[tuple[Float[Tensor, "M U"], Float[Tensor, "M J U"]], tuple[Float[Tensor, "M U"], Float[Tensor, "M J U"]]]:
    """Means, and standard deviations, along u of the router's and the experts' gradients (Eq. E.1, E.2) at theta = 0.

    Over uniform routing: both are sums over examples of terms that depend only on that example's choice of an expert.
    """
    n, M = len(batch), len(model.W)
    parts = [
        _added_up(x.transpose(0, 1), y[:, None], model, u)
        for x, y in zip(batch.x.split(500), batch.y.split(500), strict=True)
    ]
    mean, variance, first, second = (sum(part) for part in zip(*parts, strict=True))
    deviation = (second * (1 / M - 1 / M**2)).sqrt()  # pyright: ignore[reportAttributeAccessIssue]
    mean_of_experts, deviation_of_experts = (e.view(M, -1, len(u)) / n for e in (first / M, deviation))  # pyright: ignore
    return (mean / n, mean_of_experts), (variance.sqrt() / n, deviation_of_experts)  # pyright: ignore


def _added_up(x: Float[Tensor, "P n d"], y: Float[Tensor, "n 1"], model: PatchMoE, u: Tensor) -> tuple[Tensor, ...]:
    """Sums over examples: the router's mean and variance (M, U), the experts' gradients (M J, U) and their squares."""
    M, J = model.W.shape[:2]
    z, along = x @ model.W.data.flatten(0, 1).T, x @ u.T
    f, s = model.sigma.value(z).sum(0).view(-1, M, J).sum(2), along.sum(0)
    g = -torch.sigmoid(-y * f / M) / M * y  # l' pi y of one that is sent to m
    b = g * f  # the router's gradient is (1[m_i = m] - 1/M) b_{m_i} s
    mean = b / M - b.sum(1, keepdim=True) / M**2
    square = b**2 / M * (1 - 2 / M) + (b**2).sum(1, keepdim=True) / M**3
    w = model.sigma.slope(z) * g.repeat_interleave(J, 1)
    first, second = w.flatten(0, 1).T @ along.flatten(0, 1), 0
    for p, q in combinations_with_replacement(range(len(w)), 2):
        second = second + (2 - (p == q)) * (w[p] * w[q]).T @ (along[p] * along[q])
    return mean.T @ s, (square - mean**2).T @ s**2, first, second


def derived_ratio(batch: PatchBatch, w: Float[Tensor, "J d"], M: int) -> float:
    """The size r of an expert's gradient across the mean gradient over that along it, M experts that are alike.

    `r = sqrt((M - 1) / n) sqrt(mean_i ||g_i^perp||^2) / ||mean_i g_i||`, with g_i what example i would send to its
    expert, of cubic filters w (J, d), at the start of Algorithm 1 (its factors common to all examples cancel).
    """
    n = len(batch)
    slope = 3 * (batch.x @ w.T).square() * batch.y[:, None, None]
    g = torch.einsum("npj,npd->njd", slope, batch.x).flatten(1)
    mean = g.mean(0)
    across = g - (g @ mean / mean.square().sum())[:, None] * mean
    return float(((M - 1) / n * across.square().sum(1).mean()).sqrt() / mean.norm())
