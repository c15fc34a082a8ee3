import math
import re

import pytest
import torch

from moe_theory.models.routers import MLPRouter, MultiHeadRouter
from moe_theory.models.rules import RULES, gumbel, sampled_topk, softmax_topk, topk_set, topk_softmax
from moe_theory.models.systems import SYSTEMS
from moe_theory.theory import router_gradient
from moe_theory.theory.router_gradient import (
    Ray,
    affine_loss,
    boundary_rays,
    boundary_term,
    circle_term,
    disc_integral,
    equation_20,
    kept_mass,
    logit_jacobian,
    mean_gradient,
    plane_nodes,
    plane_risk,
    reaches_router,
    risk_differences,
    top1_norm,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_autograd(h, f, k, rule, noise):
    return torch.autograd.functional.jacobian(lambda h: rule.gates(h, k, noise) @ f, h).T


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("M", [1, 2, 5])
def test_jacobian_is_that_of_autograd(rule, M):
    h, f, noise = 2 * draw(M), draw(M, 3, seed=1), gumbel((M,), torch.Generator().manual_seed(2), torch.float64)
    for k in range(1, M + 1):
        found, exact = logit_jacobian(h, f, k, rule, noise), by_autograd(h, f, k, rule, noise)
        assert (found - exact).abs().max() < 1e-14
        assert found.sum(0).abs().max() < 1e-14
    assert torch.equal(logit_jacobian(h[None], f[None], 1, rule, noise[None])[0], logit_jacobian(h, f, 1, rule, noise))


def test_the_two_orders_are_not_interchangeable():
    h, f = 2 * draw(5), draw(5, 3, seed=1)
    wrong = logit_jacobian(h, f, 2, softmax_topk) - by_autograd(h, f, 2, topk_softmax, None)
    assert wrong.abs().max() > 1e-2


def test_unselected_experts_get_a_gradient_only_after_a_softmax_over_all():
    h, f = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64), draw(3, 2)
    assert (logit_jacobian(h, f, 1, softmax_topk)[1:] != 0).all()
    assert (logit_jacobian(h, f, 2, topk_softmax)[2] == 0).all()


