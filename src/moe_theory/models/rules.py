"""The rules that select experts by their logits and give them gates, with softmax before or after the selection."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory import _validate as check


def top1_noisy(h: Float[Tensor, "*batch M"], noise: Float[Tensor, "*batch M"] | None = None) -> Int[Tensor, "*batch"]:
    """The selected expert, `argmax_m h_m + r_m`: switch routing of Chen et al. (2022), Section 3.3.

    Args:
        h: logits, a row of M for each input.
        noise: r, of the shape of h, such as `torch.rand_like(h)` for Unif[0, 1]; None is the test-time rule.

    Raises:
        ValueError: for NaN or infinite logits or noise, or noise of another shape.
    """
    check.finite("h", check.tensor("h", h, ..., "M"))
    if noise is None:
        return h.argmax(-1)
    noisy = h + check.tensor("noise", noise, *h.shape)
    m = noisy.argmax(-1)
    check.finite("noise", noisy.gather(-1, m[..., None]))  # NaN and infinity win, and h has none
    return m


def topk_set(scores: Float[Tensor, "*batch M"], k: int) -> Bool[Tensor, "*batch M"]:
    """True at the k largest scores; of equal scores `torch.topk` decides.

    Raises:
        ValueError: for a k outside 1..M.
    """
    M = check.tensor("scores", scores, ..., "M").shape[-1]
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
                `moe_theory.models.rules.gumbel(h.shape, generator)` draws it; the other rules do not read it.

        Raises:
            ValueError: for NaN or infinite logits, a k outside 1..M, or, where the rule needs noise, none, noise of
                another shape, or noise that is NaN or infinite.
        """
        check.finite("h", check.tensor("h", h, ..., "M"))
        if self.needs_noise and noise is not None:
            check.finite("noise", check.tensor("noise", noise, *h.shape))
        return self.gates(h, k, noise)

    def gates(
        self, h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"] | None = None
    ) -> Float[Tensor, "*batch M"]:
        """The gates; ValueError as for `chosen`."""
        chosen = self.chosen(h, k, noise)
        return self.shares(h, chosen) * chosen

    def chosen(
        self, h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"] | None = None
    ) -> Bool[Tensor, "*batch M"]:
        """The selected set; ValueError for a k outside 1..M, or no noise of the shape of h where the rule needs it."""
        if self.needs_noise and noise is None:
            raise ValueError(f"noise: {self.name} needs Gumbel noise of the shape of h, got None")
        return topk_set(h + check.tensor("noise", noise, *h.shape) if self.needs_noise else h, k)

    def shares(self, h: Float[Tensor, "*batch M"], chosen: Bool[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
        """The softmax that the gates are taken from, over all M experts or over those chosen."""
        return torch.softmax(h if self.over_all else h.masked_fill(~chosen, -math.inf), -1)


# The names of the rules are read from left to right, in the order of the operations.
softmax_topk = Rule(
    "softmax_topk",
    over_all=True,
    about="""First softmax over all M experts, then the k largest are kept as they are; they sum to less than 1.
    The gate of the switch layer (k = 1), of Chen et al. (2022) and of Appendix C of
    Smoothness (2025).""",
)
topk_softmax = Rule(
    "topk_softmax",
    over_all=False,
    about="""First the k largest logits are kept, then softmax over those; the gates sum to 1 (Smoothness 2025,
    3.1 and 4.2). Softmax over all, selection and division by the kept mass gives the same gates.""",
)
sampled_topk = Rule(
    "sampled_topk",
    over_all=True,
    needs_noise=True,
    about="""Softmax over all M; k experts drawn without replacement with those probabilities keep their gates:
    the k largest of `h + noise`, for standard Gumbel noise, are such a sample (Smoothness 2025, 4.2, with the gate
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
