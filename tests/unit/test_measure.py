import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from moe_book.speed import exponent
from moe_theory.measure import dispatch_counts, dispatch_entropy
from moe_theory.measure.scaling import Exponent, by_size, exponent_difference, fit_exponent, log_slope, paired_exponent
from moe_theory.tasks.patches import PatchTask
from moe_theory.theory.concentration import largest_of_noise, mean_and_spread, signal_sums

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=60)


@given(pairs=pairs)
@settings(max_examples=60, deadline=None)
def test_entropy_against_scipy(pairs):
    cluster, expert = (torch.tensor(t) for t in zip(*pairs, strict=True))
    counts = dispatch_counts(cluster, expert).numpy()
    used = counts[:, counts.sum(0) > 0]
    expected = (entropy(used, axis=0) * used.sum(0)).sum() / counts.sum()
    assert dispatch_entropy(cluster, expert) == pytest.approx(expected, abs=1e-12)


def test_entropy_at_its_ends():
    cluster = torch.arange(400) % 4
    assert dispatch_entropy(cluster, cluster + 3) == 0.0
    assert dispatch_entropy(cluster, torch.zeros(400, dtype=torch.int64)) == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("cluster", "expert", "name"),
    [([0, 1], [0], "expert"), ([], [], "cluster"), ([0, -1], [0, 1], "cluster"), ([0, 1], [0.5, 1.0], "expert")],
)
def test_bad_dispatch_is_named(cluster, expert, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        dispatch_entropy(torch.tensor(cluster), torch.tensor(expert))


def test_exponent_is_found_and_a_wrong_one_excluded():
    sizes = np.array([10, 20, 40, 80, 160, 320])
    values = np.random.default_rng(0).normal(size=(6, 200)) * sizes[:, None] ** -0.5
    fit = fit_exponent(sizes, values)
    assert fit.low < -0.5 < fit.high and fit.low < fit.slope < fit.high
    assert not fit.low < -0.6 < fit.high


def test_exponents_of_means_and_of_repetitions_that_share_their_data():
    sizes = np.array([10.0, 20, 40, 80])
    shared = np.exp(np.random.default_rng(1).normal(size=30))  # a factor that a repetition has at every size
    fit = fit_exponent(sizes, shared * sizes[:, None] ** -0.5, power=1)
    assert np.allclose(fit, -0.5)  # whole repetitions are drawn again, so the factor moves no slope
    alone = fit_exponent(sizes, shared * sizes[:, None] ** -0.5, power=1, paired=False)
    x = np.log(sizes) - np.log(sizes).mean()
    error = shared.std() / shared.mean() / np.sqrt(30 * (x @ x))  # of a slope through four independent means
    assert alone.slope == fit.slope and np.isclose((alone.high - alone.low) / 3.92, error, rtol=0.15)
    mixed = np.random.default_rng(2).permuted(np.tile(shared, (4, 1)), axis=1) * sizes[:, None] ** -0.5
    assert np.allclose(fit_exponent(sizes, mixed, power=1, paired=False), alone, atol=0.05 * error * 3.92)
    two = np.array([1.0] * 5 + [3.0] * 5) * np.array([1.0, 2, 4, 8])[:, None]
    two[-1] = 8 * np.array([2.0] * 10)  # the mean is what the law says, the root mean square is not
    assert np.isclose(fit_exponent(sizes, two, power=1).slope, 1) and fit_exponent(sizes, two).slope < 0.99
    apart = exponent_difference(sizes, shared * sizes[:, None] ** -0.5, shared**2 * sizes[:, None] ** 0.25)
    assert np.allclose(apart, -0.75)
    with pytest.raises(ValueError, match="^power: expected"):
        fit_exponent(sizes, two, power=0)


def test_exponents_of_objects_measured_at_all_sizes_are_averaged():
    sizes, own = np.array([2.0, 4, 8, 16]), np.array([-0.5, -0.7, -0.6])
    values = 3.0 * sizes[:, None] ** own
    fit = paired_exponent(sizes, values)
    half = 4.302653 * 0.1 / 3**0.5  # Student's t with two degrees of freedom
    assert np.allclose(fit, (-0.6, -0.6 - half, -0.6 + half), atol=1e-6)
    assert np.allclose(paired_exponent(sizes[:, None] ** [2, 2, 2], values).slope, -0.3)
    for bad in (values[:, :1], np.where(np.eye(4, 3), np.nan, values)):
        with pytest.raises(ValueError, match="^values: expected"):
            paired_exponent(sizes, bad)


@pytest.mark.parametrize(
    ("sizes", "values", "name"),
    [
        ([1, 2, 3], np.ones((3, 10)), "sizes"),
        ([1, 3, 2, 4], np.ones((4, 10)), "sizes"),
        ([1, 2, 3, 4], np.ones((4, 9)), "values"),
        ([1, 2, 3, 4], np.zeros((4, 10)), "values"),
        ([1, 2, 3, np.inf], np.ones((4, 10)), "sizes"),
        ([1, 2, 3, 4], np.where(np.eye(4, 10), np.nan, 1.0), "values"),
    ],
)
def test_bad_fits_are_named(sizes, values, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        fit_exponent(sizes, values)


@pytest.mark.slow
def test_exact_means_and_spreads_of_the_sums():
    task, n, repeats = PatchTask(K=3, d=6), 300, 1500
    exact = mean_and_spread(task, n)
    sums = [signal_sums(task.coefficients(n, r), 3) for r in range(repeats)]
    for name, (mean, spread) in exact.items():
        drawn = torch.stack([s[name] for s in sums])
        assert drawn.shape[1] == (3 if "," not in name else 6)
        error = spread / repeats**0.5
        assert (drawn.mean(0) - mean).abs().max() < 5 * error, name
        assert (drawn.std(0) / spread - 1).abs().max() < 5 / (2 * repeats) ** 0.5, name


@pytest.mark.parametrize("d", [16, 50, 400])
def test_mean_largest_of_noise_of_two_patches_in_closed_form(d):
    """Of two half-normals the larger has mean 2/sqrt(pi); |<xi, xi'>| is a length times a half-normal, over d."""
    signal, pair, norm = largest_of_noise(d, patches=2, signals=1)
    assert signal == pytest.approx(2 / math.sqrt(math.pi * d), rel=1e-4)
    length = math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    assert pair == pytest.approx(math.sqrt(2 / math.pi) * length / d, rel=1e-3)
    off = np.abs(np.random.default_rng(0).chisquare(d, (200_000, 2)) / d - 1).max(1)
    assert norm == pytest.approx(off.mean(), abs=5 * off.std() / 200_000**0.5)


def test_mean_largest_of_noise_among_sampled_patches():
    task, repeats = PatchTask(K=3, P=23, d=32), 400
    signals = torch.cat([task.v, task.c])
    drawn = [task.sample(1, r, torch.float64) for r in range(repeats)]
    xi = torch.stack([batch.x[0][batch.role[0] >= 3] for batch in drawn])
    gram = xi @ xi.mT
    norms = gram.diagonal(dim1=1, dim2=2)
    found = (xi @ signals.T, gram - torch.diag_embed(norms), norms - 1)
    for mean, values in zip(largest_of_noise(32, patches=20, signals=6), found, strict=True):
        largest = values.abs().flatten(1).amax(1)
        assert float(largest.mean()) == pytest.approx(mean, abs=5 * float(largest.std()) / repeats**0.5)


@pytest.mark.parametrize("name, value", [("d", 15), ("patches", 1), ("signals", 0)])
def test_bad_counts_of_noise_patches_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        largest_of_noise(**{"d": 32, "patches": 20, "signals": 6, name: value})


def test_rows_become_an_array_of_sizes_and_repetitions():
    rows = pd.DataFrame([dict(n=n, rep=r, error=n + r) for n in (20, 10) for r in (1, 0)])
    sizes, values = by_size(rows, "error")
    assert sizes.tolist() == [10, 20] and values.tolist() == [[10, 11], [20, 21]]
    assert str(Exponent(-0.5, -0.523, -0.48)) == "-0.50 [-0.52, -0.48]"


def test_bad_rows_with_holes_are_refused():
    rows = pd.DataFrame([dict(n=n, rep=r, error=1.0) for n, r in ((10, 0), (10, 1), (20, 0))])
    with pytest.raises(ValueError, match="rows: expected every repetition of error"):
        by_size(rows, "error")


def test_a_slope_is_that_of_the_fitted_line():
    sizes, values = np.array([1.0, 3.0, 10.0, 50.0]), np.random.default_rng(0).uniform(1, 2, (4, 3))
    expected = np.polyfit(np.log(sizes), np.log(values), 1)[0]
    np.testing.assert_allclose(log_slope(sizes, values), expected, rtol=1e-12)
    assert exponent(sizes, 7 * sizes**1.5) == pytest.approx(1.5, rel=1e-12)
