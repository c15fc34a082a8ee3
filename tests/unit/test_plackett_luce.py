import itertools
import math

import pytest
import torch

from moe_theory.models.rules import gumbel, sampled_topk
from moe_theory.theory.plackett_luce import (
    expected_output,
    inclusion_by_orders,
    inclusion_by_quadrature,
    inclusion_by_sets,
    inclusion_probabilities,
    order_probability,
    orders,
    pathwise_and_score,
    set_gates,
    set_probability,
    subsets,
)


def logits(M, seed=0, scale=1.5):
    return scale * torch.randn(M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(h, order):
    """The product of Plackett and Luce, written as a loop."""
    w, p = {m: math.exp(v) for m, v in enumerate(h.tolist())}, 1.0
    for m in order:
        p *= w[m] / sum(w.values())
        del w[m]
    return p


@pytest.mark.parametrize("M, k", [(1, 1), (3, 2), (5, 3), (5, 5), (6, 1)])
def test_orders_and_sets_against_the_product(M, k):
    h = logits(M)
    p = order_probability(h, orders(M, k))
    assert p.tolist() == pytest.approx([by_hand(h, s) for s in itertools.permutations(range(M), k)], abs=1e-14)
    assert float(p.sum()) == pytest.approx(1, abs=1e-13)
    members = subsets(M, k)
    assert len(members) == math.comb(M, k)
    sums = [sum(by_hand(h, s) for s in itertools.permutations(row.nonzero()[:, 0].tolist())) for row in members]
    assert set_probability(h, members).tolist() == pytest.approx(sums, abs=1e-13)


@pytest.mark.parametrize("M, k", [(2, 1), (4, 2), (6, 4), (8, 3), (8, 7), (8, 8)])
def test_three_routes_to_the_inclusion_probabilities(M, k):
    h = logits(M, seed=M + k)
    p = inclusion_by_sets(h, k)
    assert (p - inclusion_by_orders(h, k)).abs().max() < 1e-12
    assert (p - inclusion_by_quadrature(h, k)).abs().max() < 1e-12
    assert float(p.sum()) == pytest.approx(k, abs=1e-12)
    assert torch.equal(p, inclusion_probabilities(h, k))
    if k not in (1, M):  # neither K softmax nor the softmax
        assert (p - k * h.softmax(0)).abs().max() > 1e-2 and (p - h.softmax(0)).abs().max() > 1e-2


def test_special_cases_and_many_experts():
    h = logits(40)
    assert (inclusion_probabilities(h, 1) - h.softmax(0)).abs().max() < 1e-14
    assert (inclusion_probabilities(h, 40) - 1).abs().max() < 1e-12
    assert (inclusion_probabilities(torch.zeros(20), 7) - 7 / 20).abs().max() < 1e-13
    spread = torch.tensor([0.0, -1.0, 300.0, 299.0])
    assert (inclusion_by_quadrature(spread, 2) - inclusion_by_orders(spread, 2)).abs().max() < 1e-12
    p, pi = inclusion_probabilities(h, 9), h.softmax(0)
    order = h.argsort()
    assert (p[order].diff() > 0).all() and ((p / pi)[order].diff() < 0).all()


def test_gumbel_top_k_draws_this_law():
    h, k, draws = logits(5), 3, 50_000
    noise = gumbel((draws, 5), torch.Generator().manual_seed(1), torch.float64)
    drawn = (sampled_topk(h.expand(draws, 5), k, noise) > 0).double()
    p = inclusion_probabilities(h, k)
    assert ((drawn.mean(0) - p).abs() < 4 * (p * (1 - p) / draws).sqrt()).all()
    # a Gaussian in place of the Gumbel law is noticed
    wrong = torch.randn(draws, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = (sampled_topk(h.expand(draws, 5), k, wrong) > 0).double()
    assert ((drawn.mean(0) - p).abs() > 4 * (p * (1 - p) / draws).sqrt()).any()


def test_only_the_inclusion_gate_is_unbiased():
    h, f = logits(6), torch.randn(6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    dense, pi = h.softmax(0) @ f, h.softmax(0)
    for k in range(1, 7):
        assert (expected_output(h, f, k, "inclusion") - dense).abs().max() < 1e-12
        kept = (inclusion_probabilities(h, k) * pi) @ f
        assert (expected_output(h, f, k, "all") - kept).abs().max() < 1e-12
        assert ((expected_output(h, f, k, "all") - dense).abs().max() > 1e-4) == (k < 6)
        assert ((expected_output(h, f, k, "selected") - dense).abs().max() > 1e-4) == (1 < k < 6)
    assert (set_gates(h, subsets(6, 2), "selected").sum(1) - 1).abs().max() < 1e-14


def squared_losses(f, gate):
    return lambda h, members: ((set_gates(h, members, gate) @ f - 1) ** 2).sum(1)


@pytest.mark.parametrize("gate", ["all", "selected", "inclusion"])
def test_pathwise_and_score_make_the_whole_gradient(gate):
    h, k = logits(4), 2
    f = torch.randn(4, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    losses = squared_losses(f, gate)

    def expected(t):
        members = subsets(4, k)
        return float(set_probability(t, members) @ losses(t, members))

    step = 1e-5 * torch.eye(4, dtype=torch.float64)
    whole = torch.tensor([(expected(h + e) - expected(h - e)) / 2e-5 for e in step], dtype=torch.float64)
    pathwise, score = pathwise_and_score(h, k, losses)
    assert (pathwise + score - whole).abs().max() < 1e-8
    assert (pathwise - whole).abs().max() > 1e-3 and (score - whole).abs().max() > 1e-3


def test_one_expert_selected_then_normalized_has_no_pathwise_gradient():
    h, f = logits(4), logits(4, seed=5)[:, None]
    pathwise, score = pathwise_and_score(h, 1, squared_losses(f, "selected"))
    p, l = h.softmax(0), (f[:, 0] - 1) ** 2  # noqa: E741
    assert (pathwise == 0).all()
    assert (score - p * (l - p @ l)).abs().max() < 1e-14


def test_bad_logits_and_sizes():
    with pytest.raises(ValueError, match="h: expected finite"):
        inclusion_probabilities(torch.tensor([0.0, math.nan]), 1)
    with pytest.raises(ValueError, match="h: expected the logits of one input"):
        inclusion_by_sets(torch.zeros(2, 3), 1)
    with pytest.raises(ValueError, match="h: expected logits within 600"):
        inclusion_by_quadrature(torch.tensor([0.0, 700.0]), 1)
    with pytest.raises(ValueError, match="h: expected at most 12"):
        set_probability(torch.zeros(13), subsets(13, 2))
    with pytest.raises(ValueError, match="k: expected at most M = 3"):
        inclusion_by_orders(torch.zeros(3), 4)
    with pytest.raises(ValueError, match="k: expected an integer >= 1"):
        inclusion_by_quadrature(torch.zeros(3), 0)


def test_bad_orders_members_and_gates():
    with pytest.raises(ValueError, match="order: expected distinct"):
        order_probability(torch.zeros(3), torch.tensor([[0, 1], [2, 2]]))
    with pytest.raises(ValueError, match="members: expected rows"):
        set_probability(torch.zeros(3), torch.tensor([[True, False, False], [True, True, False]]))
    with pytest.raises(ValueError, match="gate: expected one of"):
        set_gates(torch.zeros(3), subsets(3, 2), "softmax")
