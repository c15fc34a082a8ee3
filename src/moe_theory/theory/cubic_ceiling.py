"""Which polynomial experts attain 7/8 on the patch task: those of Table 7 with linear or cubic filters.

Cubic filters with output weights and biases, as many as wanted, answer to `s v_k` with any `A s^3 + Q s^2 + L s` and to
`s c_k` likewise, plus a constant that all signals share. So an expert is a table of coefficients (`PolynomialExpert`).
Write `u_k^+(s) = f(s v_k)`, `u_k^-(s) = -f(-s v_k)`, and G_k(beta) for the answer to the centre with all constants.

An expert attains 7/8 if and only if for every pair of clusters always the same one of four examples is wrong and all
others are right. Then the G_k have one order at all strengths. Number the clusters by it, `G_1 > ... > G_K`. For i < j
the wrong example is (label cluster i, y = -1) or (label cluster j, y = +1). A `pattern` says which, 0 or 1, for the
pairs in the order of `itertools.combinations`. For a pattern all conditions are linear in the coefficients.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from torch import nn

from moe_theory import _validate as check
from moe_theory.models.experts import PatchCNN
from moe_theory.tasks.patches import PatchTask

Interval = tuple[Fraction | float, Fraction | float]
Row = tuple[dict, Fraction]  # coefficients of the unknowns, and a number that their sum does not exceed

TABLE_7: Interval = (1, 2)
NODES = 5  # strengths at which conditions are posed to exclude a pattern, equally spaced, ends included
FINE = 17  # the same, to find an expert


class Degrees(NamedTuple):
    """The powers of s in an expert's answers to signals and to centres, and whether it has a constant."""

    signal: tuple[int, ...]
    center: tuple[int, ...]
    constant: bool


#: Experts of one kind of filter, as many as wanted, with biases or without.
KINDS = {
    "linear": Degrees((1,), (1,), True),
    "cubic": Degrees((1, 2, 3), (1, 2, 3), True),
    "cubic, no biases": Degrees((3,), (3,), False),
}


@dataclass(frozen=True)
class PolynomialExpert:
    """`F = sum_p f(x_p)` plus a constant, where f is a polynomial without constant on each signal and centre.

    Attributes:
        signal, center: K rows of three coefficients, of s, s^2 and s^3, of `f(s v_k)` and `f(s c_k)`.
        constant: of F.
    """

    signal: tuple[tuple[Fraction, ...], ...]
    center: tuple[tuple[Fraction, ...], ...]
    constant: Fraction


def polynomial_range(coefficients: Sequence[Fraction], low: Fraction, high: Fraction, *, parts: int = 32) -> Interval:
    """Two numbers that enclose `sum_d c_d s^d`, d = 0, 1, ..., on [low, high], by Bernstein coefficients; exact."""
    n, width = len(coefficients) - 1, Fraction(high - low) / parts
    found = []
    for part in range(parts):
        a = low + part * width
        moved = [
            sum(c * comb(d, i) * Fraction(a) ** (d - i) * width**i for d, c in enumerate(coefficients) if d >= i)
            for i in range(n + 1)
        ]
        found += [sum(Fraction(comb(j, i), comb(n, i)) * moved[i] for i in range(j + 1)) for j in range(n + 1)]
    return min(found), max(found)


