import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_theory.models.experts import ACTIVATIONS, PatchCNN
from moe_theory.tasks.patches import SETTINGS, PatchTask
from moe_theory.theory.single_expert import (
    best_additive_accuracy,
    ceiling,
    error_floor,
    four_points,
    least_errors,
    tight_witness,
    without_centers,
    witness_cnn,
    witness_margins,
)


def accuracy(w, b):
    margin = witness_margins(w, b)
    margin = margin[~margin.isnan()]
    return Fraction(int((margin > 0).sum()), margin.numel())


@pytest.mark.parametrize("K", [*range(2, 11), 30, 50])
def test_witness_attains_seven_eighths_exactly(K):
    w, b = tight_witness(K)
    assert w.shape == b.shape == (K,)
    assert accuracy(w, b) == Fraction(7, 8)
    margin = witness_margins(w, b)
    assert margin[~margin.isnan()].abs().min() == 1
    assert (b < w).all()


@given(w=st.lists(st.floats(-50, 50), min_size=2, max_size=6), seed=st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_nothing_of_this_form_does_better(w, seed):
    b = 50 * torch.randn(len(w), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert accuracy(torch.tensor(w, dtype=torch.float64), b) <= Fraction(7, 8)


def test_the_gaps_matter():
    """Breaking the witness in one place costs accuracy, so the test above can fail."""
    w, b = tight_witness(5)
    for k in range(5):
        broken = b.clone()
        broken[k] = 4 * w.max()
        assert accuracy(w, broken) < Fraction(7, 8)
    assert accuracy(torch.tensor([1.0, 5.0, 8.0, 10.0]), tight_witness(4)[1]) < Fraction(7, 8)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_answers_to_the_four_points_cancel(name):
    task = PatchTask(**SETTINGS["table 7"], seed=3)
    x, y = four_points(task, task.sample(100, 4, torch.float64))
    with torch.no_grad():
        margin = y * PatchCNN(50, 32, name, 5).double()(x.flatten(0, 1)).reshape(y.shape)
    assert (margin.sum(1).abs() <= 1e-12 * margin.abs().sum(1)).all()
    assert (margin.min(1).values <= 1e-12).all()


def test_the_four_points_cancel_only_with_their_labels():
    task = PatchTask(seed=3)
    x, y = four_points(task, task.sample(100, 4, torch.float64))
    with torch.no_grad():
        margin = y[:, [0, 2, 1, 3]] * PatchCNN(50, 32, "relu", 5).double()(x.flatten(0, 1)).reshape(y.shape)
    assert margin.sum(1).abs().min() > 1e-6


def test_four_points_are_examples_of_the_task():
    """Every patch of every row: signals, strengths and labels by inner products, noise from the sampled patches."""
    task = PatchTask(P=5, seed=1)
    batch = task.sample(20, 2, torch.float64)
    x, y = four_points(task, batch)
    assert torch.equal(y, batch.y[:, None] * torch.tensor([1.0, -1.0, 1.0, -1.0]).double())
    one, two = batch.cluster, batch.other
    a, g = batch.alpha, batch.gamma
    strengths = {0: [a, a, g, g], 1: [batch.beta] * 4, 2: [g, g, a, a]}
    signs, at = {0: y, 1: torch.ones_like(y), 2: -y}, {0: [one, one, two, two], 2: [two, two, one, one]}
    at[1] = at[0]
    for role, strength in strengths.items():
        signals = task.c if role == 1 else task.v
        along = (x[:, :, role] @ signals.T).gather(2, torch.stack(at[role], 1)[..., None])[..., 0]
        assert torch.allclose(along, signs[role] * torch.stack(strength, 1), rtol=0, atol=1e-12)
        assert torch.allclose(x[:, :, role].norm(dim=2), along.abs(), rtol=0, atol=1e-12)
    for noise in (3, 4):
        assert torch.equal(x[:, :, noise], batch.patch(noise)[:, None].expand(-1, 4, -1))


def test_the_first_of_the_four_points_is_the_sampled_example_where_epsilon_is_minus_y():
    task = PatchTask(P=5, seed=1)
    batch = task.sample(50, 2, torch.float64)
    x, _ = four_points(task, batch)
    wanted = batch.x.gather(1, batch.role.argsort(1)[..., None].expand_as(batch.x))
    disagree = batch.epsilon == -batch.y
    assert 0 < disagree.sum() < 50
    assert torch.allclose(x[disagree, 0], wanted[disagree], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("alpha", "gamma", "best"),
    [((0.5, 2), (0.5, 2), 7 / 8), ((0.5, 2), (0.5, 3), 0.925), ((1, 2), (3, 4), 1.0), ((1, 3), (2, 4), 1 - 1 / 32)],
)
def test_ceiling(alpha, gamma, best):
    assert ceiling(alpha, gamma) == pytest.approx(best, abs=1e-15)
    cells = np.linspace(0.5, 4, 8)  # the laws as shares of cells of width one half
    p, q = (
        np.array([max(0, min(b, hi) - max(a, lo)) / (hi - lo) for a, b in itertools.pairwise(cells)])
        for lo, hi in (alpha, gamma)
    )
    assert 1 - error_floor(p, q) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "q", "K"),
    [((0.5, 0.5), (0.5, 0.5), 2), ((0.7, 0.3), (0.3, 0.7), 2), ((0.5, 0.5, 0), (0, 0.5, 0.5), 2), ((1.0,), (1.0,), 3)],
)
def test_integer_program_finds_the_bound(p, q, K):
    p, q = np.array(p), np.array(q)
    assert best_additive_accuracy(p, q, K) == pytest.approx(1 - error_floor(p, q), abs=1e-9)


