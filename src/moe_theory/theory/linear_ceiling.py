"""How good a linear expert can be on the patch task when all strengths are uniform on (1, 2), as in Table 7.

A linear expert answers `F = y alpha w_k + epsilon gamma w_k' + B_k(beta)`, with `B_k(beta) = b_k beta + b_0`; the
constant b_0 collects the biases of all patches. A noise patch shifts b_0 by a random number, so it is left out: no
shift does better than the best. Clusters decouple for given w and b_0. By symmetry weights are not negative, the
largest is 1, and b_0 >= 0.

`share_below` is a volume in closed form. On it rest the error, exact (`exact_linear_error`) or not (`linear_error`),
its optimum for two clusters (`two_cluster_optimum`), and the branch and bound of `certify`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import factorial, prod
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize

from moe_theory import _validate as check

CORNERS = np.array([*itertools.product((0.0, 1.0), repeat=3)])  # of the cube of alpha, gamma, beta, minus 1
PARITY = np.where(CORNERS.sum(1) % 2 == 0, 1.0, -1.0)
SIGNS = np.array([*itertools.product((1.0, -1.0), repeat=2)])  # y and epsilon y
ROUNDING = 2.0**-48  # of a sum of eight cubes in float64, relative to the sum of their sizes, with room
LEAST = 2.0**-12  # to which smaller coefficients are raised where only the largest form of a box counts
FAR = 33.0  # beyond this b_0 every error is above 0.22

#: Explicit experts for K = 2 to 6, over 10^6: w of light and of heavy clusters, their b, b_0; how many of each kind.
EXPERTS = {
    2: (439256, 1000000, 229019, -739929, 1142266, (1, 1)),
    3: (439256, 1000000, 229019, -739929, 1142266, (1, 2)),
    4: (566748, 1000000, 420407, -408829, 638327, (2, 2)),
    5: (559346, 1000000, 468617, -383275, 598530, (2, 3)),
    6: (571762, 1000000, 390714, -424987, 663465, (3, 3)),
}


def largest_ratio(q: float) -> float:
    """The largest ratio of strengths of signals at which linear experts attain 7/8, K = 2: `r = (q + 3)/(q + 1)`.

    q >= 1 is the ratio of the largest strength of a centre to the smallest.
    """
    if not 1 <= q < float("inf"):
        raise ValueError(f"q: expected a finite ratio >= 1, got {q!r}")
    return (q + 3) / (q + 1)


# --- the error of one expert ----------------------------------------------------------------------------------


class Cut(NamedTuple):
    """What a half-space cuts off the cube: the share, its derivatives, the form at the corners, and the rounding."""

    share: Float[np.ndarray, "..."]
    slopes: Float[np.ndarray, "... 4"]
    values: Float[np.ndarray, "... 8"]
    rounding: Float[np.ndarray, "..."]


def share_below(c: Float[np.ndarray, "... 4"]) -> Cut:
    """`P(c_0 + c_1 alpha + c_2 gamma + c_3 beta <= 0)` for three strengths uniform on (1, 2), c_1 c_2 c_3 not 0.

    By inclusion and exclusion over the corners v of the unit cube, `sum_v (-1)^|v| (t - <c, v>)_+^3 / (6 c_1 c_2 c_3)`
    with `t = -(c_0 + c_1 + c_2 + c_3)`. The slopes are the derivatives by c.
    """
    z = -c.sum(-1)[..., None] - c[..., 1:] @ CORNERS.T
    positive = np.maximum(z, 0)
    square, size = positive * positive, 6 * c[..., 1:].prod(-1)
    cube = square * positive
    square *= PARITY
    share = (cube @ PARITY) / size
    planes = np.concatenate([square.sum(-1, keepdims=True), square @ (1 + CORNERS)], -1)
    slopes = -3 * planes / size[..., None]
    slopes[..., 1:] -= share[..., None] / c[..., 1:]
    return Cut(share, slopes, -z, ROUNDING * cube.sum(-1) / np.abs(size))


def exact_share_below(c: Sequence[Fraction]) -> Fraction:
    """The same share, exactly, coefficients of strengths that are 0 left out; a form that is 0 counts as below."""
    c_0, *rest = (Fraction(v) for v in c)
    rest = [v for v in rest if v]
    t, n = -c_0 - sum(rest), len(rest)
    corners = itertools.product((0, 1), repeat=n)
    total = sum(
        (-1) ** sum(v) * max(t - sum(a * b for a, b in zip(rest, v, strict=True)), Fraction(0)) ** n for v in corners
    )
    return Fraction(int(t >= 0)) if n == 0 else total / (factorial(n) * prod(rest))


def exact_linear_error(w: Sequence[Fraction], b: Sequence[Fraction], b_0: Fraction) -> Fraction:
    """The probability of `y F <= 0` without noise patches, in rational arithmetic; w and b have K entries."""
    K = check.integer("len(w)", len(w), 2)
    if len(b) != K:
        raise ValueError(f"b: expected {K} entries, one for each of w, got {len(b)}")
    wrong = (
        exact_share_below((y * b_0, w[k], s * w[other], y * b[k]))
        for k, other in itertools.permutations(range(K), 2)
        for y, s in itertools.product((1, -1), repeat=2)
    )
    return sum(wrong, Fraction(0)) / (4 * K * (K - 1))


def linear_error(
    w: Float[np.ndarray, " K"], b: Float[np.ndarray, " K"], b_0: float
) -> tuple[float, Float[np.ndarray, " parameters"]]:
    """The same error in float64 and its derivatives by w, b and b_0; no entry of w and b is 0."""
    K = len(w)
    k, other = np.array([*itertools.permutations(range(K), 2)]).T
    y, s = SIGNS.T
    shape = (len(k), 4)
    c = [np.broadcast_to(v, shape) for v in (y * b_0, w[k, None], s * w[other, None], y * b[k, None])]
    cut = share_below(np.stack(c, -1))
    slopes, gradient = cut.slopes.transpose(2, 0, 1), np.zeros(2 * K + 1)
    np.add.at(gradient, k, slopes[1].sum(1))
    np.add.at(gradient, other, (s * slopes[2]).sum(1))
    np.add.at(gradient, K + k, (y * slopes[3]).sum(1))
    gradient[2 * K] = (y * slopes[0]).sum()
    return float(cut.share.sum()) / (4 * len(k)), gradient / (4 * len(k))


def least_linear_error(K: int, draw: np.random.Generator, starts: int = 24) -> float:
    """The least error that BFGS finds from random starts: no bound, a number to compare bounds with."""

    def error(x: np.ndarray) -> tuple[float, np.ndarray]:
        sign = np.where(x[:K] < 0, -1.0, 1.0)
        value, gradient = linear_error(np.abs(x[:K]) + 1e-6, x[K:-1] + 1e-9, float(x[-1]))
        gradient[:K] *= sign
        return value, gradient

    def start() -> np.ndarray:
        return np.concatenate([draw.uniform(0.3, 1, K), draw.uniform(-1, 1, K), draw.uniform(0, 2, 1)])

    how = dict(jac=True, method="BFGS", options=dict(gtol=1e-10, maxiter=600))
    return min(float(minimize(error, start(), **how).fun) for _ in range(starts))


def explicit_expert(K: int) -> tuple[list[Fraction], list[Fraction], Fraction]:
    """w, b and b_0 of the best linear expert known, K = 2 to 6: light clusters and heavy ones, each kind alike."""
    light, heavy, b_light, b_heavy, b_0, (lights, heavies) = EXPERTS[check.choice("K", K, EXPERTS)]
    w, b = [light] * lights + [heavy] * heavies, [b_light] * lights + [b_heavy] * heavies
    return [Fraction(v, 10**6) for v in w], [Fraction(v, 10**6) for v in b], Fraction(b_0, 10**6)


# --- two clusters: a convex problem -----------------------------------------------------------------------------


def corner_cuts(theta: Sequence[Fraction]) -> tuple[list, list]:
    """How deep the four corners are that an expert cuts off, by theta = (x, b_heavy, b_light, b_0), and their slopes.

    The expert has weights x (light) and 1 (heavy) and answers `b beta + b_0` to centres, b_heavy < 0 < b_light. Each
    depth z is linear in theta, its slopes are the second list; the error is `1/8 + sum z^3 / (48 x |b|)`.
    """
    x, heavy, light, b_0 = theta
    depths = [
        (2 * x - 1 - b_0 - 2 * heavy, (2, -2, 0, -1)),
        (2 * x - 1 + b_0 + heavy, (2, 1, 0, 1)),
        (2 - x - b_0 - light, (-1, 0, -1, -1)),
        (b_0 + 2 * light - 1 - x, (-1, 0, 2, 1)),
    ]
    return [z for z, _ in depths], [slope for _, slope in depths]


def two_cluster_error(theta: Sequence[Fraction]) -> tuple[Fraction, list[Fraction], list[list[Fraction]]]:
    """`1/8 + sum z^3 / (48 x |b|)` at theta = (x, b_heavy, b_light, b_0), gradient and Hessian, exact for Fractions."""
    x, heavy, light, _ = theta
    depths, slopes = corner_cuts(theta)
    value, gradient, hessian = Fraction(1, 8), [Fraction(0)] * 4, [[Fraction(0)] * 4 for _ in range(4)]
    for z, slope, (b, place) in zip(depths, slopes, [(heavy, 1), (heavy, 1), (light, 2), (light, 2)], strict=True):
        term = z**3 / (48 * x * abs(b))
        # logarithmic derivatives: of z^3, minus those of x and of b
        by = [3 * slope[i] / z - (i == 0) / x - (i == place) / b for i in range(4)]
        value += term
        for i, j in itertools.product(range(4), repeat=2):
            second = -3 * Fraction(slope[i] * slope[j]) / z**2
            second += (i == j == 0) / x**2 + (i == j == place) / b**2
            hessian[i][j] += term * (by[i] * by[j] + second)
        gradient = [g + term * part for g, part in zip(gradient, by, strict=True)]
    return value, gradient, hessian


def two_cluster_optimum(digits: int = 30) -> tuple[list[Fraction], Fraction, Fraction]:
    """The best linear expert for two clusters, (x, b_heavy, b_light, b_0), and two ends of the least error.

    Newton's method on Fractions. On the polytope where `1/8 + sum z_+^3/(48 x |b|)`, averaged over beta, is convex and
    bounds the error from below, no parameter is farther than 8 from the optimum, so the error is at least
    `value - 8 sum |gradient|` there; outside, `certify` excludes it.
    """
    theta = [Fraction(v, 10**6) for v in (439256, -739929, 229019, 1142266)]
    value, gradient, hessian = two_cluster_error(theta)
    for _ in range(6):
        step = solve(hessian, gradient)
        theta = [(t - s).limit_denominator(10**digits) for t, s in zip(theta, step, strict=True)]
        value, gradient, hessian = two_cluster_error(theta)
    return theta, value - 8 * sum(map(abs, gradient)), value


def solve(matrix: Sequence[Sequence[Fraction]], right: Sequence[Fraction]) -> list[Fraction]:
    """The solution of a regular system of Fractions, by elimination; ZeroDivisionError if it is singular."""
    rows, n = [[*row, value] for row, value in zip(matrix, right, strict=True)], len(right)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: rows[r][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for r in range(n):
            if r != i and (factor := rows[r][i]):
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [row[n] for row in rows]


# --- branch and bound -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boxes:
    """Boxes of weights and b_0, and for each box and cluster the intervals of `B_k(2)` that are still possible.

    Attributes:
        w, half: centres and half widths of the weights, not falling; the last weight is 1.
        b_0, half_0: the same for b_0.
        box, k: of each interval its box and its cluster.
        end, half_end: centre and half width of the interval, in which `B_k(2) = 2 b_k + b_0` lies.
    """

    w: Float[np.ndarray, "n K"]
    half: Float[np.ndarray, "n K"]
    b_0: Float[np.ndarray, " n"]
    half_0: Float[np.ndarray, " n"]
    box: Int[np.ndarray, " m"]
    k: Int[np.ndarray, " m"]
    end: Float[np.ndarray, " m"]
    half_end: Float[np.ndarray, " m"]

    def __len__(self) -> int:
        return len(self.w)

    def keep(self, alive: Bool[np.ndarray, " n"], intervals: Bool[np.ndarray, " m"] | bool = True) -> "Boxes":
        """These boxes and, of them, these intervals."""
        stay = alive[self.box] & intervals
        place = np.cumsum(alive) - 1
        outer = {name: getattr(self, name)[alive] for name in ("w", "half", "b_0", "half_0")}
        inner = {name: getattr(self, name)[stay] for name in ("k", "end", "half_end")}
        return Boxes(**outer, box=place[self.box[stay]], **inner)

    def parts(self, most: int = 2_000) -> Iterator[tuple[slice, slice, "Boxes"]]:
        """The boxes in parts of few intervals, with the slices of both; intervals lie in order of their boxes."""
        ends = np.searchsorted(self.box, np.arange(len(self) + 1))
        first = 0
        while first < len(self):
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + most, "right")) - 1)
            here, there = slice(first, last), slice(ends[first], ends[last])
            outer = {name: getattr(self, name)[here] for name in ("w", "half", "b_0", "half_0")}
            inner = {name: getattr(self, name)[there] for name in ("k", "end", "half_end")}
            yield here, there, Boxes(**outer, box=self.box[there] - first, **inner)
            first = last


def all_experts(K: int) -> Boxes:
    """Boxes that hold every linear expert with b_0 <= `FAR`, up to symmetry, but for intervals where |B_k| >= 4.

    There, beyond `B_k(2) >= 8` and `B_k(2) <= -8 - b_0`, half of cluster k is wrong.
    """
    edges = [0, 0.5, 1, 1.5, 2, 3, 5, 9, 17, FAR]
    weights = [*itertools.combinations_with_replacement((0.125, 0.375, 0.625, 0.875), K - 1)]
    w, b_0, half_0, box, ends, half_end = [], [], [], [], [], []
    for n, (low_w, (low, high)) in enumerate(itertools.product(weights, itertools.pairwise(edges))):
        w.append([*low_w, 1.0])
        b_0.append((low + high) / 2)
        half_0.append((high - low) / 2)
        width = max(0.125, half_0[-1] / 2)
        count = int(np.ceil((16 + high) / (2 * width)))
        ends += [8 - (2 * i + 1) * width for i in range(count)] * K
        half_end += [width] * count * K
        box += [n] * count * K
    w, box = np.array(w), np.array(box)
    half = np.full_like(w, 0.125)
    half[:, -1] = 0
    k = np.concatenate([np.repeat(np.arange(K), np.sum(box == n) // K) for n in range(len(w))])
    return Boxes(w, half, np.array(b_0), np.array(half_0), box, k, np.array(ends), np.array(half_end))


class Bounds(NamedTuple):
    """Lower bounds of the error of cluster k, summed over the other clusters, on a box and an interval.

    Attributes:
        monotone: for each other cluster, from the corner of the box where each share is least.
        value, slopes: at the centre, and its derivatives by w and b_0.
        loss: what to take off on the way to any other point, but for the slopes by w and b_0.
    """

    monotone: Float[np.ndarray, "m K"]
    value: Float[np.ndarray, " m"]
    slopes: Float[np.ndarray, "m parameters"]
    loss: Float[np.ndarray, " m"]


def bounds(boxes: Boxes) -> Bounds:
    """First- and second-order lower bounds.

    The second order is `second_order_loss` on the way from the centre to any other point.
    """
    m, K = len(boxes.box), boxes.w.shape[1]
    rows, k = np.arange(m), boxes.k
    others = np.array([[i for i in range(K) if i != j] for j in range(K)])[k]
    weight, other = boxes.w[boxes.box, k][:, None], boxes.w[boxes.box[:, None], others]
    half, half_other = boxes.half[boxes.box, k][:, None], boxes.half[boxes.box[:, None], others]
    b_0, half_0 = boxes.b_0[boxes.box][:, None], boxes.half_0[boxes.box][:, None]
    flat = boxes.end == boxes.b_0[boxes.box]  # B would be constant: take another centre
    end = (boxes.end + flat * boxes.half_end / 2)[:, None]
    half_end = (boxes.half_end * (1 + flat / 2))[:, None]

    y, s = SIGNS.T
    highest = _form(weight + half, other, half_other, end, half_end, b_0, half_0)
    monotone = np.zeros((m, K))
    cut = share_below(highest)
    monotone[rows[:, None], others] = np.maximum(cut.share - cut.rounding, 0).sum(2) / 4

    cut = share_below(_form(weight, other, 0 * other, end, 0 * end, b_0, 0 * b_0))
    D = (2 * half + 2 * half_other + np.maximum(half_end, (half_end + half_0) / 2))[..., None]
    moved = half[..., None], half_other[..., None]
    loss = second_order_loss(cut, s, D, (weight - half)[..., None], (other - half_other)[..., None], *moved)
    slopes = np.zeros((m, K + 1))
    by = cut.slopes.transpose(3, 0, 1, 2)
    slopes[rows, k] = by[1].sum((1, 2)) / 4
    slopes[rows[:, None], others] += (s * by[2]).sum(2) / 4
    slopes[:, K] = (y * (by[0] - by[3] / 2)).sum((1, 2)) / 4
    by_end = np.abs((y * by[3] / 2).sum((1, 2)) / 4) * half_end[:, 0]
    raised = (np.abs(end - b_0) / 2 < LEAST) | (other.min(1, keepdims=True) < LEAST)  # not the form at the centre
    by_end += np.where(raised[:, 0], np.inf, 0)
    return Bounds(monotone, cut.share.sum((1, 2)) / 4, slopes, loss.sum((1, 2)) / 4 + by_end)


def second_order_loss(
    cut: Cut,
    s: Float[np.ndarray, "..."],
    D: Float[np.ndarray, "..."],
    weight: Float[np.ndarray, "..."],
    other: Float[np.ndarray, "..."],
    moved: Float[np.ndarray, "..."],
    moved_other: Float[np.ndarray, "..."],
) -> Float[np.ndarray, "..."]:
    """By how much the share below can fall under its tangent, along a segment that starts at `cut`.

    The second derivative is at least `-2 D moved / weight^2`, less `D^2/(weight other)` if the plane l = 0 can meet the
    face alpha = 2. The same holds for gamma, with the face 2 or, if its sign s is -1, the face 1; the better counts.

    Args:
        cut: share and values of the form l at the start.
        s: sign of gamma's coefficient.
        D: by how much l moves at most, at every corner of the cube.
        weight, other: least sizes of the coefficients of alpha and gamma on the segment.
        moved, moved_other: by how much these sizes move at most.
    """
    gamma_high = CORNERS[:, 1] == 1
    by_alpha = _meets(cut.values[..., CORNERS[:, 0] == 1], D)
    by_gamma = np.where(s > 0, *(_meets(cut.values[..., face], D) for face in (gamma_high, ~gamma_high)))
    corner = D * D / (weight * other)
    first = np.where(by_alpha, corner, 0) + 2 * moved * D / weight**2
    second = np.where(by_gamma, corner, 0) + 2 * moved_other * D / other**2
    return np.where(_meets(cut.values, D), np.fmin(first, second) / 2, 0) + 8 * cut.rounding


def _form(weight, other, half_other, end, half_end, b_0, half_0) -> Float[np.ndarray, "m others 4 4"]:
    """Coefficients of `y F` at the centre or, with half widths, at the corner where it is largest for all strengths."""
    y, s = SIGNS.T
    shape = (*other.shape, 4)
    raised, shift = end[..., None] + y * half_end[..., None], b_0[..., None] + y * half_0[..., None]
    by_gamma = s * other[..., None] + half_other[..., None]
    by_beta = y * (raised - shift) / 2
    c = [y * shift, weight[..., None], by_gamma, by_beta]
    c[2:] = [np.where(np.abs(v) < LEAST, LEAST, v) for v in c[2:]]
    return np.stack([np.broadcast_to(v, shape) for v in c], -1)


def _meets(values: Float[np.ndarray, "... corners"], D: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Whether the form can vanish on a face, its corners given, if it moves by at most D."""
    return (values.min(-1) < D) & (values.max(-1) > -D)


