"""Gaussian mixtures with labels, soft mixtures side by side, their training, and what is read off their routers."""

import math

import pytest
import torch

from moe_theory.measure.sparsity import average_sparsity, norm_ratio, shuffled
from moe_theory.models.soft import DenseNets, SoftMoE
from moe_theory.tasks.gaussians import Examples, GaussianMixture
from moe_theory.training.batched import losses, train

SMALL = GaussianMixture(5, 4, outputs=3, seed=3)


def test_a_mixture_has_the_moments_it_names():
    task = GaussianMixture(3, 2, spurious=4, seed=1)
    got = task.sample(60_000, 0)
    for c in range(3):
        x = got.x[got.cluster == c]
        assert (x.mean(0) - task.mean[c]).abs().max() < 0.04
        assert (x.T.cov() - torch.eye(6)).abs().max() < 0.05
    assert not task.mean[:, 2:].any()
    assert (got.y == task.target[got.cluster]).all()
    assert task.target.mean(0).abs().max() < 1e-6
    assert task.target.square().mean(0).sub(1).abs().max() < 1e-6


def test_linear_labels_are_a_function_of_the_relevant_part():
    task = GaussianMixture(4, 3, spurious=2, outputs=2, label="linear", seed=1)
    got = task.sample(20_000, 5)
    inner = torch.einsum("nod,nd->no", task.target[got.cluster], got.x - task.mean[got.cluster])
    assert (got.y - inner).abs().max() < 1e-5
    assert not task.target[..., 3:].any()
    assert got.y.square().mean().sub(1).abs() < 0.04


def test_separation_is_that_of_the_closest_pair():
    task = GaussianMixture(3, 4, seed=0)
    task.mean = torch.tensor([[0.0, 0, 0, 0], [3, 0, 0, 0], [0, 8, 0, 0]])
    assert task.separation == pytest.approx(1.5)


@pytest.mark.parametrize("expert", [0, 1, 3])
@pytest.mark.parametrize("router", [1, 3])
def test_the_answer_is_the_mean_under_the_gates(expert, router):
    x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    moe = SoftMoE(4, 3, 5, expert_layers=expert, router_layers=router, width=6, seeds=(1, 2))
    pi, f = moe.probabilities(x), moe.answers(x)
    expected = sum(pi[:, :, m, None] * f[:, m] for m in range(5))
    assert (moe(x) - expected).abs().max() < 1e-6
    best = pi.argmax(-1)
    assert (moe.chosen(x) == best).all()
    one = torch.stack([torch.stack([f[r, best[r, i], i] for i in range(7)]) for r in range(2)])
    assert (moe.routed(x) == one).all()


def test_layers_are_products_with_relus_between():
    x = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(0))
    nets = DenseNets([4, 5, 3], [7]).nets
    nets.b[0].data += 0.3
    (W, V), (b, c) = ([p[0, 0] for p in part] for part in (nets.W, nets.b))
    assert (nets(x)[0, 0] - (torch.relu(x[0] @ W.T + b) @ V.T + c)).abs().max() < 1e-6


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_network_learns_beside_others_what_it_learns_alone(optimizer):
    sets = [SMALL.sample(n, n) for n in (50, 80, 20)]
    how = dict(steps=20, batch=16, optimizer=optimizer, rate=0.01, router_rate=0.05)
    for expert in (0, 3):
        together = SoftMoE(4, 3, 5, expert_layers=expert, width=6, seeds=(1, 2, 3))
        list(train(together, sets, seeds=(4, 5, 6), decay=(0, 0.1, 0), frozen=(0, 0, 1), **how))
        for r in range(3):
            alone = SoftMoE(4, 3, 5, expert_layers=expert, width=6, seeds=(r + 1,))
            list(train(alone, sets[r : r + 1], seeds=(4 + r,), decay=(0.1 * (r == 1),), frozen=(r == 2,), **how))
            for p, q in zip(together.parameters(), alone.parameters(), strict=True):
                assert (p[r] - q[0]).abs().max() < 1e-5


