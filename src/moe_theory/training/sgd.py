"""Stochastic gradient descent on a mixing measure: the procedure of Nguyen et al. (2025), E.1."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure
from moe_theory.models.routers import Router
from moe_theory.streams import torch_stream
from moe_theory.training.least_squares import Problems, evaluate, gradient, problems, unknowns


def stochastic_descent(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    start: MixingMeasure,
    router: Router,
    expert: str = "relu",
    *,
    epochs: int = 10,
    rate: float = 0.1,
    batch: int = 100,
    seed: int = 0,
) -> MixingMeasure:
    """Plain steps `G <- G - rate * grad` of the mean squared error of a batch, in (beta0, beta1, eta).

    Args:
        x, y: the data; start: the measure that the descent begins at.
        router, expert: of the fitted function; expert is a key of `moe_theory.models.mixture.EXPERTS`.
        epochs, rate: 10 and 0.1 in E.1; batch: not given there.
        seed: orders the examples anew in every epoch; what is left over after the last full batch waits.

    Raises:
        ValueError: for a batch larger than the data, or a descent that left the finite numbers.
    """
    check.integer("epochs", epochs, 1)
    check.positive("rate", rate)
    if check.integer("batch", batch, 1) > len(x):
        raise ValueError(f"batch: expected at most n = {len(x)}, got {batch}")
    rng = torch_stream(seed, "order")
    data = problems(x[None], y[None], router, expert)
    G = start
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=rng).to(x.device)
        for some in order[: len(x) // batch * batch].view(-1, batch):
            G = _stepped(G, data.rows(some), router, 2 * rate / batch)
    return MixingMeasure(G.beta0, G.beta1, G.eta)


def _stepped(G: MixingMeasure, data: Problems, router: Router, rate: float) -> MixingMeasure:
    """One step; the measure is made without the checks of its constructor, which would cost as much as the step."""
    by_router, by_expert = rate * gradient(*evaluate(unknowns(G, router)[None], data), data)[0]
    new = object.__new__(MixingMeasure)
    beta1 = G.beta1 + router.pull_back(G.beta1, by_router[:, 1:])
    new.__dict__.update(beta0=G.beta0 + by_router[:, 0], beta1=beta1, eta=G.eta + by_expert)
    return new
