"""What the logits of a router tell: ties, loads, what the dispatch knows of labels, and the common shift.

A `RouterStream` takes them batch after batch and keeps some numbers for each token, not its logits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.diagnose.findings import LEVEL, Finding
from moe_theory.diagnose.gauge import gauge_share
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.measure.tables import effective_experts
from moe_theory.models.rules import topk_set
from moe_theory.streams import stream
from moe_theory.theory.smoothing import keep_probability

#: Permutations of the labels, against which the entropy of a dispatch is held.
PERMUTATIONS = 199


@dataclass(frozen=True)
class Dispatch:
    """What the first expert of a token tells about a label of it.

    Attributes:
        entropy: Eq. 6.1, of the label given the expert, in nats.
        blind: mean of the same with the labels permuted; spread: its standard deviation.
        p: share of dispatches at least as telling, this one and the permuted ones together.
    """

    entropy: float
    blind: float
    spread: float
    p: float


@dataclass(frozen=True)
class RouterReport:
    """What one router does with the tokens it was shown.

    Attributes:
        where: its name; tokens: how many; k: experts selected.
        loads: share of the selections that each expert gets.
        gaps: by how much the last selected logit leads the first rejected one, for each token.
        undecided: tokens whose gap is within the rounding of their logits; expected: how many chance gives.
        changed: share of tokens whose experts change under Gaussian noise of standard deviation `noise`.
        dropped: share of tokens without all of their experts; misled: of the others and decided ones, with others
            than those of the largest logits.
        gauge: share of the router's squared norm in its mean vector; nan if the router was not given.
        dispatch: for each label what the first expert tells of it.
    """

    where: str
    tokens: int
    k: int
    loads: tuple[float, ...]
    gaps: Float[Tensor, " n"] = field(repr=False)
    undecided: int
    expected: float
    changed: float
    noise: float
    dropped: float
    misled: float
    gauge: float
    dispatch: dict[str, Dispatch]
    slip: str = ""

    @property
    def effective(self) -> float:
        """Experts in use, `1 / sum_m rho_m^2`."""
        return effective_experts([self.loads])

    @property
    def dead(self) -> list[int]:
        """Experts that no token selected."""
        return [m for m, load in enumerate(self.loads) if not load]

    @property
    def findings(self) -> list[Finding]:
        found = []
        unseen, fair = 1 - LEVEL ** (1 / self.tokens), self.k / len(self.loads)
        if self.dead and unseen < fair / 2:  # so few tokens that chance may pass an expert by say nothing
            found.append(Finding("dead", self.where, len(self.dead), 0, f"experts {self.dead}"))
        chance = stats.poisson.sf(self.undecided - 1, self.expected) < LEVEL
        if chance and self.undecided > 2 * self.expected:  # the law of the gaps is not quite the one expected
            share = self.undecided / self.tokens
            found.append(Finding("ties", self.where, share, self.expected / self.tokens, "share of the tokens"))
        for name, share in (("dropped", self.dropped), (self.slip or "selection", self.misled)):
            if share:
                found.append(Finding(name, self.where, share, 0, "share of the tokens"))
        return found


class RouterStream:
    """Takes the logits of a router batch after batch.

    Args:
        experts: number M; k: experts selected.
        noise: standard deviation of the Gaussian noise whose effect is computed.
        where: the router's name.

    Raises:
        ValueError: for a k outside 1..M or a noise that is not > 0.
    """

    def __init__(self, experts: int, k: int, *, noise: float = 0.01, where: str = "router"):
        if check.integer("k", k, 1) > check.integer("experts", experts, 1):
            raise ValueError(f"k: expected at most M = {experts} experts, got {k}")
        self.experts, self.k, self.noise, self.where = experts, k, check.positive("noise", noise), where
        self.weight: Tensor | None = None
        self._kept: dict[str, list[Tensor]] = {}
        self._labels: dict[str, list[Tensor]] = {}

    def add(
        self,
        h: Float[Tensor, "n M"],
        *,
        scores: Float[Tensor, "n M"] | None = None,
        chosen: Tensor | None = None,
        rounding: Float[Tensor, " n"] | None = None,
        labels: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Takes a batch.

        Args:
            h: logits.
            scores: the numbers by which experts are selected, where these are not the logits.
            chosen: (n, M), true at the experts that the tokens were sent to; by default those of the k largest logits.
            rounding: error of the logits of each token; by default the resolution of their dtype at their size.
            labels: for each name a non-negative integer for each token; the same names in every batch.

        Raises:
            ValueError: for logits that are no matrix of M columns, not floating point, NaN or infinite, a mask of
                another shape or type or with more than k experts of a token, labels that are no integers >= 0, or
                arguments for another number of tokens.
        """
        if h.ndim != 2 or h.shape[1] != self.experts:
            raise ValueError(f"h: expected logits of shape (n, {self.experts}), got {tuple(h.shape)}")
        if not h.is_floating_point():
            raise ValueError(f"h: expected floating point logits, got {h.dtype}")
        h64 = check.finite("h", h.detach()).double().cpu()
        if rounding is None:
            rounding = torch.finfo(h.dtype).eps * h64.abs().amax(1)
        if rounding.shape != h.shape[:1] or bool((rounding < 0).any()):
            raise ValueError(f"rounding: expected {len(h)} numbers >= 0, got {tuple(rounding.shape)}")
        h64 = h64 if scores is None else scores.detach().double().cpu().clamp(min=-1e9)
        wanted = topk_set(h64, self.k)
        chosen = wanted if chosen is None else self._mask(chosen, h)
        labels = {} if labels is None else labels
        if not isinstance(labels, Mapping):
            raise ValueError(f"labels: expected integers for each token by name, got {type(labels).__name__}")
        labels = {name: checked_label(name, label, len(h)) for name, label in labels.items()}
        if self._kept and labels.keys() != self._labels.keys():
            before, now = (sorted(names) for names in (self._labels, labels))
            raise ValueError(f"labels: expected those of the batches before, {before}, got {now}")
        gap, complete = kept_gap(h64, self.k), chosen.sum(1) == self.k
        lead = h64.masked_fill(~chosen, -math.inf)
        batch = dict(
            gap=gap,
            rounding=rounding.double().cpu(),
            stays=keep_probability(h64, self.k, scale=self.noise),
            complete=complete,
            misled=complete & (gap > 2 * rounding.cpu()) & (chosen != wanted).any(1),
            first=torch.where(chosen.any(1), lead.argmax(1), -1),
            loads=chosen.double().sum(0, keepdim=True),
        )
        for seen, values in ((self._kept, batch), (self._labels, labels)):
            for name, value in values.items():
                seen.setdefault(name, []).append(value)

    def _mask(self, chosen: Tensor, h: Float[Tensor, "n M"]) -> Bool[Tensor, "n M"]:
        """A mask of the experts that the tokens were sent to, if it is one."""
        chosen = check.array("chosen", chosen).cpu()
        if chosen.dtype != torch.bool or chosen.shape != h.shape:
            raise ValueError(
                f"chosen: expected a mask of shape {tuple(h.shape)}, got {chosen.dtype} {tuple(chosen.shape)}; "
                "numbers (n, k) become one by torch.zeros_like(h, dtype=torch.bool).scatter(1, numbers, True)"
            )
        most = int(chosen.sum(1).max()) if len(chosen) else 0
        if most > self.k:
            raise ValueError(f"chosen: expected at most k = {self.k} experts for a token, got {most}")
        return chosen

    def report(self, *, seed: int = 0) -> RouterReport:
        """What was seen so far.

        Args:
            seed: draws the permutations of the labels.

        Raises:
            ValueError: if no token was taken.
        """
        seen = {name: torch.cat(parts) for name, parts in self._kept.items()}
        if not seen or not len(seen["gap"]):
            raise ValueError("batches: expected at least one token, got none")
        undecided = seen["gap"] <= 2 * seen["rounding"]
        loads = seen["loads"].sum(0)
        complete = seen["complete"]
        return RouterReport(
            where=self.where,
            tokens=len(complete),
            k=self.k,
            loads=tuple((loads / loads.sum().clamp(min=1)).tolist()),
            gaps=seen["gap"],
            undecided=int(undecided.sum()),
            expected=_by_chance(seen["gap"], seen["rounding"]),
            changed=float(1 - seen["stays"].mean()),
            noise=self.noise,
            dropped=float((~complete).double().mean()),
            misled=float(seen["misled"].double().mean()),
            gauge=math.nan if self.weight is None else gauge_share(self.weight),
            dispatch={
                name: dispatch_entropies(torch.cat(parts), seen["first"], seed=seed, at=i)
                for i, (name, parts) in enumerate(self._labels.items())
            },
        )


