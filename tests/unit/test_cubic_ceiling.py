import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_theory.tasks.patches import PatchTask
from moe_theory.theory import cubic_ceiling as cc

WIDE = (Fraction(1, 2), Fraction(2))
fractions = st.fractions(-5, 5, max_denominator=9)


@given(c=st.lists(fractions, min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_range_encloses_a_polynomial_closely(c):
    low, high = cc.polynomial_range(c, Fraction(1), Fraction(2))
    s = np.linspace(1, 2, 500)
    values = np.polyval([float(v) for v in reversed(c)], s)
    assert low - 1e-9 <= values.min() and values.max() <= high + 1e-9
    assert values.min() - low < 0.03 * (1 + sum(map(abs, c))) and high - values.max() < 0.03 * (1 + sum(map(abs, c)))


@pytest.mark.parametrize("K", range(2, 7))
def test_cubic_experts_attain_seven_eighths_up_to_six_clusters(K):
    accuracy, margin = cc.exact_accuracy(cc.polynomial_expert(K))
    assert accuracy == Fraction(7, 8) and margin > Fraction(1, 2000)


@pytest.mark.parametrize("K", [2, 3])
def test_with_wider_signals_up_to_three(K):
    assert cc.exact_accuracy(cc.polynomial_expert(K, WIDE), WIDE)[0] == Fraction(7, 8)


@pytest.mark.parametrize(("K", "alpha"), [(7, (1, 2)), (4, WIDE)])
def test_one_cluster_more_has_none(K, alpha):
    with pytest.raises(RuntimeError, match="not solved"):
        cc.polynomial_expert(K, alpha)


def test_an_expert_that_is_not_clear_is_refused():
    expert = cc.polynomial_expert(3)
    none = cc.PolynomialExpert(expert.signal, ((Fraction(0),) * 3,) * 3, Fraction(0))
    with pytest.raises(RuntimeError, match="F lies in"):
        cc.exact_accuracy(none)


def test_the_network_is_the_polynomial_expert():
    """Filters, with biases and output signs, beside the polynomials, and its accuracy on examples."""
    expert, task = cc.polynomial_expert(4), PatchTask(K=4, P=3, d=12, alpha=(1, 2), beta=(1, 2), gamma=(1, 2), seed=1)
    cnn, batch = cc.polynomial_cnn(expert, task), task.sample(40_000, 2, torch.float64)

    def answer(row, s):
        return sum(float(c) * s ** (d + 1) for d, c in enumerate(row))

    with torch.no_grad():
        F = cnn(batch.x)
    s = (batch.y * batch.alpha, batch.beta, batch.epsilon * batch.gamma)
    for n in range(50):
        k, other = int(batch.cluster[n]), int(batch.other[n])
        rows = expert.signal[k], expert.center[k], expert.signal[other]
        expected = float(expert.constant) + sum(answer(row, float(v[n])) for row, v in zip(rows, s, strict=True))
        assert float(F[n]) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert float((batch.y * F > 0).double().mean()) == pytest.approx(7 / 8, abs=4 * (7 / 64 / 40_000) ** 0.5)


def test_margins_of_a_pair_are_all_examples_but_one():
    """The right examples of a quadruple sum, with the wrong one, to nothing; four more have epsilon = y."""
    for wrong in (0, 1):
        found = [*cc._margins([(0, 1)], [wrong])]
        assert len(found) == 7 and sum(not minus for _, minus, _ in found) == 4
        left = {(0, 1), (0, -1), (1, 1), (1, -1)} - {of for _, minus, of in found if minus}
        assert left == {(1, 1) if wrong else (0, -1)}


def test_the_conditions_hold_for_experts_that_attain_and_for_no_others():
    """With the program's unknowns put in, slack 0: random strengths are no worse than the rows say."""
    K = 3
    expert = cc.polynomial_expert(K)
    pattern = [0] * comb(K, 2)
    values = {("signal", k, d): expert.signal[k][d - 1] for k in range(K) for d in (1, 2, 3)}
    values |= {("center", k, d): expert.center[k][d - 1] for k in range(K) for d in (1, 2, 3)}
    values |= {"constant": expert.constant, "slack": Fraction(0)}
    rows = [*cc.conditions(K, pattern)]
    for row, _ in rows:  # least and most from their rows
        own = [v for v in row if v[0] in ("least", "most")]
        if len(own) == 1 and "slack" not in row:
            bound = -sum(c * values[v] for v, c in row.items() if v != own[0]) / row[own[0]]
            pick = min if own[0][0] == "least" else max
            values[own[0]] = pick(values.get(own[0], bound), bound)
    assert all(sum(c * values[v] for v, c in row.items()) <= b for row, b in rows)
    values["constant"] += 10**6
    for name in [v for v in values if v[0] in ("least", "most") and v[2] == 0]:
        values[name] += 10**6
    assert not all(sum(c * values[v] for v, c in row.items()) <= b for row, b in rows)


def test_patterns_by_all_subsets_and_by_brute_force():
    """The growth from smaller numbers of clusters loses no pattern."""
    three = cc.surviving_patterns(3)[0]
    brute = [p for p in itertools.product((0, 1), repeat=3) if cc.least_violation(3, p).violation < 1e-7]
    assert sorted(three) == sorted(brute) and len(three) == 6
    four = cc.surviving_patterns(4, three)[0]
    brute = [p for p in itertools.product((0, 1), repeat=6) if cc.least_violation(4, p).violation < 1e-7]
    assert sorted(four) == sorted(brute) and len(four) == 12


def proved_violation(program):
    """The rows added up with the multipliers: nothing is left but -slack, which is at most minus the violation."""
    y, total = cc.certificate(program), {}
    assert min(y.values()) >= 0
    for r, a in y.items():
        for v, c in program.rows[r][0].items():
            total[v] = total.get(v, 0) + a * c
    assert {v: c for v, c in total.items() if c} == {"slack": -1}
    return -sum(a * program.rows[r][1] for r, a in y.items())


@pytest.mark.parametrize(
    ("most", "count", "how"),
    [
        (7, 38, {}),
        (4, 8, {"alpha": WIDE}),
        (2, 2, {"kind": "linear"}),
        (2, 2, {"kind": "cubic, no biases"}),
    ],
)
def test_every_excluded_pattern_has_a_rational_certificate(most, count, how):
    fewer, programs = None, []
    for K in range(2, most + 1):
        fewer, excluded = cc.surviving_patterns(K, fewer, **how)
        programs += [program for _, program in excluded]
    for program in programs:
        exact = proved_violation(program)
        assert exact > 0 and float(exact) == pytest.approx(program.violation, rel=1e-9)
    assert fewer == [] and len(programs) == count


@pytest.mark.parametrize(("r", "attains"), [(Fraction(17, 10), True), (Fraction(7, 4), False)])
def test_linear_experts_attain_for_ratios_up_to_the_root_of_three(r, attains):
    alive, _ = cc.surviving_patterns(2, kind="linear", alpha=(1, r), beta=(1, r))
    assert bool(alive) == attains


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: [*cc.conditions(2, [0], kind="relu")], "kind: expected"),
        (lambda: [*cc.conditions(3, [0, 1])], "pattern: expected 3"),
        (lambda: cc.surviving_patterns(1), "K: expected"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        call()