def exact_accuracy(
    polynomials: PolynomialExpert, alpha: Interval = TABLE_7, beta: Interval = TABLE_7
) -> tuple[Fraction, Fraction]:
    """Accuracy without noise patches, and the least |F| over the largest; alpha and gamma share an interval.

    Each of the configurations (k, k', y, epsilon) must be right, or wrong, at all strengths; RuntimeError if the
    enclosures do not show which.
    """
    K, right, sizes = len(polynomials.signal), 0, []
    zero = Fraction(0)
    answers = {
        (k, y): polynomial_range([zero, *(y ** (d + 1) * c for d, c in enumerate(row))], *alpha)
        for k, row in enumerate(polynomials.signal)
        for y in (1, -1)
    }
    centers = [polynomial_range([polynomials.constant, *row], *beta) for row in polynomials.center]
    for (k, other), y, epsilon in itertools.product(itertools.permutations(range(K), 2), (1, -1), (1, -1)):
        parts = answers[k, y], answers[other, epsilon], centers[k]
        low, high = (sum(part[i] for part in parts) for i in (0, 1))
        if low <= 0 <= high:
            raise RuntimeError(f"k = {k}, k' = {other}, y = {y}, epsilon = {epsilon}: F lies in {low} to {high}")
        right += (low > 0) == (y > 0)
        sizes.append((min(abs(low), abs(high)), max(abs(low), abs(high))))
    return Fraction(right, len(sizes)), min(s for s, _ in sizes) / max(s for _, s in sizes)


# --- conditions for 7/8, as linear programs -----------------------------------------------------------------------


def conditions(
    K: int,
    pattern: Sequence[int],
    *,
    kind: str = "cubic",
    alpha: Interval = TABLE_7,
    beta: Interval = TABLE_7,
    nodes: int = NODES,
) -> Iterator[Row]:
    """What an expert that attains 7/8 in this pattern satisfies with `slack` 0, up to its scale.

    Unknown are the coefficients `("signal", k, d)`, `("center", k, d)` and `"constant"`, bounds `("least", k, sign)`
    and `("most", k, sign)` of u_k^+ and u_k^- at the nodes, those with sign 0 of G_k, and `"slack"`. Each margin is at
    least -slack at the nodes, and its mean over the strengths is at least 1 - slack.
    """
    degrees = KINDS[check.choice("kind", kind, KINDS)]
    pairs = [*itertools.combinations(range(check.integer("K", K, 2)), 2)]
    if len(pattern) != len(pairs) or not {*pattern} <= {0, 1}:
        raise ValueError(f"pattern: expected {len(pairs)} entries 0 or 1, one for each pair, got {pattern!r}")

    def answer(k: int, sign: int, power) -> dict:
        """Coefficients of u_k^sign, or of G_k for sign 0, where s^d is put in as power(d)."""
        if sign:
            return {("signal", k, d): sign ** (d + 1) * power(d) for d in degrees.signal}
        shared = {"constant": Fraction(1)} if degrees.constant else {}
        return {("center", k, d): power(d) for d in degrees.center} | shared

    for k, sign in itertools.product(range(K), (1, -1, 0)):
        low, high = beta if sign == 0 else alpha
        for i in range(nodes):
            s = low + Fraction(i, nodes - 1) * Fraction(high - low)
            u = answer(k, sign, lambda d, s=s: s**d)
            yield {("least", k, sign): Fraction(1)} | {v: -c for v, c in u.items()}, Fraction(0)
            yield u | {("most", k, sign): Fraction(-1)}, Fraction(0)
    for plus, minus, (k, of) in _margins(pairs, pattern):
        bound = {("least", *v): Fraction(-1) for v in plus} | {("most", *v): Fraction(1) for v in minus}
        bound |= {("least" if of > 0 else "most", k, 0): Fraction(-of)}
        yield bound | {"slack": Fraction(-1)}, Fraction(0)
        mean = {"slack": Fraction(-1)}
        for sign, terms in ((-1, [*plus]), (1, [*minus]), (-of, [(k, 0)])):
            for cluster, u in terms:
                low, high = beta if u == 0 else alpha
                for v, c in answer(cluster, u, lambda d, a=low, b=high: _mean_power(d, a, b)).items():
                    mean[v] = mean.get(v, 0) + sign * c
        yield mean, Fraction(-1)


def _mean_power(d: int, low, high) -> Fraction:
    """The mean of s^d over (low, high)."""
    return Fraction(high ** (d + 1) - low ** (d + 1)) / ((d + 1) * Fraction(high - low))


