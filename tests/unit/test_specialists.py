"""Coupons, gaps of logits and their moments, each against a route of its own."""

import itertools
import math

import numpy as np
import pytest
import torch

from moe_theory.streams import torch_stream
from moe_theory.theory import specialists as s

MU = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
OTHER = torch.tensor([-0.5, 1.0, 1.0], dtype=torch.float64)


def gauss(f):
    """E f(z, zeta, zeta') for independent standard normal variables, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = np.meshgrid(nodes, nodes, nodes, indexing="ij")
    w = weights / weights.sum()
    return float(np.einsum("abc,a,b,c->", f(*z), w, w, w))


def gap(mu, other, bias):
    """The gap's summand of one coordinate."""

    def summand(z, own, foreign):
        half = ((other + foreign) ** 2 - (mu + own) ** 2) / 2 if bias else 0
        return (mu + own - other - foreign) * (mu + z) + half

    return summand


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("t", [0.0, 0.1, 0.25])
def test_the_moment_is_a_product_over_coordinates(bias, t):
    gaps = [gap(float(a), float(b), bias) for a, b in zip(MU, OTHER, strict=True)]
    parts = [gauss(lambda *at, f=f: np.exp(-t * f(*at))) for f in gaps]
    found = s.log_moment(torch.tensor([t], dtype=torch.float64), torch.stack([MU, OTHER]), bias=bias)
    assert float(found[0, 0, 1]) == pytest.approx(sum(map(math.log, parts)), abs=1e-9)


def test_moments_of_the_gap():
    parts = [gap(float(a), float(b), False) for a, b in zip(MU, OTHER, strict=True)]
    means = [gauss(f) for f in parts]
    variances = [gauss(lambda *at, f=f: f(*at) ** 2) - m**2 for f, m in zip(parts, means, strict=True)]
    assert s.gap_moments(MU, OTHER) == pytest.approx((sum(means), sum(variances)))


def test_coupons_by_enumeration():
    for k, e in ((1, 0), (1, 3), (3, 2), (3, 5)):
        every = list(itertools.product(range(k), repeat=e))
        assert s.all_collected(k, e) == pytest.approx(sum(len(set(one)) == k for one in every) / len(every))
    needed = s.experts_needed(10, 0.1)
    assert s.all_collected(10, needed) >= 0.9 > s.all_collected(10, needed - 1)


def test_farthest_first_takes_one_of_each_cluster():
    rng = torch_stream(0, "chapter", 10, 91)
    cluster = torch.arange(8).repeat(5)
    x = 20 * torch.eye(8)[cluster] + torch.rand(40, 8, generator=rng)
    assert len(set(cluster[s.farthest_first(x, 8)].tolist())) == 8
    assert len(s.farthest_first(x, 20).unique()) == 20


def test_the_bias_gives_the_nearest_row():
    rng = torch_stream(0, "chapter", 10, 92)
    x, w = torch.randn(50, 4, generator=rng), 3 * torch.randn(9, 4, generator=rng)
    assert torch.equal(s.logits(x, w, bias=True).argmax(1), torch.cdist(x, w).argmin(1))
    torch.testing.assert_close(s.logits(x, w, bias=False), x @ w.T)


def test_a_long_row_wins_inputs_that_a_near_one_should_have():
    w, home = torch.tensor([[3.0, 0.0], [6.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1, 2])
    x, cluster = torch.tensor([[3.0, 0.1], [6.0, 0.1], [0.1, 3.0], [5.0, 0.0]]), torch.tensor([0, 1, 2, 0])
    assert s.shares(x, cluster, w, home, bias=False) == (0.5, 0.75)
    assert s.shares(x, cluster, w, home, bias=True) == (0.75, 1.0)


def test_bounds_hold_and_rates_are_positive():
    rng = torch_stream(0, "chapter", 10, 93)
    mean = 3 * torch.randn(4, 12, generator=rng, dtype=torch.float64)
    home = torch.arange(4).repeat(2)
    for bias in (False, True):
        weights = []
        for _ in range(20):
            noise = torch.randn(208, 12, generator=rng, dtype=torch.float64)
            x, w = mean.repeat(50, 1) + noise[:200], mean[home] + noise[200:]
            weights.append(s.foreign_weight(x, torch.arange(4).repeat(50), w, home, bias=bias).mean())
        assert torch.stack(weights).mean() <= s.foreign_bound(mean, torch.full((4,), 2), bias=bias)
    assert 0 < s.rate(0.2) < s.rate(1.0) < s.rate(3.0)
    assert s.pair_bound(torch.stack([MU, 3 * MU]), bias=False)[0, 1] == 1  # mu.mu' is above |mu|^2


def test_descent_is_that_of_autograd():
    rng = torch_stream(0, "chapter", 10, 94)
    pi = torch.randn(30, 5, generator=rng, dtype=torch.float64).softmax(1)
    y, u = torch.randn(30, 2, generator=rng, dtype=torch.float64), torch.zeros(5, 2, dtype=torch.float64)
    course = s.descent_course(pi, y, 0.7, 10)
    for step in range(11):
        torch.testing.assert_close(course[step], u)
        v = u.clone().requires_grad_()
        u = u - 0.7 * torch.autograd.grad((pi @ v - y).square().sum(1).mean(), v)[0]


def test_the_slope_of_the_router_is_that_of_autograd():
    rng = torch_stream(0, "chapter", 10, 95)
    x, w, y, u = (
        torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((30, 4), (5, 4), (30, 2), (5, 2))
    )
    w.requires_grad_()
    pi = (x @ w.T).softmax(1)
    (slope,) = torch.autograd.grad((pi @ u - y).square().sum(1).mean(), w)
    torch.testing.assert_close(s.router_slope(x, y, pi.detach(), u), slope)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"miss: expected a probability in \(0, 1\), got 1"):
        s.experts_needed(4, 1.0)
    with pytest.raises(ValueError, match="rows: expected at most the 3 inputs, got 4"):
        s.farthest_first(torch.zeros(3, 2), 4)
    with pytest.raises(ValueError, match="separation: expected a finite number > 0"):
        s.rate(-1.0)
    assert s.log_moment(torch.tensor([0.8]), torch.eye(2), bias=False).isinf().all()
