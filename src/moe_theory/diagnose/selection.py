"""By which numbers a router selects: scores of its logits, a bias that only selects, and groups of experts."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_theory.diagnose.arrays import spacing
from moe_theory.models.rules import topk_set

#: Scores of logits, and by how much they change at the most where a logit changes by 1.
SCORES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "logits": (lambda h: h, 1.0),
    "softmax": (lambda h: h.softmax(-1), 0.5),
    "sigmoid": (torch.sigmoid, 0.25),
    "sqrtsoftplus": (lambda h: nn.functional.softplus(h).sqrt(), 0.33),
}


class Groups(NamedTuple):
    """Experts in groups of which a token is sent to some.

    Attributes:
        number: of groups of M / number experts each; kept: for a token.
        worth: by how many of its largest scores, summed, a group is valued.
        outside: score of the experts in all other groups; where it is 0, it may be the largest.
    """

    number: int
    kept: int
    worth: int = 2
    outside: float = -math.inf


class Rule(NamedTuple):
    """How K experts are selected.

    Attributes:
        score: key of `SCORES`; bias: added to the scores; groups: to which a token is limited.
        half: precision to which scores are rounded before, by mistake.
    """

    score: str = "logits"
    bias: Float[Tensor, " M"] | None = None
    groups: Groups | None = None
    half: torch.dtype | None = None

    def __str__(self) -> str:
        bias = "" if self.bias is None else " + bias"
        groups = "" if self.groups is None else f", {self.groups.kept} of {self.groups.number} groups"
        return self.score + bias + groups

    def of(
        self, h: Float[Tensor, "n M"], rounding: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n M"], Float[Tensor, " n"]]:
        """The numbers of which the K largest are selected, and how far rounding may move them; more than any gap where
        it decides which groups a token has.

        Args:
            h: logits in float64; rounding: of the logits of each token.
        """
        score, steepest = SCORES[self.score]
        s = score(h)
        off = rounding
        if self.score != "logits":  # in single precision, whatever the model's
            off = steepest * rounding + 4 * torch.finfo(torch.float32).eps * s.amax(1)
        if self.bias is not None:
            s = s + self.bias.to(s)
            off = off + torch.finfo(torch.float32).eps * s.abs().amax(1)
        if self.half is not None:
            off = off + torch.finfo(self.half).eps * s.abs().amax(1)
        if self.groups is None:
            return s, off
        number, kept, worth, outside = self.groups
        value = s.unflatten(1, (number, -1)).topk(worth, -1).values.sum(-1)
        inside = topk_set(value, kept)
        lead = value.masked_fill(~inside, math.inf).amin(1) - value.masked_fill(inside, -math.inf).amax(1)
        inside = inside.repeat_interleave(s.shape[1] // number, 1)
        any_gap = 2 * s.abs().amax(1) + 1
        return s.masked_fill(~inside, outside), torch.where(lead <= 2 * worth * off, any_gap, off)

    def resolution(self, h: Float[Tensor, "n M"], dtype: torch.dtype) -> torch.dtype | Float[Tensor, "n M"]:
        """In which the numbers that it compares are rounded: those of logits by their format, of scores by widths."""
        return dtype if self.score == "logits" and self.bias is None else widths(self.score, h, dtype)

    def misled(self, h: Float[Tensor, "n M"], rounding: Float[Tensor, " n"], chosen: Bool[Tensor, "n M"]) -> float:
        """Share of tokens with other experts than the rule's, among those with k experts whose set is decided."""
        k = int(chosen.sum(1).max())
        s, off = self.of(h, rounding)
        top = s.topk(min(k + 1, s.shape[1]), 1).values
        decided = (chosen.sum(1) == k) & ((top[:, k - 1] - top[:, -1] > 2 * off) | (k == s.shape[1]))
        wrong = decided & (topk_set(s, k) != chosen).any(1)
        return float(wrong.sum()) / max(1, int(decided.sum()))


def widths(score: str, h: Float[Tensor, "n M"], dtype: torch.dtype) -> Float[Tensor, "n M"]:
    """How far apart the scores of two neighbouring logits of a format are, each logit moved alone.

    Args:
        score: key of `SCORES`; h: logits; dtype: the format in which they were rounded.
    """
    exact, unit = h.double(), spacing(h, dtype)
    if score == "softmax":
        pi = exact.softmax(1)
        width = pi * (1 - pi) * unit
    else:
        of, _ = SCORES[score]
        width = of(exact + unit / 2) - of(exact - unit / 2)
    return width.clamp(min=torch.finfo(torch.float64).tiny)