#: Errors that are proved to be lower bounds for fewer clusters; `certify` uses them where several weights are near 0.
PROVED = {2: 0.12934024, 3: 0.16956, 4: 0.1765545, 5: 0.18}


def lower_bounds(boxes: Boxes, proved: Mapping[int, float]) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " m"]]:
    """Lower bounds of the error, times K(K - 1), on each box, and with B_k in each interval.

    Clusters decouple, so a bound is the sum over k of the least over the intervals of k. For the second order a linear
    form with slopes `tilt`, those at the best interval, is first taken off each cluster's error; their sum over the
    clusters is small near an optimum. Near w_1 = ... = w_j = 0 pairs among these clusters count as `proved[j]` says.
    """
    n, K = boxes.w.shape
    found, key = bounds(boxes), boxes.box * K + boxes.k
    halves = np.concatenate([boxes.half, boxes.half_0[:, None]], 1)

    def total(per_interval, far) -> tuple[np.ndarray, np.ndarray]:
        """Sum over k of the least, on boxes, and the same with each interval's own in place of its cluster's least."""
        least = np.tile(np.asarray(far, float), (n, 1)).ravel() if np.ndim(far) < 2 else far.ravel().copy()
        np.minimum.at(least, key, per_interval)
        whole = least.reshape(n, K).sum(1)
        return whole, whole[boxes.box] - least[key] + per_interval

    whole, each = total(found.monotone.sum(1), np.full(K, (K - 1) / 2))
    for j in range(2, K):
        near_zero = (boxes.k < j)[:, None] & (np.arange(K) < j)
        far = np.where(np.arange(K) < j, (K - j) / 2, (K - 1) / 2)
        more = [v + j * (j - 1) * proved[j] for v in total((found.monotone * ~near_zero).sum(1), far)]
        whole, each = np.fmax(whole, more[0]), np.fmax(each, more[1])

    best = np.full(n * K, np.inf)
    np.minimum.at(best, key, found.value)
    at = found.value == best[key]
    tilt = np.zeros((n * K, K + 1))
    tilt[key[at]] = found.slopes[at]
    off = np.abs(found.slopes - tilt[key]) * halves[boxes.box]
    second = np.nan_to_num(found.value - found.loss - off.sum(1), nan=-np.inf) - 1e-9
    tilt = tilt.reshape(n, K, K + 1)
    far = (K - 1) / 2 - (np.abs(tilt) * halves[:, None]).sum(2)
    more = [v for v in total(second, far)]
    slope = (np.abs(tilt.sum(1)) * halves).sum(1)
    whole = np.fmax(whole, more[0] - slope)
    return whole, np.fmax(each, more[1] - slope[boxes.box])


