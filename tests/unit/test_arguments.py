"""Bad arguments are refused by an error that names the argument, what came and what was expected."""

import math

import numpy as np
import pytest
import torch

from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models.experts import PatchCNN
from moe_theory.models.mixture import MixingMeasure, draw_measure, regression_function
from moe_theory.models.moe import PatchMoE
from moe_theory.models.routers import (
    CosineRouter,
    Linear,
    LinearRouter,
    MLPRouter,
    MultiHeadRouter,
    Perturbed,
    PerturbedCosineRouter,
)
from moe_theory.models.rules import RULES, sampled_topk, softmax_topk, top1_noisy, topk_set, topk_softmax
from moe_theory.models.sparse import SparseBlock, SparseMLP
from moe_theory.tasks.gaussians import GaussianClasses
from moe_theory.tasks.patches import PatchTask
from moe_theory.tasks.regression import sample_regression, uniform_inputs
from moe_theory.theory.identifiability import nullity
from moe_theory.theory.single_expert import best_additive_accuracy
from moe_theory.theory.smoothing import route_probabilities
from moe_theory.training import train_patch_moe
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
    for router in ("dense", Perturbed, None, ["linear"]):
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


# --- what other tools rely on: every wrong kind, shape and number meets the package, and none meets torch -------------

H, NAN = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), math.nan
TASK = PatchTask(K=3, d=8)
TRAIN, TEST, WIDER = TASK.sample(20, 1), TASK.sample(10, 2), PatchTask(K=3, d=9).sample(10, 2)
MEASURE = draw_measure(2, 3, 0)
DOUBLE = dict(beta0=MEASURE.beta0, beta1=MEASURE.beta1, eta=MEASURE.eta)
FLOATS = r"floating numbers of shape \({}\), got"


def trained(**how):
    return train_patch_moe(**{**dict(train=TRAIN, test=TEST, experts=2, filters=2, steps=1), **how})


