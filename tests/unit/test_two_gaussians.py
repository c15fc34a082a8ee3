import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gammainc

from moe_theory.tasks.gaussian_pair import TwoGaussians
from moe_theory.theory.two_gaussians import (
    ball_cubature,
    by_pairs,
    decay_bounds,
    drift,
    joint_drive,
    joint_flow,
    joint_loss,
    noise_law,
    reduced_flow,
    reduced_loss,
    router_path,
    saddle_exit,
    time_bounds,
    valley_rate,
)

LAWS = [(1, 0.5, 1.0), (2, 0.5, 1.0), (5, 0.9, 0.3), (24, 0.99, 1.0), (3, 2.0, 1.0), (2, math.inf, 0.7)]


@pytest.mark.parametrize("d, r, sigma", LAWS)
def test_the_law_of_a_coordinate_against_its_density(d, r, sigma):
    def density(tau):
        if r == math.inf:
            return math.exp(-(tau**2) / (2 * sigma**2))
        inside = gammainc((d - 1) / 2, (r**2 - tau**2) / (2 * sigma**2)) if d > 1 else 1.0
        return math.exp(-(tau**2) / (2 * sigma**2)) * inside

    law, end = noise_law(d, r, sigma=sigma), min(r, 9 * sigma)
    mass = quad(density, -end, end)[0]
    for f in (np.square, np.exp, lambda t: 1 / (1 + (2 * t - 1) ** 2)):
        mean = quad(lambda t, f=f: f(t) * density(t), -end, end)[0] / mass
        assert law.p @ f(law.tau) == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("d, r, sigma", LAWS)
def test_samples_have_that_law_in_every_direction(d, r, sigma):
    task, law = TwoGaussians(d, r, sigma=sigma), noise_law(d, r, sigma=sigma)
    x, y = task.sample(40_000, 5)
    g = x * y[:, None] - task.z
    assert float(g.norm(dim=1).max()) <= r and abs(float(y.mean())) < 0.03
    for direction in (g[:, 0], g.sum(1) / math.sqrt(d)):
        square, fourth = law.p @ law.tau**2, law.p @ law.tau**4
        assert float(direction.square().mean()) == pytest.approx(square, abs=5 * (fourth / 40_000) ** 0.5)
        assert abs(float(direction.mean())) < 5 * (square / 40_000) ** 0.5


@pytest.mark.parametrize("d, r, sigma", LAWS)
def test_the_drive_is_the_slope_of_the_reduced_loss(d, r, sigma):
    law, eps = noise_law(d, r, sigma=sigma), 1e-5
    m, s = np.meshgrid([0.3, 1.0, 4.0], [0.2, 1.5, 5.0])
    a, b, _ = drift(law, m, s)
    along = (reduced_loss(law, m - eps, s) - reduced_loss(law, m + eps, s)) / (2 * eps)
    across = (reduced_loss(law, m, s - eps) - reduced_loss(law, m, s + eps)) / (2 * eps)
    assert a * m + b == pytest.approx(along, rel=1e-5, abs=1e-9)
    assert a * s == pytest.approx(across, rel=1e-5, abs=1e-9)
    assert (a < 0).all() and (b > 0).all()
    assert r > 1 or (a * m + b > 0).all()


def test_the_path_follows_the_drive_and_the_joint_flow_follows_it_for_a_fast_u():
    law = noise_law(2, 0.5)
    m = np.linspace(0.5, 2, 31)
    s, t = router_path(law, m, 1.0)
    a, b, rho = drift(law, m, s)
    assert np.gradient(s, m)[1:-1] == pytest.approx((a * s / (a * m + b))[1:-1], rel=0.03)
    assert np.gradient(t, m)[5:-1] == pytest.approx((1 / (a * m + b))[5:-1], rel=0.03)
    joint = joint_flow(law, np.array([0.5, 1.0, rho[0], 0.0]), t, ratio=1e4)
    assert joint[0] == pytest.approx(m, rel=1e-2) and joint[2] == pytest.approx(rho, rel=1e-2)


def test_pairs_of_copies_give_the_drive():
    law, m, s = noise_law(3, 0.8, nodes=60), np.array(1.3), np.array(0.7)
    a, b, rho = drift(law, m, s)
    assert 4 * rho * by_pairs(law, m, s, np.ones(60)) == pytest.approx(b, rel=1e-9)
    assert 4 * rho * by_pairs(law, m, s, law.tau) == pytest.approx(a * np.hypot(m, s), rel=1e-9)


def test_the_joint_loss_is_the_reduced_one_where_u_is_at_its_optimum():
    law, m, s = noise_law(3, 0.8), np.array(0.7), np.array(1.1)
    best = joint_loss(law, np.array([m, s, drift(law, m, s).rho, 0.0]))
    assert best == pytest.approx(reduced_loss(law, m[None], s[None])[0], rel=1e-12)
    square = np.tanh((m + np.hypot(m, s) * law.tau) / 2) ** 2 @ law.p
    for aside in ([0.3, 0.0], [0.0, 0.3]):
        state = np.array([m, s, drift(law, m, s).rho + aside[0], aside[1]])
        assert joint_loss(law, state) == pytest.approx(best + 2 * square * 0.09, rel=1e-12)