def test_a_step_of_plain_descent_is_the_gradient_of_the_penalized_loss():
    data = SMALL.sample(1, 0)
    moe = SoftMoE(4, 3, 5, seeds=(1,))
    W, U = (p.detach().clone().requires_grad_() for p in (moe.router.W[0], moe.experts.U))
    x, y = data.x.double(), data.y.double()
    F = (x @ W[0, 0].double().T).softmax(-1) @ U[0].double()
    (by_W, by_U) = torch.autograd.grad((F - y).square().mean() + 0.3 * W.double().square().sum(), (W, U))
    list(train(moe, [data], steps=1, batch=9, seeds=(0,), optimizer="sgd", rate=0.1, router_rate=0.2, decay=(0.3,)))
    assert (moe.router.W[0] - W + 0.2 * by_W).abs().max() < 1e-6
    assert (moe.experts.U - U + 0.1 * by_U).abs().max() < 1e-6


def test_a_frozen_router_stays_and_the_others_move():
    moe = SoftMoE(4, 3, 5, seeds=(1, 2))
    W = moe.router.W[0].detach().clone()
    sets = [SMALL.sample(50, 0)] * 2
    list(train(moe, sets, steps=3, batch=8, seeds=(0, 0), rate=0.01, router_rate=0.1, frozen=(True, False)))
    assert (moe.router.W[0][0] == W[0]).all()
    assert (moe.router.W[0][1] != W[1]).all()


def test_losses_are_those_of_the_chosen_expert():
    moe, sets = SoftMoE(4, 3, 5, seeds=(1, 2)), [SMALL.sample(30, s) for s in (0, 1)]
    for r in range(2):
        m = (sets[r].x @ moe.router.W[0][r, 0].T).argmax(-1)
        expected = (moe.experts.U[r, m].detach() - sets[r].y).square().mean()
        assert losses(moe, sets, rows=7)[r] == pytest.approx(float(expected), rel=1e-5)


def test_sparsity_counts_experts():
    cluster = torch.tensor([0, 0, 1, 1])
    one_each = torch.eye(4)[[0, 0, 3, 3]]
    assert average_sparsity(one_each, cluster) == 1
    two_each = torch.eye(4)[[0, 1, 2, 3]]
    assert average_sparsity(two_each, cluster) == pytest.approx(2)
    assert average_sparsity(torch.full((4, 4), 0.25), cluster) == pytest.approx(4)
    half = torch.cat([one_each[:2], two_each[2:]])
    assert average_sparsity(half, cluster) == pytest.approx(1.5)


def test_shuffling_moves_whole_columns():
    W = torch.arange(12.0).view(3, 4)
    got = shuffled(W, 0)
    assert got.tolist() != W.tolist()
    assert sorted(map(tuple, got.T.tolist())) == sorted(map(tuple, W.T.tolist()))


def test_the_norm_ratio_runs_from_one_to_the_number_of_experts():
    assert norm_ratio(torch.eye(5)) == pytest.approx(1)
    assert norm_ratio(torch.eye(5)[:1].T @ torch.ones(1, 3)) == pytest.approx(5)
    assert norm_ratio(torch.diag(torch.tensor([1.0, 3.0]))) == pytest.approx(5 / 4)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: GaussianMixture(1, 2), "k"),
        (lambda: GaussianMixture(3, 2, label="cubic"), "label"),
        (lambda: GaussianMixture(3, 2, scale=-1.0), "scale"),
        (lambda: SMALL.sample(0, 0), "n"),
        (lambda: SoftMoE(4, 3, 5, expert_layers=-1), "expert_layers"),
        (lambda: SoftMoE(4, 3, 0), "experts"),
        (lambda: next(train(DenseNets([4, 3], [0]), [], steps=1, batch=1, seeds=(0,), rate=0.1)), "data"),
        (lambda: next(train(SoftMoE(4, 3, 2), [SMALL.sample(3, 0)], steps=1, batch=1, seeds=(0,), rate=0.1)), "router"),
        (lambda: average_sparsity(torch.ones(2, 2), torch.zeros(2, dtype=torch.long)), "pi"),
        (lambda: average_sparsity(torch.eye(2), torch.zeros(3, dtype=torch.long)), "cluster"),
        (lambda: norm_ratio(torch.zeros(2, 2)), "W"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=rf"^{named}"):
        call()


def test_dense_networks_learn_a_line():
    x = torch.linspace(-1, 1, 50)[:, None]
    data = Examples(x, 2 * x + 1, torch.zeros(50, dtype=torch.long))
    nets = DenseNets([1, 1], [0])
    *_, last = train(nets, [data], steps=500, batch=50, seeds=(0,), optimizer="sgd", rate=0.05)
    assert last < 1e-6
    assert math.isclose(nets.nets.W[0].item(), 2, abs_tol=1e-2)
