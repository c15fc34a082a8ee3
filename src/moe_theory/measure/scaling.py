"""Fitted exponents: what an O(n^a) statement is checked with."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import bootstrap

from moe_theory import _validate as check
from moe_theory.measure.tables import mean_interval
from moe_theory.streams import stream

RESAMPLES = 2000


class Exponent(NamedTuple):
    """A power law fitted on log-log axes: the slope and its 95% interval."""

    slope: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.slope:.2f} [{self.low:.2f}, {self.high:.2f}]"


def by_size(rows, column: str, *, size: str = "n") -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, "S R"]]:
    """Sizes and the values of a column, one row for each size, from a frame with columns `size`, rep and that one.

    Raises:
        ValueError: where a size lacks a repetition that another has.
    """
    table = rows.pivot(index=size, columns="rep", values=column)
    if table.isna().any(axis=None):
        raise ValueError(f"rows: expected every repetition of {column} at every size {size}")
    return table.index.to_numpy(float), table.to_numpy(float)


def log_slope(sizes, values) -> np.floating | np.ndarray:
    """Slope of the line of least squares through logarithms, `values ~ sizes^slope`, along the first dimension."""
    x = np.log(np.asarray(sizes, float))
    x = x - x.mean()
    return np.tensordot(x, np.log(np.asarray(values, float)), 1) / (x @ x)


def paired_exponent(sizes, values: Float[np.ndarray, "S R"]) -> Exponent:
    """Mean of the exponents of R repetitions, each of which is one object measured at all sizes; 95% t interval.

    Args:
        sizes: S sizes, or (S, R) where repetitions have sizes of their own; values: (S, R), positive, R >= 2.

    Raises:
        ValueError: for fewer than two repetitions.
    """
    values = np.asarray(values, float)
    if values.ndim != 2 or values.shape[1] < 2:
        raise ValueError(f"values: expected shape (S, R) with R >= 2, got {values.shape}")
    sizes = np.broadcast_to(np.asarray(sizes, float).reshape(len(values), -1), values.shape)
    slopes = np.array([log_slope(*pair) for pair in zip(sizes.T, values.T, strict=True)])
    return Exponent(*mean_interval(slopes))


def fit_exponent(
    sizes, values: Float[np.ndarray, "S R"], seed: int = 0, *, power: float = 2, paired: bool = True
) -> Exponent:
    """Fit `mean(|values|^power)^(1 / power) ~ sizes^slope` by least squares in logarithms.

    Args:
        sizes: S increasing sizes, at least four.
        values: (S, R) measurements, R independent repetitions at each size, at least 10.
        seed: of the bootstrap.
        power: 2 fits root mean squares, 1 means.
        paired: whether a repetition has the same data or initial weights at all sizes. Then whole repetitions are
            resampled. Otherwise each size is resampled by itself, so that the order of its runs does not matter.

    Raises:
        ValueError: for fewer sizes or repetitions, shapes that do not match, numbers that are not finite, or a size or
            mean that is not positive.
    """
    return _resampled(sizes, [values], [1], seed, power, paired)


def exponent_by_size(rows, column: str, *, power: float = 2) -> Exponent:
    """`fit_exponent` of the values that `by_size` finds, repetitions paired; errors are those of the two."""
    return fit_exponent(*by_size(rows, column), power=power)


def exponent_difference(
    sizes, first: Float[np.ndarray, "S R"], second: Float[np.ndarray, "S R"], *, seed: int = 0, power: float = 2
) -> Exponent:
    """The exponent of the first less that of the second, where repetition r of both is of the same data.

    Arguments and errors are those of `fit_exponent`; repetitions are paired.
    """
    return _resampled(sizes, [first, second], [1, -1], seed, power, True)


def _resampled(sizes, samples: list, signs: list[int], seed: int, power: float, paired: bool) -> Exponent:
    """The sum of the samples' exponents, each with its sign, and an interval from resampled repetitions."""
    sizes, samples = check.numbers("sizes", sizes), [check.numbers("values", values) for values in samples]
    if sizes.ndim != 1 or len(sizes) < 4 or not (np.diff(sizes) > 0).all() or sizes[0] <= 0:
        raise ValueError(f"sizes: expected at least four increasing positive sizes, got {sizes}")
    for values in samples:
        if values.ndim != 2 or len(values) != len(sizes) or values.shape[1] < 10 or values.shape != samples[0].shape:
            raise ValueError(f"values: expected shape ({len(sizes)}, R) with R >= 10, got {values.shape}")
        if not np.abs(values).mean(1).all():
            raise ValueError("values: expected a positive finite mean at every size")
    check.positive("power", power)

    def slope(*powers, axis=-1):
        means = [p.mean(axis) for p in powers]
        halves = zip(signs, np.split(np.arange(len(means)), len(signs)), strict=True)
        return sum(sign * log_slope(sizes, [means[i] for i in half]) for sign, half in halves) / power

    powers = tuple(np.abs(np.concatenate(samples)) ** power)
    resampling = dict(n_resamples=RESAMPLES, method="percentile", paired=paired, rng=stream(seed, "resampling"))
    low, high = bootstrap(powers, slope, **resampling).confidence_interval
    return Exponent(float(slope(*powers)), float(low), float(high))
