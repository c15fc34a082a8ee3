"""Regression data: inputs in a cube and responses with Gaussian noise (Nguyen et al. 2025, Section 5.1)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import torch_stream

#: Standard deviation of the responses about the regression function (E.1).
NOISE = 0.1


def uniform_inputs(n: int, d: int, seed: int) -> Float[Tensor, "n d"]:
    """n inputs from Uniform([-1, 1]^d), float64."""
    rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
    return torch.rand(check.integer("n", n, 1), check.integer("d", d, 1), generator=rng, dtype=torch.float64) * 2 - 1


def sample_regression(
    f: Callable[[Tensor], Tensor], n: int, d: int, seed: int, noise: float = NOISE
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Inputs from the cube and `y = f(x) + noise N(0, 1)` (Eq. 1).

    Args:
        f: maps (n, d) to (n,).
        n, d: number of inputs, and their dimension.
        seed: of inputs and noise.
        noise: standard deviation, >= 0.
    """
    check.not_negative("noise", noise)
    check.integer("n", n, 1)
    check.integer("d", d, 1)
    rng = torch_stream(seed, "regression")
    x = torch.rand(n, d, generator=rng, dtype=torch.float64) * 2 - 1
    return x, f(x) + noise * torch.randn(n, generator=rng, dtype=x.dtype)
