import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from moe_theory.theory import linear_ceiling as lc

COUNT = 400_000


def sampled_error(w, b, b_0, seed=0):
    """Share of `y F <= 0` on sampled examples, without any formula of the module."""
    rng, w, b = np.random.default_rng(seed), np.array(w, float), np.array(b, float)
    k = rng.integers(len(w), size=COUNT)
    other = (k + rng.integers(1, len(w), size=COUNT)) % len(w)
    alpha, beta, gamma = rng.uniform(1, 2, (3, COUNT))
    y, epsilon = rng.choice([-1, 1], (2, COUNT))
    F = y * alpha * w[k] + beta * b[k] + epsilon * gamma * w[other] + float(b_0)
    return float((y * F <= 0).mean())


def random_expert(K, seed):
    rng = np.random.default_rng(seed)
    return np.append(rng.uniform(0.1, 1, K - 1), 1.0), rng.uniform(-1.5, 1.5, K), float(rng.uniform(0, 2))


@pytest.mark.parametrize(("K", "seed"), [(2, 0), (3, 1), (4, 2), (5, 3)])
def test_the_error_is_that_of_sampled_examples(K, seed):
    w, b, b_0 = random_expert(K, seed)
    error, _ = lc.linear_error(w, b, b_0)
    assert abs(sampled_error(w, b, b_0) - error) < 4 * (0.25 / COUNT) ** 0.5
    exact = lc.exact_linear_error([Fraction(v) for v in w], [Fraction(v) for v in b], Fraction(b_0))
    assert float(exact) == pytest.approx(error, abs=1e-12)