BAD = {  # what is called: the message that it meets
    "LinearRouter, a type of integers": (lambda: LinearRouter(3, 2, dtype=torch.int64), "dtype: expected a floating"),
    "LinearRouter, inputs too wide": (lambda: LinearRouter(3, 2)(H[None]), "x: expected " + FLOATS.format("n, P, 3")),
    "LinearRouter, no patches": (lambda: LinearRouter(4, 2)(H), "x: expected " + FLOATS.format("n, P, 4")),
    "CosineRouter, inputs too wide": (lambda: CosineRouter(3, 2)(H), "x: expected " + FLOATS.format("..., 3")),
    "CosineRouter, NaN": (lambda: CosineRouter(4, 2)(NAN * H), "x: expected finite numbers, got 6 NaN"),
    "CosineRouter, infinity": (lambda: CosineRouter(4, 2)(H / 0), "x: expected finite numbers, got 6 NaN"),
    "Perturbed, inputs too wide": (lambda: PerturbedCosineRouter(3, 2)(H), "x: expected " + FLOATS.format("..., 3")),
    "MultiHeadRouter, inputs too wide": (
        lambda: MultiHeadRouter(3, 2, 5, 0)(H),
        "x: expected " + FLOATS.format("..., 3"),
    ),
    "MultiHeadRouter, no units": (lambda: MultiHeadRouter(3, 2, 0, 0), "width: expected an integer >= 1, got 0"),
    "MLPRouter, inputs too wide": (lambda: MLPRouter(3, 2, 5, 0)(H), "x: expected " + FLOATS.format("..., 3")),
    "MLPRouter, no units": (lambda: MLPRouter(3, 2, 0, 0), "width: expected an integer >= 1, got 0"),
    "MLPRouter, no experts": (lambda: MLPRouter(3, 0, 2, 0), "experts: expected an integer >= 1, got 0"),
    "top1_noisy, noise of one row": (lambda: top1_noisy(H, H[0]), "noise: expected " + FLOATS.format("6, 4")),
    "top1_noisy, noise of NaN": (lambda: top1_noisy(H, NAN * H), "noise: expected finite numbers, got 6 NaN"),
    "top1_noisy, a list": (lambda: top1_noisy(H.tolist()), "h: expected Tensor, got"),
    "top1_noisy, no experts": (lambda: top1_noisy(H[:, :0]), "h: expected " + FLOATS.format("..., M")),
    "topk_set, a number": (lambda: topk_set(H[0, 0], 1), "scores: expected " + FLOATS.format("..., M")),
    "softmax_topk, integers": (lambda: softmax_topk(H.long(), 1), "h: expected " + FLOATS.format("..., M")),
    "topk_softmax, integers": (lambda: topk_softmax(H.long(), 1), "h: expected " + FLOATS.format("..., M")),
    "sampled_topk, noise of one row": (lambda: sampled_topk(H, 2, H[0]), "noise: expected " + FLOATS.format("6, 4")),
    "its gates, noise of one row": (lambda: sampled_topk.gates(H, 2, H[0]), "noise: expected " + FLOATS.format("6, 4")),
    "sampled_topk, noise of NaN": (lambda: sampled_topk(H, 2, NAN * H), "noise: expected finite numbers, got 24 NaN"),
    "route_probabilities, a word": (
        lambda: route_probabilities("abc"),
        "h: expected a tensor or what makes one, got 'abc'",
    ),
    "route_probabilities, ragged": (
        lambda: route_probabilities([[0.0], [1.0, 2.0]]),
        "h: expected a tensor or what makes",
    ),
    "route_probabilities, complex": (
        lambda: route_probabilities(1j * H),
        "h: expected real logits, got torch.complex64",
    ),
    "dispatch_entropy, None": (
        lambda: dispatch_entropy(None, [0]),
        "cluster: expected a tensor or what makes one, got None",
    ),
    "dispatch_entropy, words": (
        lambda: dispatch_entropy([0], ["a"]),
        "expert: expected a tensor or what makes one, got",
    ),
    "dispatch_counts, a huge label": (
        lambda: dispatch_counts([10**12, 0], [0, 1]),
        "cluster, expert: expected numbers",
    ),
    "voronoi_loss, None": (lambda: voronoi_loss(None, MEASURE), "G: expected MixingMeasure, got None"),
    "voronoi_loss, a tensor": (lambda: voronoi_loss(MEASURE, H), "G_star: expected MixingMeasure, got tensor"),
    "voronoi_loss, a word": (
        lambda: voronoi_loss(MEASURE, MEASURE, r="2"),
        "r: expected a finite number >= 1, got '2'",
    ),
    "voronoi_loss, infinity": (lambda: voronoi_loss(MEASURE, MEASURE, r=math.inf), "r: expected a finite number >= 1"),
    "voronoi_loss, two types": (
        lambda: voronoi_loss(MEASURE, MixingMeasure(**{n: t.float() for n, t in DOUBLE.items()})),
        "G: expected torch.float32 as in G_star, got torch.float64",
    ),
    "MixingMeasure, lists": (lambda: MixingMeasure([0.0], [[1.0]], [[1.0, 2.0]]), "beta0: expected Tensor, got"),
    "MixingMeasure, integers": (
        lambda: MixingMeasure(**{n: t.long() for n, t in DOUBLE.items()}),
        "G: expected beta0, beta1 and eta of one floating type",
    ),
    "MixingMeasure, two types": (
        lambda: MixingMeasure(**DOUBLE | {"eta": DOUBLE["eta"].float()}),
        "G: expected beta0, beta1 and eta of one floating type",
    ),
    "PatchTask.sample, integers": (lambda: TASK.sample(4, 0, torch.int64), "dtype: expected a floating type such as"),
    "PatchTask.sample, a word": (lambda: TASK.sample(4, 0, "float"), "dtype: expected a floating type such as"),
    "train_patch_moe, nothing": (lambda: trained(train=None), "train: expected PatchBatch, got None"),
    "train_patch_moe, other inputs": (lambda: trained(test=WIDER), "test: expected " + FLOATS.format("n, P, 8")),
    "train_patch_moe, a seed": (lambda: trained(seeds=0), "seeds: expected Iterable, got 0"),
    "train_patch_moe, a later seed": (
        lambda: trained(seeds=(0, -1), measure=1 / 1),
        "measure: expected Callable or None",
    ),
    "train_patch_moe, seeds": (lambda: trained(seeds=(0, -1)), "seeds: expected an integer >= 0, got -1"),
    "train_patch_moe, a word": (lambda: trained(normalized="no"), "normalized: expected bool, got 'no'"),
    "train_patch_moe, another word": (lambda: trained(same_start="x"), "same_start: expected bool, got 'x'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    call, says = BAD[case]
    with pytest.raises(ValueError, match=f"^{says}"):
        call()


def test_bad_seeds_are_refused_before_the_first_training():
    seen = []
    with pytest.raises(ValueError, match="^seeds: expected an integer >= 0, got 0.5"):
        trained(seeds=(0, 0.5), measure=lambda at: seen.append(at) or {})
    assert not seen


def test_what_is_right_is_not_refused():
    """Empty batches, single inputs, half precision, noise in another precision, seeds of numpy and of a generator."""
    for rule in RULES.values():
        assert rule(H[0], 2, H[1]).shape == (4,) and rule(H[:0], 2, H[:0]).shape == (0, 4)
        assert rule(H.half(), 2, H).shape == rule(H.double(), 4, H).shape == (6, 4)
    assert top1_noisy(H[:0]).shape == (0,) and topk_set(H[0].bfloat16(), 1).sum() == 1
    assert CosineRouter(4, 2)(H[0]).shape == PerturbedCosineRouter(4, 2)(H[0]).shape == (2,)
    assert MultiHeadRouter(4, 3, 5, 0)(H.view(2, 3, 4)).shape == (2, 3, 3)
    assert LinearRouter(4, 2)(H[:0, None]).shape == (0, 2)
    assert torch.func.vmap(lambda h, g: sampled_topk.gates(h, 2, g))(H, H).shape == (6, 4)
    for seeds in (np.arange(2), (s for s in range(2)), range(2)):
        assert [run.seed for run in trained(seeds=seeds, normalized=np.bool_(True))] == [0, 1]
    assert dispatch_entropy(torch.tensor([10**6, 0]), torch.tensor([0, 1])) == 0 and route_probabilities(
        [0, 1]
    ).tolist() == [0, 1]
