"""Truths, starts and rows of the experiments on rates; the standard errors they are compared with."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from moe_book import experiments
from moe_book.experiments import overfit, rates
from moe_theory.measure.scaling import log_slope
from moe_theory.measure.voronoi import aligned, error_parts
from moe_theory.models.mixture import MixingMeasure, draw_measure, jacobian, regression_function
from moe_theory.models.routers import ROUTERS, Cosine, Linear, Perturbed
from moe_theory.tasks.regression import NOISE, sample_regression, uniform_inputs
from moe_theory.theory import splits
from moe_theory.theory.fisher import descent_law, polar_errors, standard_errors
from moe_theory.theory.identifiability import nullity_formula
from moe_theory.training.least_squares import least_squares
from moe_theory.training.sgd import stochastic_descent


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUTERS)
def test_standard_errors_are_those_of_repeated_fits(kind):
    router, k, d, n, repeats = ROUTERS[kind](), 2, 3, 20_000, 80
    G = draw_measure(k, d, 4, router_scale=0.5, expert_scale=2.0)
    inputs = uniform_inputs(50_000, d, 3)
    expected, f = standard_errors(G, inputs, router, "tanh"), regression_function(G, inputs, router, "tanh")
    found = {name: [] for name in expected}
    for seed in range(repeats):
        x, y = sample_regression(lambda x: regression_function(G, x, router, "tanh"), n, d, seed)
        (end,) = least_squares(x[None], y[None], [G], router, "tanh", radius=50.0, tolerance=1e-6, steps=200).G
        error = regression_function(end, inputs, router, "tanh") - f
        parts = error_parts(end, G, router, torch.arange(k)) | {"regression": float(error.square().mean().sqrt())}
        for name, values in found.items():
            values.append(n * parts[name] ** 2)
    for name, values in found.items():
        standard = np.std(values) / math.sqrt(repeats)
        # what is of higher order in 1 / sqrt(n) may add a tenth
        assert abs(np.mean(values) - expected[name] ** 2) < 4 * standard + 0.1 * expected[name] ** 2, name


def test_the_truth_of_the_paper_has_two_routers_at_zero():
    G, regular = rates.truth("paper"), rates.truth("regular")
    assert (G.beta1 == 0).all(1).tolist() == [False] * 6 + [True] * 2 and G.beta0[6:].tolist() == [0, 0]
    assert torch.equal(G.eta, regular.eta) and torch.equal(G.beta1[:6], regular.beta1[:6])
    assert (regular.beta1 != 0).any(1).all()


def test_a_zero_router_scores_zero_under_the_cosine():
    G, x = rates.truth("paper"), uniform_inputs(50, rates.D, 0)
    f = rates.true_function(G, Cosine(), "relu", x)
    nearly = G.with_(beta1=G.beta1 + 1e-9)  # a direction for every router, however short
    assert float((rates.true_function(nearly, Cosine(), "relu", x) - f).abs().max()) > 1e-4
    regular = rates.truth("regular")
    assert torch.equal(rates.true_function(regular, Cosine(), "relu", x), regression_function(regular, x, Cosine()))


def test_starts_lie_about_the_truth_at_the_distance_asked_for():
    G = rates.truth("regular")
    for scale in (0.1, 1.0):
        start, cell = rates.near(G, 8, scale, 5)
        moved = (start.eta - G.eta).square().mean().sqrt() * math.sqrt(rates.D)
        assert cell.tolist() == list(range(8)) and float(moved) == pytest.approx(scale, rel=0.15)
    start, cell = rates.near(G, 9, 0.1, 5)
    weight = torch.zeros(8, dtype=torch.float64).index_add_(0, cell, start.beta0.exp())
    assert len(start) == 9 and torch.allclose(weight, G.beta0.exp(), rtol=0.05)


def test_a_shift_of_all_weights_is_undone():
    G = rates.truth("regular")
    assert torch.allclose(rates.normalized(G.with_(beta0=G.beta0 + 3), G).beta0, G.beta0)


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_law_of_ten_steps_is_what_a_descent_does(kind):
    """Without noise from one error, and the noise as the sum of what each step brings."""
    router, G, x = ROUTERS[kind](), draw_measure(2, 3, 4, 0.5, 2.0), uniform_inputs(5_000, 3, 3)
    keeps, noise = descent_law(G, x, router, "tanh", rate=0.1, steps=10)
    start = MixingMeasure.of(G.flat() + 1e-5 * torch.linspace(-1, 1, 16, dtype=torch.float64), 2)
    y = regression_function(G, x, router, "tanh")
    end = stochastic_descent(x, y, start, router, "tanh", epochs=10, rate=0.1, batch=len(x))
    torch.testing.assert_close(end.flat() - G.flat(), keeps @ (start.flat() - G.flat()), rtol=0, atol=1e-9)
    J = jacobian(G, x, router, "tanh")
    step, by_noise = torch.eye(16, dtype=x.dtype) - 0.2 * J.T @ J / len(x), torch.zeros(16, len(x), dtype=x.dtype)
    for _ in range(10):
        by_noise = step @ by_noise + 0.2 * J.T / len(x)
    torch.testing.assert_close(noise @ noise.T / len(x), NOISE**2 * by_noise @ by_noise.T)


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_limit_of_the_function_counts_what_it_determines(kind):
    """sigma^2 for each parameter outside the null space, whose dimension chapter 21 derives."""
    router, k, d = ROUTERS[kind](), 3, 4
    limit = standard_errors(draw_measure(k, d, 1), uniform_inputs(2_000, d, 3), router, "tanh")["regression"]
    assert limit**2 == pytest.approx(NOISE**2 * (k * (2 * d + 2) - nullity_formula(router, k, d)))


def test_a_law_of_steps_needs_inputs_and_a_rate():
    G = draw_measure(2, 3, 4)
    with pytest.raises(ValueError, match="x: expected at least as many inputs as parameters, 16, got 10"):
        descent_law(G, uniform_inputs(10, 3, 0), Linear(), rate=0.1, steps=10)
    with pytest.raises(ValueError, match="rate: expected"):
        descent_law(G, uniform_inputs(50, 3, 0), Linear(), rate=0.0, steps=10)


def test_a_loss_by_the_law_is_that_of_a_descent():
    """One descent at the paper's size; one data set scatters by some 5 %."""
    law = rates.Law.of(Perturbed()).losses(1e-3)
    assert law.shape == (len(rates.SIZES), rates.DRAWS)
    assert rates.Law.of(Perturbed()).slope(1e-3) == pytest.approx(float(log_slope(rates.SIZES, law.mean(1))))
    key = dict(figure="1a", truth="regular", router="perturbed", near=1e-3, batch="all", n=4_642, rep=0)
    found = rates.sgd_row(key)["L3"]
    assert found == pytest.approx(float(law[rates.SIZES.index(4_642)].mean()), rel=0.15)


