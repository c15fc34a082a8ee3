"""Spurious directions: the exact loss, its minima, and the experiment with 240 dimensions."""

import numpy as np
import pytest
import torch

from moe_book.experiments import load, recompute
from moe_book.experiments import spurious_runs as experiment
from moe_theory.theory.spurious import (
    Decay,
    Weights,
    averaged_loss,
    bias_hessian,
    bump_moments,
    carried,
    clusters,
    coin_minimum,
    data_loss,
    descend,
    find_minimum,
    gaussian_nodes,
    implied_decay,
    loss,
    mode_rates,
    quartic_minimum,
    relevant_share,
    slope,
    specialists,
    stein_fit,
    stretched,
    three_values,
    two_experts,
    two_valleys,
)

MEAN = torch.tensor([[-4.0], [0.0], [4.0]], dtype=torch.float64)
Y = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64)
ROOT = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)  # of the covariance of two spurious inputs


def weights(seed: int = 0) -> Weights:
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(*shape, generator=rng, dtype=torch.float64)

    return Weights(draw(3), draw(3, 3), draw(3, 1))


def points(nodes: int = 16):
    return clusters(MEAN, Y, 2, nodes=6, spurious_nodes=nodes)


def test_nodes_have_the_moments_of_a_gaussian():
    z, p = gaussian_nodes(2, 4)
    assert z.shape == (16, 2)
    for powers, moment in (((0, 0), 1), ((2, 0), 1), ((2, 2), 1), ((4, 2), 3), ((6, 0), 15), ((1, 2), 0)):
        assert float(p @ (z[:, 0] ** powers[0] * z[:, 1] ** powers[1])) == pytest.approx(moment, abs=1e-12)
    z, p = gaussian_nodes(0, 4)
    assert z.shape == (1, 0) and p.tolist() == [1.0]


def test_clusters_have_their_means_and_unit_covariance():
    law = points(4)
    for c in range(3):
        own = law.y[:, 0] == Y[c]
        x, p = law.x[own], law.weight[own]
        assert float(p.sum()) == pytest.approx(1 / 3)
        mean = 3 * p @ x
        assert torch.allclose(mean, torch.tensor([float(MEAN[c]), 0, 0], dtype=torch.float64))
        assert torch.allclose(3 * (x - mean).T @ (p[:, None] * (x - mean)), torch.eye(3, dtype=torch.float64))


def test_the_loss_of_one_expert_is_known():
    theta = Weights(*(t[:1] for t in weights()))
    error = float(((Y - theta.U) ** 2).mean())
    penalty = 0.1 * theta.W.square().sum() + 0.2 * theta.U.square().sum() + 0.3 * theta.b.square().sum()
    assert float(loss(theta, points(), Decay(0.1, 0.2, 0.3))) == pytest.approx(error + float(penalty))


def test_slope_in_spurious_weights_is_curvature_in_the_bias():
    theta, law = weights(), stretched(points(24), 1, ROOT)
    assert torch.allclose(
        slope(data_loss, theta, law).W[:, 1:], bias_hessian(theta, law) @ theta.W[:, 1:] @ ROOT @ ROOT.T, atol=1e-6
    )


def test_stretched_inputs_have_their_covariance_and_the_others_stay():
    law, own = points(4), stretched(points(4), 1, ROOT)
    x = own.x[:, 1:]
    assert torch.equal(own.x[:, 0], law.x[:, 0]) and torch.equal(own.weight, law.weight)
    assert torch.allclose(x.T @ (law.weight[:, None] * x), ROOT @ ROOT.T)
    assert torch.allclose(ROOT @ law.x[7, 1:], x[7])


