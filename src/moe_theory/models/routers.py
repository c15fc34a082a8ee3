"""Routers: how inputs are scored, the modules that learn such scores, and the rules that select experts by them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models import layers

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
        """The logits of inputs."""
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
    """Norms of the last dimension; ValueError for zero vectors."""
    norm = v.norm(dim=-1, keepdim=True)
    zeros = int((norm == 0).sum())
    if zeros:
        raise ValueError(f"{name}: expected no zero vectors, where the cosine is not defined, got {zeros}")
    return norm


@dataclass(frozen=True)
class Cosine(Router):
    """`s = beta1 / |beta1|`, `u = x / |x|` (Nguyen et al. 2025, Eq. 2)."""

    sphere = True

    def embedding(self, beta1: Vectors) -> Vectors:
        """beta1 / |beta1|; ValueError for a zero vector."""
        return beta1 / _norm("beta1", beta1)

    def feature(self, x: Vectors) -> Vectors:
        """x / |x|; ValueError for a zero vector."""
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
        """beta1 / (|beta1| + tau), of norm below 1."""
        return beta1 / (beta1.norm(dim=-1, keepdim=True) + self.tau)

    def feature(self, x: Vectors) -> Vectors:
        """x / (|x| + tau), as the embedding."""
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
    """

    def __init__(self, d: int, experts: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.theta = nn.Parameter(
            torch.zeros(check.integer("d", d, 1), check.integer("experts", experts, 1), dtype=dtype)
        )

    def forward(self, x: Float[Tensor, "n P d"]) -> Float[Tensor, "n M"]:
        """The noiseless logits h of n examples.

        Args:
            x: n examples of P patches.
        """
        return x.sum(1) @ self.theta


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
            ValueError: under the cosine router, for a zero vector among inputs or router vectors.
        """
        return self.router.scores(self.beta0, self.beta1, x)


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
        rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
        self.hidden, self.logits = layers.Linear(d, width, rng), layers.Linear(width, experts, rng)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """Logits of inputs."""
        return self.logits(torch.relu(self.hidden(x)))


class MultiHeadRouter(nn.Module):
    """A multi-headed router: M networks of one hidden layer, one for each logit, sharing nothing (smooth2025, 4.2).

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
        rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
        self.hidden, self.logits = layers.Fan(d, width, experts, rng), layers.Stack(width, 1, experts, rng)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """Logits of inputs: head m reads all of x and nothing of the other heads.

        Args:
            x: inputs, any number of leading dimensions.
        """
        return self.logits(torch.relu(self.hidden(x)))[..., 0]


def random_router(kind: str, d: int, experts: int, seed: int) -> nn.Module:
    """A router with random weights that maps inputs (n, d) to logits (n, M).

    Args:
        kind: "linear" (standard normal weights), "one trunk" (`MLPRouter`), "heads" (`MultiHeadRouter`), both with
            6 hidden units, or "cosine" (`PerturbedCosineRouter`).
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


def top1_noisy(h: Float[Tensor, "*batch M"], noise: Float[Tensor, "*batch M"] | None = None) -> Int[Tensor, "*batch"]:
    """The selected expert, `argmax_m h_m + r_m`: switch routing of Chen et al. (2022), Section 3.3.

    Args:
        h: logits, a row of M for each input.
        noise: r, of the shape of h, such as `torch.rand_like(h)` for Unif[0, 1]; None is the test-time rule.

    Raises:
        ValueError: for NaN or infinite logits.
    """
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


@dataclass(frozen=True)
class Rule:
    """A rule that selects k of M experts by their logits h and gives them gates; the gates of the others are 0.

    `rule(h, k)`, or `rule(h, k, noise)`, is checked; `rule.gates` does not look whether h is finite, so that it
    runs under `torch.func.vmap`.

    Args:
        name: under which `RULES`, stored rows and figures have it.
        over_all: whether gates are taken from a softmax over all M experts, or over the selected ones.
        needs_noise: whether the k largest of `h + noise` are selected, or of h.
        about: what it does, for a reader.
    """

    name: str
    over_all: bool
    needs_noise: bool = False
    about: str = field(default="", repr=False, compare=False)

    def __call__(
        self, h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"] | None = None
    ) -> Float[Tensor, "*batch M"]:
        """The gates, a row for each input, 0 where an expert is not selected.

        Args:
            h: logits, a row of M for each input.
            k: number of selected experts, 1 to M.
            noise: for `sampled_topk` standard Gumbel noise of the shape of h, as
                `moe_theory.models.routers.gumbel(h.shape, generator)` draws it; the other rules do not read it.

        Raises:
            ValueError: for NaN or infinite logits, a k outside 1..M, or no noise where the rule needs it.
        """
        return self.gates(check.finite("h", h), k, noise)

    def gates(
        self, h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"] | None = None
    ) -> Float[Tensor, "*batch M"]:
        """The gates; ValueError for a k outside 1..M, or no noise where the rule needs it."""
        chosen = self.chosen(h, k, noise)
        return self.shares(h, chosen) * chosen

    def chosen(
        self, h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"] | None = None
    ) -> Bool[Tensor, "*batch M"]:
        """The selected set; ValueError for a k outside 1..M, or no noise where the rule needs it."""
        if self.needs_noise and noise is None:
            raise ValueError(f"noise: {self.name} needs Gumbel noise of the shape of h, got None")
        return topk_set(h + noise if self.needs_noise else h, k)

    def shares(self, h: Float[Tensor, "*batch M"], chosen: Bool[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
        """The softmax that the gates are taken from, over all M experts or over those chosen."""
        return torch.softmax(h if self.over_all else h.masked_fill(~chosen, -math.inf), -1)


# The names of the rules are read from left to right, in the order of the operations.
softmax_topk = Rule(
    "softmax_topk",
    over_all=True,
    about="""First softmax over all M experts, then the k largest are kept as they are; they sum to less than 1.
    The gate of the switch layer (k = 1), of Chen et al. (2022) and of Appendix C of smooth2025.""",
)
topk_softmax = Rule(
    "topk_softmax",
    over_all=False,
    about="""First the k largest logits are kept, then softmax over those; the gates sum to 1 (smooth2025, 3.1
    and 4.2). Softmax over all, selection and division by the kept mass gives the same gates.""",
)
sampled_topk = Rule(
    "sampled_topk",
    over_all=True,
    needs_noise=True,
    about="""Softmax over all M; k experts drawn without replacement with those probabilities keep their gates:
    the k largest of `h + noise`, for standard Gumbel noise, are such a sample (smooth2025, 4.2, with the gate
    of Appendix C).""",
)

#: The rules by the names that stored rows have for them.
RULES = {rule.name: rule for rule in (softmax_topk, topk_softmax, sampled_topk)}


def known(rule: Rule) -> Rule:
    """The rule itself; ValueError for anything else, such as the name of one."""
    if not isinstance(rule, Rule):
        raise ValueError(f"rule: expected one of the values of RULES, got {rule!r}")
    return rule


def with_softmax(rule: Rule) -> Rule:
    """A rule whose gates a closed form may take for a softmax; ValueError for one that makes them itself."""
    own = [name for name in ("gates", "shares") if getattr(type(known(rule)), name) is not getattr(Rule, name)]
    if own:
        raise ValueError(f"rule: expected gates of a softmax, got {rule!r}, whose class has {own} of its own")
    return rule


def gumbel(shape: tuple[int, ...], rng: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel variables, `-log E` with E standard exponential."""
    return -torch.empty(shape, dtype=dtype).exponential_(generator=rng).log()
