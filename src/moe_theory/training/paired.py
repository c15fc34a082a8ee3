"""Networks that train side by side with rates of their own: settings compared on the same examples in the same order.

The losses of the networks share no parameter and Adam treats every number by itself, so that network r learns what it
would learn alone.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

B1, B2, EPS = 0.9, 0.999, 1e-8  # Adam's usual constants


class Adam:
    """Adam with a rate for each of R networks whose parameters are stacked along their first dimension.

    Args:
        groups: pairs of parameters (R, ...) and rates (R,); parameters without `requires_grad` are left out.
    """

    def __init__(self, groups: Iterable[tuple[Iterable[nn.Parameter], Float[Tensor, " R"]]]):
        self.parts = [
            (p, rates.view(-1, *[1] * (p.ndim - 1)), torch.zeros_like(p), torch.zeros_like(p))
            for parameters, rates in groups
            for p in parameters
            if p.requires_grad
        ]
        self.t = 0

    @torch.no_grad()
    def step(self, loss: Tensor, share: float = 1.0) -> None:
        """One step down the gradient of a loss, at that share of the rates."""
        slopes = torch.autograd.grad(loss, [p for p, *_ in self.parts], allow_unused=True)
        self.t += 1
        for (p, rate, m, v), g in zip(self.parts, slopes, strict=True):
            if g is None:
                continue
            m.lerp_(g, 1 - B1)
            v.mul_(B2).addcmul_(g, g, value=1 - B2)
            bottom = (v / (1 - B2**self.t)).sqrt_().add_(EPS)
            p -= share / (1 - B1**self.t) * rate * m / bottom


def descend(
    loss: Callable[[tuple[Tensor, ...]], Float[Tensor, " R"]],
    batches: Iterable[tuple[Tensor, ...]],
    adam: Adam,
    steps: int,
) -> Iterator[Float[Tensor, " R"]]:
    """A step on each of `steps` batches, the rates falling linearly to zero, and the R losses before it."""
    for t, batch in enumerate(batches):
        with torch.enable_grad():
            values = loss(batch)
        adam.step(values.sum(), 1 - t / steps)
        yield values.detach()
