"""What is read off stored rows of models that share their seeds."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mutual_info_score

from moe_theory.measure import readings


@pytest.fixture
def rows():
    """Two models on two tasks, three seeds; a third model on one task and two seeds."""
    lines = [("plain", s, m, 10 * s + (m == "moe") * (s + 1)) for s in range(3) for m in ("single", "moe")]
    lines += [("rotated", s, m, 3.0 * s + (m == "moe") * 5) for s in (2, 0, 1) for m in ("moe", "single")]
    lines += [("rotated", s, "wide", 1.0) for s in (1, 2)]
    return pd.DataFrame(lines, columns=["task", "seed", "model", "accuracy"]).assign(network="CNN")


def test_differences_are_paired_by_seed(rows):
    found = readings.differences(rows, ["moe - single", "wide - moe"], "CNN")
    assert found["moe - single"]["plain"].tolist() == [1, 2, 3]
    assert found["moe - single"]["rotated"].tolist() == [5, 5, 5]
    assert found["moe - single"]["rotated less plain"].tolist() == [4, 3, 2]
    assert {task: v.tolist() for task, v in found["wide - moe"].items()} == {"rotated": [-7, -10]}


def test_unknown_network_is_refused(rows):
    with pytest.raises(ValueError, match=r"network: expected one of \['CNN'\], got 'RNN'"):
        readings.differences(rows, ["moe - single"], "RNN")


def test_interval_in_words():
    assert readings.interval_text([1.0, 1.1, 0.9]) == "+1.0 [+0.8, +1.2]"
    assert readings.interval_text([1.0, -0.5, 0.4], 2) == "+0.30 [-1.58, +2.18]; open, settled by 27 seeds"


@pytest.mark.parametrize(
    ("values", "predicted", "word"),
    [
        ([1, 1.1], "+", "met"),
        ([1, 1.1], "- or 0", "contradicted"),
        ([-1, 1.1], "- or 0", "met"),
        ([-1, 1.1], "-", "undecided"),
        ([-1, -1.1], "-", "met"),
        ([-1, -1.1], "+", "contradicted"),
    ],
)
def test_outcome_of_a_prediction(values, predicted, word):
    assert readings.outcome(values, predicted) == word


def test_nats():
    assert readings.nats([[5, 0], [0, 5]]) == pytest.approx(np.log(2))
    assert readings.nats([[2, 4], [3, 6]]) == pytest.approx(0, abs=1e-12)
    some = np.random.default_rng(0).integers(0, 9, (3, 5))
    assert readings.nats(some) == pytest.approx(mutual_info_score(None, None, contingency=some), rel=1e-12)
    counts = np.zeros((2, 2, 2), int)  # the expert is "label = class": alone it tells nothing of the label
    counts[0, 0, 0] = counts[1, 1, 0] = counts[0, 1, 1] = counts[1, 0, 1] = 4
    assert readings.nats_of_label(counts) == pytest.approx((0, np.log(2)), abs=1e-12)


def test_sample_of_a_table():
    counts = np.array([[2, 0], [1, 3]])
    assert readings.drawn_from([0, 0, 1], [0, 0, 1], counts)
    assert not readings.drawn_from([0, 1], [1, 0], counts)
