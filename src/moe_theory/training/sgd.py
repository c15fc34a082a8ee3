"""Stochastic gradient descent on a mixing measure: the procedure of Nguyen et al. (2025), E.1."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure, regression_function
from moe_theory.models.routers import Router


def stochastic_descent(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    start: MixingMeasure,
    router: Router,
    expert: str = "relu",
    epochs: int = 10,
    rate: float = 0.1,
    batch: int = 100,
    seed: int = 0,
) -> MixingMeasure:
    """Plain steps `G <- G - rate * grad` of the mean squared error of a batch, in (beta0, beta1, eta).

    Args:
        x, y: the data.
        epochs, rate: 10 and 0.1 in E.1; batch: not given there.
        seed: orders the examples anew in every epoch; what is left over after the last full batch waits.

    Raises:
        ValueError: for a batch larger than the data, or a descent that left the finite numbers.
    """
    check.integer("epochs", epochs, 1), check.positive("rate", rate)
    if check.integer("batch", batch, 1) > len(x):
        raise ValueError(f"batch: expected at most n = {len(x)}, got {batch}")
    parts = [t.clone().requires_grad_() for t in (start.beta0, start.beta1, start.eta)]
    rng = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=rng)
        for some in order[: len(x) // batch * batch].view(-1, batch):
            G = _trusted(parts)
            loss = (regression_function(G, x[some], router, expert) - y[some]).square().mean()
            steps = torch.autograd.grad(loss, parts)
            with torch.no_grad():
                for part, step in zip(parts, steps, strict=True):
                    part -= rate * step
    return MixingMeasure(*(t.detach() for t in parts))


def _trusted(parts: list[Tensor]) -> MixingMeasure:
    """A measure made without the checks of its constructor, which would double the time of a step."""
    G = object.__new__(MixingMeasure)
    G.__dict__.update(zip(("beta0", "beta1", "eta"), parts, strict=True))
    return G
