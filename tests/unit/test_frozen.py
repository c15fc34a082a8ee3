"""What a random router keeps together: formulas against simulation, quadrature and their limits."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import multivariate_normal, norm

from moe_theory.theory.frozen import _below, change_rate, first_change, largest_sum


def order_mean(M, j):
    """The mean of the j-th largest of M standard normal numbers, from its density."""
    c = M * math.comb(M - 1, j - 1)
    return quad(lambda z: c * z * norm.pdf(z) * ndtr(z) ** (M - j) * ndtr(-z) ** (j - 1), -12, 12)[0]


@pytest.mark.parametrize(("M", "k"), [(2, 1), (5, 3), (16, 2), (64, 1)])
def test_largest_sum(M, k):
    assert largest_sum(M, k) == pytest.approx(sum(order_mean(M, j) for j in range(1, k + 1)), rel=1e-8)


def test_the_distribution_of_two_logits():
    """Against scipy's bivariate normal, in all four quadrants."""
    for a, b in ((0.3, 0.8), (0.3, -0.8), (-1.3, 0.2), (-0.4, -1.8)):
        for angle in (0.2, 1.5, 2.9):
            law = multivariate_normal([0, 0], [[1, math.cos(angle)], [math.cos(angle), 1]])
            assert _below(np.array(a), np.array(b), angle) == pytest.approx(law.cdf([a, b]), abs=1e-7)


def test_two_experts_are_a_hyperplane():
    """The angle over pi."""
    assert change_rate(2, 1) == pytest.approx(1 / math.pi, rel=1e-12)
    for angle in (0.1, 1.0, 2.0, 3.0):
        assert first_change(angle, 2) == pytest.approx(angle / math.pi, abs=1e-6)


@pytest.mark.parametrize("M", [3, 4, 16, 32])
def test_the_rate_is_the_slope_at_zero_and_a_bound(M):
    rate = change_rate(M, 1)
    near = [first_change(angle, M, nodes=1200) / angle for angle in (0.02, 0.01)]
    assert 2 * near[1] - near[0] == pytest.approx(rate, rel=1e-3)
    for angle in (0.1, 0.7, 1.5, 3.0):
        assert first_change(angle, M) < rate * angle


def test_against_drawn_routers():
    """400,000 routers; three standard errors."""
    rng, n, M, angle = np.random.default_rng(0), 400_000, 8, 1.2
    h, g = rng.standard_normal((2, n, M))
    turned = math.cos(angle) * h + math.sin(angle) * g
    p = float((h.argmax(1) != turned.argmax(1)).mean())
    assert first_change(angle, M) == pytest.approx(p, abs=3 * math.sqrt(p * (1 - p) / n))


def test_bad_arguments():
    for k in (0, 4):
        with pytest.raises(ValueError, match="k: expected"):
            largest_sum(4, k)
    for angle in (0, math.pi, -1, float("nan")):
        with pytest.raises(ValueError, match="angle: expected one strictly between 0 and pi"):
            first_change(angle, 4)
