"""Labelled data from Gaussian distributions, one to a class (smooth2025, 5.1.1)."""

from typing import NamedTuple

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from moe_theory import _validate as check


class Labelled(NamedTuple):
    """n inputs and their classes."""

    x: Shaped[Tensor, "n ..."]
    y: Int[Tensor, " n"]


class GaussianClasses:
    """Classes `N(mu_c, s_c^2 I)` with means `mu_c ~ N(0, spread^2 I)` and scales `s_c ~ Unif(0.5, 1.5)`.

    The paper says ten classes in 128 dimensions with varying means and standard deviations, and no
    more; the two laws are ours.

    Args:
        classes: number of classes; d: dimension of an input.
        spread: standard deviation of a mean's coordinates. At 0.3 and d = 128 two means are about
            5 apart, and nearest neighbours overlap.
        seed: draws means and scales.

    Attributes:
        mean: (classes, d); scale: (classes,).
    """

    def __init__(self, classes: int = 10, d: int = 128, *, spread: float = 0.3, seed: int = 0):
        check.integer("classes", classes, 2)
        check.integer("d", d, 1)
        check.positive("spread", spread)
        rng = torch.Generator().manual_seed(2 * check.integer("seed", seed, 0))
        self.mean = spread * torch.randn(classes, d, generator=rng)
        self.scale = 0.5 + torch.rand(classes, generator=rng)

    def sample(self, n: int, seed: int) -> Labelled:
        """n examples of each class, in random order."""
        classes, d = self.mean.shape
        rng = torch.Generator().manual_seed(2 * check.integer("seed", seed, 0) + 1)
        y = torch.arange(classes).repeat(check.integer("n", n, 1))[torch.randperm(classes * n, generator=rng)]
        return Labelled(self.mean[y] + self.scale[y, None] * torch.randn(classes * n, d, generator=rng), y)
