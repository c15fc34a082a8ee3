"""A router or a rule is one class or one value: everything else works with it as it stands."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares as scipy_least_squares

from moe_theory.measure.voronoi import error_parts
from moe_theory.models.mixture import MixingMeasure, draw_measure, gates, jacobian, regression_function
from moe_theory.models.routers import ROUTERS, Router
from moe_theory.models.rules import Rule, gumbel, topk_set
from moe_theory.models.sparse import SparseMLP
from moe_theory.tasks.regression import sample_regression, uniform_inputs
from moe_theory.theory.fisher import standard_errors
from moe_theory.theory.gates import jump_bound
from moe_theory.theory.identifiability import (
    centred,
    null_vectors,
    nullity,
    nullity_formula,
    numerical_nullity,
    shifted,
)
from moe_theory.theory.router_gradient import logit_jacobian
from moe_theory.training.least_squares import least_squares
from moe_theory.training.sgd import stochastic_descent

K, D = 3, 4


@dataclass(frozen=True)
class Smooth(Router):
    """`s = beta1 / sqrt(1 + |beta1|^2)`, in the open unit ball."""

    def embedding(self, beta1):
        return beta1 / (1 + beta1.square().sum(-1, keepdim=True)).sqrt()

    def feature(self, x):
        return self.embedding(x)

    def pull_back(self, beta1, g):
        s = self.embedding(beta1)
        return (g - s * (s * g).sum(-1, keepdim=True)) / (1 + beta1.square().sum(-1, keepdim=True)).sqrt()

    def preimage(self, s):
        return s / (1 - s.square().sum(-1, keepdim=True)).sqrt()

    def bound(self, radius):
        return radius / (1 + radius**2) ** 0.5


@dataclass(frozen=True)
class Sharp(Router):
    """`s = 3 beta1 / |beta1|`, on the sphere of radius 3; `u = x`."""

    sphere = True
    plain = True

    def embedding(self, beta1):
        return 3 * beta1 / beta1.norm(dim=-1, keepdim=True)

    def feature(self, x):
        return x

    def pull_back(self, beta1, g):
        b = beta1 / beta1.norm(dim=-1, keepdim=True)
        return 3 * (g - b * (b * g).sum(-1, keepdim=True)) / beta1.norm(dim=-1, keepdim=True)

    def preimage(self, s):
        return s / 3

    def bound(self, radius):
        return 3.0


@pytest.fixture(params=[Smooth, Sharp], ids=["ball", "sphere"])
def router(request, monkeypatch):
    """A router of each kind, under the name "new"."""
    monkeypatch.setitem(ROUTERS, "new", request.param)
    return request.param()


def unpacked(p):
    p = torch.as_tensor(p)
    return MixingMeasure(p[:K], p[K : K + K * D].view(K, D), p[K + K * D :].view(K, D + 1))


def packed(G):
    return torch.cat([G.beta0, G.beta1.flatten(), G.eta.flatten()])


def test_the_function_of_a_mixture_and_its_jacobian(router):
    G, x = draw_measure(K, D, 0), uniform_inputs(30, D, 1)
    score = (router.feature(x)[:, None] * router.embedding(G.beta1)).sum(2) + G.beta0
    h = torch.tanh((x[:, None] * G.eta[:, :-1]).sum(2) + G.eta[:, -1])
    assert torch.allclose(regression_function(G, x, router, "tanh"), (score.exp() * h).sum(1) / score.exp().sum(1))
    by_autograd = torch.autograd.functional.jacobian(
        lambda p: regression_function(unpacked(p), x, router, "tanh"), packed(G)
    )
    assert torch.allclose(jacobian(G, x, router, "tanh"), by_autograd, atol=1e-12)


def test_its_null_directions_are_named_and_counted(router):
    assert (
        nullity("new", K, D) == nullity(router, K, D) == nullity_formula("new", K, D) == nullity_formula(router, K, D)
    )
    G, x = draw_measure(K, D, 0), uniform_inputs(300, D, 1)
    J, V = jacobian(G, x, router, "tanh"), torch.cat(list(null_vectors(G, router).values()), 1)
    assert numerical_nullity(J) == torch.linalg.matrix_rank(V) == nullity_formula("new", K, D)
    assert (J @ V).abs().max() < 1e-12 * V.abs().max()


def test_a_common_shift_in_a_ball_is_not_seen():
    G, x = draw_measure(K, D, 0, router_scale=0.1), uniform_inputs(300, D, 1)
    for H in (shifted(G, torch.full((D,), 0.1, dtype=torch.float64), Smooth()), centred(G, Smooth())):
        assert (gates(H, x, Smooth()) - gates(G, x, Smooth())).abs().max() < 1e-14


def test_least_squares_ends_where_scipy_ends(router):
    G = draw_measure(K, D, 1, router_scale=0.5, expert_scale=2.0)
    x, y = sample_regression(lambda x: regression_function(G, x, router, "tanh"), 1_500, D, 0)
    found = least_squares(x[None], y[None], [G], router, "tanh", radius=50.0, tolerance=1e-9, steps=200)
    theirs = scipy_least_squares(
        lambda p: (regression_function(unpacked(p), x, router, "tanh") - y).numpy(),
        packed(G).numpy(),
        lambda p: jacobian(unpacked(p), x, router, "tanh").numpy(),
        x_scale="jac",
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-12,
    )
    assert bool(found.converged[0])
    np.testing.assert_allclose(float(found.sse[0]), 2 * theirs.cost, rtol=1e-10)
    if router.sphere:
        assert torch.allclose(found.G[0].beta1.norm(dim=1), G.beta1.norm(dim=1))


def test_a_bound_is_kept_and_reached():
    G = draw_measure(K, D, 1, router_scale=2.0, expert_scale=2.0)
    x, y = sample_regression(lambda x: regression_function(G, x, Smooth(), "tanh"), 1_500, D, 0)
    start = G.with_(beta1=0.01 * G.beta1)
    (end,) = least_squares(x[None], y[None], [start], Smooth(), "tanh", radius=0.2, steps=100).G
    assert float(end.beta1.norm(dim=1).max()) == pytest.approx(0.2, rel=1e-9)


def test_descent_errors_and_their_limits(router):
    G, x = draw_measure(K, D, 1), uniform_inputs(2_000, D, 2)
    y = regression_function(G, x, router, "tanh") + 1
    end = stochastic_descent(x, y, G, router, "tanh", epochs=1, rate=0.1, batch=2_000)
    step = 2 * jacobian(G, x, router, "tanh").mean(0)
    assert torch.allclose(packed(end) - packed(G), 0.1 * step, atol=1e-14)
    moved = [v for v in null_vectors(G, router)["common shift"].T]
    parts = error_parts(unpacked(packed(G) + 1e-7 * moved[0]), G, router, torch.arange(K))
    assert parts["direction"] < 1e-12 < 1e-9 < parts["shift"]
    assert all(0 < limit < 1e3 for limit in standard_errors(G, x, router, "tanh").values())


def test_a_rule_is_one_value():
    """Selection by noisy logits, and the softmax over the selected."""
    rule = Rule("noisy_topk_softmax", over_all=False, needs_noise=True)
    rng = torch.Generator().manual_seed(0)
    h, f = torch.randn(5, generator=rng).double(), torch.randn(5, 3, generator=rng).double()
    noise = gumbel((5,), rng, torch.float64)
    chosen = topk_set(h + noise, 2)
    assert torch.allclose(rule(h, 2, noise)[chosen], h[chosen].softmax(0)) and not rule(h, 2, noise)[~chosen].any()
    by_autograd = torch.autograd.functional.jacobian(lambda h: rule.gates(h, 2, noise) @ f, h).T
    assert torch.allclose(logit_jacobian(h, f, 2, rule, noise), by_autograd)
    assert jump_bound(2, rule) == 0.5
    network = SparseMLP(7, 3, 5, rule, 2, "multi", seed=0)
    x = torch.randn(4, 7, generator=rng)
    one, two = (network(x, gumbel((4, 5), rng))[1] for _ in range(2))
    assert not torch.equal(one > 0, two > 0) and torch.allclose(one.sum(1), torch.ones(4))
    with pytest.raises(ValueError, match="noise: noisy_topk_softmax needs Gumbel noise"):
        rule(h, 2)


@dataclass(frozen=True)
class Sigmoid(Rule):
    """Gates that are not taken from a softmax."""

    def shares(self, h, chosen):
        return torch.sigmoid(h)


def test_closed_forms_of_the_softmax_refuse_other_gates():
    rule = Sigmoid("sigmoid", over_all=True)
    h, f = torch.randn(5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(rule(h, 2).sum(), h.topk(2).values.sigmoid().sum())
    with pytest.raises(ValueError, match=r"rule: expected gates of a softmax, got Sigmoid.*\['shares'\]"):
        logit_jacobian(h, f, 2, rule)
    with pytest.raises(ValueError, match="rule: expected gates of a softmax"):
        jump_bound(2, rule)
