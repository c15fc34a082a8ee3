"""Near ties of the start: densities by draws, ends by the race, limits by quadrature of races."""

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid

from moe_theory.streams import stream
from moe_theory.theory.exploration import race
from moe_theory.theory.near_ties import exposed_limit, leader_at_end, mean_error_limit, tie_density

LAW, PATH, TINY = (0.5, 2.0), 0.25, 1e-7


@pytest.mark.parametrize("J", [2, 8])
def test_the_density_of_a_tie_is_that_of_draws(J):
    z = stream(0, "race", J).standard_normal((2_000_000, 2 * J), np.float32)
    two = np.argpartition(z, -2)[:, -2:]
    low, high = np.sort(np.take_along_axis(z, two, 1)).T
    close = (low > 0) & (two[:, 0] % 2 != two[:, 1] % 2)
    shares = [np.mean(close & (1 / low - 1 / high <= e)) / e for e in (0.02, 0.04)]
    assert 2 * shares[0] - shares[1] == pytest.approx(tie_density(J), rel=0.04)


def ends(delta):
    """Of two racers from the start `TINY` and a start that keeps `1/x' - 1/x` at delta."""
    start = torch.tensor([TINY, 1 / (1 / TINY + delta)], dtype=torch.float64)
    return race(start, torch.ones(2, dtype=torch.float64), PATH, steps=40_000)


@pytest.mark.parametrize("rho", [0.1, 0.25, 0.7, 1.0])
def test_the_leader_ends_where_the_race_does(rho):
    X = leader_at_end(rho, PATH)
    leader, follower = ends((1 / rho - 1) / X)
    assert float(leader) == pytest.approx(X, rel=1e-3)
    assert float(follower / leader) == pytest.approx(rho, rel=1e-3)


def test_the_limits_are_integrals_over_races():
    deltas = np.linspace(0, 20, 201)
    ratios = np.array([float(x[1] / x[0]) for x in map(ends, deltas)])
    alpha, gamma = stream(1, "race").uniform(*LAW, (2, 400_000))
    errors = np.array([np.mean(alpha < rho * gamma) / 2 for rho in ratios])
    assert trapezoid(errors, deltas) * tie_density(3) == pytest.approx(mean_error_limit(3, LAW, LAW, PATH), rel=0.01)
    last = np.interp(-LAW[0] / LAW[1], -ratios, deltas)
    assert last * tie_density(3) == pytest.approx(exposed_limit(3, LAW, LAW, PATH), rel=0.01)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: tie_density(0), "J"),
        (lambda: leader_at_end(0.0, 1.0), "rho"),
        (lambda: leader_at_end(0.5, 0.0), "path"),
        (lambda: exposed_limit(2, (2.0, 3.0), (1.0, 2.0), 1.0), "alpha"),
        (lambda: mean_error_limit(2, (1.0, 1.0), LAW, 1.0), "alpha"),
        (lambda: mean_error_limit(2, LAW, (2.0, 2.0), 1.0), "gamma"),
        (lambda: mean_error_limit(2, LAW, (0.0, 2.0), 1.0), "gamma"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        call()