def test_derivatives_of_the_error_are_finite_differences():
    w, b, b_0 = random_expert(4, 5)
    x, gradient = np.concatenate([w, b, [b_0]]), lc.linear_error(w, b, b_0)[1]
    for i, step in enumerate(1e-6 * np.eye(9)):
        ends = [lc.linear_error(v[:4], v[4:8], float(v[8]))[0] for v in (x + step, x - step)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


@given(c=st.lists(st.fractions(-3, 3, max_denominator=20), min_size=4, max_size=4))
@settings(max_examples=100, deadline=None)
def test_the_exact_share_lies_between_those_of_a_grid(c):
    """Cells of the cube that lie below as a whole, and cells that a part of lies below."""
    u, size = 1 + (np.arange(30) + 0.5) / 30, sum(map(abs, c[1:])) / 60
    form = float(c[0]) + sum(float(a) * v for a, v in zip(c[1:], np.meshgrid(u, u, u), strict=True))
    share = lc.exact_share_below(c)
    assert (form < -float(size) - 1e-9).mean() <= share <= (form <= float(size) + 1e-9).mean()
    assert share + lc.exact_share_below([-v for v in c]) == (1 if any(c) else 2)


def test_an_expert_without_weights_guesses():
    zero = [Fraction(0)] * 3
    assert lc.exact_linear_error(zero, zero, Fraction(0)) == 1  # a tie is an error
    assert lc.exact_linear_error(zero, zero, Fraction(1)) == Fraction(1, 2)


@pytest.mark.parametrize("K", lc.EXPERTS)
def test_explicit_experts_are_the_best_that_a_climb_finds(K):
    w, b, b_0 = lc.explicit_expert(K)
    error = float(lc.exact_linear_error(w, b, b_0))
    assert error == pytest.approx(lc.least_linear_error(K, np.random.default_rng(K), starts=12), abs=1e-8)
    assert error >= float(lc.PROVED.get(K, 0))


def test_one_of_three_clusters_can_copy_another():
    """A pair of equal clusters errs in a quarter: two pairs of the optimum for two clusters, and one of equal ones."""
    two, three = (lc.exact_linear_error(*lc.explicit_expert(K)) for K in (2, 3))
    assert three == (2 * two + Fraction(1, 4)) / 3


def test_the_optimum_for_two_clusters_is_exact_and_stationary():
    (x, heavy, light, b_0), low, high = lc.two_cluster_optimum()
    assert lc.exact_linear_error([x, Fraction(1)], [light, heavy], b_0) == high
    assert 0 <= high - low < Fraction(1, 10**40)
    assert float(1 - high) == pytest.approx(0.8706597538324267, abs=1e-15)
    w, b = np.array([float(x), 1]), np.array([float(light), float(heavy)])
    assert np.abs(lc.linear_error(w, b, float(b_0))[1]).max() < 1e-12


def test_the_minimum_is_where_the_page_says():
    """Hessian minus a multiple of the identity: pivots of elimination are positive for 0.005, not for 0.006."""
    _, gradient, hessian = lc.two_cluster_error(lc.two_cluster_optimum()[0])

    def definite(shift):
        rows = [[v - (i == j) * shift for j, v in enumerate(row)] for i, row in enumerate(hessian)]
        for i in range(4):
            if rows[i][i] <= 0:
                return False
            for r in range(i + 1, 4):
                rows[r] = [a - rows[r][i] / rows[i][i] * b for a, b in zip(rows[r], rows[i], strict=True)]
        return True

    assert definite(Fraction(5, 1000)) and not definite(Fraction(6, 1000))
    assert max(map(abs, gradient)) < Fraction(1, 10**55)


def polytope_points(n, seed=0):
    """Experts for two clusters with `|B_heavy| <= 2 - 2x` and `max(1 - x, 2x - 1) <= B_light <= 2 + x`."""
    rng = np.random.default_rng(seed)
    while n:
        x, light = rng.uniform(0.05, 0.95), rng.uniform(0, 3, 2)
        first = rng.uniform(-2, 2)
        b_0 = 2 * light[0] - light[1]
        heavy = np.array([first, 2 * first - b_0])
        inside = np.abs(heavy).max() <= 2 - 2 * x and max(1 - x, 2 * x - 1) <= light.min() and light.max() <= 2 + x
        if inside:
            n -= 1
            yield x, light, heavy


def test_the_error_on_the_polytope_is_convex_from_below():
    """On segments: the four convex terms are no more than the error, and convex."""

    def ends(x, light, heavy):
        return np.array([x, 1]), np.array([light[1] - light[0], heavy[1] - heavy[0]]), 2 * light[0] - light[1]

    def convex(x, light, heavy):
        beta = (np.arange(2000) + 0.5) / 2000
        low, high = light[0] + beta * (light[1] - light[0]), heavy[0] + beta * (heavy[1] - heavy[0])
        heights = (high - 1 + 2 * x, -high - 1 + 2 * x, 2 - x - low, low - 1 - x)
        parts = [np.where(h < x, np.maximum(h, 0) ** 2 / (2 * x), h - x / 2) for h in heights]
        return (1 + sum(part.mean() for part in parts)) / 8

    points = [np.array([x, *light, *heavy]) for x, light, heavy in polytope_points(60)]

    def both(v):
        return convex(v[0], v[1:3], v[3:]), lc.linear_error(*ends(v[0], v[1:3], v[3:]))[0]

    for one, two in itertools.pairwise(points):
        (a, error), (b, _), (middle, _) = both(one), both(two), both((one + two) / 2)
        assert middle <= (a + b) / 2 + 1e-12 and a <= error + 1e-6


def random_boxes(K, size, count, seed):
    """Boxes as `split` makes them, with an interval of `B_k(2)` for each cluster."""
    rng, step = np.random.default_rng(seed), 2.0 ** -rng_power(size)
    w = np.sort(step * (2 * rng.integers(0, int(0.5 / step), (count, K)) + 1), 1)
    w[:, -1] = 1
    half = np.full((count, K), step)
    half[:, -1] = 0
    b_0 = step * (2 * rng.integers(0, int(1 / step), count) + 1)
    end = step * (2 * rng.integers(-int(1 / step), int(1 / step), count * K) + 1)
    box, k = np.repeat(np.arange(count), K), np.tile(np.arange(K), count)
    return lc.Boxes(w, half, b_0, np.full(count, step), box, k, end, np.full(count * K, step))


def rng_power(size):
    return {"wide": 3, "narrow": 7}[size]


@pytest.mark.parametrize(("K", "size"), [(2, "wide"), (2, "narrow"), (4, "wide"), (4, "narrow")])
def test_bounds_are_below_the_error_of_every_point(K, size):
    boxes = random_boxes(K, size, 40, 1)
    with np.errstate(all="ignore"):
        whole, _ = lc.lower_bounds(boxes, dict.fromkeys(range(2, K), 0.0))
    rng, closest = np.random.default_rng(2), []
    for n, bound in enumerate(whole / (K * (K - 1))):
        errors = []
        for kind in range(8):
            move = rng.choice([-1.0, 1], 2 * K + 1) if kind % 2 else rng.uniform(-1, 1, 2 * K + 1)
            w = np.maximum(boxes.w[n] + boxes.half[n] * move[:K], 1e-6)
            b_0 = boxes.b_0[n] + boxes.half_0[n] * move[K]
            own = boxes.box == n
            b = (boxes.end[own] + boxes.half_end[own] * move[K + 1 :] - b_0) / 2
            exact = [[Fraction(float(v)) for v in part] for part in (w, b)]
            errors.append(float(lc.exact_linear_error(*exact, Fraction(float(b_0)))))
        closest.append(min(errors) - bound)
    assert min(closest) >= -1e-12
    assert np.median(closest) < (0.45 if size == "wide" else 0.03)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_share_loses_less_on_a_segment_than_the_lemma_says(sign):
    """On random segments, and nearly as much where the plane moves in parallel across the face."""
    rng, n = np.random.default_rng(int(sign) + 7), 20_000
    start = np.stack([rng.uniform(-2, 2, n), *rng.uniform(0.2, 1, (2, n)), rng.uniform(0.1, 1.5, n)], -1)
    move = rng.uniform(-1, 1, (n, 4)) * rng.choice([0.3, 0.03], (n, 1)) * rng.choice([0.0, 1.0], (n, 4), p=[0.3, 0.7])
    move[:, 1:3] = np.maximum(move[:, 1:3], 0.1 - start[:, 1:3])
    move[:, 3] = np.maximum(move[:, 3], 0.05 - start[:, 3])
    start[:, 2], move[:, 2] = sign * start[:, 2], sign * move[:, 2]
    before, after = lc.share_below(start), lc.share_below(start + move)
    D = np.abs(move[:, :1] + move[:, 1:] @ (1 + lc.CORNERS.T)).max(1)
    least = np.minimum(np.abs(start), np.abs(start + move))
    loss = lc.second_order_loss(before, np.full(n, sign), D, least[:, 1], least[:, 2], *np.abs(move[:, 1:3]).T)
    fallen = before.share + (before.slopes * move).sum(1) - after.share
    assert (fallen <= loss + 1e-9).all()
    far = loss > 1e-5
    assert 0.5 < (fallen[far] / loss[far]).max() <= 1


def test_branch_and_bound_proves_what_is_true_and_nothing_else():
    assert lc.certify(2, 0.1305).proved and lc.certify(3, 0.169).proved
    assert not lc.certify(3, 0.1697, most=2000).proved
    assert lc.certify(2, 0.15).proved and not lc.certify(2, 0.157, most=1000).proved  # outside the polytope


@pytest.mark.slow
def test_the_ceiling_of_four_clusters_is_proved_again():
    """The search on which the upper end for K = 4 rests; the page repeats a shorter one."""
    found = lc.certify(4, lc.PROVED[4])
    assert found.proved and found.boxes == 70_788 and found.levels == 44


def test_the_largest_ratio_is_that_of_a_linear_program():
    """`b_k`, `b_0` and `w_light` for which the windows of Theorem 4.1 hold at all ends, r by bisection."""

    def attains(r, q):
        rows, limits = [], []  # of x, b_heavy, b_light, b_0
        for beta in (1, q):
            rows += [[0, 0, -beta, -1], [0, 0, beta, 1]]  # r - x <= B_light <= 1 + x
            rows[-2][0], rows[-1][0] = -1, -1
            limits += [-r, 1]
            rows += [[r, s * beta, 0, s] for s in (1, -1)]  # |B_heavy| <= 1 - r x
            limits += [1, 1]
        free = (None, None)
        return linprog([0] * 4, rows, limits, bounds=[(0, None), free, free, free]).status == 0

    for q in (1, 1.5, 2, 4):
        low, high = 1.0, 3.0
        while high - low > 1e-7:
            low, high = ((low + high) / 2, high) if attains((low + high) / 2, q) else (low, (low + high) / 2)
        assert low == pytest.approx(lc.largest_ratio(q), abs=1e-6)
    assert lc.largest_ratio(3**0.5) == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: lc.largest_ratio(0.5), "q: expected"),
        (lambda: lc.explicit_expert(9), "K: expected"),
        (lambda: lc.certify(1, 0.1), "K: expected"),
        (lambda: lc.certify(3, 0.3), "error: expected"),
        (lambda: lc.certify(4, 0.1, proved={2: 0.1}), "proved: expected"),
        (lambda: lc.exact_linear_error([Fraction(1)] * 2, [Fraction(1)], Fraction(0)), "b: expected 2"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        call()
