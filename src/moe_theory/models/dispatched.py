"""The MoE layer of Chen et al. (2022), Section 3.2, over experts of any kind: whole networks, each of which answers."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.layers import Linear
from moe_theory.models.routers import LinearRouter
from moe_theory.models.rules import top1_noisy


class PixelRouter(LinearRouter):
    """A linear gating network on images: `h_m(x) = sum_p <theta_m, x_p>` over patches of `patch` x `patch` pixels.

    With patches as large as the image it is any linear function of the pixels; with smaller ones, as in the released
    code (4 x 4), it reads nothing but the sum of the patches.

    Args:
        channels, patch: of the images and the patches; theta has `channels * patch^2` rows.
        experts: number M of experts.
    """

    def __init__(self, channels: int, patch: int, experts: int):
        super().__init__(check.integer("channels", channels, 1) * check.integer("patch", patch, 1) ** 2, experts)
        self.patch = patch

    def forward(self, x: Float[Tensor, "n C H W"]) -> Float[Tensor, "n M"]:
        return super().forward(F.unfold(x, self.patch, stride=self.patch).mT)


class CubicLayer(Linear):
    """`(W x + b)^3`, entry by entry: the expert of A.4 of Chen et al. (2022), on examples of one patch."""

    def forward(self, x: Float[Tensor, "n 1 d"]) -> Float[Tensor, "n o"]:
        return super().forward(x.squeeze(1)) ** 3


class DispatchedMoE(nn.Module):
    """`F(x) = pi_m(x) f_m(x)` for the one selected expert m; the gate pi is the softmax of the noiseless logits.

    Args:
        gating: the router, which gives the logits (n, M) of a batch.
        networks: the M experts, of the same kind; each gives (n, o).
    """

    def __init__(self, gating: nn.Module, networks: Iterable[nn.Module]):
        super().__init__()
        self.router, self.experts = gating, nn.ModuleList(networks)

    def dispatched(self, x: Tensor, m: Int[Tensor, " n"], answer=None) -> Float[Tensor, "n o"]:
        """`f_{m_i}(x_i)`: each example through its own expert only.

        Args:
            x: n examples.
            m: the expert of each, 0 to M - 1.
            answer: what to ask the expert for, by default what it says; `lambda expert, x: expert.embedding(x)`.
        """
        order, sizes = m.argsort(stable=True), m.bincount(minlength=len(self.experts)).tolist()
        parts = zip(self.experts, order.split(sizes), strict=True)
        said = [(answer or (lambda f, a: f(a)))(expert, x[at]) for expert, at in parts if len(at)]
        return torch.cat(said)[order.argsort()]

    def forward(
        self, x: Tensor, noise: Float[Tensor, "n M"] | None = None
    ) -> tuple[Float[Tensor, "n o"], Float[Tensor, "n M"], Int[Tensor, " n"]]:
        """The outputs F(x_i), the softmax pi of the noiseless logits, and the selected experts m_i.

        Args:
            x: n examples.
            noise: added to the logits before the argmax; None is the test-time rule.
        """
        h = self.router(x)
        m, pi = top1_noisy(h, noise), h.softmax(-1)
        return pi.gather(1, m[:, None]) * self.dispatched(x, m), pi, m
