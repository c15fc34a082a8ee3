"""Theorem 4.2 in its proof's order of stages: examples by their products, starts, and the race to large d."""

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import kstest

from moe_book.experiments import own_error, own_stages
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import torch_stream
from moe_theory.tasks.patches import SETTINGS, PatchTask

TASK = PatchTask(K=2, d=32, seed=3, **SETTINGS["setting 3"])
LAYER = PatchMoE(32, 2, own_stages.FILTERS, sigma_0=0.3, seed=1, dtype=torch.float64)
A = torch.cat([LAYER.W.data.flatten(0, 1), torch.randn(2, 32, generator=torch_stream(0, "race"), dtype=torch.float64)])


@pytest.mark.parametrize("d", own_stages.DIMENSIONS)
def test_the_stages_are_in_order_from_m_to_the_twelfth_power_on(d):
    _, _, T_1, T_2 = own_stages.stages(d)
    assert (T_1 < T_2) == (d > own_stages.M**12)


def test_blocks_are_examples_of_the_task():
    batch = own_stages.sampled(TASK, own_stages.BLOCK + 7, 5).checked("batch")
    first = TASK.sample(own_stages.BLOCK, 5000)
    assert len(batch) == own_stages.BLOCK + 7
    assert torch.equal(batch.x[: own_stages.BLOCK], first.x)
    assert torch.equal(batch.x[own_stages.BLOCK :], TASK.sample(7, 5001).x)


def test_training_coefficients_are_those_of_the_training_examples():
    run = SimpleNamespace(d=32, n=own_stages.BLOCK + 7, seed=3)
    told, made = own_stages.training_coefficients(run), own_stages.sampled(TASK, run.n, 7)
    assert all(torch.equal(getattr(told, name).to(getattr(made, name)), getattr(made, name)) for name in told.__dict__)


def test_the_raced_error_is_that_of_a_layer_whose_signals_raced():
    run = SimpleNamespace(d=32, n=500, seed=3, start=1, profession=[0, 1])
    sigma_0, eta, _, T_2 = own_stages.stages(run.d)
    layer, rates = PatchMoE(32, 2, own_stages.FILTERS, sigma_0=sigma_0, seed=1, dtype=torch.float64), []
    batch = own_stages.sampled(TASK, 500, 7)
    for k in (0, 1):
        own, other = batch.cluster == k, batch.other == k
        second = (batch.y * batch.epsilon * batch.gamma**3)[other].sum()
        rates.append(float((batch.alpha[own] ** 3).sum() + second) / 500)
    for expert in layer.W.data:
        x = expert @ TASK.v.T
        expert -= x @ TASK.v
        for _ in range(T_2):
            rise = torch.tensor(rates) * x.clone() ** 2
            x = x + eta * rise / rise.norm()
        expert += x @ TASK.v
    drawn = TASK.sample(40_000, 9, torch.float64)
    wrong = drawn.y[:, None] * layer.answers(drawn.x) <= 0
    expected = 50 * sum(float(wrong[drawn.cluster == k, k].double().mean()) for k in (0, 1))
    assert own_error.raced_error(run) == pytest.approx(expected, abs=1.0)


def test_answers_and_logits_from_products_are_the_layers():
    batch = TASK.sample(500, 1, torch.float64)
    answers, logits = own_stages.parts(own_stages.products(batch, A))
    assert torch.allclose(answers.sum(1), LAYER.answers(batch.x))
    assert torch.allclose(logits.sum(1), batch.x.sum(1) @ A[-2:].T)
    assert torch.allclose(logits[:, 1], batch.patch(1) @ A[-2:].T)


def test_drawn_products_have_the_distribution_of_made_ones():
    batch = TASK.sample(20_000, 1, torch.float64)
    made, (y, cluster, drawn) = own_stages.products(batch, A), own_stages.drawn_products(TASK, A, 20_000, 2)
    for patch in range(4):
        for row in (0, 9, 17):
            signed = (made[:, patch, row] * batch.y, drawn[:, patch, row] * y)
            for k in (0, 1):
                assert kstest(signed[0][batch.cluster == k], signed[1][cluster == k]).pvalue > 1e-3
    assert (torch.cov(made[:, 3].T) - torch.cov(drawn[:, 3].T)).abs().max() < 0.05 * torch.cov(made[:, 3].T).max()


def test_shares_count_errors_and_wrong_experts():
    k, batch = torch.tensor([0, 1]), TASK.sample(1000, 4, torch.float64)
    found = own_stages.shares(own_stages.products(batch, A), batch.y, batch.cluster, k)
    f, m = LAYER.answers(batch.x), (batch.x.sum(1) @ A[-2:].T).argmax(1)
    wrong = [(batch.y * f[:, e] <= 0)[batch.cluster == e].double().mean() for e in (0, 1)]
    error = (batch.y * f[torch.arange(1000), m] <= 0).double().mean()
    expected = {"error": error, "misrouted": (m != batch.cluster).double().mean(), "own": sum(wrong) / 2}
    assert found == pytest.approx({name: 100 * float(value) for name, value in expected.items()})


@pytest.mark.parametrize("seed", range(10))
def test_a_start_has_both_professions_and_is_the_first_such(seed):
    start = own_stages.first_start(32, 0.3, TASK.v.float(), seed)

    def both(s):
        W = PatchMoE(32, 2, own_stages.FILTERS, sigma_0=0.3, seed=s).W.data
        return len({int(x.flatten().argmax()) % 2 for x in W @ TASK.v.float().T}) == 2

    assert [both(s) for s in range(seed, start + 1, 10)] == [False] * ((start - seed) // 10) + [True]


def test_the_least_margin_is_below_every_example_and_reached():
    own, other, center = (torch.tensor([x], dtype=torch.float64) for x in (0.02, -0.001, 0.0005))
    y, like = 1.0, dict(generator=torch_stream(1, "race"), dtype=torch.float64)
    u = torch.rand(3, 100_000, **like)
    low, high = (torch.tensor([own_error.LAWS[n][i] for n in ("alpha", "beta", "gamma")])[:, None] for i in (0, 1))
    alpha, beta, gamma = low + (high - low) * u
    margins = alpha**3 * own - y * (gamma**3 * other.abs() + beta**3 * center.abs())
    least = float(own_error.least_margin(own, other, center))
    assert least <= float(margins.min()) < least + 0.1 * abs(least)


def test_noise_turns_an_example_less_often_than_the_bound():
    like = dict(generator=torch_stream(2, "race"), dtype=torch.float64)
    cubes = (torch.randn(400_000, own_error.FILTERS, **like) ** 3).sum(1)
    for margin in (20.0, 50.0, 100.0):
        bound = float(own_error.noise_bound(torch.tensor([margin], dtype=torch.float64), 1.0))
        assert 0 < float((cubes > margin).double().mean()) <= bound


def test_errors_are_the_share_of_wrong_examples():
    rng, like = torch_stream(3, "race"), dict(generator=torch_stream(4, "race"), dtype=torch.float64)
    own, other = torch.tensor([[1.0, 1e-3], [1.0, 0.0]], dtype=torch.float64)
    tied = own_error.errors(own, other, torch.zeros_like(own), 1e-9, rng)
    alpha, gamma = (low + (high - low) * torch.rand(10**6, **like) for low, high in ((0.5, 2.0), (0.5, 2.0)))
    assert float(tied[1]) == 0
    assert float(tied[0]) == pytest.approx(float((alpha < gamma).double().mean()) / 2, abs=0.02)
