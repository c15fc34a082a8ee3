"""The training loop, against steps written out."""

import torch

from moe_theory.training.fit import fit


def test_steps_are_gradient_steps_taken_one_at_a_time():
    w, rate = torch.tensor([1.0, -2.0], requires_grad=True), 0.1
    batches = [torch.tensor([1.0, 0.0]), torch.tensor([0.5, 1.0]), torch.tensor([0.0, 2.0])]
    expected, losses = w.detach().clone(), []
    training = fit(lambda x: (w @ x - 1).square(), batches, torch.optim.SGD([w], rate))
    for x in batches:
        assert torch.equal(w.detach(), expected)  # no step before it is asked for
        residual = expected @ x - 1
        losses.append(float(residual**2))
        expected = expected - rate * 2 * residual * x
        assert next(training) == losses[-1]
        assert torch.allclose(w.grad, 2 * residual * x)
    assert torch.allclose(w.detach(), expected) and next(training, None) is None
