"""Bounds on the gate of the selected experts, and its derivatives."""

import itertools
import math

import pytest
import torch

from moe_theory.models.rules import sampled_topk, softmax_topk, topk_softmax
from moe_theory.theory import gates


def _logits(k, spread, draws=2000, seed=0):
    """Random logits whose largest and smallest are `spread` apart."""
    h = torch.rand(draws, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    h[:, 0], h[:, 1] = 0.0, 1.0
    return spread * h


@pytest.mark.parametrize(("k", "spread"), [(2, 0.5), (5, 1.0), (16, 3.0)])
def test_the_gate_range_is_kept_and_attained(k, spread):
    low, high = gates.gate_range(k, spread)
    pi = _logits(k, spread).softmax(-1)
    assert low <= float(pi.min()) and float(pi.max()) <= high
    one_apart = torch.zeros(2, k, dtype=torch.float64)
    one_apart[0, 0], one_apart[1, 0] = spread, -spread
    assert one_apart.softmax(-1)[:, 0].tolist() == pytest.approx([high, low], rel=1e-12)
    assert high < math.exp(spread) / k and low > math.exp(-spread) / k


@pytest.mark.parametrize(("k", "spread"), [(2, 1.0), (8, 1.0), (33, 4.0)])
def test_the_energy_bound_is_kept_and_nearly_attained(k, spread):
    energy = (_logits(k, spread).softmax(-1) ** 2).sum(-1)
    bound = gates.energy_bound(k, spread)
    assert 1 / k < float(energy.min()) and float(energy.max()) <= bound
    two_values = [[spread] * top + [0.0] * (k - top) for top in range(1, k)]
    best = float((torch.tensor(two_values, dtype=torch.float64).softmax(-1) ** 2).sum(-1).max())
    assert 0.8 * bound < best <= bound
    if k == 33:  # a bound a tenth smaller would be exceeded
        assert best > 0.9 * bound


@pytest.mark.parametrize("rule", [topk_softmax, softmax_topk, sampled_topk])
@pytest.mark.parametrize("k", [1, 3])
def test_jumps_are_bounded_and_the_bound_is_attained(rule, k):
    h = torch.randn(500, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sort(-1, True).values
    h[:, k] = h[:, k - 1]
    h[0] = torch.tensor([0.0] * (k + 1) + [-50.0] * (7 - k))
    pi = rule.gates(h, k, torch.zeros_like(h))
    last = pi.masked_fill(pi == 0, 2).amin(-1)
    assert float(last.max()) == pytest.approx(gates.jump_bound(k, rule), rel=1e-12)


@pytest.mark.parametrize("rule", [topk_softmax, softmax_topk])
@pytest.mark.parametrize("k", [1, 3])
def test_the_jump_at_a_tie_is_the_gate_of_the_last_expert(rule, k):
    rng = torch.Generator().manual_seed(3)
    h, f = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((50, 8), (50, 8, 2)))
    found = gates.jumps_at_ties(k, rule, h, f)
    tied = h.sort(-1, descending=True).values
    tied[:, k - 1] = tied[:, k] = tied[:, k - 1 : k + 1].mean(-1)
    share = tied.softmax(-1) if rule is softmax_topk else tied[:, :k].softmax(-1)
    assert torch.allclose(found, share[:, k - 1], atol=1e-9)


def test_the_hessian_of_a_router_whose_logits_share_all_parameters():
    rng = torch.Generator().manual_seed(4)
    A, f, p = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((4, 5), (4,), (5,)))

    def logits(p):
        return torch.sin(A @ p)

    parts = logits(p).softmax(0), f, torch.func.jacrev(logits)(p), torch.func.hessian(logits)(p)
    exact = torch.func.hessian(lambda p: logits(p).softmax(0) @ f)(p)
    assert torch.allclose(gates.router_hessian(*parts), exact, atol=1e-13)
    pi, _, dh, d2h = parts
    printed = torch.zeros(5, 5, dtype=torch.float64)
    for j, k in itertools.product(range(4), repeat=2):
        pair = dh[j] - dh[k]
        mean = sum(pi[m] * (dh[j] - dh[m]) for m in range(4)) / 4
        printed += pi[j] * f[j] * (4 * torch.outer(mean, mean) + pi[k] ** 2 * torch.outer(pair, pair))
        printed += pi[j] * f[j] * pi[k] * (d2h[j] - d2h[k])
    assert torch.allclose(gates.printed_router_hessian(*parts), printed, atol=1e-13)


def test_jacobian_and_hessian_in_the_logits():
    rng = torch.Generator().manual_seed(2)
    h, f = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((4,), (4, 3)))

    def F(h):
        return h.softmax(0) @ f

    pi = h.softmax(0)
    J = torch.func.jacrev(F)(h)
    assert torch.allclose(gates.gate_jacobian(pi, f), J.T, atol=1e-13)
    H = torch.func.hessian(F)(h).permute(1, 2, 0)
    assert torch.allclose(gates.gate_hessian(pi, f), H, atol=1e-13)
    assert float(gates.gate_hessian(pi, f).sum(0).abs().max()) < 1e-13  # adding a number to all logits changes nothing
    # the sign of the second term matters
    phi = f - pi @ f
    wrong = torch.stack([pi[i] * pi[j] * (phi[i] + phi[j]) for i, j in itertools.product(range(4), repeat=2)])
    assert float((gates.gate_hessian(pi, f) + 2 * wrong.reshape(4, 4, 3) - H).abs().max()) > 1e-2


def test_bad_arguments_are_named():
    for call, message in (
        (lambda: gates.gate_range(0, 1.0), "k: expected an integer >= 1"),
        (lambda: gates.gate_range(2, -1.0), "spread: expected a finite number >= 0"),
        (lambda: gates.energy_bound(2, math.nan), "spread"),
        (lambda: gates.jump_bound(2, "softmax"), "rule: expected one of"),
        (lambda: gates.energy_bound(2.5, 1.0), "k: expected an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
