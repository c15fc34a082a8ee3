"""Losses of networks that share their seeds: which leads, and whether by more than chance."""

from bisect import bisect_left
from collections.abc import Hashable, Mapping

import numpy as np
import pandas as pd
from scipy.stats import t, ttest_rel

from moe_theory.measure.tables import interval_sign, mean_interval


def p_value(one, other) -> float:
    """Of a paired t-test on the logarithms of two lists of losses, in the same order of seeds."""
    return float(ttest_rel(np.log(one), np.log(other)).pvalue)


def lead(rows: pd.DataFrame, loss: str, model: str, other: str) -> pd.DataFrame:
    """How far one model is ahead of another, for every number n of examples that both have.

    Args:
        rows: with columns `model`, `n`, `seed`, one row for each of their combinations.
        loss: the column to compare.
        model, other: two values of the column `model`.

    Returns:
        By n: `ratio` of the mean losses, `p` of `p_value`, and `every`, whether `model` has the smaller loss in
        every seed.

    Raises:
        ValueError: if the two have no n and seed in common.
    """
    wide = rows.pivot(index=["n", "seed"], columns="model", values=loss).reindex(columns=[model, other]).dropna()
    if wide.empty:
        raise ValueError(f"model, other: expected two that share n and seed, got {model!r}, {other!r}")
    found = {
        n: {"ratio": a.mean() / b.mean(), "p": p_value(a, b), "every": bool((a < b).all())}
        for n, (a, b) in ((n, (g[model], g[other])) for n, g in wide.groupby("n"))
    }
    return pd.DataFrame.from_dict(found, orient="index")


def seeds_needed(differences) -> int:
    """The least number n >= 2 of pairs with which a 95 % t-interval of this mean and standard deviation excludes 0.

    Raises:
        ValueError: for fewer than two differences, one that is not finite, or a mean of 0.
    """
    values = np.asarray(differences, float)
    if len(values) < 2 or not np.isfinite(values).all() or not values.mean():
        raise ValueError(f"differences: expected two or more numbers whose mean is not 0, got {values.tolist()}")
    of_one = values.std(ddof=1) / abs(values.mean())

    def excludes(n: int) -> bool:
        return t.ppf(0.975, n - 1) * of_one < np.sqrt(n)

    most = 2
    while not excludes(most):
        most *= 2
    return 2 + bisect_left(range(2, most), True, key=excludes)


def paired_differences(wide: pd.DataFrame, pairs: Mapping[str, tuple[str, str]]) -> dict[str, pd.Series]:
    """Differences of two columns, seed by seed, by the name of the pair: the first less the second."""
    return {name: wide[one] - wide[two] for name, (one, two) in pairs.items()}


def decisions(gaps: Mapping[str, pd.Series], digits: int, *, most: int = 1_000) -> pd.DataFrame:
    """By pair the mean difference and its interval, the standard deviation of one, what is decided, and the seeds that
    would decide where it is not.

    Args:
        gaps: by name differences of independent pairs, as of `paired_differences`.
        digits: decimals of means, intervals and standard deviations.
        most: more seeds are called "> most".
    """
    lines = {}
    for name, gap in gaps.items():
        mean, low, high = (f"{v:.{digits}f}" for v in mean_interval(gap))
        sign = interval_sign(gap)
        needed = "–" if sign else seeds_needed(gap)
        needed = needed if sign or needed <= most else f"> {most:,}"
        lines[name] = (
            mean,
            f"{gap.std():.{digits}f}",
            f"{low} to {high}",
            ("undecided", "above 0", "below 0")[sign],
            needed,
        )
    columns = ["mean", "sd of a pair", "95 % interval", "decided", "seeds that would decide"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


def off_line(x: pd.Series, y: pd.Series, arm: pd.Series) -> np.ndarray:
    """By arm the mean of y less the least-squares line in x through all rows, in standard errors of that mean.

    Raises:
        ValueError: for an arm with fewer than two rows.
    """
    if (few := arm.value_counts()).min() < 2:
        raise ValueError(f"arm: expected two rows or more of each, got {few.idxmin()!r} once")
    arms = (y - np.polyval(np.polyfit(x, y, 1), x)).groupby(arm)
    return (arms.mean() / arms.sem()).to_numpy()


def holm(p) -> np.ndarray:
    """p-values adjusted so that all those at most a level are right together, with that level's error (Holm 1979).

    Raises:
        ValueError: for numbers outside 0 to 1.
    """
    p = np.asarray(p, float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"p: expected numbers from 0 to 1, got {p.tolist()}")
    order = p.argsort()
    stepped = np.maximum.accumulate(np.minimum(p[order] * np.arange(len(p), 0, -1), 1))
    return stepped[order.argsort()]


def told_apart(p: Mapping[Hashable, float], *, level: float = 0.05) -> list:
    """The keys whose p-values Holm's test rejects.

    If the p-values are exact, none of them in all but a share `level` of exact replications.

    Raises:
        ValueError: for numbers outside 0 to 1.
    """
    return [key for key, adjusted in zip(p, holm(list(p.values())), strict=True) if adjusted <= level]


def one_run_more(ours: Mapping[Hashable, pd.Series], printed: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Two-sided p-values of t-tests that each printed run is one more of ours.

    Args:
        ours: by cell the results of runs that differ in their seeds only, in all cells with one standard deviation,
            which is estimated from all of them.
        printed: by cell the result of one run.

    Raises:
        ValueError: for other cells in one than in the other, or one run of ours in each cell.
    """
    if ours.keys() != printed.keys():
        raise ValueError(f"printed: expected the cells {list(ours)}, got {list(printed)}")
    freedom = sum(len(runs) - 1 for runs in ours.values())
    if not freedom:
        raise ValueError("ours: expected two runs or more in some cell, got one in each")
    sd = np.sqrt(sum(np.square(runs - np.mean(runs)).sum() for runs in ours.values()) / freedom)
    off = {cell: (printed[cell] - np.mean(runs)) / sd / np.sqrt(1 + 1 / len(runs)) for cell, runs in ours.items()}
    return {cell: float(2 * t.sf(abs(value), freedom)) for cell, value in off.items()}
