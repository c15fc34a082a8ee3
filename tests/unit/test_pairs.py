import numpy as np
import pandas as pd
import pytest
from scipy.stats import t, ttest_1samp, ttest_ind

from moe_theory.measure.pairs import (
    decisions,
    lead,
    off_line,
    one_run_more,
    p_value,
    paired_differences,
    seeds_needed,
    told_apart,
)

ONE, OTHER = np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 2.9])


def test_a_lead_is_by_number_of_examples():
    rows = [
        dict(model=model, n=n, seed=seed, loss=value * (1 if n == 8 or model == "b" else 0.1))
        for model, values in (("a", ONE), ("b", OTHER))
        for n in (8, 16)
        for seed, value in enumerate(values)
    ]
    rows.append(dict(model="b", n=32, seed=0, loss=1.0))
    found = lead(pd.DataFrame(rows).sample(frac=1, random_state=0), "loss", "a", "b")
    assert list(found.index) == [8, 16] and list(found.every) == [False, True]
    assert found.ratio.tolist() == pytest.approx([6 / 7.9, 0.6 / 7.9])
    assert found.p[8] == pytest.approx(ttest_1samp(np.log(ONE / OTHER), 0).pvalue)
    assert found.p[8] == pytest.approx(p_value(ONE, OTHER))


def test_models_without_common_rows_are_refused():
    rows = pd.DataFrame([dict(model="a", n=1, seed=0, loss=1.0), dict(model="b", n=2, seed=0, loss=1.0)])
    for other in ("b", "c"):
        with pytest.raises(ValueError, match="^model, other: expected"):
            lead(rows, "loss", "a", other)


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
def test_seeds_needed(spread):
    """With so many pairs of that mean and spread the interval excludes 0, with one less it does not."""
    values = 1 + spread * np.array([-1.0, 0, 1])
    n = seeds_needed(values)

    def half(n):
        return t.ppf(0.975, n - 1) * spread / np.sqrt(n)

    assert half(n) < 1 and (n == 2 or half(n - 1) >= 1)
    assert seeds_needed(-values) == n


@pytest.mark.parametrize("values", [[1.0], [1.0, -1.0], [1.0, np.nan], [1.0, np.inf]])
def test_bad_differences(values):
    with pytest.raises(ValueError, match="differences: expected two or more numbers whose mean is not 0, got"):
        seeds_needed(values)


def test_decisions():
    """Above, below, undecided with the seeds that would decide, or more than are counted."""
    wide = pd.DataFrame({"a": [3.0, 3.1, 2.9], "b": [1.0, 1.1, 1.0], "c": [3.0, 3.2, 2.7], "d": [3.0, 3.1, 2.93]})
    gaps = paired_differences(wide, {"up": ("a", "b"), "down": ("b", "a"), "open": ("a", "c"), "far": ("c", "d")})
    assert gaps["up"].tolist() == pytest.approx([2.0, 2.0, 1.9])
    found = decisions(gaps, 2, most=70)
    assert found["decided"].tolist() == ["above 0", "below 0", "undecided", "undecided"]
    assert found["seeds that would decide"].tolist() == ["–", "–", "> 70", seeds_needed(gaps["far"])]
    assert found.loc["up", "mean"] == "1.97" and found.loc["up", "95 % interval"] == "1.82 to 2.11"
    assert found.loc["up", "sd of a pair"] == f"{np.std([2.0, 2.0, 1.9], ddof=1):.2f}"


def test_an_arm_off_the_line_of_the_others_is_seen():
    """One arm is 4 above the line of the others, so the common line 1 above; each arm is off it by 0.1 both ways."""
    arm = pd.Series(list("aabbccdd"))
    x = pd.Series([0.0, 1.0] * 4)
    noise = pd.Series([0.1, -0.1, -0.1, 0.1] * 2)
    assert off_line(x, 2 * x + noise + 4 * (arm == "d"), arm) == pytest.approx([-10, -10, -10, 30])
    with pytest.raises(ValueError, match="^arm: expected two rows or more of each, got 'e' once"):
        off_line(x, x, arm.replace({"d": "e"}).where(arm.index < 7, "d"))


def test_one_run_more_is_a_two_sample_test_with_one_spread():
    runs = pd.Series([70.0, 72.0, 71.0, 74.0])
    assert one_run_more({"a": runs}, {"a": 78.0})["a"] == pytest.approx(ttest_ind(runs, [78.0]).pvalue)
    two = one_run_more({"a": runs, "b": runs + 5}, {"a": 78.0, "b": 83.0})
    assert two["a"] == pytest.approx(two["b"]) and two["a"] < one_run_more({"a": runs}, {"a": 78.0})["a"]


def test_exact_replications_are_told_apart_as_rarely_as_said():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(2_000):
        ours = {cell: pd.Series(rng.normal(size=3)) for cell in range(6)}
        hits += bool(told_apart(one_run_more(ours, {cell: rng.normal() for cell in ours}), level=0.05))
    # the tests share one estimated spread, so that the share is below the level, by little
    assert 0.03 < hits / 2_000 < 0.06


def test_other_cells_or_single_runs_are_refused():
    runs = pd.Series([1.0, 2.0])
    with pytest.raises(ValueError, match=r"^printed: expected the cells \['a'\]"):
        one_run_more({"a": runs}, {"b": 1.0})
    with pytest.raises(ValueError, match="^ours: expected two runs"):
        one_run_more({"a": runs[:1]}, {"a": 1.0})