def split(boxes: Boxes) -> Boxes:
    """Each box halved where it is widest, without boxes in which weights fall, and intervals halved to its width."""
    n, K = boxes.w.shape
    widths = np.concatenate([2 * boxes.half, boxes.half_0[:, None] / 2], 1)
    at = np.arange(n), widths.argmax(1)
    centre = np.concatenate([boxes.w, boxes.b_0[:, None]], 1)
    half = np.concatenate([boxes.half, boxes.half_0[:, None]], 1)
    half[at] /= 2
    low, high = centre.copy(), centre.copy()
    low[at] -= half[at]
    high[at] += half[at]
    w, half = np.concatenate([low, high]), np.concatenate([half, half])
    k, end, half_end = (np.tile(v, 2) for v in (boxes.k, boxes.end, boxes.half_end))
    both = Boxes(
        w[:, :K], half[:, :K], w[:, K], half[:, K], np.concatenate([boxes.box, boxes.box + n]), k, end, half_end
    )
    rising = (both.w[:, 1:] + both.half[:, 1:] >= both.w[:, :-1] - both.half[:, :-1]).all(1)
    both = both.keep(rising)
    limit = 1.01 * np.maximum((2 * both.half).max(1), both.half_0 / 2)[both.box]
    while (wide := both.half_end > limit).any():
        part = both.half_end[wide] / 2
        box, k = (np.concatenate([v[~wide], v[wide], v[wide]]) for v in (both.box, both.k))
        end = np.concatenate([both.end[~wide], both.end[wide] - part, both.end[wide] + part])
        half_end = np.concatenate([both.half_end[~wide], part, part])
        both = replace(both, box=box, k=k, end=end, half_end=half_end)
        limit = np.concatenate([limit[~wide], limit[wide], limit[wide]])
    order = np.argsort(both.box, kind="stable")
    return replace(both, box=both.box[order], k=both.k[order], end=both.end[order], half_end=both.half_end[order])


