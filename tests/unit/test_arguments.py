"""Bad arguments are refused by an error that names the argument, what came and what was expected."""

import numpy as np
import pytest

from moe_theory.models.experts import PatchCNN
from moe_theory.models.mixture import draw_measure, regression_function
from moe_theory.models.moe import PatchMoE
from moe_theory.models.routers import CosineRouter, Linear, MLPRouter, MultiHeadRouter, Perturbed, PerturbedCosineRouter
from moe_theory.models.rules import topk_softmax
from moe_theory.models.sparse import SparseBlock, SparseMLP
from moe_theory.tasks.gaussians import GaussianClasses
from moe_theory.tasks.regression import sample_regression, uniform_inputs
from moe_theory.theory.identifiability import nullity
from moe_theory.theory.single_expert import best_additive_accuracy
from moe_theory.training.sgd import stochastic_descent


def descent(seed):
    G, x = draw_measure(2, 3, 0), uniform_inputs(10, 3, 0)
    return stochastic_descent(x, regression_function(G, x, Linear()), G, Linear(), batch=5, seed=seed)


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: uniform_inputs(3, 2, seed),
        lambda seed: sample_regression(lambda x: x[:, 0], 3, 2, seed),
        lambda seed: draw_measure(2, 3, seed),
        lambda seed: GaussianClasses(2, 3, seed=seed),
        lambda seed: GaussianClasses(2, 3).sample(1, seed),
        lambda seed: CosineRouter(3, 2, seed=seed),
        lambda seed: PerturbedCosineRouter(3, 2, seed=seed),
        lambda seed: MLPRouter(3, 2, 4, seed=seed),
        lambda seed: MultiHeadRouter(3, 2, 4, seed=seed),
        lambda seed: SparseMLP(3, 2, 4, topk_softmax, 1, "single", seed=seed),
        descent,
    ],
)
@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_bad_seeds(draw, seed):
    draw(0)
    with pytest.raises(ValueError, match=f"seed: expected an integer >= 0, got {seed}"):
        draw(seed)


@pytest.mark.parametrize("name", ["router_scale", "expert_scale"])
def test_bad_scales(name):
    with pytest.raises(ValueError, match=f"{name}: expected a finite number >= 0, got -1.0"):
        draw_measure(2, 3, 0, **{name: -1.0})


def test_bad_routers_of_a_nullity():
    assert nullity(Perturbed(0.3), 3, 4) == nullity("perturbed", 3, 4) == 5
    for router in ("dense", Perturbed, None):
        with pytest.raises(ValueError, match=r"router: expected one of \['cosine', 'linear', 'perturbed'\], got"):
            nullity(router, 3, 4)


@pytest.mark.parametrize(
    ("p", "q", "K", "name"),
    [
        ([0.5, 0.5], [0.5, 0.5], 1, "K"),
        ([0.5, 0.6], [0.5, 0.5], 2, "p"),
        ([0.5, 0.5], [1.5, -0.5], 2, "q"),
        ([0.5, 0.5], [1.0], 2, "q"),
        ([0.5, float("nan")], [0.5, 0.5], 2, "p"),
        (1.0, 1.0, 2, "p"),
    ],
)
def test_bad_laws(p, q, K, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        best_additive_accuracy(np.array(p), np.array(q), K)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda name: PatchMoE(4, 2, 2, name), "activation_name"),
        (lambda name: PatchCNN(4, 2, name, 0), "activation"),
        (
            lambda name: SparseBlock(4, 2, 3, rule=topk_softmax, k=1, heads="single", activation=name, seed=0),
            "activation",
        ),
    ],
)
def test_bad_activations(make, name):
    with pytest.raises(ValueError, match=f"^{name}: expected one of .*, got 'swish'"):
        make("swish")
