"""What a stream keeps of its tokens, in memory that does not grow with their number, and that adds up over shards."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from scipy.special import entr
from scipy.stats import random_table
from torch import Tensor

from moe_theory.streams import stream

#: Tables of labels and experts with the same margins, against which the entropy of a dispatch is held.
PERMUTATIONS = 199

#: Tokens of the sample that is asked what noise does; a share of them is off by 0.5 / sqrt(ASKED) = 0.8 % at most.
ASKED = 4096

#: Edges of histograms of gaps and of roundings: eighths of octaves, from below the resolution of float64.
EDGES = torch.cat([torch.zeros(1), torch.exp2(torch.arange(-60 * 8, 20 * 8 + 1) / 8), torch.full((1,), math.inf)])
EDGES = EDGES.double()

_LARGEST = 2**63 - 1


class Histogram(NamedTuple):
    """Counts between edges: of values with `edges[i] <= value < edges[i + 1]`, the last edge with them."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def in_bins(values: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The bin of `EDGES` of each of some numbers >= 0."""
    return torch.bucketize(values, EDGES[1:-1], right=True)


def expected_within(counts: Int[Tensor, " bins"], sums: Float[Tensor, " bins"], mean: float) -> float:
    """Exponential variables of that mean that are at most their own limit 2 r, `sum_i 1 - exp(-2 r_i / mean)`.

    The r are given as a histogram with the sum of each bin, and one bin's are taken for equal. With x = 2 r / mean a
    term is concave in x, so that the result is not too small, and with bins of the relative width w = 2^(1/8) - 1 too
    large by a share of at most `w^2 / 8 max x^2 / (e^x - 1) < 0.65 w^2 / 8 < 7e-4`.

    Args:
        counts: r in each bin; sums: their sums.
        mean: of the variables, > 0.
    """
    return float((counts * -torch.expm1(-2 * sums / counts.clamp(min=1) / mean)).sum())


@dataclass(frozen=True)
class Sample:
    """A uniform sample of tokens: those with the `ASKED` smallest keys.

    The union of two, with the largest keys left out, is that of both streams, in whatever order they come.

    Attributes:
        keys: in ascending order; rows: numbers of each token by name.
    """

    keys: np.ndarray
    rows: dict[str, Tensor]

    def __add__(self, other: "Sample") -> "Sample":
        if not len(self.keys) or not len(other.keys):
            return self if len(self.keys) else other
        keys = np.concatenate([self.keys, other.keys])
        first = np.argsort(keys, kind="stable")[:ASKED]
        kept = torch.from_numpy(first)
        return Sample(keys[first], {name: torch.cat([t, other.rows[name]])[kept] for name, t in self.rows.items()})

    def with_tokens(self, keys: UInt64[np.ndarray, " n"], rows: dict[str, Tensor]) -> "Sample":
        """The sample after some tokens more."""
        limit = self.keys[-1] if len(self.keys) == ASKED else np.uint64(2**64 - 1)
        (enter,) = np.nonzero(keys <= limit)
        enter = enter[np.argsort(keys[enter])[:ASKED]]
        kept = torch.from_numpy(enter)
        return self + Sample(keys[enter], {name: t[kept.to(t.device)].cpu() for name, t in rows.items()})


def keys_of(start: int, numbers: Float[Tensor, " n"]) -> UInt64[np.ndarray, " n"]:
    """A key for each token, from its place in the stream and a number of it, so that shards do not pick one place.

    The finalizer of SplitMix64, on the place and then on the result and the number's bits.
    """
    place = np.arange(start, start + len(numbers), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mixed(_mixed(place) ^ numbers.double().contiguous().numpy().view(np.uint64))


def _mixed(z: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Pairs:
    """How many tokens have each pair of a label and a first expert; only pairs that occur take memory.

    Args:
        experts: number M.
    """

    def __init__(self, experts: int):
        self.experts = experts
        self._parts, self._waiting = [(np.zeros(0, np.int64), np.zeros(0, np.int64))], 0

    def count(self, label: Int[Tensor, " n"], expert: Int[Tensor, " n"]) -> None:
        """Takes some tokens; those with the expert -1 have none, and are left out.

        Raises:
            ValueError: for a label so large that a pair has no number of 64 bits.
        """
        label, expert = label[expert >= 0].long(), expert[expert >= 0]
        if len(label) and int(label.max()) > _LARGEST // self.experts - 1:
            raise ValueError(f"labels: expected numbers below 2^63 / {self.experts}, got {int(label.max())}")
        pairs, counts = np.unique((label * self.experts + expert).numpy(), return_counts=True)
        self._parts.append((pairs, counts))
        self._waiting += 100 + len(pairs)  # numbers that a part takes, about
        if self._waiting > max(1 << 16, len(self._parts[0][0])):  # as many as were there: each is sorted a few times
            self._parts, self._waiting = [self._merged()], 0

    def __add__(self, other: "Pairs") -> "Pairs":
        both = Pairs(self.experts)
        both._parts = [*self._parts, *other._parts]
        both._parts = [both._merged()]
        return both

    def _merged(self) -> tuple[np.ndarray, np.ndarray]:
        pairs, counts = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        unique, at = np.unique(pairs, return_inverse=True)
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, at, counts)
        return unique, total

    def table(self) -> Int[np.ndarray, "labels used"]:
        """Tokens by label and expert, of those that occur, in ascending order."""
        pairs, counts = self._merged()
        label, expert = (np.unique(part, return_inverse=True)[1] for part in divmod(pairs, self.experts))
        table = np.zeros((label.max(initial=-1) + 1, expert.max(initial=-1) + 1), np.int64)
        table[label, expert] = counts
        return table


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


def table_entropy(table: Int[np.ndarray, "K M"]) -> float:
    """Eq. 6.1 of a table of counts whose columns are not empty."""
    loads = table.sum(0)
    return float(loads @ entr(table / loads).sum(0) / loads.sum())


def table_dispatch(table: Int[np.ndarray, "K M"], *, seed: int, at: int = 0) -> Dispatch:
    """Eq. 6.1 of a table of labels and experts, and of the same with the labels permuted.

    A permutation of the labels gives a random table with the margins of this one (generalized hypergeometric law), and
    that is drawn itself. What is drawn again may differ by rounding, and counts as at least as telling.

    Args:
        table: tokens of each label that have each expert, no row or column of it empty.
        seed, at: draw the tables.
    """
    if not table.size:
        return Dispatch(math.nan, math.nan, math.nan, math.nan)
    entropy, rng = table_entropy(table), stream(seed, "permutations", at)
    law = random_table(table.sum(1), table.sum(0))
    blind = np.array([table_entropy(law.rvs(random_state=rng)) for _ in range(PERMUTATIONS)])
    p = (1 + int((blind <= entropy * (1 + 1e-12)).sum())) / (1 + PERMUTATIONS)
    return Dispatch(entropy, float(blind.mean()), float(blind.std()), p)
