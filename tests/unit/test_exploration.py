import itertools

import numpy as np
import pytest
import torch

from moe_theory.measure.inner import expert_errors, inner_products, professions
from moe_theory.measure.patch_layer import spread
from moe_theory.models.experts import patch_cnn
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchTask
from moe_theory.theory.exploration import (
    center_rates,
    coverage_probability,
    growth_rates,
    near_tie_bound,
    near_tie_constant,
    near_tie_probability,
    race,
    race_in_steps,
    race_of_layer,
    runaway_bound,
    uniform_moments,
)
from moe_theory.training import expert_gradient, router_gradient

F64 = torch.float64


@pytest.mark.parametrize(("N", "G"), [(2, 0.3), (8, 0.1), (64, 0.02)])
def test_near_ties_against_sampling(N, G):
    two = np.sort(np.random.default_rng(N).normal(size=(100_000, N)), axis=1)[:, -2:]
    p = near_tie_probability(N, G)
    assert np.mean(two[:, 0] >= (1 - G) * two[:, 1]) == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / 1e5))


@pytest.mark.parametrize("N", [2, 3, 10, 100, 10_000])
@pytest.mark.parametrize("G", [1e-5, 0.01, 0.2, 0.7])
def test_near_ties_stay_below_the_bound_and_reach_it_for_small_gaps(N, G):
    share = near_tie_probability(N, G) / near_tie_bound(N, G)
    assert share <= 1 and (G > 1e-5 or share > 0.9995)


def test_the_constant_of_near_ties_in_closed_form():
    closed = {2: 1 / (2 * np.pi), 3: 3 / (4 * np.pi) * (1 + 3**-0.5), 4: 3 / (4 * np.pi) + 2 / (np.pi * 3**0.5)}
    assert {N: near_tie_constant(N) for N in closed} == pytest.approx(closed, rel=1e-9)
    assert all(near_tie_constant(N) < 2 * np.log(N) for N in (3, 5, 100, 10**6))


def test_coverage_by_enumeration():
    K, M = 3, 6
    full = np.mean([len(set(draw)) == K for draw in itertools.product(range(K), repeat=M)])
    assert coverage_probability(K, M) == pytest.approx(full, abs=1e-12)
    assert coverage_probability(5, 4) == pytest.approx(0, abs=1e-12) and coverage_probability(1, 1) == 1


def test_runaway_bound_holds_in_random_races():
    rng = np.random.default_rng(0)
    G, jump, S = (10 ** rng.uniform(low, high, 2000) for low, high in ((-2, 1), (-3, 0.7), (-1, 1)))
    x, y, fullness = S * (1 + G), np.ones(2000), rng.uniform(0, 2, 2000)
    x_0 = x
    for _ in range(2000):
        tau = rng.random(2000) ** fullness * jump * x_0 / x**2
        x, y = x + tau * x**2, y + S * tau * y**2
    filled = [end / runaway_bound(1.0, g, jump=far) for end, g, far in zip(y, G, jump, strict=True)]
    assert 0.97 < max(filled) <= 1


@pytest.mark.parametrize(("G", "jump"), [(5.0, 0.01), (0.3, 1e-3), (1e-3, 0.5), (1e-3, 3.0)])
def test_runaway_bound_is_reached_by_small_steps_and_by_small_leads(G, jump):
    y, x_0 = 1.0, 1 + G
    for x in x_0 * np.arange(1, 100 * (1 + jump) * (1 + 1 / G), jump):
        y += jump * x_0 * (y / x) ** 2
    assert 0.98 < y / runaway_bound(1.0, G, jump=jump) <= 1


