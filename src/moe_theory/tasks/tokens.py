"""Sequences of tokens from a mixture of Gaussians, labelled by a sum over the tokens (Dikkala et al. 2023, C.2)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import torch_stream

OUTPUTS = ("linear", "quadratic")


class Sequences(NamedTuple):
    """n sequences of s tokens, their labels, and the Gaussian of each token."""

    x: Float[Tensor, "n s d"]
    y: Float[Tensor, "n 1"]
    cluster: Int[Tensor, "n s"]


class TokenTask:
    """Tokens `x_i ~ N(mu_g, sigma^2 I)`, g uniform; `y = sum_i w_g.x_i` or `sum_i (w_g.x_i)^2`, over `scale`.

    The means and the w are standard Gaussian vectors, the means times `spread`; the paper names no size.

    Args:
        k: number of Gaussians, 32 in the paper; d: dimension of a token, 32; s: tokens in a sequence.
        output: `linear` or `quadratic`.
        spread: standard deviation of a mean's coordinates, > 0; sigma: that of a token's about its mean, > 0.
        seed: draws means and w; they are the same for every s and output.

    Attributes:
        mean, w: (k, d) float64.
        scale: standard deviation of the sum: a label has variance 1, and a constant the loss 1.
    """

    def __init__(
        self,
        k: int,
        d: int,
        s: int,
        *,
        output: str = "linear",
        spread: float = 0.5,
        sigma: float = 0.125,
        seed: int = 0,
    ):
        check.integer("k", k, 2)
        check.integer("d", d, 1)
        self.s, self.output = check.integer("s", s, 1), check.choice("output", output, OUTPUTS)
        self.sigma = check.positive("sigma", sigma)
        mean, w = (torch_stream(seed, "classes", part) for part in (0, 1))
        self.mean = check.positive("spread", spread) * torch.randn(k, d, generator=mean, dtype=torch.float64)
        self.w = torch.randn(k, d, generator=w, dtype=torch.float64)
        self.scale = float((self.s * self._variance()) ** 0.5)

    def _variance(self) -> Tensor:
        """Of one token's term, `t ~ N(m, v)` in each Gaussian: of t, or of its square."""
        m, v = (self.mean * self.w).sum(1), self.sigma**2 * self.w.square().sum(1)
        if self.output == "linear":
            first, second = m, m**2 + v
        else:
            first, second = m**2 + v, m**4 + 6 * m**2 * v + 3 * v**2
        return second.mean() - first.mean() ** 2

    def sample(self, n: int, seed: int, *, dtype: torch.dtype = torch.float32) -> Sequences:
        k, d = self.mean.shape
        rng = torch_stream(seed, "examples")
        cluster = torch.randint(k, (check.integer("n", n, 1), self.s), generator=rng)
        noise = self.sigma * torch.randn(n, self.s, d, generator=rng, dtype=torch.float64)
        x = self.mean[cluster] + noise
        term = (self.w[cluster] * x).sum(2)
        y = (term if self.output == "linear" else term**2).sum(1, keepdim=True) / self.scale
        return Sequences(x.to(dtype), y.to(dtype), cluster)
