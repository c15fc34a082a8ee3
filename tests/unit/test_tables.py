import numpy as np
import pytest
import torch

from moe_theory.measure.dispatch import dispatch_counts
from moe_theory.measure.tables import (
    bootstrap_interval,
    counts,
    curves,
    effective_experts,
    experts_in_use,
    interval_sign,
    labels,
    mean_interval,
)


def test_tables_go_through_counts_and_labels():
    n_km = counts([[3, 0, 1], [0, 5, 0]])
    assert n_km.tolist() == [[3, 0, 1], [0, 5, 0]]
    cluster, expert = labels(n_km)
    assert torch.equal(dispatch_counts(cluster, expert, 3), torch.as_tensor(n_km))
    assert np.array_equal(curves([[1, 2], [3, 4.5]]), [[1, 2], [3, 4.5]])


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match="^histories: expected"):
        curves([[1, 2], [3]])
    with pytest.raises(ValueError, match="^histories: expected"):
        curves([])
    for bad in ([1, 2], [[0.5, 1.0]], [[-1, 2]]):
        with pytest.raises(ValueError, match="^n_km: expected"):
            labels(bad)


def test_experts_in_use_count_from_a_share_of_one_percent():
    assert experts_in_use(counts([[990, 9, 1], [0, 0, 0]])) == 1
    assert experts_in_use(counts([[980, 11, 9], [0, 0, 0]])) == 2


def test_effective_experts_are_those_of_equal_shares():
    assert effective_experts(counts([[5, 0, 5, 0], [5, 0, 5, 0]])) == 2 and effective_experts([[3, 0], [9, 0]]) == 1
    assert effective_experts([[3, 1]]) == pytest.approx(16 / 10)
    with pytest.raises(ValueError, match="^n_km: expected examples"):
        effective_experts([[0, 0]])


def test_the_interval_is_that_of_student():
    assert mean_interval([1.0, 2, 3]) == pytest.approx((2, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    draws = np.random.default_rng(0).standard_normal((4000, 10))
    held = [low <= 0 <= high for _, low, high in (mean_interval(d, 0.8) for d in draws)]
    assert np.mean(held) == pytest.approx(0.8, abs=0.03)
    for values, level in (([1.0], 0.95), ([1.0, 2.0], 1.0)):
        with pytest.raises(ValueError, match="^values, level: expected"):
            mean_interval(values, level)
    with pytest.raises(ValueError, match="^values: expected finite numbers, got 1 NaN"):
        mean_interval([1.0, 2.0, np.nan])


def test_all_resamples_are_counted():
    assert bootstrap_interval([2.0, 2.0, 2.0]) == (2, 2, 2)
    assert bootstrap_interval([0.0, 1.0]) == pytest.approx((0.5, 0.0375, 0.9625))  # means 0, 1/2, 1/2, 1
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5)
    drawn = np.quantile(rng.choice(values, (200_000, 5)).mean(1), [0.025, 0.975])
    assert bootstrap_interval(values)[1:] == pytest.approx(tuple(drawn), abs=0.01)
    for number in (1, 8):
        with pytest.raises(ValueError, match="^values: expected two to seven"):
            bootstrap_interval(np.ones(number))


def test_interval_sign():
    """By hand: mean 1, standard deviation 1, t = 2.306 at nine values."""
    nine = np.array([-1.0, 1, 1, 1, 1, 1, 1, 1, 3])
    assert np.std(nine, ddof=1) == pytest.approx(1) and [interval_sign(s * nine) for s in (1, -1)] == [1, -1]
    assert interval_sign([-1.0, 3.0]) == 0