def test_a_mean_adds_the_slope_of_the_bias():
    theta, law, m = weights(), points(24), torch.tensor([0.7, -0.4], dtype=torch.float64)
    moved = law._replace(x=law.x + torch.cat([torch.zeros(1, dtype=torch.float64), m]))
    up = slope(data_loss, theta, moved)
    expected = bias_hessian(theta, moved) @ theta.W[:, 1:] + torch.outer(up.b, m)
    assert torch.allclose(up.W[:, 1:], expected, atol=1e-6)
    assert float(torch.outer(up.b, m).abs().max()) > 1e-3
    assert float(up.W.sum(0).abs().max()) < 1e-12


def test_the_average_over_z_is_the_sum_over_its_nodes():
    theta, law = weights(), points(3)
    small = torch.cat([theta.W[:, :1], 0.8 * theta.W[:, 1:]], 1)
    z, p = gaussian_nodes(2, 2)
    each = [data_loss(theta._replace(b=theta.b + 0.5 * theta.W[:, 1:] @ ROOT @ own, W=small), law) for own in z]
    mean = averaged_loss(theta, law, 1, root=ROOT, epsilon=0.2, variance=0.25, nodes=2)
    assert float(mean) == pytest.approx(float(p @ torch.stack(each)))


def test_a_gaussian_is_shrunk_and_filled_up():
    theta, law = weights(), stretched(points(20), 1, ROOT)
    mean = averaged_loss(theta, law, 1, root=ROOT, epsilon=0.3, variance=1 - 0.7**2, nodes=10)
    assert float(mean) == pytest.approx(float(data_loss(theta, law)), rel=1e-6)
    root = averaged_loss(theta, law, 1, root=ROOT, epsilon=0.3, variance=(1 - 0.7**2) ** 0.5, nodes=10)
    assert abs(float(root - mean)) > 1e-4
    with pytest.raises(ValueError, match="variance: expected a finite number > 0"):
        averaged_loss(theta, law, 1, root=ROOT, epsilon=0.3, variance=0.0, nodes=4)


def test_a_minimum_has_no_spurious_weight():
    found = find_minimum(weights(), points(6), Decay(1e-2, 1e-2))
    down = slope(loss, found.theta, points(6), Decay(1e-2, 1e-2))
    assert max(float(part.abs().max()) for part in down) < 1e-12
    assert abs(float(found.curvature[0])) < 1e-9 < float(found.curvature[1])
    assert float(found.theta.W[:, 1:].abs().max()) < 1e-10 < float(found.theta.W[:, 0].abs().max())
    assert found.loss == pytest.approx(float(loss(found.theta, points(6), Decay(1e-2, 1e-2))))


def test_a_saddle_is_refused():
    theta = weights()._replace(U=torch.zeros(3, 1, dtype=torch.float64))
    flat = theta._replace(b=0 * theta.b, W=0 * theta.W)
    coin = clusters(torch.tensor([[-2.0], [2.0]], dtype=torch.float64), Y[:2], 0, nodes=4, spurious_nodes=1)
    with pytest.raises(RuntimeError, match="no minimum: the search ended at slope"):
        find_minimum(flat._replace(W=flat.W[:, :1]), coin, Decay(1e-3, 1e-3))


def test_rates_of_the_modes():
    law = clusters(MEAN, Y, 1, nodes=6, spurious_nodes=8)
    decay = Decay(1e-2, 1e-2)
    found = find_minimum(weights()._replace(W=weights().W[:, :2]), law, decay).theta
    predicted, measured = mode_rates(found, law, decay, rate=0.1, steps=3)
    assert predicted[0] == pytest.approx(2e-2) and np.all(np.diff(predicted) > 0)
    assert measured == pytest.approx(predicted, rel=1e-2)


def test_the_quartic_keeps_a_coin_and_empties_a_gaussian():
    b, w = quartic_minimum(np.array([-1.0, 1.0]), np.array([0.5, 0.5]), decay_w=0.2)
    assert abs(b) < 1e-6 and w**2 == pytest.approx(0.9)
    z, p = (v.numpy() for v in gaussian_nodes(1, 8))
    b, w = quartic_minimum(z[:, 0], p, decay_w=0.2)
    assert abs(w) < 1e-6 and b**2 == pytest.approx(1.0)
    assert quartic_minimum(z[:, 0], p, decay_w=0.2, decay_b=0.3)[1] ** 2 == pytest.approx(0.3)