@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("kind", ROUTERS)
def test_measures_that_a_loss_is_taken_over_have_one_function(kind, scale):
    router, G, x = ROUTERS[kind](), rates.truth("regular"), uniform_inputs(300, rates.D, 1)
    H, _ = rates.near(G, rates.K, scale, 3)
    A = aligned(H, G, router)
    torch.testing.assert_close(regression_function(A, x, router), regression_function(H, x, router), rtol=0, atol=1e-12)
    over = rates.over_norms(H, G, router, seed=0)
    assert over["L3_aligned"] < rates.losses(H, G)["L3"]
    if router.sphere:  # every norm is 1: the farthest part of the loss can be written down
        apart = (router.embedding(H.beta1) - G.beta1).norm(dim=1) + (H.eta - G.eta).norm(dim=1)
        expected = (H.beta0.exp() * apart).sum() + (H.beta0.exp() - G.beta0.exp()).abs().sum()
        assert over["L3_one"] == pytest.approx(float(expected))
    else:
        assert over["L3_one"] == over["L3_uniform"] == rates.losses(H, G)["L3"]


def test_only_measures_of_one_size_are_aligned():
    with pytest.raises(ValueError, match="G: expected 3 atoms as in G_star, got 2"):
        aligned(draw_measure(2, 3, 0), draw_measure(3, 3, 0), Linear())


def test_slopes_of_readings_and_how_far_they_are_from_the_papers():
    power = {1e-4: -0.5, 1e-2: -0.1, 0.1: 0.0}
    more = pd.DataFrame(rates.batches()).assign(truth="paper", rep=0)
    more = pd.concat(more.assign(rep=rep) for rep in range(rates.TOGETHER))
    rows = pd.concat([pd.DataFrame(rates.sgd()), more], ignore_index=True)
    rows = rows[rows["figure"] == "1b"].copy()
    rows["L2"] = rows["n"].astype(float) ** rows["near"].map(power)
    rows.loc[(rows["batch"] == 100) & (rows["near"] < 0.1), "L2"] = rows["n"].astype(float) ** 0.3
    rows.loc[rows["router"] == "cosine", "L2"] **= 0.5
    rows["L3"] = 1.0
    found = rates.slopes(rows, "1b")
    assert list(found) == list(rates.READINGS)
    for (name, pair), slope in zip(found.items(), [*power.values(), 0.3, 0.3], strict=True):
        assert [e.slope for e in pair.values()] == pytest.approx([slope / 2, slope]), name
    off = rates.compare_targets([found, found], [dict(cosine=-0.2, perturbed=-0.5), dict(cosine=-0.25, perturbed=-0.1)])
    assert list(off.values()) == pytest.approx([0.4, 0.4, 0.5, 0.8, 0.8])


def test_repetitions_together_are_those_one_by_one():
    key = dict(figure="1b", router="cosine", near=1e-2, batch=100, n=700)
    together = rates.by_repetition(pd.DataFrame([{**key, "reps": 2, **rates.batches_row({**key, "reps": 2})}]))
    for rep, row in together.set_index("rep").iterrows():
        single = rates.sgd_row({**key, "truth": row["truth"], "rep": rep})
        for loss in ("L2_start", "L2", "L3"):
            assert row[loss] == pytest.approx(single[loss], rel=1e-5), (rep, loss)