def rules(bias: Tensor | None, groups: Groups | None, scores: tuple[str, ...] = tuple(SCORES)) -> list[Rule]:
    """All ways to select by everything that a router has.

    Without a bias and groups all scores have the order of their logits. A softmax's groups are valued by one score in
    some models, by two in others.
    """
    if bias is None and groups is None:
        return [Rule()]
    found = []
    for score in scores:
        worths = () if groups is None else (1, 2) if score == "softmax" else (2,)
        of_score = [groups._replace(worth=w) for w in worths if groups] or [None]
        found += [Rule(score, bias, g) for g in of_score]
    return found


def rule_of(
    h: Float[Tensor, "n M"],
    rounding: Float[Tensor, " n"],
    chosen: Bool[Tensor, "n M"],
    *,
    bias: Tensor | None = None,
    groups: Groups | None = None,
    scores: tuple[str, ...] = tuple(SCORES),
) -> tuple[Rule, str]:
    """The rule by which tokens were sent, of those that use all a router has, and what is wrong where none explains it.

    Returns:
        The nearest of these rules, and "" where it explains every decided token, else the name of the finding: that
        of the slip whose rule explains every token, "selection" where none does.
    """

    def nearest(of: list[Rule]) -> tuple[float, Rule]:
        return min(((rule.misled(h, rounding, chosen), rule) for rule in of), key=lambda pair: pair[0])

    own = rules(bias, groups, scores)
    off, rule = nearest(own)
    if not off:
        return rule, ""
    for name, slips in _slips(h.shape[1], bias, groups, scores):
        if slips and nearest(slips)[0] == 0:
            return rule, name
    return rule, "selection"


def _slips(
    experts: int, bias: Tensor | None, groups: Groups | None, scores: tuple[str, ...]
) -> list[tuple[str, list[Rule]]]:
    """What may have been done in place of the rules of a router, by the finding that it is."""
    halves = [] if bias is None else [bias.to(half).to(bias) for half in (torch.bfloat16, torch.float16)]
    lost = [] if bias is None else rules(None, groups, scores)
    valued = [] if groups is None else [groups._replace(worth=w) for w in (1, 2)]
    regrouped: list[Rule] = []
    if groups is not None:
        other = [None, *valued, *(g._replace(outside=0.0) for g in valued)]
        regrouped = [Rule(score, bias, g) for score, g in product(scores, other)]
        numbers = [n for n in range(2, experts // 2 + 1) if experts % n == 0]
        kept = [Groups(n, some, w) for n in numbers for some in range(1, n) for w in (1, 2)]
        regrouped += [Rule(score, bias, g) for score, g in product(scores, kept)]
    full = [Rule(score, bias, g) for score, g in product(scores, valued or [None])]
    return [
        ("bias rounded", [rule for half in halves for rule in rules(half, groups, scores)]),
        ("bias lost", lost),
        ("groups", regrouped),
        # last, since its limit is wide
        ("scores rounded", [rule._replace(half=half) for rule in full for half in (torch.float16, torch.bfloat16)]),
    ]


def groups_of(router: nn.Module, config: Any) -> Groups | None:
    """The groups that a router, or else the configuration, names; None where a token may go to any expert."""

    def named(*names: str):
        asked = [getattr(of, name, None) for of in (router, config) for name in names]
        return next((value for value in asked if value is not None), None)

    number, kept = named("num_group", "n_group"), named("topk_group")
    limited = number is not None and kept is not None and 0 < kept < number
    return Groups(number, kept) if limited and named("topk_method") != "greedy" else None


def half_precision(bias: Float[Tensor, " M"]) -> torch.dtype | None:
    """The half precision in which a bias was kept before, by its digits; None where they are those of another.

    The entries of a bias that were never rounded to eight bits fit into them by chance once in 65,536; those that fit
    into five bits say nothing, for they may have been set by hand.
    """
    if bias.dtype in (torch.bfloat16, torch.float16):
        return bias.dtype
    mantissa = torch.frexp(bias.double()).mantissa
    for dtype, bits in ((torch.bfloat16, 8), (torch.float16, 11)):
        fits, plain = (whole(mantissa * 2.0**b) for b in (bits, 5))
        if bool(fits.all()) and not bool(plain.all()):
            return dtype
    return None


def whole(number: Float[Tensor, " M"]) -> Bool[Tensor, " M"]:
    """Whether numbers are whole."""
    return number == number.round()
