"""Routers, and the rules that select experts from their logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check


class LinearRouter(nn.Module):
    """The gating network of Chen et al. (2022), Section 3.2: `h_m(x) = sum_p <theta_m, x_p>`.

    Args:
        d: patch dimension.
        experts: number M of experts.

    Attributes:
        theta: (d, M), zero at initialization (Algorithm 1, line 2).
    """

    def __init__(self, d: int, experts: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.theta = nn.Parameter(
            torch.zeros(check.integer("d", d, 1), check.integer("experts", experts, 1), dtype=dtype)
        )

    def forward(self, x: Float[Tensor, "n P d"]) -> Float[Tensor, "n M"]:
        """The noiseless logits h of n examples."""
        return x.sum(1) @ self.theta


def top1_noisy(h: Float[Tensor, "*batch M"], noise: Float[Tensor, "*batch M"] | None = None) -> Int[Tensor, "*batch"]:
    """`argmax_m h_m + r_m`, the switch routing of Section 3.3; without `noise` the test-time rule."""
    check.finite("h", h)
    return (h if noise is None else h + noise).argmax(-1)
