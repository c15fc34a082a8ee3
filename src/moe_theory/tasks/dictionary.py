"""Inputs that are sums of a few Gaussian atoms (Dikkala et al. 2023, Section 3.6 and C.3)."""

from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import torch_stream

#: What a label sums over the atoms of an input: `w.x` of the whole input (C.3), or `w.mu` of each atom (Section 3.6).
LABELS = ("input", "atoms")


class Sums(NamedTuple):
    """n inputs, their labels, and the atoms each is a sum of."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n 1"]
    atoms: Int[Tensor, "n r"]


class DictionaryTask:
    """`x = sum_{i in I} x_i`, `x_i ~ N(mu_i, (sigma^2/d) I)`, I a set of r of the c atoms, drawn without replacement.

    Labels are `(sum_{i in I} w_i).x` or `sum_{i in I} w_i.mu_i`, over `scale`. The mu_i and the w_i are uniform
    unit vectors; the paper names neither their lengths nor sigma.

    Args:
        c: number of atoms, 32 or 128 in the paper; d: dimension of an input, 32; r: atoms in an input, at most c.
        label: `input` (C.3) or `atoms` (Section 3.6).
        sigma: root mean square length of the noise of one atom, > 0.
        seed: draws mu and w.

    Attributes:
        mean, w: (c, d) float64.
        subsets: (S, r) all sets of r atoms.
        scale: standard deviation of the label before it is divided: a constant has the loss 1.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """

    def __init__(self, c: int, d: int, *, r: int = 2, label: str = "input", sigma: float = 0.5, seed: int = 0):
        check.integer("d", d, 1)
        if check.integer("r", r, 1) > check.integer("c", c, 1):
            raise ValueError(f"r: expected at most c = {c} atoms, got {r}")
        self.label, self.sigma = check.choice("label", label, LABELS), check.positive("sigma", sigma)
        draws = (torch.randn(c, d, generator=torch_stream(seed, "classes", p), dtype=torch.float64) for p in (0, 1))
        self.mean, self.w = (draw / draw.norm(dim=1, keepdim=True) for draw in draws)
        self.subsets = torch.tensor(list(combinations(range(c), r)))
        self.variance = r * self.sigma**2 / d  # of a coordinate of the noise of x
        center, w = self.mean[self.subsets].sum(1), self.w[self.subsets].sum(1)
        if label == "input":
            m, v = (w * center).sum(1), self.variance * w.square().sum(1)
        else:
            m, v = (self.w * self.mean).sum(1)[self.subsets].sum(1), torch.zeros(())
        self.scale = float((m.var(correction=0) + v.mean()) ** 0.5)

    def sample(self, n: int, seed: int, *, dtype: torch.dtype = torch.float32) -> Sums:
        rng = torch_stream(seed, "examples")
        drawn = torch.randint(len(self.subsets), (check.integer("n", n, 1),), generator=rng)
        atoms = self.subsets[drawn]
        noise = torch.randn(n, self.mean.shape[1], generator=rng, dtype=torch.float64)
        x = self.mean[atoms].sum(1) + self.variance**0.5 * noise
        at = x[:, None] if self.label == "input" else self.mean[atoms]
        y = (self.w[atoms] * at).sum((1, 2))
        return Sums(x.to(dtype), (y[:, None] / self.scale).to(dtype), atoms)