def checked_label(name: str, label, tokens: int) -> Int[Tensor, " n"]:
    """A label of some tokens as a vector of integers.

    Raises:
        ValueError: unless it has an integer >= 0 for each of them.
    """
    label = check.array(f"labels of {name!r}", label).flatten().cpu()
    if len(label) != tokens:
        raise ValueError(f"labels: expected {tokens} of {name!r}, one for each token, got {len(label)}")
    if label.is_floating_point() or label.is_complex() or bool((label < 0).any()):
        least = f", the least of them {label.min()}" if label.dtype.is_signed and not label.is_complex() else ""
        raise ValueError(f"labels: expected integers >= 0 for {name!r}, got {label.dtype}{least}")
    return label


def kept_gap(h: Float[Tensor, "n M"], k: int) -> Float[Tensor, " n"]:
    """By how much the last of the k selected logits leads the first rejected one; infinite if none is rejected."""
    top = h.topk(min(k + 1, h.shape[1]), 1).values
    return top[:, k - 1] - top[:, k] if h.shape[1] > k else torch.full_like(top[:, 0], math.inf)


def _by_chance(gap: Float[Tensor, " n"], rounding: Float[Tensor, " n"]) -> float:
    """Gaps within twice the rounding if gaps are exponential: what the larger ones have beyond it has the law's mean.

    Where none is larger, nothing is known of the law, and all are expected; none where all gaps are 0.
    """
    over = gap - 2 * rounding
    beyond = over[over > 0]
    if not len(beyond):
        return float(len(gap)) if bool(gap.any()) else 0.0
    return float(-torch.expm1(-2 * rounding / beyond.mean()).sum())