def in_polytope(boxes: Boxes) -> Bool[np.ndarray, " n"]:
    """For K = 2: whether the boxes, or their mirror images by y, lie where the error has a convex lower bound.

    That is `|B_heavy| <= 2 - 2x` and `max(1 - x, 2x - 1) <= B_light <= 2 + x` at every strength of the centre.
    """
    x, half = boxes.w[boxes.box, 0], boxes.half[boxes.box, 0]
    b_0, half_0 = boxes.b_0[boxes.box], boxes.half_0[boxes.box]
    ends = [boxes.end - boxes.half_end, boxes.end + boxes.half_end]
    starts = [(ends[0] + b_0 - half_0) / 2, (ends[1] + b_0 + half_0) / 2]  # B(1)
    low, high = np.minimum(ends[0], starts[0]), np.maximum(ends[1], starts[1])
    heavy = np.maximum(-low, high) <= 2 - 2 * (x + half)
    least, most = np.maximum(1 - x + half, 2 * (x + half) - 1), 2 + x - half
    light = ((low >= least) & (high <= most)) | ((-high >= least) & (-low <= most))
    out = ~np.where(boxes.k == 1, heavy, light)
    return np.bincount(boxes.box, out, len(boxes)) == 0


class Certificate(NamedTuple):
    """How branch and bound ended: whether no expert is left, how many boxes were bounded, and at how many levels."""

    proved: bool
    boxes: int
    levels: int


