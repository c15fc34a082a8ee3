"""Data from Gaussian distributions: one to a class (smooth2025, 5.1.1), or one to a label or a function of the input
(Dikkala et al. 2023, 3.1 and 3.2).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream


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


class Examples(NamedTuple):
    """n inputs, what is to be predicted of each, and the cluster it came from."""

    x: Float[Tensor, "n D"]
    y: Float[Tensor, "n o"]
    cluster: Int[Tensor, " n"]


class GaussianMixture:
    """k equally likely Gaussians `N(mu_c, I)`, with a label or a linear function for each (Dikkala et al. 2023).

    The means are `mu_c ~ N(0, scale^2 I)` in the first d coordinates and zero in the others, which are spurious:
    every cluster looks the same there. The paper says that the clusters are well separated and gives no law.
    Labels have variance 1, so that whoever answers the mean has the loss 1.

    Args:
        k: number of clusters, 64 in the paper; d: dimensions in which they differ, 24.
        spurious: dimensions in which they do not.
        outputs: numbers to predict for each input.
        label: "constant": `y = v_c` with `v_c ~ N(0, I)` (3.1), centred and scaled to variance 1 over the clusters;
            "linear": `y = w_c^T (x - mu_c)` with unit vectors `w_c` in the first d dimensions (3.2).
        scale: standard deviation of a mean's coordinates.
        seed: draws means and targets.
        dtype: of everything that is drawn.

    Attributes:
        mean: (k, d + spurious).
        target: v (k, outputs), or w (k, outputs, d + spurious).

    Raises:
        ValueError: for an argument outside its range, naming it.
    """

    def __init__(
        self,
        k: int,
        d: int,
        *,
        spurious: int = 0,
        outputs: int = 10,
        label: str = "constant",
        scale: float = 3.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        check.integer("k", k, 2)
        check.integer("d", d, 1)
        check.integer("spurious", spurious, 0)
        check.integer("outputs", outputs, 1)
        self.label = check.choice("label", label, ("constant", "linear"))
        rng = stream(seed, "classes")
        mean = check.positive("scale", scale) * rng.standard_normal((k, d))
        if label == "constant":
            target = rng.standard_normal((k, outputs))
            target = (target - target.mean(0)) / target.std(0)
        else:
            target = rng.standard_normal((k, outputs, d))
            target /= np.linalg.norm(target, axis=-1, keepdims=True)
            target = np.pad(target, [(0, 0), (0, 0), (0, spurious)])
        self.mean = torch.from_numpy(np.pad(mean, [(0, 0), (0, spurious)])).to(dtype)
        self.target = torch.from_numpy(target).to(dtype)

    @property
    def separation(self) -> float:
        """The largest c for which the clusters are c-separated: `min |mu_i - mu_j| / sqrt(d)`, d all dimensions."""
        return float(torch.pdist(self.mean.double()).min()) / math.sqrt(self.mean.shape[1])

    def sample(self, n: int, seed: int) -> Examples:
        """n independent examples."""
        rng, (k, D) = stream(seed, "examples"), self.mean.shape
        cluster = torch.from_numpy(rng.integers(k, size=check.integer("n", n, 1)))
        noise = torch.from_numpy(rng.standard_normal((n, D))).to(self.mean)
        y = self.target[cluster]
        if self.label == "linear":
            y = torch.einsum("nod,nd->no", y, noise)
        return Examples(self.mean[cluster] + noise, y, cluster)
