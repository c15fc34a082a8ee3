"""Algorithm 1 as Chen et al. (2022) write it, and what the notebooks released with the paper run.

The released variant differs in: inputs times 10; experts with two logits and biases, started at
0.001 times a convolution's default; the gate value is the raw noisy logit of the winner instead of
a softmax probability; the output passes through a softmax and then through a cross-entropy that
applies another; the norm an expert's gradient is divided by adds the norms of its weights' and its
biases' gradients; the load-balancing loss takes the mean noisy logit where Switch routing takes the
mean probability; training stops as soon as a loss that is no new minimum is at most 0.314, or 0.02
above the minimum; and the routing noise stays on at test time. Two more are ours: "released, to the end" makes all
steps, and "released, centered" has a load-balancing loss with rho_m - 1/M in place of rho_m, which does not
move the mean logit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.moe import PatchMoE
from moe_theory.streams import stream


def logistic_loss(z: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """`l(z) = log(1 + e^-z)` (Eq. 3.2), without the threshold at which torch's softplus turns linear."""
    return -torch.nn.functional.logsigmoid(z)


def loss_slope(z: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """`l'(z) = -1 / (1 + e^z)` for the logistic loss l(z) = log(1 + e^-z); negative, -1/2 at 0."""
    return -torch.sigmoid(-z)


def twice_softmaxed_loss(z: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """`l(tanh(z/2))`: two logits z apart, a softmax, and a cross-entropy that takes its output for logits."""
    return logistic_loss(torch.tanh(z / 2))


def twice_softmaxed_slope(z: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The derivative of `twice_softmaxed_loss`."""
    q = torch.tanh(z / 2)
    return loss_slope(q) * (1 - q * q) / 2


def _gaussian(d: int, experts: int, filters: int, sigma_0: float, seed: int) -> Float[Tensor, "M J d"]:
    return PatchMoE(d, experts, filters, sigma_0=sigma_0, seed=seed, dtype=torch.float64).W.data


def _convolution(d: int, experts: int, filters: int, sigma_0: float, seed: int) -> Float[Tensor, "M J D"]:
    draw = torch.from_numpy(stream(seed, "weights").uniform(-1, 1, (experts, filters, d + 1)))
    return 0.001 / math.sqrt(d) * draw


@dataclass(frozen=True)
class Variant:
    """What distinguishes the algorithms.

    Attributes:
        input_scale: multiplies every patch.
        initial: `initial(d, M, J, sigma_0, seed)` draws the experts' weights (M, J, d), with a last
            column more if they have biases.
        biases: whether filters have biases and fixed output signs, -1 on the first half, +1 on the second.
        raw_gate: whether the gate value is the winner's noisy logit, not its softmax probability.
        loss, slope: of the margin y F(x), and its derivative.
        noisy_test: whether routing noise stays on at test time.
        stops: `stops(loss, least)`: whether training ends at a loss, `least` being the smallest before it.
        centered: whether the load-balancing loss has rho_m - 1/M in place of rho_m.
    """

    input_scale: float
    initial: Callable[[int, int, int, float, int], Tensor]
    biases: bool
    raw_gate: bool
    loss: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    noisy_test: bool
    stops: Callable[[float, float], bool]
    centered: bool = False


VARIANTS = {
    "as written": Variant(1.0, _gaussian, False, False, logistic_loss, loss_slope, False, lambda loss, least: False),
    "released": Variant(
        10.0,
        _convolution,
        True,
        True,
        twice_softmaxed_loss,
        twice_softmaxed_slope,
        True,
        lambda loss, least: loss > least and (loss <= 0.314 or loss > least + 0.02),
    ),
}
VARIANTS["released, to the end"] = replace(VARIANTS["released"], stops=VARIANTS["as written"].stops)
VARIANTS["released, centered"] = replace(VARIANTS["released"], centered=True)
