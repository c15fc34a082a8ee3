"""Sets drawn anew: SGD, overlaps and bounds against enumeration."""

from itertools import product

import pytest
import torch

from moe_theory.theory import drawn_sets
from moe_theory.theory import plackett_luce as pl
from moe_theory.theory.headed_blocks import section_42
from moe_theory.theory.uniform_stability import LOGISTIC


@pytest.fixture(scope="module")
def problem():
    return drawn_sets.draw_problem(7, 3, seed=11)


def some_gates(problem, k=2):
    return torch.zeros_like(problem.noise).scatter(2, problem.noise.topk(k).indices, 1.0) / k


def test_training_is_that_of_automatic_differentiation(problem):
    gates, alpha, data = some_gates(problem), 0.7, drawn_sets.NEIGHBOURS[0]
    ours = drawn_sets.trained(problem, data, gates, alpha, LOGISTIC)
    for run, index in enumerate(problem.index):
        theta = torch.zeros(6, 2, dtype=torch.float64)
        for t, i in enumerate(index):
            x, y = problem.x[data[i]], problem.y[data[i]]
            slope = torch.func.grad(lambda w, x=x, y=y, t=t: LOGISTIC.value(gates[run, t] @ w @ x, y))  # noqa: B023
            theta = theta - alpha * slope(theta)
        torch.testing.assert_close(ours[run], theta)


@pytest.mark.parametrize("gate", ["all", "selected"])
def test_overlap_is_the_mean_over_pairs_of_sets(problem, gate):
    members = pl.subsets(6, 3)
    p, gates = pl.set_probability(problem.h, members), pl.set_gates(problem.h, members, gate)
    assert drawn_sets.overlap(problem.h, 3, gate) == pytest.approx(float(p @ (gates @ gates.T) @ p), rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_stability_of_three_experts_over_all_sets_is_below_both_bounds(k):
    """Two visits, every sequence of sets: no draws."""
    _, x, y = drawn_sets.random_points(torch.Generator().manual_seed(k))
    members, N, alpha = pl.subsets(3, k).double() / k, 2, 1.5
    index = torch.cartesian_prod(*[torch.arange(4)] * N)
    choices = list(product(range(4**N), *[range(len(members))] * N))
    noise = torch.zeros(len(choices), N + 1, 3, dtype=torch.float64)
    every = drawn_sets.Problem(x, y, torch.zeros(3, dtype=torch.float64), index[[c[0] for c in choices]], noise)
    gates = torch.stack([torch.stack([members[s] for s in (*c[1:], 0)]) for c in choices])

    def read(data):
        theta = drawn_sets.trained(every, data, gates, alpha, LOGISTIC)
        return LOGISTIC.value(torch.einsum("sm,rmd,pd->srp", members, theta, x), y)

    first = read(drawn_sets.DATA)
    eps = max(float((first - read(other)).abs().mean((0, 1)).max()) for other in drawn_sets.NEIGHBOURS)
    assert 0 < eps < drawn_sets.fresh_bound(alpha, LOGISTIC.curvature, k, 3, N, 4)
    drawn = torch.Generator().manual_seed(1)
    problem = drawn_sets.equal_logits(x, y, 3, N, drawn)
    many = problem._replace(
        index=problem.index.repeat(2_000, 1), noise=torch.rand(16 * 2_000, N + 1, 3, generator=drawn).double()
    )
    assert drawn_sets.fresh_stability(many, k, alpha, LOGISTIC) == pytest.approx(eps, rel=0.02)


@pytest.mark.parametrize(("k", "M"), [(1, 4), (2, 5), (3, 7), (6, 6)])
@pytest.mark.parametrize("N", [1, 3, 10])
@pytest.mark.parametrize("share", [0.1, 2.0])
def test_bounds_for_equal_logits_from_all_sets(k, M, N, share):
    at = share * k / 0.25, 0.25, k, M, N, 5
    assert drawn_sets.fresh_bound(*at) == pytest.approx(drawn_sets.fresh_bound_by_sets(*at), rel=1e-12)


def test_the_simpler_form_is_attained_at_equal_logits_only(problem):
    for s, k in product((0.0, 1.0), range(1, 7)):
        at = problem._replace(h=s * problem.h)
        bound = drawn_sets.anew_bound(at, k, section_42, "selected", 1.0)
        simple = drawn_sets.spread_bound(at, k, 1.0)
        assert bound < simple if s else bound == pytest.approx(simple, rel=1e-12)


@pytest.mark.parametrize("N", [1, 3])
def test_witness_has_its_closed_form(N):
    rows = drawn_sets.fresh_sweep(
        *drawn_sets.fresh_witness(N), 8, N, lambda k: 2.0 * k, torch.Generator().manual_seed(3)
    )
    assert [row["eps"] for row in rows] == pytest.approx([row["lead"] for row in rows], rel=1e-9)
