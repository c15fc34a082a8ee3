"""Exact counterparts of the estimators, and what is predicted of them, each by a second route."""

import math

import pytest
import torch
from torch.func import functional_call

from moe_theory.measure.stability import estimate
from moe_theory.models.layers import Linear
from moe_theory.models.rules import sampled_topk, softmax_topk, topk_softmax
from moe_theory.models.sparse import Experts, SparseMLP, SparseTransformer
from moe_theory.theory import estimators as est


def network(k: int, seed: int = 0):
    """Smooth experts and a linear router in float64, and 40 examples of three classes."""
    rng = torch.Generator().manual_seed(seed)
    model = SparseMLP(3, 3, 3, topk_softmax, k, "single", seed=0)
    model.block.experts, model.block.router = Experts(3, 3, 2, 3, "tanh", rng), Linear(3, 3, rng)
    x, y = torch.randn(40, 3, generator=rng).double(), torch.randint(3, (40,), generator=rng)
    return model.double(), x, y


def loss_at(model, theta, x, y):
    """Losses (b,) at a parameter vector, by way of the module itself."""
    torch.nn.utils.vector_to_parameters(theta, model.parameters())
    return torch.nn.functional.cross_entropy(model(x, torch.zeros(model.noise_shape(len(x))))[0], y, reduction="none")