@pytest.mark.parametrize("Router", [MLPRouter, MultiHeadRouter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_proposition_1_is_exact(Router, dtype):
    for seed in range(20):
        x, f = draw(8, 5, seed=seed).to(dtype), draw(8, 4, 3, seed=seed + 100).to(dtype)
        for rule in (topk_softmax, softmax_topk):
            module = Router(5, 4, 6, seed).to(dtype)
            torch.einsum("nm,nmo->no", rule.gates(module(x), 1), f).tanh().sum().backward()
            size = torch.cat([p.grad.flatten() for p in module.parameters()]).abs().max()
            assert size == 0.0 if rule == topk_softmax else size > 1e-4


@pytest.mark.parametrize("rule", [softmax_topk, topk_softmax])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_linear_router_is_its_own_heads(rule, k):
    x, f, theta = draw(32, 6), draw(4, 3, 6, seed=1), draw(6, 4, seed=2).requires_grad_()
    heads = [column.detach().clone().requires_grad_() for column in theta.mT]
    one, many = x @ theta, torch.stack([x @ head for head in heads], 1)
    outputs = [torch.einsum("nm,moi,ni->no", rule.gates(h, k), f, x).tanh().mean() for h in (one, many)]
    (single,), multi = torch.autograd.grad(outputs[0], theta), torch.autograd.grad(outputs[1], heads)
    assert (single - torch.stack(multi, 1)).abs().max() < 1e-15


@pytest.mark.parametrize("k", [1, 2, 4])
def test_equation_20_corrected_is_that_of_autograd(k):
    x, f, W = draw(6), draw(4, 3, seed=1), draw(4, 5, 6, seed=2)  # a head's logit is sum tanh(W x)
    h_of = lambda W: (W @ x).tanh().sum(-1)  # noqa: E731
    dh = torch.autograd.functional.jacobian(h_of, W)  # (j, head, 5, 6)
    exact = torch.autograd.functional.jacobian(lambda W: softmax_topk.gates(h_of(W), k) @ f, W)
    printed, corrected = equation_20(h_of(W), f, dh, k)
    assert corrected.shape == exact.shape and (corrected - exact).abs().max() < 1e-14
    chosen = topk_set(h_of(W), k)
    assert (printed[:, ~chosen] == 0).all()
    assert ((printed - exact)[:, chosen].abs().max() < 1e-14) == (k == 1)


def test_which_systems_reach_the_router_with_one_expert():
    h, f, noise = draw(20, 10), draw(20, 10, 2, seed=1), gumbel((20, 10), torch.Generator().manual_seed(2)).double()
    for system in SYSTEMS:
        found = reaches_router(system.gate, 1, h, f, noise)
        sums_to_one = "divide" in system.about or re.search(
            r"(logits|those|keep K.*), softmax|softmax over those", system.about
        )
        assert found == ("zero" if sums_to_one else "not zero"), system.name
        for k in system.used:
            gates = system.gate(h, k, noise)
            assert ((gates > 0).sum(-1) == k).all() and bool((gates.sum(-1) - 1).abs().max() < 1e-12) == bool(
                sums_to_one
            )
            assert reaches_router(system.gate, k, h, f, noise) == ("zero" if sums_to_one and k == 1 else "not zero")
    f[:10] = 0.0
    assert reaches_router(softmax_topk, 1, h, f, noise) == "mixed"


def test_zero_exactly_where_the_selected_experts_agree():
    h, f = torch.tensor([2.0, 1.0, 0.5, -1.0], dtype=torch.float64), draw(4, 3)
    f[1] = f[0]  # the two selected at k = 2
    assert logit_jacobian(h, f, 2, topk_softmax).abs().max() < 1e-15
    assert logit_jacobian(h, f, 3, topk_softmax).abs().max() > 1e-2
    assert logit_jacobian(h, f, 2, softmax_topk).abs().max() > 1e-2


@pytest.mark.parametrize("M", [2, 3, 9])
def test_top1_norm_and_its_bounds(M):
    h, f = draw(200, M) * torch.linspace(0.1, 12, 200, dtype=torch.float64)[:, None], draw(200, M, 2, seed=1)
    norm = top1_norm(h, f)
    exact = logit_jacobian(h, f, 1, softmax_topk).flatten(1).norm(dim=1)
    assert ((norm - exact).abs() <= 1e-13 * (1 + exact)).all()
    pi, m = torch.softmax(h, -1).sort(descending=True)
    unit = pi[:, 0] * pi[:, 1:].sum(1) * f[torch.arange(200), m[:, 0]].norm(dim=1)
    low, high = math.sqrt(M / (M - 1)), math.sqrt(2)
    assert (norm >= low * unit * (1 - 1e-12)).all() and (norm <= high * unit * (1 + 1e-12)).all()
    equal = torch.tensor([1.0] + [0.0] * (M - 1), dtype=torch.float64)
    ratio = top1_norm(equal, torch.ones(M, 1, dtype=torch.float64)) / (lambda p: p * (1 - p))(
        torch.softmax(equal, 0)[0]
    )
    assert abs(float(ratio) - low) < 1e-12  # attained


def test_upper_bound_of_the_top1_norm_needs_half_of_the_probability():
    def ratio(*pi):
        h, p = torch.tensor(pi, dtype=torch.float64).log(), max(pi)
        return float(top1_norm(h, torch.ones(len(pi), 1, dtype=torch.float64))) / (p * (1 - p))

    assert abs(ratio(0.6, 0.4 - 1e-9, 1e-9) - math.sqrt(2)) < 1e-8  # approached
    assert ratio(0.4, 0.4 - 1e-9, 0.2 + 1e-9) < math.sqrt(2) - 0.1  # the most that 0.4 allows


def test_kept_mass_is_the_factor_between_the_orders():
    h = 2 * draw(50, 6)
    for k in range(1, 7):
        P = kept_mass(h, k)
        assert (P[:, None] * topk_softmax(h, k) - softmax_topk(h, k)).abs().max() < 1e-15
        assert P.min() > k / 6 - 1e-14 and P.max() < 1 + 1e-14
        assert bool((P < 1 - 1e-6).any()) == (k < 6)


def plane_loss(M, rule, seed):
    return affine_loss(draw(M, 2, seed=seed), draw(M, seed=seed + 1), rule)


@pytest.mark.parametrize("rule", [softmax_topk, topk_softmax])
@pytest.mark.parametrize("M, k", [(2, 1), (4, 1), (4, 2), (3, 3)])
def test_slope_of_the_risk_is_mean_gradient_plus_boundary_term(rule, M, k):
    theta, loss = draw(M, 2, seed=5), plane_loss(M, rule, 6)
    mean, edge = mean_gradient(theta, k, loss), boundary_term(theta, k, loss)
    assert (risk_differences(theta, k, loss) - mean - edge).abs().max() < 1e-8
    if k == 1 and rule == topk_softmax:
        assert (mean == 0).all()
    assert (edge == 0).all() if k == M else edge.norm() > 1e-2  # without the term, or with its sign turned, it fails


def test_boundary_of_two_opposed_constant_experts_in_closed_form():
    """h = <theta_m, x>, f = (1, -1), y = sign x_1: the risk is 4 |angle| / pi, angle that of theta_1 - theta_2."""

    def loss(theta, x, chosen):
        return (chosen.to(x) @ torch.tensor([1.0, -1.0], dtype=x.dtype) - x[:, 0].sign()).square() + 0 * theta.sum()

    a = 0.4
    theta = torch.tensor([[math.cos(a), math.sin(a)], [0.0, 0.0]], dtype=torch.float64)
    assert abs(float(plane_risk(theta, 1, loss)) - 4 * a / math.pi) < 0.02  # the target jumps within a piece
    turn = torch.tensor([-math.sin(a), math.cos(a)], dtype=torch.float64)
    assert abs(float(boundary_term(theta, 1, loss)[0] @ turn) - 4 / math.pi) < 1e-12


@pytest.mark.parametrize("rule", [softmax_topk, topk_softmax])
def test_affine_loss_is_that_of_the_gates(rule):
    theta, W, c, x = draw(4, 2), draw(4, 2, seed=1), draw(4, seed=2), draw(30, 2, seed=3)
    h = x @ theta.T
    direct = ((rule(h, 2) * (x @ W.T + c)).sum(-1) - x[:, 0].sin()) ** 2
    assert (affine_loss(W, c, rule)(theta, x, topk_set(h, 2)) - direct).abs().max() < 1e-14


def test_boundary_term_of_a_disc_in_closed_form():
    """With jump(x) = <v, x> + 1 the integral over the disc is pi a (<v, center> + 1)."""
    v, center, a = draw(2), draw(2, seed=1).requires_grad_(), torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    value = disc_integral(lambda x: x @ v + 1, center, a)
    exact = math.pi * a * (v @ center + 1)
    assert abs((value - exact).item()) < 1e-12
    slope = torch.hstack(torch.autograd.grad(exact, (center, a)))
    assert (circle_term(lambda x: x @ v + 1, center.detach(), a.detach()) - slope).abs().max() < 1e-12


def test_rays_are_where_the_selection_changes():
    theta = draw(5, 2, seed=3)
    for k in (1, 2, 4):
        for angle, enters, leaves in boundary_rays(theta, k):
            before, after = (
                set((theta @ torch.tensor([math.cos(t), math.sin(t)], dtype=theta.dtype)).topk(k).indices.tolist())
                for t in (angle - 1e-6, angle + 1e-6)
            )
            assert after - before == {enters} and before - after == {leaves}
    assert boundary_rays(theta, 5) == []
    x, w = plane_nodes(theta)
    assert abs(float(w.sum()) - 1) < 1e-12
    assert ((w[:, None] * x).T @ x - torch.eye(2)).abs().max() < 1e-11


def test_every_ray_counts_and_the_naming_of_its_sides_does_not(monkeypatch):
    theta, loss = draw(3, 2, seed=5), plane_loss(3, topk_softmax, 6)
    rays, right = boundary_rays(theta, 1), boundary_term(theta, 1, loss)
    monkeypatch.setattr(router_gradient, "boundary_rays", lambda theta, k: [Ray(a, j, i) for a, i, j in rays])
    assert (boundary_term(theta, 1, loss) - right).abs().max() < 1e-14
    for missing in range(len(rays)):
        left = rays[:missing] + rays[missing + 1 :]
        monkeypatch.setattr(router_gradient, "boundary_rays", lambda theta, k, left=left: left)
        assert (boundary_term(theta, 1, loss) - right).abs().max() > 1e-3


def test_three_logits_may_tie_below_the_selection():
    theta = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 0.0]], dtype=torch.float64)
    angles = [ray.angle for ray in boundary_rays(theta, 1)]  # on the axes three logits tie, but one is larger
    assert torch.allclose(torch.tensor(angles), math.pi / 4 * torch.tensor([1.0, 3.0, 5.0, 7.0]))
    with pytest.raises(ValueError, match="theta: expected two logits tied"):
        boundary_rays(theta, 2)


