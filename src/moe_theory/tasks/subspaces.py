"""Inputs near random subspaces, with one linear function to a subspace (Dikkala et al. 2023, Section 3.3 and C.1)."""

import torch

from moe_theory import _validate as check
from moe_theory.streams import torch_stream
from moe_theory.tasks.gaussians import Examples

#: What the label is a linear function of: the point of the subspace, or the noise on it, as C.1 prints.
LABELS = ("point", "noise")


class SubspaceTask:
    """Inputs `x + eps`: x a standard Gaussian in one of k random subspaces of dimension t, `eps ~ N(0, tau^2 I)`.

    Labels are `w.x` or `w.eps` over `scale`, with one standard Gaussian vector w to a subspace.

    Args:
        k: number of subspaces, 64 in the paper; t: their dimension, 8, at most d; d: that of an input, which is not
            named: the hidden width 4 * 24 says 24.
        label: `point` or `noise`.
        tau: standard deviation of a coordinate of eps, > 0.
        seed: draws subspaces and w.

    Attributes:
        basis: (k, d, t) float64, orthonormal columns; w: (k, d).
        scale: standard deviation of the label before it is divided: a constant has the loss 1.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """

    def __init__(self, k: int, t: int, d: int, *, label: str = "point", tau: float = 0.1, seed: int = 0):
        check.integer("k", k, 1)
        if check.integer("t", t, 1) > check.integer("d", d, 1):
            raise ValueError(f"t: expected at most d = {d}, got {t}")
        self.label, self.tau = check.choice("label", label, LABELS), check.positive("tau", tau)
        spaces, w = (torch_stream(seed, "classes", part) for part in (0, 1))
        self.basis = torch.linalg.qr(torch.randn(k, d, t, generator=spaces, dtype=torch.float64)).Q
        self.w = torch.randn(k, d, generator=w, dtype=torch.float64)
        inside = torch.einsum("kdt,kd->kt", self.basis, self.w)
        square = inside.square() if label == "point" else self.tau**2 * self.w.square()
        self.scale = float(square.sum(1).mean() ** 0.5)

    def sample(self, n: int, seed: int, *, dtype: torch.dtype = torch.float32) -> Examples:
        k, d, t = self.basis.shape
        rng = torch_stream(seed, "examples")
        cluster = torch.randint(k, (check.integer("n", n, 1),), generator=rng)
        inside = torch.randn(n, t, generator=rng, dtype=torch.float64)
        point = torch.einsum("ndt,nt->nd", self.basis[cluster], inside)
        noise = self.tau * torch.randn(n, d, generator=rng, dtype=torch.float64)
        y = (self.w[cluster] * (point if self.label == "point" else noise)).sum(1, keepdim=True)
        return Examples((point + noise).to(dtype), (y / self.scale).to(dtype), cluster)