def test_rows_that_a_chapter_computes_again_are_stored_ones():
    keys = rates.checked(("1a", "2b"))
    assert len(keys) == 16
    for key in keys:
        assert sum(all(row[name] == value for name, value in key.items()) for row in rates.sgd()) == 1, key


@pytest.mark.parametrize("kind", ROUTERS)
def test_little_of_a_narrow_bump_can_be_taken_off(kind):
    """Half as wide, 2^(-3/2) as high; the projection is of smaller order."""
    G, e, x = draw_measure(2, 3, 1, 0.3, 2.0), torch.eye(4)[1].double(), uniform_inputs(20_000, 3, 2)
    left, law = zip(*(splits.left_over(G, e, t, ROUTERS[kind](), x) for t in (0.02, 0.01)), strict=True)
    assert left == pytest.approx(law, rel=0.05)
    assert law[1] / law[0] == pytest.approx(2**-1.5)


def test_a_contrast_is_of_sizes_from_10_000_on():
    rows = pd.DataFrame(key for key in rates.lse() if key["truth"] == "regular")
    rows["L3"] = rows["n"].astype(float) ** rows["router"].map(dict(cosine=-0.2, perturbed=-0.5, linear=0))
    rows.loc[rows["n"] < rates.FROM, "L3"] = 1.0
    assert [e.slope for e in rates.contrast(rows, "L3").values()] == pytest.approx([-0.2, -0.5, 0.3])


def test_orders_of_splits():
    rows = pd.DataFrame(dict(gap=overfit.GAPS))
    rows["distance"] = np.where(rows["gap"].between(0.05, 0.1), 3 * rows["gap"] ** 1.5, 1.0)
    assert overfit.order(rows) == pytest.approx(1.5)
    assert overfit.order(rows.assign(distance=1e-10)) == math.inf


def test_the_bound_on_vectors_is_that_of_the_row():
    """Noise draws the vectors of 700 examples to the bound, wherever it is."""
    key = dict(truth="regular", router="perturbed", n=700, rep=0)
    small, usual, large = (rates.lse_row(key | how) for how in (dict(bound=0.5), {}, dict(bound=2.0)))
    assert small["at_bound"] == usual["at_bound"] == large["at_bound"] == rates.K
    assert small["L3"] < usual["L3"] < large["L3"]


@pytest.mark.slow
@pytest.mark.parametrize(("truth", "router"), [("regular", "linear"), ("paper", "cosine"), ("paper", "perturbed")])
def test_large_fits_are_what_the_code_computes(truth, router):
    key = dict(truth=truth, router=router, n=46_416, rep=3)
    assert experiments.recomputed_off("voronoi_lse", ["sse", "regression", "L3", "L3_aligned"], [key]) < 0.02


@pytest.mark.slow
def test_a_split_along_a_homogeneous_expert_is_never_noticed_and_one_across_is():
    key = dict(router="perturbed", expert="relu", gap=0.2)
    along, across = (overfit.contact_row({**key, "split": split})["distance"] for split in ("along", "across"))
    assert along < 1e-12 and across > 1e-5


def test_bad_samples_are_refused():
    with pytest.raises(ValueError, match="x: expected at least as many inputs as parameters, 16, got 10"):
        standard_errors(draw_measure(2, 3, 0), uniform_inputs(10, 3, 0), Linear())


@pytest.mark.parametrize("router", [Cosine(), Perturbed(0.1), Perturbed(3.0), Linear()])
def test_errors_of_length_and_angle_are_those_of_a_model_written_in_them(router):
    """Length and angle as the unknowns from the start, and automatic differentiation for the Jacobian."""
    k, x = 3, uniform_inputs(400, 2, 1)
    G = draw_measure(k, 2, 3, 2.0, 2.0)
    start = torch.cat([G.beta1.norm(dim=1).log(), torch.atan2(G.beta1[:, 1], G.beta1[:, 0]), G.beta0, G.eta.flatten()])

    def function(unknown):
        length, angle, beta0, eta = unknown.split([k, k, k, 3 * k])
        beta1 = length.exp()[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        weights = torch.softmax(router.feature(x) @ router.embedding(beta1).T + beta0, 1)
        return (weights * torch.tanh(x @ eta.view(k, 3)[:, :2].T + eta.view(k, 3)[:, 2])).sum(1)

    J = torch.autograd.functional.jacobian(function, start)
    known = {k - 1, 2 * k - 1, 3 * k - 1} | (set(range(k)) if router.sphere else set())
    free = [i for i in range(6 * k) if i not in known]
    errors = dict(
        zip(free, (NOISE**2 * torch.linalg.inv(J[:, free].T @ J[:, free] / len(x))).diagonal().sqrt(), strict=True)
    )
    expected = [errors[k]] if router.sphere else [errors[0], errors[k]]
    torch.testing.assert_close(polar_errors(G, x, router, "tanh"), torch.stack(expected), rtol=1e-6, atol=0)


def test_errors_of_length_and_angle_are_for_the_plane():
    with pytest.raises(ValueError, match="G: expected inputs of dimension 2, got 3"):
        polar_errors(draw_measure(2, 3, 0), uniform_inputs(50, 3, 0), Linear(), "tanh")
