"""Two linear experts: paths, turns and the law of the turns for many inputs a step."""

import math

import pytest
import torch

from moe_theory.theory.staircase import ALPHA, START, excess_length, limiting_turn, turns, walk


def drawn(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(*shape, generator=rng, dtype=torch.float64) - 1
    return x, torch.randint(2, shape, generator=rng)


def test_a_step_is_gradient_descent():
    x, coins = drawn(3, 4, 5)
    gates = torch.eye(2, dtype=torch.float64)[coins]
    path = walk(x, gates)
    assert path.shape == (3, 5, 2) and path[:, 0].tolist() == 3 * [list(START)]
    for run in range(3):
        for t in range(4):
            theta = path[run, t].clone().requires_grad_()
            loss = ((gates[run, t] @ theta) * x[run, t]).square().mean()
            step = theta - ALPHA * torch.autograd.grad(loss, theta)[0]
            assert torch.allclose(step, path[run, t + 1], rtol=1e-14)


def test_turns_and_lengths_of_known_paths():
    square = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [-1.0, 1.0]]])
    assert turns(square)[0].tolist() == [90.0, 90.0, 0.0]
    assert float(excess_length(square)[0]) == pytest.approx(4 / math.sqrt(2))


def test_both_experts_go_straight_and_one_alone_goes_along_the_axes():
    x, coins = drawn(50, 20, 1)
    both = walk(x, torch.full((*x.shape, 2), 0.5, dtype=torch.float64))
    assert float(turns(both).max()) < 1e-6 and torch.allclose(excess_length(both), torch.ones(50).double())
    one = turns(walk(x, torch.eye(2, dtype=torch.float64)[coins]))
    changed = coins[:, 1:, 0] != coins[:, :-1, 0]
    assert torch.allclose(one, 90.0 * changed.double(), atol=1e-5)


def test_the_turn_of_many_inputs_follows_the_limit():
    x, coins = drawn(400, 20, 400)
    found = float(turns(walk(x, torch.eye(2, dtype=torch.float64)[coins])).mean())
    assert found == pytest.approx(limiting_turn() / 20, rel=0.03)
