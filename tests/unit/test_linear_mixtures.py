"""The two mixtures of linear experts that solve the patch task without training."""

import pytest
import torch

from moe_theory.tasks.patches import PatchTask
from moe_theory.theory.linear_mixtures import covered, disturbance, sign_vectors, two_ways


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
