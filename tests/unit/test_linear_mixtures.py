"""The two mixtures of linear experts that solve the patch task without training."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from moe_theory.tasks.patches import PatchTask
from moe_theory.theory.linear_mixtures import covered, disturbance, sign_vectors, two_ways, uncovered


@pytest.mark.parametrize("K", [1, 3, 4, 5])
def test_half_of_the_sign_vectors_have_product_one(K):
    tau = sign_vectors(K)
    assert tau.shape == (2 ** (K - 1), K) and (tau.prod(1) == 1).all() and len(tau.unique(dim=0)) == len(tau)


def test_the_disturbance_is_what_the_noise_adds_to_the_inner_products():
    batch = PatchTask(K=3, P=6, d=20, seed=1).sample(200, 2, torch.float64)
    rows, signals = torch.arange(200), torch.cat([batch.v, batch.c])
    left = batch.x.sum(1) @ signals.T
    left[rows, batch.cluster] -= batch.y * batch.alpha
    left[rows, batch.other] -= batch.epsilon * batch.gamma
    left[rows, 3 + batch.cluster] -= batch.beta
    assert torch.allclose(disturbance(batch), left.abs().amax(1), atol=1e-12)


@pytest.mark.parametrize("K", [3, 4, 5])
def test_covered_examples_are_right_and_others_can_be_wrong(K):
    batch = PatchTask(K=K, d=20, sigma_p=2.0, gamma=(0.1, 9.0), seed=K).sample(20_000, K, torch.float64)
    s, safe = batch.x.sum(1), covered(batch)
    for way, (theta, w) in two_ways(batch).items():
        right = batch.y * (w[(s @ theta.T).argmax(1)] * s).sum(1) > 0
        assert right[safe[way]].all() and not right.all() and safe[way].any()


@pytest.mark.parametrize("way", ["by cluster", "by sign"])
@pytest.mark.parametrize("K, P, sigma_p", [(3, 4, 2.0), (4, 6, 1.0)])
def test_as_many_examples_are_covered_as_the_formula_says(way, K, P, sigma_p):
    task = PatchTask(K=K, P=P, d=30, sigma_p=sigma_p, seed=1)
    exact, bound = uncovered(task, way)
    share = 1 - covered(task.sample(40_000, 5, torch.float64))[way].double().mean().item()
    assert share == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 40_000) ** 0.5) and exact < bound


@pytest.mark.parametrize("d", [20, 50, 200])
def test_a_tiny_share_keeps_its_digits(d):
    task = PatchTask(d=d)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = task.alpha  # beta / 2 runs from 1/2 to 1, alpha from 1/2 to 2
    b = 0.75 + nodes / 4
    density = (high - b) / (high - low) / 0.5 + (1 - b) / 0.5 / (high - low)  # of the smaller of the two
    share = -np.expm1(2 * task.K * np.log1p(-2 * norm.sf(d**0.5 * b)))
    assert uncovered(task, "by cluster")[0] == pytest.approx((weights * density * share).sum() / 4, rel=5e-4)


def test_the_bound_is_nearly_exact_for_one_strength_and_little_noise():
    task = PatchTask(d=50, alpha=(1.0, 1.0), beta=(2.0, 2.0), sigma_p=1.5)
    exact, bound = uncovered(task, "by cluster")
    assert 1e-5 < exact < bound < 1.001 * exact


def test_a_bad_way_and_a_task_without_noise_are_refused():
    with pytest.raises(ValueError, match="^way: expected"):
        uncovered(PatchTask(), "by label")
    with pytest.raises(ValueError, match="^task: expected noise patches"):
        uncovered(PatchTask(P=3), "by sign")