def test_gradients_are_those_of_autograd():
    model, x, y = network(2)
    g, theta = est.example_gradients(model, x, y), est.parameter_vector(model)
    for i in (0, 7):
        loss = loss_at(model, theta, x[i : i + 1], y[i : i + 1]).sum()
        own = torch.cat([v.flatten() for v in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(g[i], own)


def test_texts_have_parameter_vectors_too():
    model = SparseTransformer(9, 5, 6, 3, 4, rule=softmax_topk, k=2, heads="single", seed=1).double()
    tokens, y = torch.randint(9, (4, 5)), torch.tensor([0, 1, 2, 0])
    value, pi = est.vector_losses(model)(est.parameter_vector(model), tokens, y)
    F, _ = functional_call(model, dict(model.named_parameters()), (tokens, torch.zeros(4, 5, 4)))
    torch.testing.assert_close(value, torch.nn.functional.cross_entropy(F, y, reduction="none"))
    assert pi.shape == (4, 5, 4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_exact_constants_bound_differences(k):
    model, x, y = network(k)
    L, beta = est.exact_constants(model, x, y)
    g, theta = est.example_gradients(model, x, y), est.parameter_vector(model)
    torch.testing.assert_close(L, g.norm(dim=1))
    v = torch.randn(20, len(theta), dtype=theta.dtype, generator=torch.Generator().manual_seed(1))
    t, quotient = 1e-5, torch.zeros_like(beta)
    for u in v / v.norm(dim=1, keepdim=True):
        moved = []
        for w in (theta + t * u, theta - t * u):
            torch.nn.utils.vector_to_parameters(w, model.parameters())
            moved.append(est.example_gradients(model, x, y))
        quotient = torch.maximum(quotient, (moved[0] - moved[1]).norm(dim=1) / (2 * t))
    assert (quotient <= beta * (1 + 1e-6)).all() and not (quotient <= 0.2 * beta).all()


def test_steps_and_parts_are_those_of_the_estimator():
    model, x, y = network(2)
    found = estimate(model, x, y, rate=1.0, draws=30, batch=8, seed=3)
    steps = est.two_steps(model, x, y, 1.0, 30, 8, 3)
    torch.testing.assert_close((steps.one - steps.two).norm(dim=1), found.distance)
    same, flipped = est.parts_of_eps(model, x, y, 1.0, 30, batch=8, seed=3)
    torch.testing.assert_close(same + flipped, found.eps)
    assert ((flipped > 0) <= (found.flips > 0)).all() and (flipped > 0).any()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_estimates_stay_below_the_means_over_their_segment_unless_sets_flip(k):
    model, x, y = network(k)
    found = estimate(model, x, y, rate=1.0, draws=60, batch=8, seed=3)
    mean = est.segment_means(model, x, y, est.two_steps(model, x, y, 1.0, 60, 8, 3), nodes=20)
    still, above = found.flips == 0, (found.L / mean.slope, found.beta / mean.curvature)
    assert all((ratio[still] <= 1 + 2e-3).all() and (ratio[still] > 0.98).any() for ratio in above)
    assert bool((above[0] > 1.1).any() or (above[1] > 1.1).any()) == (k == 2)  # where sets flip the bound is broken


def test_changed_sets_are_those_of_the_estimator():
    model, x, y = network(2)
    ends = est.two_steps(model, x, y, 1.0, 30, 8, 3)
    changed, parts = est.changed_sets(model, x, y, ends), torch.zeros(30, 8).double()
    torch.testing.assert_close(
        changed.where.double().mean(1), estimate(model, x, y, 1.0, draws=30, batch=8, seed=3).flips
    )
    parts[changed.where] = changed.apart
    torch.testing.assert_close(parts.mean(1), est.parts_of_eps(model, x, y, 1.0, 30, batch=8, seed=3)[1])


def test_a_jump_by_routers_that_exclude_one_expert():
    model, x, y = network(2)
    ends = est.two_steps(model, x, y, 1.0, 30, 8, 3)
    changed = est.changed_sets(model, x, y, ends)
    draw, i = changed.where.nonzero()[0].tolist()
    j, losses, bias = ends.third[draw, i], [], model.block.router.b.detach().clone()
    for theta in (ends.one[draw], ends.two[draw]):
        (out,) = (est.vector_losses(model)(theta, x[j : j + 1], y[j : j + 1])[1][0] == 0).nonzero()[0]
        with torch.no_grad():
            model.block.router.b[out] = -1e9
            losses.append(loss_at(model, est.parameter_vector(model), x[j : j + 1], y[j : j + 1]))
            model.block.router.b.copy_(bias)
    torch.testing.assert_close((losses[0] - losses[1]).abs().detach()[0], changed.jump[0])


def test_slopes_and_jumps_predict_short_steps():
    model, x, y = network(2)
    ends = est.two_steps(model, x, y, 0.01, 200, 8, 3)
    changed = est.changed_sets(model, x, y, ends)
    found, L = est.slopes_and_jumps(model, x, y, ends, changed), estimate(model, x, y, 0.01, batch=8, seed=3).L
    assert changed.where.any(1).sum() > 3
    torch.testing.assert_close(found, L, rtol=0.05, atol=0)


def test_first_order_prediction_and_a_wrong_one():
    model, x, y = network(3)
    gaussian, _ = est.first_order_eps(est.example_gradients(model, x, y), 1e-3, 20)
    measured = float(estimate(model, x, y, rate=1e-3, draws=400, batch=20).eps.mean())
    assert measured == pytest.approx(gaussian, rel=0.08)
    assert measured != pytest.approx(math.sqrt(2) * gaussian, rel=0.08)  # no correction for half of the data used


def test_heavy_tails_lower_the_prediction():
    """One parameter, gradients from the Laplace distribution (excess kurtosis 3), batches of 2."""
    torch.manual_seed(0)
    g = torch.distributions.Laplace(0.0, 1.0).sample((4000, 1)).double()
    batches = g[torch.randint(4000, (2, 200_000, 2))].squeeze(-1).mean(-1)
    exact = float(g.abs().mean() * (batches[0] - batches[1]).abs().mean())
    gaussian, corrected = est.first_order_eps(g, 1.0, 2)
    assert corrected == pytest.approx(exact, rel=0.008)
    assert gaussian > 1.015 * exact


def test_constants_by_differences_are_the_exact_ones():
    model, x, y = network(2)
    exact = [float(v.max()) for v in est.exact_constants(model, x, y)]
    assert est.constants_by_differences(model, x, y) == pytest.approx(exact, rel=1e-5)


def test_draws_of_two_batches_have_the_variance_of_two_means():
    """One parameter: batches without repetition, so that of all but one example a difference hardly varies."""
    g = torch.randn(12, 1, generator=torch.Generator().manual_seed(0)).double()
    for batch in (2, 11):
        found = est.first_order_draws(g, batch, 20_000, torch.Generator().manual_seed(1)) / float(g.abs().mean())
        assert float(found.square().mean()) == pytest.approx(float(2 / batch * (1 - batch / 12) * g.var()), rel=0.03)


def test_one_step_stability_by_replacing_every_example():
    model, x, y = network(2)
    x, y, rate, theta = x[:8], y[:8], 1e-3, est.parameter_vector(model)
    g, worst, again = est.example_gradients(model, x, y), 0.0, est.stability_by_exchange(model, x, y, rate)
    for i in range(8):
        for j in range(8):
            data = [j if m == i else m for m in range(8)]
            one, two = (loss_at(model, theta - rate * v.mean(0), x, y) for v in (g, g[data]))
            worst = max(worst, float((one - two).detach().abs().max()))
    assert worst == pytest.approx(est.one_step_stability(g, rate), rel=1e-2)
    assert worst == pytest.approx(again, rel=1e-9)


def test_largest_of_normals():
    assert est.largest_normal(1) == pytest.approx((0, 1), abs=1e-9)
    assert est.largest_normal(2) == pytest.approx((1 / math.sqrt(math.pi), math.sqrt(1 - 1 / math.pi)), rel=1e-9)
    draws = torch.randn(4000, 200, generator=torch.Generator().manual_seed(0)).amax(1)
    assert est.largest_normal(200) == pytest.approx((float(draws.mean()), float(draws.std())), rel=0.04)


def test_bad_arguments_are_named():
    model, x, y = network(2)
    g = est.example_gradients(model, x, y)
    noisy = SparseMLP(3, 3, 3, sampled_topk, 2, "single", seed=0)
    for call, name in (
        (lambda: est.vector_losses(noisy), "model"),
        (lambda: est.first_order_eps(g, 0.0, 8), "rate"),
        (lambda: est.first_order_eps(g, 0.1, 40), "batch"),
        (lambda: est.one_step_stability(g, -1.0), "rate"),
        (lambda: est.stability_by_exchange(model, x, y, 0.0), "rate"),
        (lambda: est.first_order_draws(g, 41, 1, torch.Generator()), "batch"),
        (lambda: est.two_steps(model, x, y, 0.0, 1, 8, 0), "rate"),
        (lambda: est.largest_normal(0), "n"),
    ):
        with pytest.raises(ValueError, match=f"^{name}:"):
            call()
