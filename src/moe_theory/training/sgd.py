"""Stochastic gradient descent on a mixing measure: the procedure of Nguyen et al. (2025), E.1."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure
from moe_theory.models.routers import Router
from moe_theory.streams import torch_stream
from moe_theory.training.least_squares import Problems, evaluate, gradient, problems


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
    """One descent on one data set: `stochastic_descents`, of which arguments and errors are, with R = 1."""
    how = dict(epochs=epochs, rate=rate, batch=batch, seeds=[seed])
    return stochastic_descents(x[None], y[None], [start], router, expert, **how)[0]


def stochastic_descents(
    x: Float[Tensor, "R n d"],
    y: Float[Tensor, "R n"],
    starts: list[MixingMeasure],
    router: Router,
    expert: str = "relu",
    *,
    epochs: int = 10,
    rate: float = 0.1,
    batch: int = 100,
    seeds: list[int],
) -> list[MixingMeasure]:
    """Plain steps `G <- G - rate * grad` of the mean squared error of a batch, in (beta0, beta1, eta), R at a time.

    Args:
        x, y: R data sets; starts: the measures that the descents begin at, of one number of atoms.
        router, expert: of the fitted functions; expert is a key of `moe_theory.models.mixture.EXPERTS`.
        epochs, rate: 10 and 0.1 in E.1; batch: not given there.
        seeds: each orders the examples of its data set anew in every epoch; what is left over after the last full
            batch waits.

    Raises:
        ValueError: for a batch larger than the data, starts or seeds that are not one for each data set, or a descent
            that left the finite numbers.
    """
    check.integer("epochs", epochs, 1)
    check.positive("rate", rate)
    R, n = y.shape
    if check.integer("batch", batch, 1) > n:
        raise ValueError(f"batch: expected at most n = {n}, got {batch}")
    for name, given in (("starts", starts), ("seeds", seeds)):
        if len(given) != R:
            raise ValueError(f"{name}: expected one for each of {R} data sets, got {len(given)}")
    rngs = [torch_stream(seed, "order") for seed in seeds]
    data = problems(x, y, router, expert)
    at = [torch.stack([getattr(G, name) for G in starts]) for name in ("beta0", "beta1", "eta")]
    for _ in range(epochs):
        order = torch.stack([torch.randperm(n, generator=rng) for rng in rngs]).to(x.device)
        for some in order[:, : n // batch * batch].view(R, -1, batch).unbind(1):
            at = _stepped(at, data.rows(some), router, 2 * rate / batch)
    return [MixingMeasure(*one) for one in zip(*at, strict=True)]


def _stepped(at: list[Tensor], data: Problems, router: Router, rate: float) -> list[Tensor]:
    """One step of `(beta0, beta1, eta)`, each with a first dimension for the data sets."""
    beta0, beta1, eta = at
    here = torch.stack([torch.cat([beta0[..., None], router.embedding(beta1)], -1), eta], 1)
    by_router, by_expert = (rate * gradient(*evaluate(here, data), data)).unbind(1)
    return [beta0 + by_router[..., 0], beta1 + router.pull_back(beta1, by_router[..., 1:]), eta + by_expert]