def _margins(pairs: Sequence[tuple[int, int]], pattern: Sequence[int]) -> Iterator[tuple[list, list, tuple[int, int]]]:
    """The margins that have to be positive: (k, sign) of the answers added, of those subtracted, and (k, y) of G."""
    for (i, j), wrong in zip(pairs, pattern, strict=True):
        for k, other, y in ((i, j, 1), (i, j, -1), (j, i, 1), (j, i, -1)):
            if (k, y) != ((j, 1) if wrong else (i, -1)):
                yield [(k, y)], [(other, -y)], (k, y)
            yield [(k, y), (other, y)], [], (k, y)


class Program(NamedTuple):
    """A linear program `min slack` for the conditions, solved: the least violation and the multipliers of the rows."""

    violation: float
    unknowns: list
    rows: list[Row]
    multipliers: np.ndarray


def least_violation(K: int, pattern: Sequence[int], **how) -> Program:
    """The least slack with which the conditions hold; above 0, no expert attains 7/8 in this pattern.

    At slack 1 all coefficients 0 will do. `how` is the kind of expert and the intervals, as for `conditions`.
    """
    rows = [*conditions(K, pattern, **how)]
    unknowns, found = _solved(rows, cost={"slack": 1.0}, slack=(0, None))
    return Program(float(found.fun), unknowns, rows, -found.ineqlin.marginals)


def _solved(rows: Sequence[Row], cost: Mapping, slack: tuple[float | None, float | None]) -> tuple[list, Any]:
    """The unknowns and what `linprog` finds for these rows."""
    unknowns = [*dict.fromkeys(v for row, _ in rows for v in row)]
    place = {v: i for i, v in enumerate(unknowns)}
    r, i, c = zip(*((r, place[v], float(c)) for r, (row, _) in enumerate(rows) for v, c in row.items()), strict=True)
    matrix = coo_array((c, (r, i)), shape=(len(rows), len(unknowns))).tocsr()
    bounds = [slack if v == "slack" else (None, None) for v in unknowns]
    limits = [float(b) for _, b in rows]
    found = linprog([cost.get(v, 0.0) for v in unknowns], A_ub=matrix, b_ub=limits, bounds=bounds)
    if found.status != 0:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return unknowns, found


def polynomial_expert(K: int, alpha: Interval = TABLE_7, beta: Interval = TABLE_7) -> PolynomialExpert:
    """A cubic expert that attains 7/8 in the pattern of zeros, with integer coefficients; `exact_accuracy` proves it.

    Every margin is at least about 1000 and the answers are as small as that allows. RuntimeError where there is none.
    """
    rows = [*conditions(K, [0] * comb(K, 2), alpha=alpha, beta=beta, nodes=FINE)]
    largest = {("most", k, sign): 1.0 for k in range(K) for sign in (1, -1)}
    unknowns, found = _solved(rows, largest, slack=(-1, -1))
    value = {v: Fraction(round(1000 * float(x))) for v, x in zip(unknowns, found.x, strict=True)}
    signal, center = (
        tuple(tuple(value[name, k, d] for d in (1, 2, 3)) for k in range(K)) for name in ("signal", "center")
    )
    return PolynomialExpert(signal, center, value["constant"])


def certificate(program: Program) -> dict[int, Fraction]:
    """Rational multipliers of some rows that combine them to `-slack <= -v`, with v the least violation (Farkas).

    The program's multipliers keep their support, and `sum y_r row_r = -slack` is solved on it in Fractions. Whoever
    adds up the rows with these `y_r >= 0` has proved that no slack below v will do. RuntimeError without a solution.
    """
    support = np.flatnonzero(program.multipliers > 1e-9)
    equations = {v: [Fraction(0)] * (len(support) + 1) for v in program.unknowns}
    equations["slack"][-1] = Fraction(-1)
    for column, r in enumerate(support):
        for v, c in program.rows[r][0].items():
            equations[v][column] += c
    y = _solution([*equations.values()], len(support))
    if y is None or min(y) < 0:
        raise RuntimeError("the multipliers of the linear program have no exact counterpart of the same support")
    return {int(r): a for r, a in zip(support, y, strict=True)}


