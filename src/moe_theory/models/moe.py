"""The MoE layer: a router, experts, and the softmax gate that joins them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.experts import ACTIVATIONS, patch_cnn
from moe_theory.models.routers import LinearRouter
from moe_theory.models.rules import top1_noisy
from moe_theory.streams import stream


class PatchMoE(nn.Module):
    """Section 3.2 of Chen et al. (2022): `F(x) = pi_m(x) f_m(x)` for the one selected expert m.

    The gate value pi is the softmax of the noiseless logits; noise moves only the selection.

    Args:
        d: patch dimension.
        experts: number M of experts.
        filters: filters J of each expert.
        activation_name: a key of `moe_theory.models.experts.ACTIVATIONS`.
        sigma_0: standard deviation of the expert weights at initialization, > 0.
        seed: draws them.
        dtype: floating type of all weights.

    Attributes:
        router: a `LinearRouter`, zero at initialization.
        W: (M, J, d) expert weights.
    """

    def __init__(
        self,
        d: int,
        experts: int = 8,
        filters: int = 16,
        activation_name: str = "cubic",
        *,
        sigma_0: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.router = LinearRouter(d, experts, dtype)
        self.sigma = ACTIVATIONS[check.choice("activation_name", activation_name, ACTIVATIONS)]
        shape = (experts, check.integer("filters", filters, 1), d)
        W = torch.from_numpy(stream(seed, "weights").standard_normal(shape))
        self.W = nn.Parameter((check.positive("sigma_0", sigma_0) * W).to(dtype))

    def answers(self, x: Float[Tensor, "n P d"]) -> Float[Tensor, "n M"]:
        """`f_m(x_i)`: each example through every expert.

        Args:
            x: n examples of P patches.
        """
        return torch.stack([patch_cnn(x, W, self.sigma) for W in self.W], 1)

    def dispatched(self, x: Float[Tensor, "n P d"], m: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`f_{m_i}(x_i)`: each example through its own expert only.

        Args:
            x: n examples of P patches.
            m: the expert of each example, 0 to M - 1.
        """
        f = x.new_zeros(len(x))
        for expert, W in enumerate(self.W):
            at = (m == expert).nonzero().squeeze(1)
            f = f.index_put((at,), patch_cnn(x[at], W, self.sigma))
        return f

    def forward(
        self, x: Float[Tensor, "n P d"], noise: Float[Tensor, "n M"] | None = None
    ) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
        """The outputs F(x_i) and the selected experts m_i.

        Args:
            x: n examples of P patches.
            noise: added to the logits before the argmax; None is the test-time rule.
        """
        h = self.router(x)
        m = top1_noisy(h, noise)
        pi = h.softmax(-1).gather(1, m[:, None]).squeeze(1)
        return pi * self.dispatched(x, m), m
