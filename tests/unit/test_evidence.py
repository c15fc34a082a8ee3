import math

import numpy as np
import pytest

from moe_book.evidence import Close, Compared, Inside, Ordered, stands

NAN = float("nan")


@pytest.mark.parametrize(
    ("evidence", "true"),
    [
        (Compared(1.9, "<=", 2), True),
        (Compared(2.1, "<=", 2), False),
        (Compared(NAN, "<=", 2), False),
        (Close(1.04, 1, relative=0.05), True),
        (Close(1.06, 1, relative=0.05), False),
        (Close(0.94, 1, relative=0.05), False),
        (Close(-1.04, -1, relative=0.05), True),
        (Close(1, -1, relative=0.05), False),
        (Close(0.01, 0, within=0.02), True),
        (Close(0.03, 0, within=0.02), False),
        (Close(NAN, 0, within=0.02), False),
        (Close(0, NAN, within=0.02), False),
        (Inside(2, 2, 3), True),
        (Inside(1.99, 2, 3), False),
        (Inside(3.01, 2, 3), False),
        (Inside(NAN, 2, 3), False),
        (Ordered({"a": 3, "b": 2, "c": 1}), True),
        (Ordered({"a": 3, "b": 3}), False),
        (Ordered({"a": 3, "b": 2, "c": 2.5}), False),
        (Ordered({"a": 3, "b": 2}, margin=1), False),
        (Ordered({"a": NAN, "b": 2}), False),
        (Compared(np.float64(1), "==", 1), True),
    ],
)
def test_a_comparison_is_true_or_false(evidence, true):
    assert bool(evidence) is true


@pytest.mark.parametrize(
    ("evidence", "columns"),
    [
        (Compared(1.98765, "<=", 2, digits=3), ("1.99", "at most 2", "> 2")),
        (Compared(3e-14, "<=", 1e-12, digits=0), (r"at most $10^{-12}$", r"at most $10^{-12}$", r"> $10^{-12}$")),
        (Compared(7, "==", 7), ("7", "exactly 7", "≠ 7")),
        (Close(0.4987, 0.5, relative=0.05, digits=2), ("0.5", "0.5", "off by more than 5 %")),
        (Close(-0.47, -0.5, within=0.05), ("-0.47", "-0.5", "off by more than 0.05")),
        (Close(1 + 1e-15, 1.0, within=1e-12, digits=0), (r"within $10^{-12}$", "1", r"off by more than $10^{-12}$")),
        (Inside(0.75, 0.7, 0.8), ("0.75", "0.7 to 0.8", "outside")),
        (Ordered({"$a$": 3.0, "$b$": 2.0}), ("3, 2", "$a$ > $b$", "another order")),
        (Ordered({"a": 3.0, "b": 2.0}, margin=0.5), ("3, 2", "a > b", "a lead of 0.5 or less")),
        (Compared(2.5e-7, "<", 1), (r"$2.5 \cdot 10^{-7}$", "below 1", "≥ 1")),
        (Compared(17.9, ">", 5, digits=1), ("20", "above 5", "≤ 5")),
        (Compared(-1e-6, "<", 1), (r"$-10^{-6}$", "below 1", "≥ 1")),
    ],
)
def test_a_comparison_says_what_was_predicted_and_what_refutes(evidence, columns):
    assert (evidence.measured, evidence.predicted, evidence.refuted) == columns


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compared(1, "~", 2), "relation: expected one of"),
        (lambda: Close(1, 2), "within, relative: expected one positive tolerance, got None, None"),
        (lambda: Close(1, 2, within=1, relative=1), "within, relative: expected one"),
        (lambda: Close(1, 2, within=0), "within, relative: expected one positive"),
        (lambda: Close(1, 2, relative=NAN), "within, relative: expected one positive"),
        (lambda: Inside(1, 2, 2), "low, high: expected low < high, got 2, 2"),
        (lambda: Ordered({"a": 1}), "values: expected at least two, got {'a': 1}"),
        (lambda: stands({"a": 1, "b": "text"}), r"evidence: expected at least one comparison, got only \['a', 'b'\]"),
    ],
)
def test_bad_evidence_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_evidence_stands_if_every_comparison_does():
    good, bad = Close(math.pi, 22 / 7, relative=0.01), Inside(4, 1, 2)
    assert stands({"a": good, "shown": 0}) and not stands({"a": good, "b": bad})
