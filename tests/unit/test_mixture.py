"""Routers, mixing measures and the regression function of Nguyen et al. (2025)."""

import math

import pytest
import torch

from moe_theory.models.mixture import EXPERTS, MixingMeasure, draw_measure, gates, regression_function
from moe_theory.models.routers import ROUTERS, Cosine, CosineRouter, Linear, Perturbed, PerturbedCosineRouter
from moe_theory.tasks.regression import sample_regression, uniform_inputs


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("expert", EXPERTS)
def test_the_regression_function_is_the_sum_written_out(kind, expert):
    G, x, router = draw_measure(3, 4, 0), uniform_inputs(5, 4, 1), ROUTERS[kind]()
    tau = {"linear": None, "cosine": 0.0, "perturbed": 0.1}[kind]
    for i, row in enumerate(x):
        scale = [1.0 if tau is None else 1 / ((b.norm() + tau) * (row.norm() + tau)) for b in G.beta1]
        weight = [math.exp(float(b @ row * s + c)) for b, s, c in zip(G.beta1, scale, G.beta0, strict=True)]
        h = [float(EXPERTS[expert].value(e[:-1] @ row + e[-1])) for e in G.eta]
        by_hand = sum(w * v for w, v in zip(weight, h, strict=True)) / sum(weight)
        assert float(regression_function(G, x, router, expert)[i]) == pytest.approx(by_hand, abs=1e-14)


@pytest.mark.parametrize("kind", ROUTERS)
def test_preimages_have_the_embedding_they_were_asked_for(kind):
    router, s = ROUTERS[kind](), torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = s / s.norm(dim=1, keepdim=True) * (1.0 if kind == "cosine" else 0.7)
    assert torch.allclose(router.embedding(router.preimage(s)), s, atol=1e-14)


@pytest.mark.parametrize("kind", ROUTERS)
def test_slopes_and_pull_backs_are_the_derivative_of_the_embedding(kind):
    router, (beta1, g) = ROUTERS[kind](), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    exact = torch.stack([torch.autograd.functional.jacobian(router.embedding, v) for v in beta1])
    assert torch.allclose(router.slope(beta1), exact, atol=1e-15)
    assert torch.allclose(router.pull_back(beta1, g), torch.einsum("kab,ka->kb", exact, g), atol=1e-15)


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("k", [2, 4])
def test_the_gauge_holds_the_common_shifts_that_keep_embeddings_where_they_may_be(kind, k):
    router, beta1 = ROUTERS[kind](), torch.randn(k, 4, generator=torch.Generator().manual_seed(0)).double()
    s = router.embedding(beta1)
    P = router.gauge(s)
    assert torch.allclose(P @ P, P, atol=1e-14) and torch.allclose(P, P.mT, atol=1e-14)
    assert float(P.trace()) == pytest.approx(4 if kind != "cosine" else 4 - k, abs=1e-12)
    assert kind != "cosine" or (s @ P).abs().max() < 1e-14
    assert torch.allclose(router.gauge(torch.stack([s, s]))[1], P, atol=1e-14)


def test_the_modules_score_as_the_rules_do():
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    for module, router in ((CosineRouter(5, 3), Cosine()), (PerturbedCosineRouter(5, 3, tau=0.3), Perturbed(0.3))):
        G = MixingMeasure(module.beta0.double(), module.beta1.double(), torch.zeros(3, 6, dtype=torch.float64))
        assert torch.allclose(module(x).softmax(-1).double(), gates(G, x.double(), router), atol=1e-6)


def test_the_cosine_ignores_norms_and_the_perturbed_router_does_not():
    x, scale = uniform_inputs(20, 4, 2), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[:, None]
    G = draw_measure(3, 4, 3)
    H = G.with_(beta1=scale * G.beta1)
    apart = {k: float((gates(G, x, ROUTERS[k]()) - gates(H, x, ROUTERS[k]())).abs().max()) for k in ROUTERS}
    assert apart["cosine"] < 1e-15 and apart["perturbed"] > 1e-3 and apart["linear"] > 1e-3


def test_noise_and_inputs_come_from_two_streams():
    x, y = sample_regression(lambda x: 0 * x[:, 0], 50_000, 2, seed=3)
    assert abs(float(y.std()) - 0.1) < 0.002
    assert float(torch.corrcoef(torch.stack([x[:, 0], y]))[0, 1].abs()) < 0.02


def test_bad_vectors_and_shapes_are_refused():
    G, x = draw_measure(3, 4, 0), uniform_inputs(5, 4, 1)
    with pytest.raises(ValueError, match="beta1: expected no zero vectors.*got 1"):
        regression_function(G.with_(beta1=G.beta1.clone().index_fill_(0, torch.tensor([1]), 0)), x, Cosine())
    with pytest.raises(ValueError, match="x: expected no zero vectors"):
        CosineRouter(4, 2)(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="G: expected beta0"):
        MixingMeasure(G.beta0, G.beta1, G.eta[:, :-1])
    with pytest.raises(ValueError, match="eta: expected finite"):
        G.with_(eta=G.eta * float("nan"))
    with pytest.raises(ValueError, match="tau: expected a finite number > 0"):
        Perturbed(0.0)
    with pytest.raises(ValueError, match="s: the perturbed router"):
        Perturbed().preimage(torch.ones(1, 2))
    with pytest.raises(ValueError, match="expert: expected one of"):
        regression_function(G, x, Linear(), "softplus")
    with pytest.raises(ValueError, match="noise: expected"):
        sample_regression(lambda x: x[:, 0], 5, 2, 0, noise=-1.0)
