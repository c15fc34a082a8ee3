from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from moe_book.experiments import load
from moe_book.experiments.router_stage import (
    _off,
    gap,
    gap_row,
    off_start,
    predicted_weights,
    spread_on_centers,
    watched,
)
from moe_book.experiments.stages import ERRORS, SCANS, outcome_errors, outcome_exponent
from moe_theory.measure.inner import feature_ratios
from moe_theory.measure.patch_layer import off_the_set, sampling_errors
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import torch_stream
from moe_theory.tasks.patches import PatchTask
from moe_theory.training import expert_gradient, router_gradient


def test_ratios_of_known_products():
    products = {
        "expert_v": torch.tensor([[1.0, 4, 2]]),
        "expert_c": torch.tensor([[-3.0, 1, 0]]),
        "router_v": torch.tensor([[0.5, -2, 0]]),
        "router_c": torch.tensor([[1.0, -8, 3]]),
    }
    ratios = {name: value.tolist() for name, value in feature_ratios(products).items()}
    assert ratios == {"second": [0.5], "centers": [0.25], "router": [0.25]}


def test_gap_by_hand():
    weights = torch.tensor([[3.0, 0], [1, 5], [2, 1]])
    assert gap(weights, torch.tensor([0, 0, 1])) == pytest.approx((0 - 1.5) / 2)
    assert gap(weights, torch.tensor([1, 1, 0])) == pytest.approx((0 + 1.5) / 2)


def test_spread_by_hand():
    weights = torch.tensor([[3.0, 0], [1, 5], [2, 1], [9, 4]])
    assert spread_on_centers(weights, torch.tensor([0, 0, 1, 1])) == 3
    assert spread_on_centers(weights, torch.tensor([1, 0, 1, 0])) == 8


def test_predicted_weights_are_those_that_training_reaches():
    key = dict(K=3, experts=3, sigma_0=0.01, eta=1e-3, steps=400, every=20, until=400, n=4_000, seed=3)
    run = SimpleNamespace(**key, **gap_row(key))
    reached = torch.tensor(run.weights[-1], dtype=torch.float64)
    assert (predicted_weights(run) - reached).norm() < 0.05 * reached.norm()


def test_exponents_of_known_powers():
    power = dict(zip(ERRORS, (-1.0, -0.5, -0.25, 0.0, 0.5), strict=True))
    sizes = {
        name: (256, 512, 1024, 2048, 4096) if size == "n" else (16, 32, 64, 128, 256) for name, size in SCANS.items()
    }
    rows = [
        {"scan": scan, "d": 64, "n": 64, SCANS[scan]: size, "seed": seed}
        | {name: 10 * (size / sizes[scan][0]) ** a - 100 / 8000 for name, a in power.items()}
        for scan in SCANS
        for size in sizes[scan]
        for seed in range(10)
    ]
    frame = pd.DataFrame(rows)
    frame = frame.assign(to_own=100 - frame.past_own, to_master=100 - frame.past_master, used=1)
    errors = outcome_errors(frame.drop(columns=["past_own", "past_master"]))
    assert list(errors)[4:] == list(ERRORS)
    for scan in SCANS:
        for name, a in power.items():
            assert outcome_exponent(errors, scan, name).slope == pytest.approx(a, abs=1e-9)
            assert outcome_exponent(errors, scan, name, without=sizes[scan][1]).slope == pytest.approx(a, abs=1e-9)


def test_shares_past_the_experts_are_what_is_left():
    errors = outcome_errors(rows := load("outcome"))
    assert (errors.past_own + rows.to_own == 100).all() and (errors.past_master + rows.to_master == 100).all()


@pytest.mark.parametrize("reads", ["centers", "signals"])
def test_a_layer_on_the_invariant_set(reads):
    task = PatchTask(seed=1)
    test, source = task.sample(4_000, 3), torch_stream(0, "weights")
    parameters = {
        "W": torch.randn(8, 16, 4, generator=source) @ test.v,
        "theta": ((test.c if reads == "centers" else test.v).T @ torch.randn(4, 8, generator=source)),
    }
    seen = off_the_set(parameters, task, test, "cubic")
    assert seen["off_center"].sub(1).abs().max() < 0.06
    assert seen["rest"] < 0.05
    assert seen["on_centers"] == pytest.approx(float(reads == "centers") * torch.ones(8), abs=1e-5)
    assert (seen["off_noise"] > 1.5).all() == (reads == "signals")


@pytest.mark.parametrize("P", [4, 10])
def test_logits_off_the_center_are_as_large_as_their_weights_say(P):
    task = PatchTask(P=P, seed=1)
    source = torch_stream(0, "weights")
    parameters = {"W": torch.randn(2, 4, task.d, generator=source), "theta": torch.randn(task.d, 2, generator=source)}
    seen = off_the_set(parameters, task, task.sample(20_000, 3), "cubic")
    assert seen["off_center"].sub(1).abs().max() < 0.03


def test_the_size_of_logits_off_the_center_needs_noise_patches():
    task = PatchTask(P=3)
    with pytest.raises(ValueError, match=r"^task.P: expected an integer >= 4"):
        off_the_set({"W": torch.zeros(2, 4, task.d), "theta": torch.zeros(task.d, 2)}, task, task.sample(5, 0), "cubic")


def test_both_kinds_of_experts_see_the_same_examples():
    runs = watched()
    assert [{**key, "activation": "cubic"} for key in runs[1::2]] == runs[::2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("inner_products", dict(activation="linear", seed=3)),
        ("router_gap", dict(K=4, experts=16, seed=5)),
        ("router_gap", dict(K=2, experts=4, seed=9)),
    ],
)
def test_stored_curves_start_as_they_are_recomputed(name, which):
    assert off_start(name, **which) < 1e-4


def test_a_difference_is_not_hidden_by_nan():
    now = np.array([0.0, np.nan, 2.0])
    assert _off(now, now) == 0.0
    assert _off(np.array([0.0, np.nan, 1.0]), now) == 0.5
    assert np.isnan(_off(np.array([0.0, 1.0, 2.0]), now))
    assert _off(np.zeros(3), np.zeros(3)) == 0.0


def test_sampling_errors_add_up_the_examples_own_gradients():
    batch = PatchTask(K=3, P=4, d=10, seed=0).sample(6, 1, torch.float64)
    layer, source = PatchMoE(10, 2, 3, sigma_0=1.0, seed=0, dtype=torch.float64), torch.Generator().manual_seed(0)
    layer.router.theta.data = torch.randn(10, 2, generator=source, dtype=torch.float64)
    m = torch.tensor([0, 1, 1, 0, 1, 1])
    u, r = batch.v, batch.c
    router, experts = 0, 0
    for i in range(6):
        one = slice(i, i + 1)
        x, y = batch.x[one], batch.y[one]
        to = x, y, m[one], layer.router(x).softmax(1).detach()
        f = layer.dispatched(x, m[one]).detach()
        router = router + (router_gradient(*to, f).T @ u.T) ** 2
        experts = experts + (expert_gradient(*to, f, layer.W.data, layer.sigma) @ r.T) ** 2
    for found, squares in zip(sampling_errors(batch, layer, m, u, r), (router, experts), strict=True):
        assert torch.allclose(found, squares.sqrt() / 6)