@pytest.mark.parametrize(("strengths", "K", "cases"), [(1, 2, 8), (2, 2, 32), (1, 3, 24)])
def test_the_best_expert_errs_on_an_eighth_of_the_configurations(strengths, K, cases):
    assert least_errors(strengths, K) == (pytest.approx(cases / 8, abs=1e-6), cases)


@pytest.mark.parametrize(("K", "seed"), [(2, 0), (2, 1), (3, 2), (4, 3)])
def test_blind_experts_attain_their_bound_whatever_the_laws(K, seed):
    """Among them are laws of three ratios at K = 3, where experts that see centres stay below theirs."""
    p, q = np.random.default_rng(seed).dirichlet((2, 2, 2), 2)
    bound = 1 - error_floor(p, q, blind=True)
    assert best_additive_accuracy(p, q, K, blind=True) == pytest.approx(bound, abs=1e-6)
    assert 1 - bound == pytest.approx(2 * error_floor(p, q), abs=1e-15)


def test_the_blind_network_does_not_see_the_centres():
    task = PatchTask(P=3, d=8, alpha=(1.0, 2.0), gamma=(1.5, 3.0))
    batch = task.sample(4000, 9, torch.float64)
    with torch.no_grad():
        sees, blind = witness_cnn(task, 1e-4), witness_cnn(task, 1e-4, blind=True)
        assert torch.allclose(without_centers(blind, task, batch), blind(batch.x))
        b = tight_witness(task.K)[1]
        moved = sees(batch.x) - without_centers(sees, task, batch)
        assert torch.allclose(moved, b[batch.cluster] - b.mean())
        reached = float((batch.y * blind(batch.x) > 0).double().mean())
    best = ceiling(task.alpha, task.gamma, blind=True)
    assert best == pytest.approx(1 - 2 * (1 - ceiling(task.alpha, task.gamma)))
    assert abs(reached - best) < 4 * (best * (1 - best) / 4000) ** 0.5


@pytest.mark.slow
def test_integer_program_can_stay_below_the_bound():
    """With three clusters and laws of three likelihood ratios the bound is not attained."""
    p = np.array((0.5, 0.3, 0.2))
    assert best_additive_accuracy(p, p[::-1], 3) == pytest.approx(0.92, abs=1e-9)
    assert 1 - error_floor(p, p[::-1]) == pytest.approx(0.92375, abs=1e-12)


@pytest.mark.parametrize("name", ["table 7", "setting 1"])
def test_witness_cnn_reaches_the_ceiling(name):
    task = PatchTask(**{**SETTINGS[name], "d": 400})
    cnn, batch = witness_cnn(task, 0.01), task.sample(4000, 9, torch.float64)
    assert int(cnn.a.sum()) == 0
    with torch.no_grad():
        reached = float((batch.y * cnn(batch.x) > 0).double().mean())
    best = ceiling(task.alpha, task.gamma)
    assert abs(reached - best) < 4 * (best * (1 - best) / 4000) ** 0.5


@pytest.mark.parametrize(("call", "name"), [(lambda: tight_witness(1), "K"), (lambda: tight_witness(51), "K"),
    (lambda: ceiling((2, 1), (1, 2)), "alpha"), (lambda: ceiling((1, 2), (1, 1)), "gamma"),
    (lambda: witness_cnn(PatchTask(), 0), "width")])  # fmt: skip
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call()