def certify(K: int, error: float, *, most: int = 200_000, proved: Mapping[int, float] = PROVED) -> Certificate:
    """Prove that no linear expert errs less often than `error` on the task of Table 7 with K clusters.

    For K = 2 boxes in the polytope of `two_cluster_optimum` are left to it. The search gives up, and proves nothing,
    when more than `most` boxes are left.

    Args:
        K: number of clusters, at least 2.
        error: in (0, 0.22), beyond which experts with b_0 > `FAR` would count.
        most: boxes at a level.
        proved: lower bounds of the error for 2 to K - 1 clusters.
    """
    check.integer("K", K, 2)
    if not 0 < error < 0.22:
        raise ValueError(f"error: expected a number in (0, 0.22), got {error!r}")
    if missing := {*range(2, K)} - {*proved}:
        raise ValueError(f"proved: expected a bound for each number of clusters below {K}, missing {sorted(missing)}")
    boxes, count, level = all_experts(K), 0, 0
    while 0 < len(boxes) <= most:
        whole, each = np.empty(len(boxes)), np.empty(len(boxes.box))
        with np.errstate(all="ignore"):  # where a weight can be 0 the second order has no bound
            for here, there, part in boxes.parts():
                whole[here], each[there] = lower_bounds(part, proved)
        limit = error * K * (K - 1)
        count, level = count + len(boxes), level + 1
        boxes = boxes.keep(~(whole > limit), ~(each > limit))
        if K == 2:
            boxes = boxes.keep(~in_polytope(boxes))
        boxes = split(boxes)
    return Certificate(len(boxes) == 0, count, level)
