"""The loop of whatever autograd trains."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor
from torch.optim import Optimizer

Batch = TypeVar("Batch")


def fit(loss: Callable[[Batch], Tensor], batches: Iterable[Batch], optimizer: Optimizer) -> Iterator[float]:
    """A step of the optimizer on each batch, and its loss before the step.

    A step is taken when its loss is asked for, so that one can measure between two steps; the gradients of
    the last step stay in the parameters.

    Args:
        loss: of a batch, a scalar.
        batches: what `loss` is called with, one for each step.
        optimizer: of the parameters that the loss depends on.
    """
    for batch in batches:
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        optimizer.step()
        yield value.item()
