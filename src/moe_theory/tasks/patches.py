"""The patch classification task of Chen et al. (2022), Definition 3.1."""

from dataclasses import dataclass, field, fields

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream

#: The strength laws of the paper's synthetic study (Appendix A.2), and the one its Table 7 names.
SETTINGS = {
    "setting 1": dict(alpha=(0.5, 2.0), beta=(1.0, 2.0), gamma=(0.5, 3.0), sigma_p=1.0),
    "setting 2": dict(alpha=(0.5, 2.0), beta=(1.0, 2.0), gamma=(0.5, 3.0), sigma_p=2.0),
    "setting 3": dict(alpha=(0.5, 2.0), beta=(1.0, 2.0), gamma=(0.5, 2.0), sigma_p=1.0),
    "setting 4": dict(alpha=(0.5, 2.0), beta=(1.0, 2.0), gamma=(0.5, 2.0), sigma_p=2.0),
    "table 7": dict(alpha=(1.0, 2.0), beta=(1.0, 2.0), gamma=(1.0, 2.0), sigma_p=1.0),
}

#: What a patch holds; random-noise patches carry the roles NOISE, NOISE + 1, ...
SIGNAL, CENTER, FEATURE_NOISE, NOISE = 0, 1, 2, 3


@dataclass(frozen=True)
class Coefficients:
    """The random numbers behind n examples, without the patches.

    Attributes:
        cluster: (n,) the cluster k of each example, in 0..K-1.
        other: (n,) the cluster k' != k whose label signal appears as feature noise.
        y: (n,) labels, +1 or -1.
        epsilon: (n,) signs of the feature noise, +1 or -1.
        alpha, beta, gamma: (n,) strengths of label signal, cluster center and feature noise.
    """

    cluster: Int[Tensor, " n"]
    other: Int[Tensor, " n"]
    y: Float[Tensor, " n"]
    epsilon: Float[Tensor, " n"]
    alpha: Float[Tensor, " n"]
    beta: Float[Tensor, " n"]
    gamma: Float[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class PatchBatch(Coefficients):
    """Coefficients and the patches made of them.

    Attributes (besides those of `Coefficients`):
        x: (n, P, d) the patches, in shuffled order.
        role: (n, P) what patch p of example i holds: SIGNAL, CENTER, FEATURE_NOISE or >= NOISE.
        v, c: (K, d) the task's label signals and cluster centers.
    """

    x: Float[Tensor, "n P d"]
    role: Int[Tensor, "n P"]
    v: Float[Tensor, "K d"]
    c: Float[Tensor, "K d"]

    def to(self, *args, **kwargs) -> "PatchBatch":
        """Move or cast every tensor as `Tensor.to` does; integer fields keep their dtype."""
        moved = {}
        for f in fields(self):
            t = getattr(self, f.name)
            moved[f.name] = (
                t.to(*args, **kwargs) if t.is_floating_point() else t.to(t.new_empty(0).to(*args, **kwargs).device)
            )
        return PatchBatch(**moved)

    def checked(self, name: str) -> "PatchBatch":
        """The batch itself; a ValueError that names it and the field for another shape or type, or other labels."""
        n, _, d = check.tensor(f"{name}.x", self.x, "n", "P", "d").shape
        signals = (len(check.tensor(f"{name}.v", self.v, "K", "d")), d)
        sizes = {"x": self.x.shape, "role": self.x.shape[:2], "v": signals, "c": signals}
        for f in fields(self):
            t, size = check.instance(f"{name}.{f.name}", getattr(self, f.name), Tensor), sizes.get(f.name, (n,))
            dtype = torch.int64 if f.name in ("cluster", "other", "role") else self.x.dtype
            if t.shape != size or t.dtype != dtype:
                asked = f"{dtype} {tuple(size)}"
                raise ValueError(f"{name}.{f.name}: expected {asked}, got {t.dtype} {tuple(t.shape)}")
        if not (self.y.abs() == 1).all():
            raise ValueError(f"{name}.y: expected labels +1 and -1, got {self.y.unique().tolist()[:4]}")
        return self

    def __getitem__(self, rows: slice) -> "PatchBatch":
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return PatchBatch(**{name: t if name in ("v", "c") else t[rows] for name, t in own.items()})

    def patch(self, role: int) -> Float[Tensor, "n d"]:
        """The patch of every example that holds `role`, undoing the shuffle."""
        at = (self.role == role).int().argmax(1)
        return self.x[torch.arange(len(self), device=at.device), at]


@dataclass(frozen=True)
class PatchTask:
    """Definition 3.1 of Chen et al. (2022).

    An example of cluster k has label y = +-1 and P patches in random order:
    `y alpha v_k`, `beta c_k`, `epsilon gamma v_k'` with k' != k, and P - 3 draws of
    N(0, sigma_p^2/d I). All 2K signals v_1..v_K, c_1..c_K are orthonormal.

    Args:
        K: number of clusters, at least 2.
        P: patches per example, at least 3.
        d: dimension of a patch, at least 2K.
        alpha, beta, gamma: (low, high) of the uniform law of each strength, 0 < low <= high.
        sigma_p: scale of the noise patches, > 0; a noise patch has squared norm about sigma_p^2.
        seed: draws the signals.

    Attributes:
        v, c: (K, d) float64 label signals and cluster centers.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """

    K: int = 4
    P: int = 4
    d: int = 50
    alpha: tuple[float, float] = (0.5, 2)
    beta: tuple[float, float] = (1, 2)
    gamma: tuple[float, float] = (0.5, 3)
    sigma_p: float = 1.0
    seed: int = 0
    v: Float[Tensor, "K d"] = field(init=False, repr=False, compare=False)
    c: Float[Tensor, "K d"] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        check.integer("K", self.K, 2)
        check.integer("P", self.P, 3)
        check.integer("d", self.d, 1)
        if self.d < 2 * self.K:
            raise ValueError(f"d: expected d >= 2K for 2K orthonormal signals, got d={self.d} and K={self.K}")
        for name in ("alpha", "beta", "gamma"):
            check.strength_range(name, getattr(self, name))
        check.positive("sigma_p", self.sigma_p)
        rng = stream(self.seed, "signals")
        signals = torch.linalg.qr(torch.from_numpy(rng.standard_normal((self.d, 2 * self.K)))).Q.T
        object.__setattr__(self, "v", signals[: self.K].contiguous())
        object.__setattr__(self, "c", signals[self.K :].contiguous())

    def coefficients(self, n: int, seed: int) -> Coefficients:
        """Draw the coefficients of n examples (float64); `sample` with the same seed uses the same.

        Args:
            n: number of examples, at least 1.
            seed: draws them.
        """
        return self._coefficients(check.integer("n", n, 1), stream(seed, "examples"))

    def sample(self, n: int, seed: int, dtype: torch.dtype = torch.float32) -> PatchBatch:
        """Draw n examples; the same seed gives the same examples.

        Args:
            n: number of examples, at least 1.
            seed: draws coefficients, noise patches and the order of the patches.
            dtype: floating type of the batch.
        """
        check.integer("n", n, 1)
        check.floating("dtype", dtype)
        rng = stream(seed, "examples")
        a = self._coefficients(n, rng)
        noise = torch.from_numpy(rng.standard_normal((n, self.P - 3, self.d)))
        ordered = torch.cat(
            [
                ((a.y * a.alpha)[:, None] * self.v[a.cluster])[:, None],
                (a.beta[:, None] * self.c[a.cluster])[:, None],
                ((a.epsilon * a.gamma)[:, None] * self.v[a.other])[:, None],
                noise * (self.sigma_p / self.d**0.5),
            ],
            dim=1,
        )
        role = torch.from_numpy(rng.random((n, self.P))).argsort(dim=1)
        x = ordered.gather(1, role[:, :, None].expand(-1, -1, self.d)).to(dtype)
        values = {f.name: getattr(a, f.name) for f in fields(Coefficients)}
        values = {k: t.to(dtype) if t.is_floating_point() else t for k, t in values.items()}
        return PatchBatch(**values, x=x, role=role, v=self.v.to(dtype), c=self.c.to(dtype))

    def _coefficients(self, n: int, rng: np.random.Generator) -> Coefficients:
        def sign():
            return torch.from_numpy(2.0 * rng.integers(2, size=n) - 1)

        def uniform(low, high):
            return torch.from_numpy(rng.uniform(low, high, n))

        cluster = torch.from_numpy(rng.integers(self.K, size=n))
        other = (cluster + torch.from_numpy(rng.integers(1, self.K, size=n))) % self.K
        return Coefficients(
            cluster, other, sign(), sign(), uniform(*self.alpha), uniform(*self.beta), uniform(*self.gamma)
        )