@pytest.mark.parametrize("toward_zero", [0.0, 0.3, 1.2, np.pi / 2])
def test_runaway_bound_holds_with_errors_and_is_reached_from_zero(toward_zero):
    G, S, jump = 2.0, 0.5, 1e-3
    y_0, error = np.cos(toward_zero), np.sin(toward_zero)
    x, y, r = np.hypot(S * (1 + G), error), y_0, S * (1 + G)
    for _ in range(200_000):
        tau = jump * r / (x**2 - error**2)
        x, y = x + jump * r, y + S * tau * (y**2 + error**2)
    share = y / runaway_bound(y_0, G, jump=jump, error=error)
    assert 0.6 < share <= 1 and (toward_zero > 0 or share > 0.99)
    assert runaway_bound(1.0, G, jump=jump) == pytest.approx((1 + G + jump) / G, rel=1e-14)
    near_zero = 1e-3  # S u / r -> 0: the follower's gain is then S error^2 / x_0
    assert runaway_bound(0.0, 1 / near_zero - 1, error=1.0) == pytest.approx(near_zero, rel=2e-3)


def test_moments_over_uniform_routing_by_all_routings():
    M, task = 3, PatchTask(K=3, P=4, d=8, seed=2)
    batch = task.sample(5, 3, F64)
    model = PatchMoE(8, M, 2, sigma_0=0.4, seed=1, dtype=F64)
    u, pi = torch.cat([task.v, task.c[:1]]).double(), torch.full((5, M), 1 / M, dtype=F64)
    found = []
    for choice in itertools.product(range(M), repeat=5):
        m = torch.tensor(choice)
        f = model.dispatched(batch.x, m).detach()
        experts = expert_gradient(batch.x, batch.y, m, pi, f, model.W.data, model.sigma) @ u.T
        found.append((router_gradient(batch.x, batch.y, m, pi, f).T @ u.T, experts))
    for values, mean, deviation in zip(zip(*found, strict=True), *uniform_moments(batch, model, u), strict=True):
        values = torch.stack(values)
        assert (values.mean(0) - mean).abs().max() < 1e-13 * mean.abs().max()
        assert (values.std(0, correction=0) - deviation).abs().max() < 1e-7 * deviation.abs().max()


@pytest.mark.slow
def test_race_solves_its_equation_and_has_the_given_length():
    x_0 = torch.tensor([1.0, 0.9, -0.5, 0.3], dtype=F64)
    c = torch.tensor([1.0, 1.05, 1.0, 2.0], dtype=F64)
    x, length = x_0.clone(), 0.0
    while length < 3.0:
        move = 1e-5 * c * x**2 / (c * x**2).norm()
        x, length = x + move, length + float(move.norm())
    end = race(x_0, c, 3.0, steps=20_000)
    assert (end - x).abs().max() < 2e-3 and x_0[2] < end[2] < 0


def test_race_in_small_steps_is_the_race_and_adds_up_cubes():
    x_0 = torch.tensor([[1.0, 0.9, 0.3], [0.5, 0.2, 0.4]], dtype=F64)
    c = torch.tensor([1.0, 1.05, 2.0], dtype=F64)
    x, cubes = race_in_steps(x_0, c, 1e-4, 20_000)
    for start, end in zip(x_0, x, strict=True):
        assert (race(start, c, 2.0, steps=20_000) - end).abs().max() < 2e-3
    assert torch.equal(race_in_steps(x_0, c, 1e-4, 1)[1], 1e-4 * x_0**3) and (cubes > 2.0 * x_0**3).all()


def test_experts_with_rates_of_their_own_race_as_each_does_alone():
    x_0 = torch.tensor([[1.0, 0.9, -0.3], [0.5, 0.2, 0.4]], dtype=F64)
    c = torch.tensor([[1.0, 1.05, 2.0], [3.0, 0.5, 1.0]], dtype=F64)
    together = race_in_steps(x_0, c, 1e-2, 50)
    for m in range(2):
        alone = race_in_steps(x_0[m : m + 1], c[m], 1e-2, 50)
        for here, there in zip(together, alone, strict=True):
            assert torch.allclose(here[m], there[0], rtol=1e-14, atol=0)


