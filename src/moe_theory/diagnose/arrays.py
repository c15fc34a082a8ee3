"""What the logits of a router tell, or its choices alone: ties, loads, collapse, and what a dispatch knows of labels.

A `RouterStream` takes them batch after batch and keeps sums, histograms and a sample of tokens, see `tallies`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.diagnose.findings import COLLAPSE, LEVEL, Finding
from moe_theory.diagnose.gauge import gauge_share
from moe_theory.diagnose.tallies import (
    EDGES,
    Dispatch,
    Histogram,
    Pairs,
    Sample,
    expected_within,
    in_bins,
    keys_of,
    table_dispatch,
)
from moe_theory.measure.tables import effective_experts
from moe_theory.theory.kept_sets import gap_of, keep_probability
from moe_theory.theory.smoothing import _one_thread

#: Tokens that are looked at together: what is computed of them stays in the cache.
ROWS = 1 << 14


@dataclass(frozen=True, repr=False)
class RouterReport:
    """What one router does with the tokens it was shown. Where only its choices were, what takes logits is nan.

    Attributes:
        where: its name; tokens: how many; k: experts selected.
        loads: share of the selections that each expert gets; busiest: share of the tokens that the busiest one gets.
        gaps: by how much the last selected score leads the first rejected one, a histogram with edges at eighths of
            octaves; infinite where none is rejected.
        undecided: tokens whose gap is within the rounding of their scores, at worst; expected: how many chance gives.
        flips: share of tokens whose experts change by the rounding of their scores, on average over what was rounded
            off.
        changed: share of tokens whose experts change under Gaussian noise of standard deviation `noise` on the scores,
            in a uniform sample of `asked` tokens.
        dropped: share of tokens without all of their experts; misled: share of the complete and decided ones with
            others than those of the largest scores, among all tokens.
        gauge: share of the router's squared norm in its mean vector; nan if the router was not given.
        dispatch: for each label what the first expert tells of it.
        collapse: share of the experts beyond k in use below which the router has collapsed.
        slip: the finding that tokens with other experts are, where their cause is known.
    """

    where: str
    tokens: int
    k: int
    loads: tuple[float, ...]
    busiest: float
    gaps: Histogram
    undecided: float
    expected: float
    flips: float
    changed: float
    noise: float
    asked: int
    dropped: float
    misled: float
    gauge: float
    dispatch: dict[str, Dispatch] = field(default_factory=dict)
    collapse: float = COLLAPSE
    slip: str = ""

    @property
    def effective(self) -> float:
        """Experts in use, `1 / sum_m rho_m^2`; nan if every token was dropped."""
        return effective_experts([self.loads]) if any(self.loads) else math.nan

    @property
    def used(self) -> float:
        """Experts in use beyond the k that a collapsed router uses, as a share: `(effective - k) / (M - k)`.

        1 for equal loads, 0 if all tokens have the same k experts, nan if there are no others.
        """
        spare = len(self.loads) - self.k
        return max(0.0, (self.effective - self.k) / spare) if spare and any(self.loads) else math.nan

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
        if self.used < self.collapse and self._busy_by_chance < LEVEL:
            busy = f"expert {self.loads.index(max(self.loads))} gets {100 * self.busiest:.3g} % of the tokens"
            detail = f"{busy}, {self.effective:.3g} of {len(self.loads)} experts in use, {self.k} selected"
            found.append(Finding("collapse", self.where, self.used, self.collapse, detail))
        chance = stats.poisson.sf(self.undecided - 1, self.expected) < LEVEL
        if chance and self.undecided > 2 * self.expected:  # the law of the gaps is not quite the one expected
            share = self.undecided / self.tokens
            found.append(Finding("ties", self.where, share, self.expected / self.tokens, "share of the tokens"))
        for name, share in (("dropped", self.dropped), (self.slip or "selection", self.misled)):
            if share > 0:
                found.append(Finding(name, self.where, share, 0, "share of the tokens"))
        return found

    @property
    def _busy_by_chance(self) -> float:
        """At most how probable so busy an expert is where tokens choose sets of k independently and uniformly.

        Each expert's tokens are then binomial with k / M, whatever their dependence on each other's: the bound is the
        sum over experts. A collapsed router has a busy expert, since `max rho >= sum rho^2 = 1 / effective`.
        """
        M = len(self.loads)
        return float(M * stats.binom.sf(round(self.busiest * self.tokens) - 1, self.tokens, self.k / M))

    def __repr__(self) -> str:
        size = f"{self.tokens:,} tokens, {self.k} of {len(self.loads)} experts"
        loads = f"busiest {self.busiest:.3g} of the tokens, effective {self.effective:.3g}"
        found = ", ".join(dict.fromkeys(finding.name for finding in self.findings)) or "nothing"
        return f"{type(self).__name__}({self.where}: {size}, {loads}, found: {found})"


class _Batch(NamedTuple):
    """A batch, checked: `scores` are those by which experts are selected, `numbers` (n, k) are -1 for no expert."""

    h: Float[Tensor, "n M"]
    scores: Float[Tensor, "n M"]
    top: Float[Tensor, "n top"]
    wanted: Int[Tensor, "n k"]
    numbers: Int[Tensor, "n k"]
    rounding: Float[Tensor, " n"]
    resolution: torch.dtype | Float[Tensor, "..."]


class RouterStream:
    """Takes the logits of a router, or its choices alone, batch after batch.

    Its memory does not grow with the tokens, but for labels with the pairs of a label and an expert that occur. Streams
    of shards add up: `a + b` has the counts of both, sums to rounding, and a uniform sample of the tokens of both.

    Args:
        experts: number M; k: experts selected.
        noise: standard deviation of the Gaussian noise whose effect is computed.
        collapse: share of the experts beyond k in use, in [0, 1], below which the router has collapsed.
        where: the router's name.

    Raises:
        ValueError: for a k outside 1..M, a noise that is not > 0, or a collapse outside [0, 1].
    """

    def __init__(self, experts: int, k: int, *, noise: float = 0.01, collapse: float = COLLAPSE, where: str = "router"):
        if check.integer("k", k, 1) > check.integer("experts", experts, 1):
            raise ValueError(f"k: expected at most M = {experts} experts, got {k}")
        if check.not_negative("collapse", collapse) > 1:
            raise ValueError(f"collapse: expected a share in [0, 1], got {collapse!r}")
        self.experts, self.k, self.noise, self.where = experts, k, check.positive("noise", noise), where
        self.collapse = float(collapse)
        self.weight: Tensor | None = None
        self.tokens = 0
        self._kind: str | None = None
        self._sums: dict[str, Tensor] = {}
        self._labels: dict[str, Pairs] = {}
        self._sample = Sample(keys_of(0, torch.zeros(0)), {})

    @torch.no_grad()
    def add(
        self,
        h: Float[Tensor, "n M"],
        *,
        scores: Float[Tensor, "n M"] | None = None,
        chosen: Tensor | None = None,
        rounding: Float[Tensor, " n"] | None = None,
        resolution: torch.dtype | float | Tensor | None = None,
        labels: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Takes a batch of logits. On the CPU it runs on one thread.

        Args:
            h: logits.
            scores: the numbers by which experts are selected where these are not the logits, such as a sigmoid with a
                bias added, -inf at experts left out. Gaps, rounding, noise and the experts wanted are then theirs; the
                first expert is always that of the largest logit among the chosen.
            chosen: true at the experts that the tokens were sent to, (n, M), or their numbers, (n, k) with -1 for
                none; by default those of the k largest scores.
            rounding: the largest error of the scores of each token; by default one unit of the resolution at the
                largest of them.
            resolution: of the scores; by default their dtype. A dtype: each is the number of that format nearest to an
                exact one, so that those tie that round to one number, and a tie falls out by chance. Numbers > 0 that
                broadcast to (n, M): widths of independent uniform errors of scores that are on no common grid, such as
                `spacing(h, torch.bfloat16)` times the slope of a sigmoid that came after; one kind in all batches.
            labels: for each name a non-negative integer for each token; the same names in every batch.

        Raises:
            ValueError: for logits that are no matrix of M columns, not floating point, NaN or infinite, or
                probabilities; scores of another shape, NaN or +inf, or finite at fewer than k experts of a token; a
                mask of another shape or with more than k experts of a token, numbers that are no experts or one twice;
                labels that are no integers >= 0; arguments for another number of tokens; or after choices alone.
        """
        self._is("logits")
        with _one_thread():
            batch = self._checked(h, scores, chosen, rounding, resolution)
            labels, self._kind = self._checked_labels(labels, len(h)), "logits"
            for at in range(0, len(h), ROWS):
                part = _Batch(*(_rows(t, at, len(h)) for t in batch))
                lead = part.h.gather(1, part.numbers.clamp(min=0).to(h.device)).cpu()
                first = lead.masked_fill(part.numbers < 0, -math.inf).argmax(1, keepdim=True)
                first = part.numbers.gather(1, first)[:, 0]
                self._read(part)
                self._count(part.numbers, first, {name: label[at : at + ROWS] for name, label in labels.items()})

    def add_choices(self, numbers: Tensor, *, labels: Mapping[str, Tensor] | None = None) -> None:
        """Takes a batch of choices alone, as servers write them.

        Args:
            numbers: (n, k) integers, the experts of each token, the first of them first, and -1 for none.
            labels: as for `add`.

        Raises:
            ValueError: for numbers of another shape, no integers, no experts, or one twice for a token; for labels as
                in `add`; or after logits.
        """
        self._is("choices")
        with _one_thread():
            numbers = check.array("numbers", numbers)
            if numbers.dtype == torch.bool:
                raise ValueError(f"numbers: expected integers, got a mask of shape {tuple(numbers.shape)}")
            numbers = self._numbers("numbers", numbers, len(numbers))
            labels, self._kind = self._checked_labels(labels, len(numbers)), "choices"
            there = (numbers >= 0).int().argmax(1, keepdim=True)
            self._count(numbers, numbers.gather(1, there)[:, 0], labels)

    def __add__(self, other: "RouterStream") -> "RouterStream":
        """What two shards saw together.

        Raises:
            ValueError: for streams of other sizes, noise or labels, or one of logits and one of choices.
        """
        both = RouterStream(self.experts, self.k, noise=self.noise, collapse=self.collapse, where=self.where)
        both.weight = self.weight
        seen = [s for s in (self, check.instance("other", other, RouterStream)) if s.tokens]
        for s in seen:
            mine, own = (
                (t.experts, t.k, t.noise, t._kind, sorted(t._labels), sorted(t._sample.rows)) for t in (seen[0], s)
            )
            if mine != own:
                raise ValueError(f"other: expected experts, k, noise, kind, labels and numbers {mine}, got {own}")
            both.tokens, both._kind = both.tokens + s.tokens, s._kind
            both._sums = {name: both._sums.get(name, 0) + value for name, value in s._sums.items()}
            both._labels = {name: both._labels.get(name, Pairs(self.experts)) + p for name, p in s._labels.items()}
            both._sample = both._sample + s._sample
        return both

    def report(self, *, seed: int = 0) -> RouterReport:
        """What was seen so far.

        Args:
            seed: draws the permutations of the labels.

        Raises:
            ValueError: if no token was taken.
        """
        if not self.tokens:
            raise ValueError("batches: expected at least one token, got none")
        sums = self._sums
        loads = sums["loads"].double()
        return RouterReport(
            where=self.where,
            tokens=self.tokens,
            k=self.k,
            loads=tuple((loads / loads.sum().clamp(min=1)).tolist()),
            busiest=float(loads.max() / self.tokens),
            dropped=float(sums["dropped"] / self.tokens),
            **self._of_logits(),
            noise=self.noise,
            gauge=math.nan if self.weight is None else gauge_share(self.weight),
            dispatch={
                name: table_dispatch(pairs.table(), seed=seed, at=i)
                for i, (name, pairs) in enumerate(self._labels.items())
            },
            collapse=self.collapse,
        )

    def _of_logits(self) -> dict:
        """The part of the report that takes logits."""
        edges, none, sums = tuple(EDGES.tolist()), (0,) * (len(EDGES) - 1), self._sums
        if self._kind == "choices":
            unknown = dict.fromkeys(("undecided", "expected", "flips", "changed", "misled"), math.nan)
            return dict(gaps=Histogram(edges, none), asked=0, **unknown)
        rows = self._sample.rows
        scores = rows["scores"].double().clamp(min=-torch.finfo(torch.float32).max)  # -inf: never selected
        changed = 1 - keep_probability(scores, self.k, scale=self.noise)
        # A gap that may be any is overcome as often as the errors' difference D is large, E max(0, D): uniform ones of
        # widths a >= b give a/8 + b^2/(24 a), and normal ones of their variances 2 % less at a = b, 8 % at b = 0.
        if "width" in rows:
            flips = float((1 - keep_probability(scores, self.k, scale=rows["width"] / math.sqrt(12))).mean())
        else:
            flips = float(sums["flips"] / self.tokens)
        return dict(
            gaps=Histogram(edges, tuple(sums["gaps"].tolist())),
            undecided=int(sums["undecided"]),
            expected=self._expected(),
            flips=flips,
            changed=float(changed.mean()),
            asked=len(changed),
            misled=float(sums["misled"] / self.tokens),
        )

    def _expected(self) -> float:
        """Gaps within twice the rounding if gaps are exponential: what larger ones have beyond it has the law's mean.

        Where none is larger, nothing is known of the law, and all are expected; none where all gaps are 0 or infinite.
        """
        sums = self._sums
        if not sums["larger"]:
            return float(sums["finite"]) if sums["open"] else 0.0
        return expected_within(sums["roundings"], sums["sizes"], float(sums["beyond"] / sums["larger"]))

    def _read(self, batch: _Batch) -> None:
        """Counts what the scores of some tokens tell."""
        _, scores, top, wanted, numbers, rounding, resolution = batch
        gap = gap_of(top.double(), self.k)
        finite, over, bins = gap < math.inf, gap - 2 * rounding, in_bins(rounding)
        complete = (numbers >= 0).all(1)
        differ = (numbers.sort(1).values != wanted.sort(1).values).any(1)
        larger = finite & (over > 0)
        bin_counts = dict(minlength=len(EDGES) - 1)
        self._take(
            gaps=torch.bincount(in_bins(gap), **bin_counts),
            roundings=torch.bincount(bins[finite], **bin_counts),
            sizes=torch.bincount(bins[finite], rounding[finite], **bin_counts),
            undecided=(over <= 0).sum(),
            finite=finite.sum(),
            open=(finite & (gap > 0)).sum(),
            larger=larger.sum(),
            beyond=over[larger].sum(),
            misled=(complete & (over > 0) & differ).sum(),
        )
        rows = {"scores": scores}
        if isinstance(resolution, Tensor):
            rows["width"] = resolution
        else:
            self._take(flips=_flips(scores, top, self.k, resolution))
        self._sample = self._sample.with_tokens(keys_of(self.tokens, top[:, 0]), rows)

    def _count(self, numbers: Int[Tensor, "n k"], first: Int[Tensor, " n"], labels: dict[str, Tensor]) -> None:
        """Counts experts and labels of some tokens."""
        self._take(
            loads=torch.bincount(numbers.flatten() + 1, minlength=self.experts + 1)[1:],
            dropped=(numbers < 0).any(1).sum(),
        )
        for name, label in labels.items():
            self._labels.setdefault(name, Pairs(self.experts)).count(label, first)
        self.tokens += len(numbers)

    def _take(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value

    def _is(self, kind: str) -> None:
        if self._kind not in (None, kind):
            raise ValueError(f"stream: expected {self._kind} as in the batches before, got {kind}")

    def _checked(self, h, scores, chosen, rounding, resolution) -> _Batch:
        """A batch as `add` takes it."""
        if h.ndim != 2 or h.shape[1] != self.experts:
            raise ValueError(f"h: expected logits of shape (n, {self.experts}), got {tuple(h.shape)}")
        if not h.is_floating_point():
            raise ValueError(f"h: expected floating point logits, got {h.dtype}")
        h = _finite("h", h.detach())
        if _probabilities(h):
            raise ValueError(
                "h: expected logits, got rows that are not negative and sum to 1, which are probabilities; hand over "
                "what the softmax was taken of, or their logarithm, which has the same order and the same softmax"
            )
        scores = h if scores is None else self._scores(check.array("scores", scores).detach(), h)
        top, wanted = scores.topk(min(self.k + 1, self.experts), 1)
        top, wanted = top.cpu(), wanted[:, : self.k].cpu()
        if len(h) and float(top[:, self.k - 1].min()) == -math.inf:
            raise ValueError(f"scores: expected finite ones at {self.k} experts of each token, got fewer")
        resolution = self._resolution(resolution, scores)
        if rounding is None:
            rounding = _unit(resolution, scores)
        rounding = check.array("rounding", rounding).double().cpu()
        if rounding.shape != h.shape[:1] or not bool(((rounding >= 0) & (rounding < math.inf)).all()):
            raise ValueError(f"rounding: expected {len(h)} numbers >= 0, all finite, got {tuple(rounding.shape)}")
        numbers = wanted if chosen is None else self._numbers("chosen", check.array("chosen", chosen), len(h))
        return _Batch(h, scores, top, wanted, numbers, rounding, resolution)

    def _scores(self, scores: Tensor, h: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        if scores.shape != h.shape or not scores.is_floating_point():
            raise ValueError(
                f"scores: expected floating point numbers of the shape of h, {tuple(h.shape)}, "
                f"got {scores.dtype} {tuple(scores.shape)}"
            )
        if len(scores) and not float(scores.amax()) < math.inf:
            raise ValueError("scores: expected finite numbers, or -inf at experts left out, got NaN or +inf")
        return scores

    def _resolution(self, resolution, scores: Float[Tensor, "n M"]) -> torch.dtype | Float[Tensor, "n M"]:
        """A format, or a width for each score; one kind in all batches."""
        if resolution is None or isinstance(resolution, torch.dtype):
            kind, found = "a dtype", check.floating("resolution", resolution or scores.dtype)
        else:
            kind, found = "widths", check.array("resolution", resolution).to(scores.device)
            fits = found.ndim <= 2 and all(
                a in (1, b) for a, b in zip(found.shape[::-1], scores.shape[::-1], strict=False)
            )
            if not fits or not bool((found > 0).all()) or not bool(found.isfinite().all()):
                shape = tuple(found.shape)
                raise ValueError(
                    f"resolution: expected a dtype or numbers > 0 that broadcast to {tuple(scores.shape)}, got {shape}"
                )
            found = found.expand(scores.shape)
        before = ("a dtype" if "flips" in self._sums else "widths") if self.tokens else kind
        if kind != before:
            raise ValueError(f"resolution: expected {before} as in the batches before, got {kind}")
        return found

    def _numbers(self, name: str, chosen: Tensor, tokens: int) -> Int[Tensor, "n k"]:
        """The experts that the tokens were sent to, of a mask or of their numbers; -1 for none."""
        chosen = chosen.cpu()
        if chosen.dtype == torch.bool and chosen.shape == (tokens, self.experts):
            return self._of_mask(chosen)
        if chosen.dtype == torch.bool or chosen.is_floating_point() or chosen.is_complex():
            raise ValueError(
                f"{name}: expected a mask of shape {(tokens, self.experts)} or integers of shape {(tokens, self.k)}, "
                f"got {chosen.dtype} {tuple(chosen.shape)}"
            )
        if chosen.shape != (tokens, self.k):
            raise ValueError(f"{name}: expected integers of shape {(tokens, self.k)}, got {tuple(chosen.shape)}")
        chosen = chosen.long()
        if tokens and not (int(chosen.min()) >= -1 and int(chosen.max()) < self.experts):
            ends = int(chosen.min()), int(chosen.max())
            raise ValueError(f"{name}: expected experts from 0 to {self.experts - 1}, or -1 for none, got {ends}")
        ordered = chosen.sort(1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
        if bool(twice.any()):
            raise ValueError(f"{name}: expected different experts for a token, got one twice for {int(twice.sum())}")
        return chosen

    def _of_mask(self, chosen: Bool[Tensor, "n M"]) -> Int[Tensor, "n k"]:
        count = chosen.sum(1)
        if len(chosen) and int(count.max()) > self.k:
            raise ValueError(f"chosen: expected at most k = {self.k} experts for a token, got {int(count.max())}")
        token, expert = chosen.nonzero(as_tuple=True)
        place = torch.arange(len(token)) - (count.cumsum(0) - count)[token]
        return torch.full((len(chosen), self.k), -1).index_put((token, place), expert)

    def _checked_labels(self, labels: Mapping[str, Tensor] | None, tokens: int) -> dict[str, Int[Tensor, " n"]]:
        labels = {} if labels is None else labels
        if not isinstance(labels, Mapping):
            raise ValueError(f"labels: expected integers for each token by name, got {type(labels).__name__}")
        if self.tokens and labels.keys() != self._labels.keys():
            before, now = (sorted(names) for names in (self._labels, labels))
            raise ValueError(f"labels: expected those of the batches before, {before}, got {now}")
        return {name: checked_label(name, label, tokens) for name, label in labels.items()}


def _rows(part, at: int, tokens: int):
    """`ROWS` tokens of a tensor; what is no tensor as it is."""
    return part[at : at + ROWS] if isinstance(part, Tensor) and len(part) == tokens else part


def _finite(name: str, value: Tensor) -> Tensor:
    """`check.finite`, which looks at every entry where the extremes show that one is not."""
    ends = torch.stack(value.aminmax()) if value.numel() else value
    return value if bool(ends.isfinite().all()) else check.finite(name, value)


def _probabilities(h: Float[Tensor, "n M"]) -> bool:
    """Whether every row is that of a softmax, in single precision at least, rounded to the format of h.

    True logits could be only if every token's happened to sum to 1, to the last digits, and not one were negative.
    """
    if not len(h) or h.shape[1] == 1 or bool(h.amin() < 0):
        return False
    limit = torch.finfo(h.dtype).eps + (h.shape[1] + 8) * torch.finfo(torch.float32).eps
    return bool(((h.sum(1, dtype=torch.float32) - 1).abs() <= limit).all())


def _unit(resolution: torch.dtype | Float[Tensor, "n M"], scores: Float[Tensor, "n M"]) -> Float[Tensor, " n"]:
    """The largest error of any score of a token, one unit of the resolution at the largest of them."""
    if isinstance(resolution, Tensor):
        return resolution.amax(1)
    low = scores.masked_fill(scores == -math.inf, math.inf).amin(1) if bool(scores.amin() == -math.inf) else None
    low = scores.amin(1) if low is None else low
    return torch.finfo(resolution).eps * torch.maximum(scores.amax(1), -low).double()


def _flips(scores: Float[Tensor, "n M"], top: Float[Tensor, "n top"], k: int, format: torch.dtype) -> Tensor:
    """How many sets of some tokens rounding to a format changes, on average.

    Rounding keeps the order, so that a set changes only by a tie of t numbers across the cut, and if they were rounded
    from numbers whose order is any, those a of them that are selected are the right ones with probability 1/C(t, a).
    Where gaps may be any of density f, two numbers tie over the cut with probability f u / 2, u the unit, and half of
    them are exchanged. Errors drawn at exact numbers, each for itself, would exchange f u / 6, a third less.
    """
    top = top.to(format).double()  # which compares the numbers of any format
    if top.shape[1] == k:
        return torch.zeros((), dtype=torch.float64)
    (rows,) = (top[:, k - 1] == top[:, k]).nonzero(as_tuple=True)
    at = top[rows, k - 1 : k]
    inside = (top[rows, :k] == at).sum(1).double()
    tied = (scores[rows.to(scores.device)].to(format).double().cpu() == at).sum(1).double()
    ways = torch.lgamma(tied + 1) - torch.lgamma(inside + 1) - torch.lgamma(tied - inside + 1)
    return -torch.expm1(-ways).sum()


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


def linear_logits(
    x: Float[Tensor, "n d"],
    W: Float[Tensor, "M d"],
    b: Float[Tensor, " M"] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, "n M"], Float[Tensor, " n"]]:
    """Logits `x W^T + b` in float64, and how far those computed in some precision may be from them.

    A product of d entries and a bias are off by at most `roundings(d + 1)` times `eps / 2` and the sum of their sizes.
    Where they are added up in single precision and the result is rounded once to another format, its `eps / 2` counts
    times the logit alone.

    Args:
        x: hidden states; W: router vectors; b: biases, if there are any.
        dtype: the format to which logits added up in float32 are rounded; by default they are added up in that of x.

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
    eps = torch.finfo(x.dtype if dtype is None else torch.float32).eps
    x, W = check.finite("x", x.detach()).double(), check.finite("W", W.detach()).double()
    b = torch.zeros_like(W[:, 0]) if b is None else b.detach().double()
    exact, sizes = x @ W.T + b, (x.abs() @ W.abs().T + b.abs()).amax(1)
    rounding = roundings(x.shape[1] + 1) * eps / 2 * sizes
    if dtype is not None:  # below the normal numbers the spacing is that of the least of them
        least = (exact.abs().amax(1) + rounding).clamp(min=torch.finfo(dtype).smallest_normal)
        rounding = rounding + torch.finfo(dtype).eps / 2 * least
    return exact, rounding


def spacing(h: Float[Tensor, "n M"], dtype: torch.dtype) -> Float[Tensor, "n M"]:
    """How far apart the numbers of a format are at each of some logits: one unit in the last place."""
    least = torch.finfo(dtype).smallest_normal
    exponent = torch.frexp(h.double().abs().clamp(min=least)).exponent
    return torch.ldexp(torch.full_like(h, torch.finfo(dtype).eps, dtype=torch.float64), exponent - 1)


def roundings(terms: int) -> float:
    """By how many roundings a sum of so many terms may be off, relative to the sum of their sizes, to first order.

    Each term goes through as many roundings as there are terms at most. If they are independent and have the mean 0,
    the sum is off by more than `c sqrt(terms)` with a probability of at most `2 exp(-c^2 / 2)` (Hoeffding), for c = 8
    3e-14.
    """
    return min(terms, 8 * math.sqrt(terms))
