"""Routers, and the rules that select experts from their logits."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.layers import Fan, Linear, Stack

ROUTERS = ("linear", "cosine", "perturbed")
RULES = ("softmax_topk", "topk_softmax", "sampled_topk")


def _nonzero(name: str, norms: Tensor) -> Tensor:
    zeros = int((norms == 0).sum())
    if zeros:
        raise ValueError(f"{name}: expected no zero vectors, where the cosine is not defined, got {zeros}")
    return norms


@dataclass(frozen=True)
class Router:
    """A rule for scores: linear, cosine (Eq. 2) or perturbed cosine (Eq. 8).

    Args:
        kind: "linear" (`s = beta1`, `u = x`), "cosine" (both normalized) or "perturbed" (both divided
            by their norm plus tau).
        tau: the paper's tau_1 = tau_2, > 0; only the perturbed router reads it.

    Raises:
        ValueError: for another kind or a tau that is not positive.
    """

    kind: str = "perturbed"
    tau: float = 0.1

    def __post_init__(self):
        check.choice("kind", self.kind, ROUTERS)
        check.positive("tau", self.tau)

    def _scaled(self, name: str, v: Tensor) -> Tensor:
        if self.kind == "linear":
            return v
        norm = v.norm(dim=-1, keepdim=True)
        return v / (_nonzero(name, norm) if self.kind == "cosine" else norm + self.tau)

    def embedding(self, beta1: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """s(beta1); ValueError for a zero vector given to the cosine router."""
        return self._scaled("beta1", beta1)

    def feature(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """u(x); ValueError for a zero vector given to the cosine router."""
        return self._scaled("x", x)

    def pull_back(self, beta1: Float[Tensor, "*batch d"], g: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """`s'(beta1)^T g`: a gradient in the embeddings, as a gradient in the vectors behind them.

        `s' = (I - s b^T) / (|beta1| + tau)` with `b = beta1 / |beta1|`; tau = 0 for the cosine router.
        """
        if self.kind == "linear":
            return g
        s, norm = self.embedding(beta1), beta1.norm(dim=-1, keepdim=True)
        b = beta1 / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        return (g - b * (s * g).sum(-1, keepdim=True)) / (norm + (self.tau if self.kind == "perturbed" else 0))

    def preimage(self, s: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """A beta1 with `embedding(beta1) = s`: the only one, or for the cosine router the one of norm 1.

        Raises:
            ValueError: where there is none: |s| must be below 1 for the perturbed router, 1 for the cosine.
        """
        norm = s.norm(dim=-1, keepdim=True)
        if self.kind == "perturbed" and (norm >= 1).any():
            raise ValueError(f"s: the perturbed router reaches norms below 1, got {float(norm.max()):.6g}")
        if self.kind == "cosine" and (norm - 1).abs().max() > 1e-9:
            raise ValueError(f"s: the cosine router reaches norm 1 only, got {norm.flatten().tolist()}")
        return self.tau * s / (1 - norm) if self.kind == "perturbed" else s


class LinearRouter(nn.Module):
    """The gating network of Chen et al. (2022), Section 3.2: `h_m(x) = sum_p <theta_m, x_p>`.

    Args:
        d: patch dimension.
        experts: number M of experts.

    Attributes:
        theta: (d, M), zero at initialization (Algorithm 1, line 2).
    """

    def __init__(self, d: int, experts: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.theta = nn.Parameter(
            torch.zeros(check.integer("d", d, 1), check.integer("experts", experts, 1), dtype=dtype)
        )

    def forward(self, x: Float[Tensor, "n P d"]) -> Float[Tensor, "n M"]:
        """The noiseless logits h of n examples."""
        return x.sum(1) @ self.theta


class CosineRouter(nn.Module):
    """Scores `cos(beta1_i, x) + beta0_i` (Nguyen et al. 2025, Eq. 2).

    Args:
        d: dimension of an input.
        experts: number k of experts.
        seed: draws `beta1` with standard deviation `1/sqrt(d)`; `beta0` starts at zero.

    Attributes:
        beta1: (k, d); beta0: (k,).
    """

    rule = Router("cosine")

    def __init__(self, d: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        check.integer("d", d, 1), check.integer("experts", experts, 1)
        rng = torch.Generator().manual_seed(seed)
        self.beta1 = nn.Parameter(torch.randn(experts, d, generator=rng, dtype=dtype) / math.sqrt(d))
        self.beta0 = nn.Parameter(torch.zeros(experts, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch k"]:
        """Logits of inputs; ValueError for a zero vector among inputs or embeddings."""
        return self.rule.feature(x) @ self.rule.embedding(self.beta1).mT + self.beta0


class PerturbedCosineRouter(CosineRouter):
    """Scores `<beta1_i, x> / ((|beta1_i| + tau) (|x| + tau)) + beta0_i` (Nguyen et al. 2025, Eq. 8).

    Args:
        tau: the paper's tau_1 = tau_2, > 0; the others as in `CosineRouter`.
    """

    def __init__(self, d: int, experts: int, tau: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__(d, experts, seed, dtype)
        self.rule = Router("perturbed", tau)


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
        rng = torch.Generator().manual_seed(seed)
        self.hidden, self.logits = Linear(d, width, rng), Linear(width, experts, rng)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """Logits of inputs."""
        return self.logits(torch.relu(self.hidden(x)))


class MultiHeadRouter(nn.Module):
    """A multi-headed router: M networks of one hidden layer, one for each logit, sharing nothing (smooth2025, 4.2).

    Args:
        d: dimension of an input; experts: number M of heads; width: hidden units of each head.
        seed: draws the weights as in `MLPRouter`.

    Attributes:
        hidden: `Fan` (M, width, d); logits: `Stack` (M, 1, width).
    """

    def __init__(self, d: int, experts: int, width: int, seed: int):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.hidden, self.logits = Fan(d, width, experts, rng), Stack(width, 1, experts, rng)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """Logits of inputs: head m reads all of x and nothing of the other heads."""
        return self.logits(torch.relu(self.hidden(x)))[..., 0]


def top1_noisy(h: Float[Tensor, "*batch M"], noise: Float[Tensor, "*batch M"] | None = None) -> Int[Tensor, "*batch"]:
    """`argmax_m h_m + r_m`, the switch routing of Section 3.3; without `noise` the test-time rule."""
    check.finite("h", h)
    return (h if noise is None else h + noise).argmax(-1)


def topk_set(scores: Float[Tensor, "*batch M"], k: int) -> Bool[Tensor, "*batch M"]:
    """True at the k largest scores; of equal scores `torch.topk` decides.

    Raises:
        ValueError: for a k outside 1..M.
    """
    M = scores.shape[-1]
    if check.integer("k", k, 1) > M:
        raise ValueError(f"k: expected at most M = {M} experts, got {k}")
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(k, -1).indices, True)


def gate_values(
    h: Float[Tensor, "*batch M"], k: int, rule: str, noise: Float[Tensor, "*batch M"] | None = None
) -> Float[Tensor, "*batch M"]:
    """Gates of the rule "softmax_topk", "topk_softmax" or "sampled_topk", zero for experts not selected.

    Does not look whether h is finite, so that it runs under `torch.func.vmap`; the functions named as
    the rules do.

    Raises:
        ValueError: for another rule, a k outside 1..M, or sampling without noise.
    """
    if check.choice("rule", rule, RULES) == "sampled_topk" and noise is None:
        raise ValueError("noise: sampled_topk needs Gumbel noise of the shape of h, got None")
    chosen = topk_set(h + noise if rule == "sampled_topk" else h, k)
    if rule == "topk_softmax":
        return torch.softmax(h.masked_fill(~chosen, -math.inf), -1)
    return torch.softmax(h, -1) * chosen


def softmax_topk(h: Float[Tensor, "*batch M"], k: int) -> Float[Tensor, "*batch M"]:
    """First softmax over all M experts, then the k largest are kept as they are; they sum to less than 1.

    The names of the rules are read from left to right, in the order of the operations. This is the
    gate of the switch layer (k = 1), of Chen et al. (2022) and of Appendix C of smooth2025.
    """
    return gate_values(check.finite("h", h), k, "softmax_topk")


def topk_softmax(h: Float[Tensor, "*batch M"], k: int) -> Float[Tensor, "*batch M"]:
    """First the k largest logits are kept, then softmax over those; the gates sum to 1 (smooth2025, 3.1 and 4.2).

    Softmax over all, selection and division by the kept mass gives the same gates.
    """
    return gate_values(check.finite("h", h), k, "topk_softmax")


def sampled_topk(h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
    """Softmax over all M; k experts drawn without replacement with those probabilities keep their gates.

    The k largest of `h + noise`, for standard Gumbel noise (`gumbel`), are such a sample
    (smooth2025, 4.2, with the gate of Appendix C).
    """
    return gate_values(check.finite("h", h), k, "sampled_topk", noise)


def gumbel(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel variables, `-log E` with E standard exponential."""
    return -torch.empty(shape, dtype=dtype).exponential_(generator=generator).log()
