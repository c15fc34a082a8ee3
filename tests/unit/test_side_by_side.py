"""Networks trained side by side are networks trained one by one."""

import pytest
import torch
import torch.nn.functional as F

from moe_theory.models.rules import sampled_topk, softmax_topk, topk_softmax
from moe_theory.models.sparse import SparseMLP
from moe_theory.tasks.gaussians import GaussianClasses, Labelled
from moe_theory.training.side_by_side import Networks, accuracies, stacked, train, train_specialists

CASES = [(topk_softmax, 1), (softmax_topk, 2)]
SEEDS = (0, 1)


@pytest.fixture
def data():
    return stacked([GaussianClasses(4, 6, spread=0.6, seed=s).sample(10, seed=s) for s in SEEDS])


def made(heads="single"):
    return [SparseMLP(6, 4, 2, rule, k, heads, s).double() for rule, k in CASES for s in SEEDS]


def doubled(data):
    return data._replace(x=data.x.double())


@pytest.mark.parametrize("heads", ["single", "multi"])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_is_that_of_each_network(data, heads, frozen):
    data, networks = doubled(data), Networks(made(heads))
    norms = train(networks, data, 0.3, 12, 5, torch.tensor([frozen] * 4))
    for r, network in enumerate(made(heads)):
        optimizer = torch.optim.SGD(network.block.experts.parameters() if frozen else network.parameters(), 0.3)
        for t in range(5):
            at = torch.arange(12 * t, 12 * (t + 1)) % 40
            network.zero_grad()
            F.cross_entropy(network(data.x[r % 2, at], torch.zeros(12, 2))[0], data.y[r % 2, at]).backward()
            size = torch.cat([p.grad.flatten() for p in network.block.router.parameters()]).norm()
            assert abs(float(norms[r, t] - size)) < 1e-12
            assert (size == 0) == (r < 2)
            optimizer.step()
        for name, p in network.block.named_parameters():
            torch.testing.assert_close(networks.parameters[name][r], p)
        right = network(data.x[r % 2], torch.zeros(40, 2))[0].argmax(1) == data.y[r % 2]
        assert abs(float(accuracies(networks, data)[r]) - 100 * float(right.double().mean())) < 1e-4


def test_specialists_learn_their_own_classes_only(data):
    data, networks = doubled(data), Networks(made()[:2])
    before = {name: p.detach().clone() for name, p in networks.parameters.items()}
    train_specialists(networks, data, 0.5, 16, 3)
    for r, network in enumerate(made()[:2]):
        optimizer = torch.optim.SGD(network.block.experts.parameters(), 0.5)
        for t in range(3):
            at = torch.arange(16 * t, 16 * (t + 1)) % 32
            y = data.y[r, at]
            optimizer.zero_grad()
            F.cross_entropy(network.block.experts(data.x[r, at])[torch.arange(16), y // 2], y).backward()
            optimizer.step()
        for name, p in network.block.named_parameters():
            torch.testing.assert_close(networks.parameters[name][r], p)
            if name.startswith("router"):
                assert torch.equal(networks.parameters[name], before[name])


def test_experts_are_copied_in_turn():
    start, networks = Networks(made()[:2]), Networks(made("multi"))
    networks.take_experts(start)
    for name, p in start.parameters.items():
        if name.startswith("experts"):
            assert torch.equal(networks.parameters[name], torch.cat([p, p]))
    with torch.no_grad():
        networks.parameters["experts.out.b"].add_(1.0)
    assert (start.parameters["experts.out.b"] == 0).all()


def test_rules_with_noise_are_named():
    with pytest.raises(ValueError, match="networks: expected rules without noise, got sampled_topk"):
        Networks([SparseMLP(6, 4, 2, sampled_topk, 1, "single", 0)])


def test_parts_that_do_not_fit_are_refused(data):
    networks = Networks(made()[:2])
    with pytest.raises(ValueError, match="batch: expected at most N = 40, got 41"):
        train_specialists(networks, doubled(data), 0.5, 41, 1)
    with pytest.raises(ValueError, match="parts: expected a number that divides the 2 networks, got 3"):
        accuracies(networks, stacked([Labelled(data.x[0], data.y[0])] * 3))
    other = made()[0]
    other.block.scale = 3.0
    with pytest.raises(ValueError, match="networks: expected blocks of one shape, heads and scale, got 2 kinds"):
        Networks([made()[0], other])