def test_the_joint_drive_is_the_slope_of_the_loss():
    law, at = noise_law(3, 0.8), np.array([0.7, 1.1, 0.9, 0.4])

    steps = 1e-5 * np.eye(4)
    slopes = [(joint_loss(law, at - step) - joint_loss(law, at + step)) / 2e-5 for step in steps]
    assert joint_drive(law, at, ratio=3.0) == pytest.approx(np.array(slopes) * [1, 1, 3, 3], rel=1e-6)


def test_the_exit_from_the_saddle_is_at_an_angle_proportional_to_the_start():
    law, start = noise_law(2, 0.5, nodes=60), np.array([0.3, 0.9, 0.5, 0.5])
    far, near = (saddle_exit(law, delta * start, ratio=4.0) for delta in (1e-2, 1e-3))
    assert far / near == pytest.approx(10, rel=0.05)
    with pytest.raises(ValueError, match="expected one that leaves the saddle"):
        saddle_exit(law, -1e-2 * start, ratio=4.0)


def test_the_two_clocks_agree():
    law, m = noise_law(2, 0.5), np.linspace(0.5, 2, 31)
    s, t = router_path(law, m, 1.0)
    assert reduced_flow(law, np.array([0.5, 1.0]), t) == pytest.approx(np.stack([m, s]), rel=1e-5)


def test_without_truncation_the_flow_rests_at_the_bayes_router():
    for sigma in (0.6, 1.0, 1.7):
        law, m = noise_law(1, math.inf, sigma=sigma), np.array(2 / sigma**2)
        a, b, rho = drift(law, m, np.array(0.0))
        assert a * m + b == pytest.approx(0, abs=1e-10) and rho == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise_law(0, 0.5), "d: expected an integer >= 1, got 0"),
        (lambda: noise_law(2, 0.0), "r: expected a finite number > 0, got 0.0"),
        (lambda: noise_law(2, 0.5, sigma=-1.0), "sigma: expected"),
        (lambda: TwoGaussians(2, -1.0), "r: expected"),
        (lambda: ball_cubature(0.0), "r: expected a finite number > 0, got 0.0"),
        (lambda: time_bounds(1.0, 0.0, 0.5, 0.1, 0.2), "target: expected a number between 0 and the loss 0.1, got 0.2"),
        (lambda: decay_bounds(np.array(1.0), np.array(2.0), 0.5), "m: expected routers with m > r .w., got a smallest"),
        (lambda: TwoGaussians().sample(0, 1), "n: expected"),
        (lambda: joint_flow(noise_law(2, 0.5), np.ones(4), np.arange(2.0), ratio=0.0), "ratio: expected"),
    ],
)
def test_bad_input_of_two_gaussians(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("d, r, sigma", [(1, 0.5, 1.0), (2, 0.5, 0.2), (3, 0.9, 1.0), (24, 0.9, 1.0), (2, 0.001, 1.0)])
def test_the_slope_of_the_loss_lies_between_its_bounds(d, r, sigma):
    law = noise_law(d, r, sigma=sigma)
    n, c = np.meshgrid([0.1, 1.0, 5.0, 30.0], r + (1 - r) * np.array([0.1, 0.5, 0.9, 1.0]))
    m, s = n * c, n * np.sqrt(1 - c**2)
    eps = 1e-6 * n
    along = (reduced_loss(law, m - eps, s) - reduced_loss(law, m + eps, s)) / (2 * eps)
    across = (reduced_loss(law, m, s - eps) - reduced_loss(law, m, s + eps)) / (2 * eps)
    speed = np.hypot(along, across) / reduced_loss(law, m, s)
    low, high = decay_bounds(m, s, r)
    assert (low <= speed * (1 + 1e-5)).all() and (speed <= high * (1 + 1e-5)).all()
    if r == 0.001:  # all logits are nearly the same
        assert speed[-1] == pytest.approx(low[-1], rel=0.01)


@pytest.mark.parametrize("m", [0.02, 0.5, 8.0])
def test_the_time_to_a_loss_lies_between_its_bounds(m):
    law, m, times = noise_law(2, 0.4), np.array(m), np.append(0.0, np.geomspace(1e-3, 1e12, 800))
    losses = reduced_loss(law, *reduced_flow(law, np.array([m, 0.3 * m]), times))
    for share in (0.9, 0.1, 0.001):
        passed = times[np.argmax(losses < share * losses[0])]
        low, *high = time_bounds(m, 0.3 * m, 0.4, losses[0], share * losses[0])
        assert 0 < low <= passed <= min(high) < math.inf
    small, tiny = (time_bounds(size, 0.0, 0.4, 0.1, 0.01)[2] for size in (1e-3, 1e-5))
    assert tiny < 2 * small  # a logarithm


def test_a_long_u_shrinks_at_the_rate_of_the_valley():
    law = noise_law(3, 0.6, nodes=80)
    u = joint_flow(law, np.array([0.03, 0.0, 60.0, 0.0]), np.array([0.0, 1e5, 2e5]), ratio=2.0)[2]
    assert (u[1] ** 4 - u[2] ** 4) / 1e5 == pytest.approx(4 * valley_rate(law), rel=1e-3)


def test_the_cubature_of_the_ball_is_the_law_in_every_direction():
    (g, p), law = ball_cubature(0.8, nodes=20), noise_law(3, 0.8)
    for direction in (np.eye(3)[0], np.array([0.6, 0.0, -0.8])):
        assert p @ np.exp(g @ direction) == pytest.approx(law.p @ np.exp(law.tau), rel=1e-10)
    assert p.sum() == pytest.approx(1) and np.linalg.norm(g, axis=1).max() < 0.8