def dispatch_entropies(label: Tensor, expert: Tensor, *, seed: int, at: int = 0) -> Dispatch:
    """Eq. 6.1 of a dispatch, and of the same with the labels permuted.

    Args:
        label, expert: of each token; those with the expert -1 have none, and are left out.
        seed, at: draw the permutations.

    Raises:
        ValueError: as `dispatch_counts`.
    """
    label, expert = label[expert >= 0], expert[expert >= 0]
    label = torch.unique(label, return_inverse=True)[1]
    entropy, rng = dispatch_entropy(label, expert), stream(seed, "permutations", at)
    shuffled = [torch.from_numpy(rng.permutation(len(label))) for _ in range(PERMUTATIONS)]
    blind = np.array([dispatch_entropy(label[order], expert) for order in shuffled])
    p = (1 + int((blind <= entropy).sum())) / (1 + PERMUTATIONS)
    return Dispatch(entropy, float(blind.mean()), float(blind.std()), p)


def diagnose_router(
    h: Float[Tensor, "n M"] | np.ndarray,
    *,
    k: int,
    chosen: Tensor | None = None,
    labels: Mapping[str, Tensor] | None = None,
    x: Float[Tensor, "n d"] | np.ndarray | None = None,
    W: Float[Tensor, "M d"] | np.ndarray | None = None,
    b: Float[Tensor, " M"] | np.ndarray | None = None,
    noise: float = 0.01,
    seed: int = 0,
) -> RouterReport:
    """What a router does, from its logits alone; for several batches see `RouterStream`.

    Args:
        h: logits of n tokens.
        k: experts selected.
        chosen: (n, M), true at the experts that the tokens were sent to; by default those of the k largest logits.
        labels: for each name a non-negative integer for each token.
        x, W: what the router read and its vectors, both or neither: the rounding of the logits and the share of the
            gauge are taken from them.
        b: its biases, if it has any.
        noise: standard deviation of the Gaussian noise whose effect is computed.
        seed: draws the permutations of the labels.

    Raises:
        ValueError: for no token, NaN logits, a k outside 1..M, hidden states or vectors that are for other tokens,
            experts or another width, logits that are not `x W^T + b`, or what `RouterStream.add` refuses.
    """
    h = check.array("h", h)
    if h.ndim != 2 or not h.is_floating_point() or not len(h):
        raise ValueError(f"h: expected a matrix of floating point logits, got {tuple(h.shape)} {h.dtype}")
    router = RouterStream(h.shape[1], k, noise=noise)
    if (x is None) != (W is None) or (b is not None and W is None):
        given = [name for name, value in (("x", x), ("W", W), ("b", b)) if value is not None]
        raise ValueError(f"x, W: expected both or neither, b with them, got only {' and '.join(given)}")
    rounding = None
    if W is not None:
        x, router.weight = check.array("x", x), check.array("W", W)
        b = None if b is None else check.array("b", b)
        exact, rounding = linear_logits(x, router.weight, b)
        if exact.shape != h.shape:
            raise ValueError(f"x, W: expected those of {tuple(h.shape)} logits, got them for {tuple(exact.shape)}")
        off = (h.double() - exact).abs().amax(1)
        if bool((off > 2 * rounding).any()):
            raise ValueError(
                f"h: expected the logits x W^T + b to rounding, got some that are {float(off.max()):.2g} off"
            )
    router.add(h, chosen=chosen, rounding=rounding, labels=labels)
    return router.report(seed=seed)