def test_growth_rates_are_those_of_the_mean_gradient():
    """The gradient along v_k of an expert that sees only its signals, at uniform routing and small outputs."""
    M, task = 4, PatchTask(K=3, P=3, d=10, seed=2)
    batch = task.sample(400, 3, F64)
    W = 1e-4 * torch.randn(M, 2, 10, generator=torch.Generator().manual_seed(0), dtype=F64)
    pi, f = torch.full((400, M), 1 / M, dtype=F64), torch.zeros(400, dtype=F64)
    everyone = [expert_gradient(batch.x, batch.y, torch.full((400,), m), pi, f, W, _cubic()) for m in range(M)]
    for u, rates in ((task.v, growth_rates(batch)), (task.c, center_rates(batch))):
        along = torch.stack(everyone).mean(0) @ u.T
        expected = -rates / (2 * M**2) * 3 * (W @ u.T) ** 2
        assert (along - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_race_of_a_layer_is_that_of_its_products():
    task, layer = PatchTask(K=3, P=3, d=10, seed=2), PatchMoE(10, 4, 2, sigma_0=0.1, seed=1, dtype=F64)
    nu, x_0 = torch.tensor([1.0, 1.1, 0.9], dtype=F64), layer.W.data @ task.v.T
    x, cubes = race_of_layer(layer, task.v, nu, 1e-2, 30)
    alone = race_in_steps(x_0[2].reshape(1, -1), torch.cat([nu, nu]), 1e-2, 30)
    assert torch.equal(x[2], alone[0].view(2, 3)) and torch.equal(cubes[2], alone[1].view(2, 3))
    assert torch.equal(layer.W.data @ task.v.T, x_0)


def _cubic():
    return PatchMoE(2, 1, 1).sigma


def test_professions_inner_products_and_errors_by_hand():
    task = PatchTask(K=3, d=12, seed=1)
    batch = task.sample(90, 4, F64)
    model = PatchMoE(12, 4, 2, "cubic", sigma_0=0.5, seed=3, dtype=F64)
    theta = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    k, j = professions(model.W.data, batch.v)
    found = inner_products({"theta": theta, "W": model.W.data}, batch)
    errors = expert_errors(model, batch)
    for m, W in enumerate(model.W.data):
        products = {(a, b): float(batch.v[a] @ W[b]) for a in range(3) for b in range(2)}
        assert max(products, key=products.get) == (int(k[m]), int(j[m]))
        for a in range(3):
            assert found["expert_v"][m, a] == pytest.approx(max(products[a, b] for b in range(2)))
            assert found["router_c"][m, a] == pytest.approx(float(theta[:, m] @ batch.c[a]))
            on = batch.cluster == a
            wrong = batch.y[on] * patch_cnn(batch.x[on], W, model.sigma) <= 0
            assert errors[m, a] == pytest.approx(float(wrong.double().mean()))


def test_spread_compares_experts_of_one_profession_only():
    task = PatchTask(K=2, d=6, seed=0)
    batch = task.sample(30, 1, F64)
    theta = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    h = batch.x.sum(1) @ theta
    by_hand = (h[batch.cluster == 0][:, 0] - h[batch.cluster == 0][:, 2]).abs().max()
    assert spread({"theta": theta}, batch, torch.tensor([0, 1, 0])) == pytest.approx(float(by_hand))
    assert spread({"theta": theta}, batch, torch.tensor([0, 1, 1])) != pytest.approx(float(by_hand))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: near_tie_probability(1, 0.1), "N"),
        (lambda: near_tie_probability(5, 1.0), "G"),
        (lambda: near_tie_bound(1, 0.1), "N"),
        (lambda: near_tie_constant(1), "N"),
        (lambda: coverage_probability(0, 3), "K"),
        (lambda: runaway_bound(-1.0, 0.1), "y_0"),
        (lambda: runaway_bound(1.0, 0.1, jump=-0.1), "jump"),
        (lambda: runaway_bound(0.0, 0.1), "y_0"),
        (lambda: runaway_bound(1.0, 0.1, error=-1.0), "error"),
        (lambda: race(torch.tensor([-1.0]), torch.tensor([1.0]), 1.0), "x_0"),
        (lambda: race(torch.tensor([1.0]), torch.tensor([1.0]), 0.0), "path"),
        (lambda: race_in_steps(torch.ones(1, 1), torch.ones(1), 0.0, 3), "eta"),
        (lambda: race_in_steps(torch.ones(1, 1), torch.ones(1), 0.1, 0), "steps"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call()
