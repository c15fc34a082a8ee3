"""Two truncated Gaussians at z and -z with the labels 1 and -1 (dikkala2023, Appendix F)."""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import gammainc, gammaincinv
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream


class Examples(NamedTuple):
    """n inputs, and their labels 1 or -1: which of the two answers v and -v is right."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]


class TwoGaussians:
    """`x = y (z + g)`: y is 1 or -1 with equal chances, g from `N(0, sigma^2 I_d)` truncated to a ball of radius r.

    Args:
        d: dimension; r: radius, `float("inf")` for no truncation.
        sigma: standard deviation before the truncation.

    Attributes:
        z: (d,), the first unit vector.
    """

    def __init__(self, d: int = 2, r: float = 0.5, *, sigma: float = 1.0):
        self.d, self.r = check.integer("d", d, 1), r if r == math.inf else check.positive("r", r)
        self.sigma, self.z = check.positive("sigma", sigma), torch.eye(d, dtype=torch.float64)[0]

    def sample(self, n: int, seed: int) -> Examples:
        """n independent examples in float64; the radius of g is drawn through its distribution function."""
        rng, half = stream(seed, "examples"), self.d / 2
        g = rng.standard_normal((check.integer("n", n, 1), self.d))
        level = rng.random(n) * (gammainc(half, self.r**2 / (2 * self.sigma**2)) if self.r < math.inf else 1.0)
        radius = self.sigma * np.sqrt(2 * gammaincinv(half, level))
        g *= (radius / np.linalg.norm(g, axis=1))[:, None]
        y = torch.from_numpy(rng.choice([-1.0, 1.0], n))
        return Examples(y[:, None] * (self.z + torch.from_numpy(g)), y)