def _solution(rows: list[list[Fraction]], n: int) -> list[Fraction] | None:
    """The one solution of n unknowns in at least n equations, the right sides last; None without one."""
    done = []
    for column in range(n):
        pivot = min((r for r in rows if r[column]), key=lambda r: sum(map(bool, r)), default=None)
        if pivot is None:
            return None
        rows = [r for r in rows if r is not pivot]
        pivot = [v / pivot[column] for v in pivot]
        for part in (rows, done):
            for i, r in enumerate(part):
                if r[column]:
                    factor = r[column]
                    part[i] = [a - factor * b if b else a for a, b in zip(r, pivot, strict=True)]
        done.append(pivot)
    return None if any(any(r) for r in rows) else [r[n] for r in done]


def surviving_patterns(K: int, fewer: Sequence[tuple[int, ...]] | None = None, **how) -> tuple[list, list]:
    """The patterns for K clusters that the linear programs do not exclude, and the programs of those they do.

    A pattern is tried if those of all K - 1 clusters within it survive, `fewer`, found first if not given. `how` is the
    kind of expert and the intervals, as for `conditions`.
    """
    if check.integer("K", K, 2) == 2:
        fewer = [()]
    elif fewer is None:
        fewer = surviving_patterns(K - 1, **how)[0]
    pairs, alive, excluded = [*itertools.combinations(range(K), 2)], [], []
    for inner, last in itertools.product(fewer, itertools.product((0, 1), repeat=K - 1)):
        wrong = dict(zip(itertools.combinations(range(K - 1), 2), inner, strict=True))
        wrong |= {(k, K - 1): v for k, v in enumerate(last)}
        parts = [tuple(wrong[p] for p in itertools.combinations(some, 2)) for some in _without_one(K)]
        if not {*parts} <= {*fewer}:
            continue
        pattern = tuple(wrong[p] for p in pairs)
        program = least_violation(K, pattern, **how)
        if program.violation > 1e-7:
            excluded.append((pattern, program))
        else:
            alive.append(pattern)
    return alive, excluded


def _without_one(K: int) -> list[tuple[int, ...]]:
    return [tuple(k for k in range(K) if k != out) for out in range(K)]


def polynomial_cnn(polynomials: PolynomialExpert, task: PatchTask) -> PatchCNN:
    """The same expert as a cubic patch CNN: three filters for each signal, with biases 0, 1 and -1, and one constant.

    `a s^3 + Q s^2 + L s = (a - L/3) s^3 + (L + Q)/6 (s + 1)^3 + (L - Q)/6 (s - 1)^3 - Q/3`. A filter of weight 0
    makes up for the constants of the P patches. Output weights go into the cube, so that only their signs are left.
    """
    directions, P = torch.cat([task.v, task.c]).double(), task.P
    filters, shift = [], 0.0
    for u, (L, Q, a) in zip(directions, polynomials.signal + polynomials.center, strict=True):
        filters += [(u, 0.0, a - L / 3), (u, 1.0, (L + Q) / 6), (u, -1.0, (L - Q) / 6)]
        shift += float(Q / 3)
    filters.append((0 * directions[0], 1.0, float(polynomials.constant) / P - shift))
    filters = sorted(filters, key=lambda one: one[2] < 0)
    out = torch.tensor([float(a) for _, _, a in filters], dtype=torch.float64)
    root = out.abs() ** (1 / 3)
    cnn = PatchCNN(task.d, 2 * ((len(filters) + 1) // 2), "cubic", seed=0).double()
    cnn.w = nn.Parameter(root[:, None] * torch.stack([u for u, _, _ in filters]))
    cnn.b = nn.Parameter(root * torch.tensor([b for _, b, _ in filters], dtype=torch.float64))
    cnn.a = torch.where(out < 0, -1.0, 1.0).double()
    return cnn