def test_moments_of_bumps_under_a_gaussian():
    z, p = (v.numpy() for v in gaussian_nodes(1, 60))
    of = bump_moments(z[:, 0], p)
    assert of.shape == (13, 4)
    assert of[:, 0] == pytest.approx(of[:, 2], abs=1e-6)
    c = np.linspace(-3, 3, 13)
    assert of[:, 1] == pytest.approx(c / 2 * np.exp(-(c**2) / 4) / 2**0.5, abs=1e-6)


def test_without_training_the_bias_stays():
    theta = weights()
    assert torch.equal(find_minimum(theta, points(4), Decay(1e-2, 1e-2), bias=False).theta.b, theta.b)
    (step,) = descend(theta, points(4), Decay(1e-2, 1e-2), rate=0.1, steps=1, bias=False)
    assert torch.equal(step.b, theta.b) and not torch.equal(step.W, theta.W)


def test_a_step_of_descent():
    theta, law, decay = weights(), points(4), Decay(1e-2, 1e-2)
    one, two = descend(theta, law, decay, rate=0.1, steps=2)
    up = slope(loss, one, law, decay)
    assert all(torch.equal(b, a - 0.1 * g) for a, b, g in zip(one, two, up, strict=True))
    assert float(loss(two, law, decay)) < float(loss(theta, law, decay))
    with pytest.raises(ValueError, match="rate: expected a finite number > 0"):
        next(descend(theta, law, decay, rate=0.0, steps=1))


