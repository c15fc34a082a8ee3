"""How far a sample of the patch task is from its means (Chen et al. 2022, Lemmas D.1 and D.2)."""

import math

import numpy as np
import torch
from scipy import stats
from scipy.integrate import trapezoid
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.tasks.patches import Coefficients, PatchTask


def signal_sums(a: Coefficients, K: int) -> dict[str, Tensor]:
    """The sums of Lemma D.1 (Eq. D.1-D.3), one entry for each k or each (k, k') with k' != k."""

    def over_clusters(value: Tensor) -> Tensor:
        return value.new_zeros(K).index_add_(0, a.cluster, value)

    def over_pairs(value: Tensor, kept: Tensor) -> Tensor:
        sums = value.new_zeros(K * K).index_add_(0, a.cluster * K + a.other, value * kept)
        return sums.reshape(K, K)[~torch.eye(K, dtype=torch.bool, device=sums.device)]

    same = (a.y == a.epsilon).to(a.y)
    return {
        r"$y \beta^3$": over_clusters(a.y * a.beta**3),
        r"$\alpha^3$": over_clusters(a.alpha**3),
        r"$y \epsilon \gamma^3$": over_clusters(a.y * a.epsilon * a.gamma**3),
        r"$y \alpha$, $y \epsilon = 1$": over_pairs(a.y * a.alpha, same),
        r"$y \alpha$, $y \epsilon = -1$": over_pairs(a.y * a.alpha, 1 - same),
        r"$\epsilon \gamma$, $y \epsilon = 1$": over_pairs(a.epsilon * a.gamma, same),
        r"$\epsilon \gamma$, $y \epsilon = -1$": over_pairs(a.epsilon * a.gamma, 1 - same),
        r"$\beta$": over_clusters(a.beta),
    }


def _moment(law: tuple[float, float], power: int) -> float:
    """E[s^power] for s uniform on (low, high)."""
    low, high = law
    if low == high:
        return low**power
    return (high ** (power + 1) - low ** (power + 1)) / ((power + 1) * (high - low))


def mean_and_spread(task: PatchTask, n: int) -> dict[str, tuple[float, float]]:
    """Exact mean and standard deviation of each sum of `signal_sums` over n examples.

    A sum of n independent terms s 1[k] has mean n E[s]/K and variance n (E[s^2]/K - E[s]^2/K^2);
    a random sign makes the mean zero.
    """
    K, pairs = task.K, 2 * task.K * (task.K - 1)

    def signed(law: tuple[float, float], power: int, parts: int) -> tuple[float, float]:
        return 0.0, math.sqrt(n * _moment(law, 2 * power) / parts)

    def unsigned(law: tuple[float, float], power: int) -> tuple[float, float]:
        first, second = _moment(law, power) / K, _moment(law, 2 * power) / K
        return n * first, math.sqrt(n * (second - first**2))

    return {
        r"$y \beta^3$": signed(task.beta, 3, K),
        r"$\alpha^3$": unsigned(task.alpha, 3),
        r"$y \epsilon \gamma^3$": signed(task.gamma, 3, K),
        r"$y \alpha$, $y \epsilon = 1$": signed(task.alpha, 1, pairs),
        r"$y \alpha$, $y \epsilon = -1$": signed(task.alpha, 1, pairs),
        r"$\epsilon \gamma$, $y \epsilon = 1$": signed(task.gamma, 1, pairs),
        r"$\epsilon \gamma$, $y \epsilon = -1$": signed(task.gamma, 1, pairs),
        r"$\beta$": unsigned(task.beta, 1),
    }


def largest_of_noise(d: int, patches: int, signals: int) -> tuple[float, float, float]:
    """Mean of the largest of each quantity of Lemma D.2 among noise patches xi ~ N(0, I/d), that is sigma_p = 1.

    In this order: |<v, xi>| over patches and orthonormal signals v, |<xi, xi'>| over pairs of patches, as if the
    pairs were independent, and | ||xi||^2 - 1 | over patches. The largest of N independent draws with distribution
    function G on the positive numbers has the mean `int_0^oo (1 - G(t)^N) dt`.

    Args:
        d: dimension, at least 16, which leaves nothing to integrate beyond t = 20 / sqrt(d).
        patches: how many, at least 2; signals: at least 1.
    """
    square, root = stats.chi2(check.integer("d", d, 16)), d**0.5
    pairs = check.integer("patches", patches, 2) * (patches - 1) // 2
    z = np.linspace(0, 20, 2_001)
    # <xi, xi'> is normal given the length of xi, over which it is averaged
    lengths = np.linspace(max(root - 8, 0.05), root + 8, 401)
    density = stats.chi(d).pdf(lengths)  # pyright: ignore[reportAttributeAccessIssue]
    between_two = stats.chi(1).cdf(z[:, None] * root / lengths) @ density / density.sum()
    laws = (
        (stats.chi(1).cdf(z), check.integer("signals", signals, 1) * patches),
        (between_two, pairs),
        (square.cdf(d + root * z) - square.cdf(d - root * z), patches),
    )
    return tuple(float(trapezoid(1 - G**count, z)) / root for G, count in laws)
