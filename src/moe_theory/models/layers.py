"""Linear layers, single and side by side: all that the sparse networks learn sits in these."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check


def drawn(*shape: int, rng: torch.Generator) -> nn.Parameter:
    """Weights from N(0, 1/fan_in), the fan-in being the last dimension."""
    return nn.Parameter(torch.randn(*shape, generator=rng) / math.sqrt(shape[-1]))


class Linear(nn.Module):
    """`W a + b`, with W (out, d) from N(0, 1/d) and b (out,) zero at the start."""

    def __init__(self, d: int, out: int, rng: torch.Generator):
        super().__init__()
        self.W = drawn(check.integer("out", out, 1), check.integer("d", d, 1), rng=rng)
        self.b = nn.Parameter(torch.zeros(out))

    def forward(self, a: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch out"]:
        return F.linear(a, self.W, self.b)


class Stack(nn.Module):
    """M layers side by side, `W_m a_m + b_m`: each reads an input of its own. W is (M, out, d), b (M, out)."""

    def __init__(self, d: int, out: int, experts: int, rng: torch.Generator):
        super().__init__()
        check.integer("d", d, 1)
        check.integer("out", out, 1)
        check.integer("experts", experts, 1)
        self.W, self.b = drawn(experts, out, d, rng=rng), nn.Parameter(torch.zeros(experts, out))

    def forward(self, a: Float[Tensor, "*batch M d"]) -> Float[Tensor, "*batch M out"]:
        return torch.einsum("...md,mod->...mo", a, self.W) + self.b


class Fan(Stack):
    """M layers side by side that read the same input, `W_m a + b_m`."""

    def forward(self, a: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M out"]:
        return F.linear(a, self.W.flatten(0, 1), self.b.flatten()).unflatten(-1, self.b.shape)


class Words(nn.Module):
    """A vector for each word, W (words, d), standard normal at the start."""

    def __init__(self, words: int, d: int, rng: torch.Generator):
        super().__init__()
        self.W = nn.Parameter(torch.randn(check.integer("words", words, 1), check.integer("d", d, 1), generator=rng))

    def forward(self, tokens: Tensor) -> Float[Tensor, "*batch d"]:
        return self.W[tokens]
