"""A line of evidence: which numbers it accepts, what it shows, and what the registry may say."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from moe_book.evidence import compare, flatten, names_in, validate

NAN = float("nan")


def line(spec, value, **known):
    return compare("x", {"says": "a quantity", **spec}, value, {"x": value, **known})


@pytest.mark.parametrize(
    ("spec", "value", "true"),
    [
        ({"at_most": 2}, 1.9, True),
        ({"at_most": 2}, 2, True),
        ({"at_most": 2}, 2.1, False),
        ({"at_most": 2}, NAN, False),
        ({"below": 2}, 2, False),
        ({"below": 2}, 1.9, True),
        ({"above": 2}, 2, False),
        ({"above": 2}, 2.1, True),
        ({"at_least": 2}, 2, True),
        ({"at_least": 2}, 1.9, False),
        ({"equals": 20}, 20, True),
        ({"equals": 20}, np.int64(19), False),
        ({"equals": "mC4"}, "mC4", True),
        ({"equals": "mC4"}, "man", False),
        ({"close_to": 1, "relative": 0.05}, 1.04, True),
        ({"close_to": 1, "relative": 0.05}, 1.06, False),
        ({"close_to": 1, "relative": 0.05}, 0.94, False),
        ({"close_to": -1, "relative": 0.05}, -1.04, True),
        ({"close_to": -1, "relative": 0.05}, 1, False),
        ({"close_to": 0, "within": 0.02}, 0.01, True),
        ({"close_to": 0, "within": 0.02}, -0.03, False),
        ({"close_to": 0, "within": 0.02}, NAN, False),
        ({"inside": [2, 3]}, 2, True),
        ({"inside": [2, 3]}, 1.99, False),
        ({"inside": [2, 3]}, 3.01, False),
        ({"descending": 0, "cases": 2}, {"a": 3, "b": 2, "c": 1}, True),
        ({"descending": 0, "cases": 1}, {"a": 3, "b": 3}, False),
        ({"descending": 0, "cases": 2}, {"a": 3, "b": 2, "c": 2.5}, False),
        ({"descending": 1, "cases": 1}, {"a": 3, "b": 2}, False),
        ({"descending": 0, "cases": 1}, {"a": NAN, "b": 2}, False),
    ],
)
def test_a_comparison_is_true_or_false(spec, value, true):
    assert line(spec, value).holds is true


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("make", [list, np.array, torch.tensor, pd.Series, lambda v: dict(enumerate(v))])
def test_every_case_counts(place, make):
    values = [1.0, 1.0, 1.0, 1.0]
    spec = {"close_to": 1, "within": 0.1, "cases": 4}
    assert line(spec, make(values)).holds
    values[place] = 1.2
    assert not line(spec, make(values)).holds


def test_limits_are_numbers_names_multiples_or_cases_of_their_own():
    found = {"a": 1.0, "b": 2.0}
    per = {"close_to": "theory", "within": [4, "error"], "cases": 2}
    assert line(per, found, theory={"b": 2.3, "a": 1.0}, error=0.1).holds
    assert not line(per, found, theory={"b": 2.3, "a": 1.0}, error={"a": 0.1, "b": 0.05}).holds
    assert line({"at_most": {"a": 1, "b": 2}, "cases": 2}, found).holds
    assert not line({"at_most": {"a": 2, "b": 1}, "cases": 2}, found).holds
    assert line({"close_to": "target.moe", "within": 1}, 75.0, target={"moe": 75.5, "single": 60}).holds
    assert line({"inside": [[2, "half"], "top"]}, 3.0, half=1, top=4).holds


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        ({"at_most": 1, "cases": 3}, [0.0, 0.0], "x: expected 3 cases, got 2$"),
        ({"at_most": 1}, [0.0, 0.0], "x: expected 1 cases, got 2; a line without `cases` has 1$"),
        ({"close_to": "theory", "within": 1, "cases": 2}, {"a": 1, "c": 1}, r"x: expected the cases \['a', 'b'\], got"),
        ({"at_most": "other"}, 1, "x: expected a number or one of .*, got 'other'"),
        ({"at_most": 1}, object(), "x: expected numbers, or a mapping to numbers, got object"),
        ({"at_most": 1}, {("a", 1): 0, "a, 1": 0}, "x: expected cases with names of their own, got 'a, 1' twice"),
    ],
)
def test_bad_values_are_named(spec, value, message):
    with pytest.raises(ValueError, match=message):
        line(spec, value, theory={"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("spec", "value", "measured", "refuted"),
    [
        ({"at_most": 2}, 1.98765, "1.99", "> 2"),
        ({"at_most": 1e-12}, 3.4e-14, r"$3 \cdot 10^{-14}$", r"> $10^{-12}$"),
        ({"equals": 7}, 7, "7", "≠ 7"),
        ({"equals": 1600}, 1600, "1600", "≠ 1600"),
        ({"close_to": 0.5, "relative": 0.05, "digits": 2}, 0.4987, "0.5", "farther than 5 % from 0.5"),
        (
            {"close_to": "theory", "within": 0.05},
            -0.47,
            "-0.47, predicted -0.5",
            "farther than 0.05 from the prediction",
        ),
        ({"inside": [0.7, 0.8]}, 0.75, "0.75", "outside 0.7 to 0.8"),
        ({"descending": 0, "cases": 1}, {"$a$": 3.0, "$b$": 2.0}, "3 > 2", "another order"),
        ({"descending": 0.5, "cases": 1}, {"a": 3.0, "b": 2.0}, "3 > 2", "a lead of 0.5 or less"),
        ({"above": 0, "cases": 4}, [1.0, 2.0, 5.0, 3.0], "1 to 5 (4 cases)", "≤ 0"),
        ({"at_most": {"a": 1, "b": 9}, "cases": 2}, {"a": 0.9, "b": 1.0}, "0.9 (closest call of 2: a)", "> 1"),
        ({"above": 0, "cases": 3}, [1.0, NAN, 3.0], "nan (closest call of 3: 2)", "≤ 0"),
        ({"equals": "there", "cases": 4}, {k: "there" for k in "abcd"}, "4 of 4", "≠ there"),
    ],
)
def test_a_line_shows_what_was_measured_and_what_refutes(spec, value, measured, refuted):
    found = line(spec, value, theory=-0.5)
    assert (found.measured, found.refuted) == (measured, refuted)


def test_what_is_shown_or_cannot_be_computed_refutes_nothing():
    shown = line({"shown": True}, {"a": 1.0, "b": 22.25})
    assert (shown.measured, shown.refuted, shown.holds) == ("1, 22.2", "", True)
    missing = line({"at_most": 1, "needs": "manual pages"}, None)
    assert missing.measured == "not computed: needs manual pages" and missing.holds
    with pytest.raises(ValueError, match="x: expected numbers"):
        line({"at_most": 1}, None)


def test_frames_and_nested_mappings_are_cases_by_row_and_column():
    frame = pd.DataFrame({"lead": [1.0, 2.0]}, index=["cubic", "linear"])
    assert flatten(frame) == {"cubic, lead": 1.0, "linear, lead": 2.0}
    assert flatten({0.1: {"a": 1}, 2: [3, 4]}) == {"0.1, a": 1, "2, 1": 3, "2, 2": 4}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("text", "x: expected a line with `says`, got 'text'"),
        ({"says": "a"}, r"x: expected one comparison of .*, got \[\]"),
        ({"says": "a", "above": 1, "below": 2}, r"x: expected one comparison of .*, got \['above', 'below'\]"),
        ({"says": "a", "above": 1, "limit": 2}, r"x: unknown fields \['limit'\], expected some of .*\]$"),
        ({"says": "a", "by steps": None, "above": 1}, r"x: unknown fields \['by steps'\].*; quote a text"),
        ({"says": "a", "close_to": 1}, r"x: expected one of `within` and `relative` with `close_to`, got \[\]"),
        ({"says": "a", "close_to": 1, "within": 1, "relative": 1}, "x: expected one of `within` and `relative`"),
        ({"says": "a", "above": 1, "within": 1}, "x: expected one of `within` and `relative` with `close_to`"),
        ({"says": "a", "close_to": 1, "within": 0}, "x: expected a positive tolerance, got 0"),
        ({"says": "a", "inside": [2, 2]}, r"x: expected low < high, got \[2, 2\]"),
        ({"says": "a", "inside": 2}, r"x: expected `inside: \[low, high\]`, got 2"),
    ],
)
def test_a_slip_in_the_registry_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        validate("x", spec)


def test_the_names_in_limits_are_found():
    spec = {"says": "a", "close_to": "target.moe", "within": [3, "error"], "cases": "count"}
    assert names_in(spec) == {"target", "error", "count"}
    assert names_in({"says": "a", "inside": ["low", [2, "high"]]}) == {"low", "high"}
    assert math.isinf(line({"above": 0}, 1.0).cases[0].high)
