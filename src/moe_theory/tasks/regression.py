"""Regression data: inputs in a cube and responses with Gaussian noise (Nguyen et al. 2025, Section 5.1)."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream


def uniform_inputs(n: int, d: int, seed: int) -> Float[Tensor, "n d"]:
    """n inputs from Uniform([-1, 1]^d), float64."""
    return _uniform(n, d, stream(seed, "inputs"))


def sample_regression(
    f: Callable[[Tensor], Tensor], n: int, d: int, seed: int, noise: float = 0.1
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Inputs from the cube and `y = f(x) + noise N(0, 1)` (Eq. 1).

    Args:
        f: maps (n, d) to (n,).
        seed: of inputs and noise, drawn from two streams.
        noise: standard deviation, >= 0; 0.1 in E.1.
    """
    check.not_negative("noise", noise)
    x = _uniform(n, d, stream(seed, "regression", 0))
    return x, f(x) + noise * torch.from_numpy(stream(seed, "regression", 1).standard_normal(n))


def _uniform(n: int, d: int, rng: np.random.Generator) -> Float[Tensor, "n d"]:
    return torch.from_numpy(rng.uniform(-1, 1, (check.integer("n", n, 1), check.integer("d", d, 1))))