def test_share():
    W = torch.tensor([[3.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert float(relevant_share(W, 2)) == pytest.approx(10 / 12)
    assert relevant_share(torch.stack([W, 2 * W]), 1).tolist() == pytest.approx([9 / 12] * 2)
    with pytest.raises(ValueError, match="relevant: expected an integer >= 1, got 0"):
        relevant_share(W, 0)


def test_starts_with_a_task_for_every_expert():
    rng = torch.Generator().manual_seed(0)
    law = clusters(MEAN, Y, 0, nodes=2, spurious_nodes=1)
    begun = specialists(MEAN, Y, 2, rng, scale=0.0)
    assert begun.W[:, 1:].abs().max() == 0 and torch.equal(begun.W[:, :1], MEAN / 4)
    to = (law.x @ begun.W[:, :1].T + begun.b).argmax(1)
    assert to.tolist() == [0, 0, 1, 1, 2, 2]
    two = two_experts(MEAN, Y, 2.0, 2, rng)
    assert two.U[:, 0].tolist() == [0.0, 0.5]
    assert two.W[:, :1] @ torch.tensor([2.0]).double() + two.b == pytest.approx([0, 0])
    assert two.W[1, 0] == -two.W[0, 0] == 1 and float(two.W[:, 1:].norm()) > 0


def test_coefficients_that_a_minimum_implies():
    found = find_minimum(weights(), points(6), Decay(1e-2, 2e-2)).theta
    assert implied_decay(found, points(6))[:2] == pytest.approx((1e-2, 2e-2))


def test_descent_carried_by_curvature():
    law, decay = stretched(points(14), 1, ROOT), Decay(1e-2, 1e-2)
    theta = weights()
    run = carried(theta, law, decay, 1, C=ROOT @ ROOT.T, rate=0.05, steps=3)
    assert run.spurious.shape == run.predicted.shape == (4, 3, 2) and run.lowest.shape == (3,)
    assert torch.equal(run.spurious[0], theta.W[:, 1:]) and torch.equal(run.predicted[0], theta.W[:, 1:])
    assert torch.allclose(run.predicted, run.spurious, atol=1e-5)
    *_, end = descend(theta, law, decay, rate=0.05, steps=3)
    assert torch.equal(run.spurious[-1], end.W[:, 1:])


def test_valleys_average_over_the_input():
    xi, p = (v.numpy() for v in gaussian_nodes(1, 60))
    h = np.array([-1.0, 0.0, 2.0, 6.0])
    assert two_valleys(h, 0.8) == pytest.approx(two_valleys(h[:, None] + 0.8 * xi[:, 0]) @ p, abs=1e-9)
    assert two_valleys(np.array([0.0, 6.0])) == pytest.approx([0.5, 0.0], abs=1e-7)


def test_three_values_have_their_kurtosis():
    for kurtosis in (1.0, 1.8, 4.0):
        x, p = three_values(kurtosis)
        assert [p.sum(), p @ x, p @ x**2, p @ x**4] == pytest.approx([1, 0, 1, kurtosis])
    with pytest.raises(ValueError, match="kurtosis: expected a number >= 1, got 0.9"):
        three_values(0.9)


def test_the_fit_leaves_nothing_of_a_gaussian():
    z, p = (v.numpy() for v in gaussian_nodes(1, 60))
    (alpha, beta), left = stein_fit(z[:, 0], p)
    assert [alpha, beta, left] == pytest.approx([0, 1, 0], abs=1e-5)
    assert stein_fit(*three_values(1.0))[1] > 0.05


def test_the_coin_is_at_rest():
    decay = Decay(0.002, 0.3)
    a, value = coin_minimum(decay)
    assert value < 0.3 / (0.3 + 1 / 3) and 1 < a < 4
    alone = clusters(torch.zeros(1, 0).double(), torch.ones(1, 1).double(), 1, nodes=1, spurious_nodes=100)
    near = Weights(torch.zeros(3).double(), torch.tensor([[a], [-a], [0.0]]).double(), torch.full((3, 1), 0.6).double())
    found = find_minimum(near, alone, decay, bias=False)
    assert found.loss == pytest.approx(value, abs=1e-6)
    assert float(found.theta.W.abs().max()) == pytest.approx(a, abs=1e-4)


def test_courses_of_stored_rows():
    rows = load("spurious")
    plain = experiment.courses(rows)
    assert plain["share"].shape == (5, 9) and plain["share"][0, 0] == pytest.approx(6.08298 / (6.08298 + 57.3486))
    assert experiment.courses(rows, decay=1e-5)["loss"][1, -1] == pytest.approx(0.241457)
    with pytest.raises(ValueError, match="changes: expected choices of a stored row"):
        experiment.courses(rows, decay=0.5)


@pytest.mark.parametrize("changes", [{"experts": 256, "decay": 1e-5}, {"scale": 1.5}, {"init": 0.25}, {"n": 5_000}])
def test_stored_rows_again(changes):
    pair = recompute("spurious", seed=3, **(experiment.BASE | {"steps": 3_000} | changes))
    assert experiment.distance(pair) < 1e-3
    pair.at["stored", "loss"] = [1.1 * v for v in pair.at["stored", "loss"]]
    assert experiment.distance(pair) > 0.05


def test_rows_of_the_experiment():
    key = experiment.grid()[0] | experiment.SMOKE
    plain, frozen = experiment.row(key), experiment.row(key | {"frozen": True})
    assert all(len(plain[name]) == 2 for name in ("relevant", "spurious", "loss"))
    assert plain["relevant"][0] == frozen["relevant"][0] == frozen["relevant"][1] < plain["relevant"][1]
    assert plain["relevant"][0] / (plain["relevant"][0] + plain["spurious"][0]) == pytest.approx(0.1, abs=0.02)
    assert frozen["loss"][1] < frozen["loss"][0]
    assert len({tuple(key.items()) for key in experiment.grid()}) == 5 * len(experiment.RUNS)
