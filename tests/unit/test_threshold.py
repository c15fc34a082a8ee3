"""The threshold between two constant experts: its risk in closed form, and its learners one by one."""

import pytest
import torch

from moe_theory.models.rules import softmax_topk, topk_set, topk_softmax
from moe_theory.theory.smoothing import route_probabilities
from moe_theory.theory.threshold import (
    learn_threshold,
    noisy_threshold_risk,
    threshold_logits,
    threshold_loss,
    threshold_risk,
)


def real(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("b", [-0.7, 0.0, 0.5])
def test_risk_of_the_selection_first_in_closed_form_and_its_zero_gradient(b):
    at = real(b).requires_grad_()
    risk = threshold_risk(at, topk_softmax)
    assert abs(risk.item() - 2 * abs(b)) < 1e-14
    assert float(torch.autograd.grad(risk, at)[0]) == 0.0
    wide = float(threshold_risk(real(b), topk_softmax, 2.0))
    assert abs(wide - 4 * abs(b) / 3) < 1e-14


@pytest.mark.parametrize("end", [1.0, 2.0])
def test_risk_of_the_softmax_first_is_a_mean_over_a_fine_grid(end):
    n = 300_000
    x = -1 + (1 + end) * (torch.arange(n, dtype=torch.float64) + 0.5) / n
    gates = softmax_topk.gates(threshold_logits(x, real(0.3)), 1)
    by_hand = torch.where(x > 0.3, torch.sigmoid(x - 0.3) - x.sign(), -torch.sigmoid(0.3 - x) - x.sign()).square()
    assert (threshold_loss(x, gates) - by_hand).abs().max() < 1e-14
    assert abs(float(threshold_risk(real(0.3), softmax_topk, end)) - float(by_hand.mean())) < 1e-5


@pytest.mark.parametrize("width", [0.1, 0.3, 0.5])
def test_risk_under_noise_in_closed_form(width):
    b = real(0.5).requires_grad_()
    slope = torch.autograd.grad(noisy_threshold_risk(b, width), b)[0]
    assert abs(float(slope) - 2) < 1e-12
    assert abs(float(noisy_threshold_risk(real(0.0), width)) - 2 * width / 3) < 1e-12
    with pytest.raises(ValueError, match="scale: expected a finite number > 0"):
        noisy_threshold_risk(real(0.0), 0.0)


@pytest.mark.parametrize("b", [-1.5, 1.5])
def test_a_threshold_outside_the_interval_sends_all_to_one_expert(b):
    assert abs(float(threshold_risk(real(b), topk_softmax)) - 2) < 1e-14
    with pytest.raises(ValueError, match="end: expected a finite number > 0, got -0.5"):
        threshold_risk(real(b), topk_softmax, -0.5)


def one_learner(rule, seed, noise, score, steps):
    """The same, one run and one example after another."""
    g, b, path = torch.Generator().manual_seed(seed), 0.6, []
    for _ in range(steps):
        path.append(b)
        x, at = 2 * torch.rand(64, generator=g, dtype=torch.float64) - 1, real(b).requires_grad_()
        h = torch.stack([x - at, 0 * x], -1)
        p = route_probabilities(h, "uniform", noise) if noise else topk_set(h, 1).double()
        m, total = torch.multinomial(p.detach(), 1, generator=g)[:, 0], 0.0
        for i in range(64):
            gate = torch.softmax(h[i], -1)[m[i]] if rule == softmax_topk else 1.0 + 0 * at
            loss = (gate * (1 - 2 * m[i]) - x[i].sign()) ** 2
            total = total + loss + (loss.detach() * p[i, m[i]].log() if score else 0.0)
        b -= 0.04 * float(torch.autograd.grad(total / 64, at)[0])
    return path


@pytest.mark.parametrize(
    "rule, noise, score",
    [(topk_softmax, None, False), (topk_softmax, 0.3, False), (topk_softmax, 0.3, True), (softmax_topk, None, False)],
)
def test_learners_side_by_side_are_the_learners_one_by_one(rule, noise, score):
    paths = learn_threshold(rule, [torch.Generator().manual_seed(s) for s in (3, 4)], noise=noise, score=score, steps=5)
    for path, seed in zip(paths, (3, 4), strict=True):
        assert abs(path - one_learner(rule, seed, noise, score, 5)).max() < 1e-13
    moves = abs(paths[:, -1] - 0.6).min() > 1e-3
    assert moves == (score or rule == softmax_topk) and (moves or (paths == 0.6).all())
