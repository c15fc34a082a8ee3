"""The loop of whatever autograd trains."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Batch = TypeVar("Batch")

#: Steps over which the rate of `annealed` rises at the start.
WARM_UP = 100


def fit(loss: Callable[[Batch], Tensor], batches: Iterable[Batch], optimizer: Optimizer) -> Iterator[float]:
    """A step of the optimizer on each batch, and its loss before the step.

    A step is taken when its loss is asked for, so that one can measure between two steps; the gradients of
    the last step stay in the parameters.
    """
    for batch in batches:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        yield value.item()


def annealed(
    loss: Callable[[Batch], Tensor], batches: Iterable[Batch], parameters: Iterable[Tensor], *, rate: float, steps: int
) -> Iterator[float]:
    """`fit` with Adam, whose rate rises to `rate` in `WARM_UP` steps and falls in a straight line to 0 at the end.

    Of the parameters those that need a gradient are trained; there is a batch for each of `steps`.
    """
    adam = torch.optim.Adam([p for p in parameters if p.requires_grad], rate, fused=True)
    slope = torch.optim.lr_scheduler.LambdaLR(adam, lambda t: min((t + 1) / WARM_UP, 1) * (1 - t / steps))
    for value in fit(loss, batches, adam):
        slope.step()
        yield value