def test_bad_arguments():
    h, f = torch.zeros(3), torch.zeros(3, 2)
    with pytest.raises(ValueError, match="rule: expected one of .*got 'top'"):
        logit_jacobian(h, f, 1, "top")
    with pytest.raises(ValueError, match="k: expected at most M = 3 experts, got 4"):
        logit_jacobian(h, f, 4, topk_softmax)
    with pytest.raises(ValueError, match="noise: sampled_topk needs Gumbel noise"):
        logit_jacobian(h, f, 1, sampled_topk)
    with pytest.raises(ValueError, match="h: expected finite numbers, got 1 NaN"):
        top1_norm(torch.tensor([0.0, math.nan]), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="theta: expected distinct rows, got rows 0 and 1 equal"):
        boundary_rays(torch.zeros(2, 2), 1)
    with pytest.raises(ValueError, match="theta: expected two logits tied at the angle .*, got 3"):
        boundary_rays(torch.tensor([[1.0, 0.5], [-1.0, -0.5], [0.0, 0.0]]), 2)
    with pytest.raises(ValueError, match="k: expected at most M = 2 experts, got 3"):
        boundary_rays(draw(2, 2), 3)
    with pytest.raises(ValueError, match="theta: expected finite numbers"):
        boundary_rays(torch.full((2, 2), math.inf), 1)
