"""Networks that read a sequence one token at a time and add up what they say (Dikkala et al. 2023, C.2).

R of them side by side, as in `moe_theory.models.soft`.
"""

from jaxtyping import Float
from torch import Tensor

from moe_theory.models.soft import DenseNets, SoftMoE


class TokenMoE(SoftMoE):
    """Soft mixtures, `F(x) = sum_i sum_m pi_m(x_i) f_m(x_i)`; arguments are those of `SoftMoE`."""

    def forward(self, x: Float[Tensor, "R n s d"]) -> Float[Tensor, "R n o"]:
        return super().forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3]).sum(2)


class TokenNets(DenseNets):
    """Dense networks, `F(x) = sum_i f(x_i)`; arguments are those of `DenseNets`."""

    def forward(self, x: Float[Tensor, "R n s d"]) -> Float[Tensor, "R n o"]:
        return super().forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3]).sum(2)