def linear_logits(
    x: Float[Tensor, "n d"], W: Float[Tensor, "M d"], b: Float[Tensor, " M"] | None = None
) -> tuple[Float[Tensor, "n M"], Float[Tensor, " n"]]:
    """Logits `x W^T + b` in float64, and how far those computed in the precision of x may be from them.

    A product of d entries and a bias are off by at most `roundings(d + 1)` times `eps / 2` and the sum of their sizes.

    Raises:
        ValueError: for hidden states that are not floating point or of another width than W, biases of another number,
            or NaN entries.
    """
    if not x.is_floating_point() or x.ndim != 2 or W.ndim != 2 or x.shape[1] != W.shape[1]:
        raise ValueError(
            f"x: expected floating point hidden states of the width of W, {tuple(W.shape)}, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if b is not None and b.shape != W.shape[:1]:
        raise ValueError(f"b: expected {len(W)} biases, one for each row of W, got {tuple(b.shape)}")
    eps = torch.finfo(x.dtype).eps
    x, W = check.finite("x", x.detach()).double(), check.finite("W", W.detach()).double()
    b = torch.zeros_like(W[:, 0]) if b is None else b.detach().double()
    sizes = (x.abs() @ W.abs().T + b.abs()).amax(1)
    return x @ W.T + b, roundings(x.shape[1] + 1) * eps / 2 * sizes


def roundings(terms: int) -> float:
    """By how many roundings a sum of so many terms may be off, relative to the sum of their sizes, to first order.

    Each term goes through as many roundings as there are terms at most. If they are independent and have the mean 0,
    the sum is off by more than `c sqrt(terms)` with a probability of at most `2 exp(-c^2 / 2)` (Hoeffding), for c = 8
    3e-14.
    """
    return min(terms, 8 * math.sqrt(terms))
