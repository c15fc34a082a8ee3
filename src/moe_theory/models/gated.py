"""Mixtures with other gates than one softmax, for inputs that are sums of several parts; R of them side by side."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.soft import Nets, SoftMoE


class TopTwoMoE(SoftMoE):
    """The gates are the softmax of the two largest logits, in training too; arguments are those of `SoftMoE`."""

    def probabilities(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n M"]:
        logits = self.router(x)[:, 0]
        top = logits.topk(2, -1)
        return torch.zeros_like(logits).scatter(-1, top.indices, top.values.softmax(-1))


class HeadedMoE(SoftMoE):
    """The gates are the mean of several softmaxes, the heads, over the same linear experts, each with its own weights.

    The other arguments are those of `SoftMoE`; the router's layer has `heads * M` rows, head after head.
    """

    def __init__(self, d: int, outputs: int, experts: int, *, heads: int = 2, seeds: Sequence[int] = (0,)):
        super().__init__(d, outputs, experts, expert_layers=1, seeds=seeds)
        self.heads = check.integer("heads", heads, 1)
        self.router = Nets([d, heads * experts], 1, seeds, purpose="router weights")
        self.router.b[0].requires_grad_(False)

    def probabilities(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n M"]:
        """The mean of the heads."""
        return self.router(x)[:, 0].unflatten(-1, (self.heads, -1)).softmax(-1).mean(2)

    def chosen(self, x: Float[Tensor, "R n d"]) -> Tensor:
        return self.probabilities(x).argmax(-1)
