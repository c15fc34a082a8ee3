"""Patch CNN experts (Chen et al. 2022, Eq. 3.1) and their activations."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.streams import stream


class Activation(NamedTuple):
    """An activation sigma and its derivative, both acting elementwise.

    `degree` is p if `sigma(z) = z^p`, None for other activations.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    degree: int | None = None


def _gelu_slope(z: Tensor) -> Tensor:
    return torch.special.ndtr(z) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)


#: The activations of Tables 7 and 8. ReLU and CELU take the slope 0 and 1 at the origin, as autograd does.
ACTIVATIONS = {
    "linear": Activation(lambda z: z, torch.ones_like, 1),
    "cubic": Activation(lambda z: z * z * z, lambda z: 3 * z * z, 3),
    "relu": Activation(F.relu, lambda z: (z > 0).to(z)),
    "celu": Activation(F.celu, lambda z: z.clamp(max=0).exp()),
    "gelu": Activation(F.gelu, _gelu_slope),
    "tanh": Activation(torch.tanh, lambda z: 1 - torch.tanh(z) ** 2),
}


def patch_cnn(x: Float[Tensor, "n P d"], W: Float[Tensor, "J d"], sigma: Activation) -> Float[Tensor, " n"]:
    """Eq. 3.1: `f(x) = sum_j sum_p sigma(<w_j, x_p>)`, one expert on n examples."""
    return sigma.value(x @ W.T).sum((1, 2))


class PatchCNN(nn.Module):
    """A single two-layer patch CNN, `f(x_p) = sum_j a_j sigma(<w_j, x_p> + b_j)`.

    This is the class named below Theorem 4.1, with fixed output signs: a_j = +1 on the first half
    of the filters, -1 on the second. Two logits under a softmax, each the sum of its own filters,
    are the same function. Eq. 3.1 itself has all a_j = +1 and no biases, which leaves an activation
    that is never negative, such as ReLU, with one answer for every input.

    Args:
        d: patch dimension.
        filters: number J of filters, even.
        activation: a key of `ACTIVATIONS`.
        seed: draws weights and biases from Unif[-1/sqrt(d), 1/sqrt(d)], the default of a convolution.
    """

    def __init__(self, d: int, filters: int, activation: str, seed: int):
        super().__init__()
        if check.integer("filters", filters, 2) % 2:
            raise ValueError(f"filters: expected an even number, half for each sign, got {filters}")
        self.sigma = ACTIVATIONS[check.choice("activation", activation, ACTIVATIONS)]
        draw = torch.from_numpy(stream(seed, "weights").uniform(-1, 1, (filters, d + 1))).float() / math.sqrt(d)
        self.w = nn.Parameter(draw[:, :d].clone())
        self.b = nn.Parameter(draw[:, d].clone())
        self.register_buffer("a", torch.ones(filters).index_fill_(0, torch.arange(filters // 2, filters), -1.0))

    def forward(self, x: Float[Tensor, "n P d"]) -> Float[Tensor, " n"]:
        return self.sigma.value(x @ self.w.T + self.b).sum(1) @ self.a
