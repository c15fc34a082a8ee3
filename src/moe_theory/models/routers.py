"""Routers: how inputs are scored, and the modules that learn such scores.

The rules that select experts by such scores stand in `moe_theory.models.rules`. What readers use of them can be
imported from here as well.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models import layers
from moe_theory.models.rules import (  # noqa: F401
    RULES,
    gumbel,
    sampled_topk,
    softmax_topk,
    top1_noisy,
    topk_set,
    topk_softmax,
)

#: A vector or a stack of vectors; and two stacks of them where one may be repeated for the other.
Vectors = Float[Tensor, "*batch d"]
Repeated = Float[Tensor, "*#batch d"]


class Router(ABC):
    """Scores `<s(beta1_i), u(x)> + beta0_i`: an embedding s of the router vectors, a feature u of the inputs.

    A subclass says what s and u are, and where embeddings may be: in a ball of R^d, or on a sphere. One more
    entry in `ROUTERS` makes it known by its name. Everything else that depends on the router (the function of a
    mixture, its Jacobian and null directions, least squares) is computed from what is declared here.

    Attributes:
        sphere: whether s depends on the direction of beta1 alone: all embeddings then have one norm, and the zero
            vector has none.
        plain: whether u(x) = x; other features are x times a function of |x|.
    """

    sphere: ClassVar[bool] = False
    plain: ClassVar[bool] = False

    @abstractmethod
    def embedding(self, beta1: Vectors) -> Vectors:
        """s(beta1)."""

    @abstractmethod
    def feature(self, x: Vectors) -> Vectors:
        """u(x)."""

    @abstractmethod
    def pull_back(self, beta1: Repeated, g: Repeated) -> Vectors:
        """`s'(beta1)^T g`: a gradient in the embeddings, as a gradient in the vectors behind them."""

    @abstractmethod
    def preimage(self, s: Vectors) -> Vectors:
        """The beta1 with `embedding(beta1) = s`, on a sphere that of norm 1; ValueError where there is none."""

    @abstractmethod
    def bound(self, radius: float) -> float:
        """The largest norm of an embedding over |beta1| <= radius; on a sphere the only one."""

    def slope(self, beta1: Vectors) -> Float[Tensor, "*batch d d"]:
        """`s'(beta1)`, the derivative of coordinate a of s in row a."""
        e = torch.eye(beta1.shape[-1], dtype=beta1.dtype, device=beta1.device).expand(*beta1.shape, beta1.shape[-1])
        return self.pull_back(beta1[..., None, :], e)

    def gauge(self, s: Float[Tensor, "*batch k d"]) -> Float[Tensor, "*batch d d"]:
        """The orthogonal projection on the common shifts of all k embeddings that no function sees.

        Every shift adds the same to all scores of an input. In a ball all are free; on a sphere, to first order,
        those orthogonal to every embedding.
        """
        eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        return eye - torch.linalg.pinv(s) @ s if self.sphere else eye.expand(*s.shape[:-2], *eye.shape)

    def scores(
        self, beta0: Float[Tensor, " k"], beta1: Float[Tensor, "k d"], x: Float[Tensor, "*batch d"]
    ) -> Float[Tensor, "*batch k"]:
        return self.feature(x) @ self.embedding(beta1).mT + beta0


@dataclass(frozen=True)
class Linear(Router):
    """`s = beta1`, `u = x`."""

    plain = True

    def embedding(self, beta1: Vectors) -> Vectors:
        return beta1

    def feature(self, x: Vectors) -> Vectors:
        return x

    def pull_back(self, beta1: Repeated, g: Repeated) -> Vectors:
        return g

    def preimage(self, s: Vectors) -> Vectors:
        return s

    def bound(self, radius: float) -> float:
        return radius


def _norm(name: str, v: Tensor) -> Tensor:
    """Norms of the last dimension; ValueError for zero vectors, and for NaN or infinite norms."""
    norm = v.norm(dim=-1, keepdim=True)
    if not ((norm > 0) & (norm < math.inf)).all():
        check.finite(name, norm)
        zeros = int((norm == 0).sum())
        raise ValueError(f"{name}: expected no zero vectors, where the cosine is not defined, got {zeros}")
    return norm


@dataclass(frozen=True)
class Cosine(Router):
    """`s = beta1 / |beta1|`, `u = x / |x|` (Nguyen et al. 2025, Eq. 2); ValueError for a zero vector."""

    sphere = True

    def embedding(self, beta1: Vectors) -> Vectors:
        return beta1 / _norm("beta1", beta1)

    def feature(self, x: Vectors) -> Vectors:
        return x / _norm("x", x)

    def pull_back(self, beta1: Repeated, g: Repeated) -> Vectors:
        """`(I - s s^T) g / |beta1|`."""
        s = self.embedding(beta1)
        return (g - s * (s * g).sum(-1, keepdim=True)) / beta1.norm(dim=-1, keepdim=True)

    def preimage(self, s: Vectors) -> Vectors:
        """Of all vectors in the direction s the one of norm 1; ValueError for an s of another norm."""
        norm = s.norm(dim=-1)
        if (norm - 1).abs().max() > 1e-9:
            raise ValueError(f"s: the cosine router reaches norm 1 only, got {norm.flatten().tolist()}")
        return s

    def bound(self, radius: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Perturbed(Router):
    """`s = beta1 / (|beta1| + tau)`, `u = x / (|x| + tau)` (Nguyen et al. 2025, Eq. 8).

    Args:
        tau: the paper's tau_1 = tau_2.

    Raises:
        ValueError: for a tau that is not positive.
    """

    tau: float = 0.1

    def __post_init__(self):
        check.positive("tau", self.tau)

    def embedding(self, beta1: Vectors) -> Vectors:
        return beta1 / (beta1.norm(dim=-1, keepdim=True) + self.tau)

    def feature(self, x: Vectors) -> Vectors:
        return self.embedding(x)

    def pull_back(self, beta1: Repeated, g: Repeated) -> Vectors:
        """`(I - b s^T) g / (|beta1| + tau)` with `b = beta1 / |beta1|`, 0 at the zero vector."""
        s, norm = self.embedding(beta1), beta1.norm(dim=-1, keepdim=True)
        b = beta1 / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        return (g - b * (s * g).sum(-1, keepdim=True)) / (norm + self.tau)

    def preimage(self, s: Vectors) -> Vectors:
        """`tau s / (1 - |s|)`; ValueError for an s of norm 1 or more."""
        norm = s.norm(dim=-1, keepdim=True)
        if (norm >= 1).any():
            raise ValueError(f"s: the perturbed router reaches norms below 1, got {float(norm.max()):.6g}")
        return self.tau * s / (1 - norm)

    def bound(self, radius: float) -> float:
        return radius / (radius + self.tau)


#: The routers of mixtures by the names that stored rows have for them: `ROUTERS[name]()` where a name is given.
ROUTERS: dict[str, type[Router]] = {"linear": Linear, "cosine": Cosine, "perturbed": Perturbed}


def as_router(router: Router | str) -> Router:
    """The router itself, or `ROUTERS[name]()`; ValueError for anything else."""
    return router if isinstance(router, Router) else ROUTERS[check.choice("router", router, ROUTERS)]()


class LinearRouter(nn.Module):
    """The gating network of Chen et al. (2022), Section 3.2: `h_m(x) = sum_p <theta_m, x_p>`.

    Args:
        d: patch dimension.
        experts: number M of experts.
        dtype: floating type of the weights.

    Attributes:
        theta: (d, M), zero at initialization (Algorithm 1, line 2).

    Raises:
        ValueError: for a size below 1, or another type.
    """

    def __init__(self, d: int, experts: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        sizes = check.integer("d", d, 1), check.integer("experts", experts, 1)
        self.theta = nn.Parameter(torch.zeros(sizes, dtype=check.floating("dtype", dtype)))

    def forward(self, x: Float[Tensor, "n P d"]) -> Float[Tensor, "n M"]:
        """The noiseless logits h of n examples.

        Args:
            x: n examples of P patches.

        Raises:
            ValueError: for inputs of another shape. NaN make NaN logits, which the rules refuse.
        """
        return check.tensor("x", x, "n", "P", len(self.theta)).sum(1) @ self.theta


class CosineRouter(nn.Module):
    """Scores `cos(beta1_i, x) + beta0_i` (Nguyen et al. 2025, Eq. 2), with parameters to be learned.

    Args:
        d: dimension of an input.
        experts: number k of experts.
        seed: draws `beta1` with standard deviation `1/sqrt(d)`; `beta0` starts at zero.

    Attributes:
        router: the `Router` whose scores these are.
        beta1: (k, d) router vectors.
        beta0: (k,) biases.
    """

    router: Router = Cosine()

    def __init__(self, d: int, experts: int, *, seed: int = 0):
        super().__init__()
        check.integer("d", d, 1)
        check.integer("experts", experts, 1)
        rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
        self.beta1 = nn.Parameter(torch.randn(experts, d, generator=rng) / math.sqrt(d))
        self.beta0 = nn.Parameter(torch.zeros(experts))

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch k"]:
        """Logits of inputs.

        Args:
            x: inputs, any number of leading dimensions.

        Raises:
            ValueError: for inputs of another width; under the cosine router, for a zero vector, or one that is not
                finite, among inputs or router vectors.
        """
        return self.router.scores(self.beta0, self.beta1, check.tensor("x", x, ..., self.beta1.shape[1]))


class PerturbedCosineRouter(CosineRouter):
    """Scores `<beta1_i, x> / ((|beta1_i| + tau) (|x| + tau)) + beta0_i` (Nguyen et al. 2025, Eq. 8).

    Args:
        d: dimension of an input.
        experts: number k of experts.
        tau: the paper's tau_1 = tau_2, > 0.
        seed: draws `beta1` with standard deviation `1/sqrt(d)`; `beta0` starts at zero.

    Attributes:
        router, beta1, beta0: as in `CosineRouter`.
    """

    def __init__(self, d: int, experts: int, *, tau: float = 0.1, seed: int = 0):
        super().__init__(d, experts, seed=seed)
        self.router = Perturbed(tau)


class MLPRouter(nn.Module):
    """A single-headed router: one hidden layer that all M logits share.

    Args:
        d: dimension of an input; experts: number M of logits; width: units of the hidden layer.
        seed: draws the weights of both layers from N(0, 1/fan_in); biases start at zero.

    Attributes:
        hidden: `Linear` (width, d); logits: `Linear` (M, width).
    """

    def __init__(self, d: int, experts: int, width: int, seed: int):
        super().__init__()
        check.integer("experts", experts, 1)
        check.integer("width", width, 1)
        rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
        self.hidden, self.logits = layers.Linear(d, width, rng), layers.Linear(width, experts, rng)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """Logits of inputs; ValueError for inputs of another width."""
        return self.logits(torch.relu(self.hidden(check.tensor("x", x, ..., self.hidden.W.shape[-1]))))


class MultiHeadRouter(nn.Module):
    """A multi-headed router: M networks of one hidden layer, one for each logit, sharing nothing.

    Section 4.2 of Smoothness (2025).

    Args:
        d: dimension of an input.
        experts: number M of heads, one for each expert.
        width: hidden units of each head.
        seed: draws the weights of both layers from N(0, 1/fan_in); biases start at zero.

    Attributes:
        hidden: `Fan` (M, width, d), the first layers of the heads.
        logits: `Stack` (M, 1, width), the second ones.
    """

    def __init__(self, d: int, experts: int, width: int, seed: int):
        super().__init__()
        check.integer("width", width, 1)
        rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
        self.hidden, self.logits = layers.Fan(d, width, experts, rng), layers.Stack(width, 1, experts, rng)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """Logits of inputs: head m reads all of x and nothing of the other heads.

        Args:
            x: inputs, any number of leading dimensions.

        Raises:
            ValueError: for inputs of another width. NaN make NaN logits, which the rules refuse.
        """
        check.tensor("x", x, ..., self.hidden.W.shape[-1])
        return self.logits(torch.relu(self.hidden(x)))[..., 0]


def random_router(kind: str, d: int, experts: int, seed: int) -> nn.Module:
    """A router with random weights that maps inputs (n, d) to logits (n, M).

    Args:
        kind: "linear" (standard normal weights), "one trunk" (`MLPRouter`) or "heads" (`MultiHeadRouter`), both with
            6 hidden units, or "cosine", here the perturbed cosine router (`PerturbedCosineRouter`, tau = 0.1), which
            has logits at x = 0 too; `ROUTERS` calls that one "perturbed", and "cosine" the one without tau.
        d: dimension of an input; experts: number M of logits; seed: draws the weights.

    Raises:
        ValueError: for another kind.
    """
    if check.choice("kind", kind, ("linear", "one trunk", "heads", "cosine")) == "cosine":
        return PerturbedCosineRouter(d, experts, seed=seed)
    if kind != "linear":
        return {"one trunk": MLPRouter, "heads": MultiHeadRouter}[kind](d, experts, 6, seed)
    router = LinearRouter(d, experts)
    nn.init.normal_(router.theta, generator=torch.Generator().manual_seed(seed))
    return nn.Sequential(nn.Unflatten(1, (1, d)), router)  # an input is one patch
