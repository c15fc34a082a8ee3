"""What stored rows hold as lists: histories, and dispatch tables n_km (Chen et al. 2022, Tables 4 to 6)."""

from collections.abc import Iterable
from itertools import product

import numpy as np
import torch
from jaxtyping import Int
from scipy import stats
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_entropy


def curves(histories: Iterable[list[float]]) -> np.ndarray:
    """Stored histories as an array with one line for each.

    Raises:
        ValueError: if the histories hold different numbers of entries, or there are none.
    """
    lines = [np.array(history, float) for history in histories]
    if len({len(line) for line in lines}) != 1:
        raise ValueError(f"histories: expected some of one length, got lengths {[len(line) for line in lines]}")
    return np.stack(lines)


def counts(table: list[list[int]]) -> np.ndarray:
    """A stored dispatch table, a list of counts for each cluster, as an array (K, M)."""
    return np.array(table, int)


def labels(n_km) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Cluster and expert of every example of a dispatch table; `dispatch_counts` undoes it.

    Args:
        n_km: (K, M) counts >= 0.

    Raises:
        ValueError: for anything else.
    """
    n_km = torch.as_tensor(n_km)
    if n_km.ndim != 2 or n_km.is_floating_point() or n_km.is_complex() or n_km.numel() == 0 or int(n_km.min()) < 0:
        raise ValueError(f"n_km: expected a table of counts >= 0, got {tuple(n_km.shape)} {n_km.dtype}")
    k, m = torch.meshgrid(*map(torch.arange, n_km.shape), indexing="ij")
    k, m = (t.flatten().repeat_interleave(n_km.flatten()) for t in (k, m))
    return k, m


def experts_in_use(n_km) -> int:
    """How many experts get at least 1 % of the examples of a dispatch table (K, M)."""
    n_m = np.asarray(n_km).sum(0)
    return int((n_m >= 0.01 * n_m.sum()).sum())


def effective_experts(n_km) -> float:
    """Experts in use, `1 / sum_m rho_m^2` with rho_m the share of expert m in a dispatch table (K, M).

    It is M for equal shares and 1 if one expert gets all.

    Raises:
        ValueError: for a table without examples.
    """
    n_m = np.asarray(n_km, float).sum(0)
    if not n_m.sum() > 0:
        raise ValueError(f"n_km: expected examples, got a table with the loads {n_m.tolist()}")
    return float(n_m.sum() ** 2 / np.square(n_m).sum())


def entropies(tables) -> np.ndarray:
    """Eq. 6.1 for each of some dispatch tables n_km, by the route over single examples."""
    return np.array([dispatch_entropy(*labels(counts(table))) for table in tables])


def mean_interval(values, level: float = 0.95) -> tuple[float, float, float]:
    """The mean of independent values, and the t-interval around it.

    Raises:
        ValueError: for fewer than two values, one that is not finite, or a level that is not strictly between 0 and 1.
    """
    values = check.numbers("values", values)
    if len(values) < 2 or not 0 < check.not_negative("level", level) < 1:
        raise ValueError(f"values, level: expected two values or more and 0 < level < 1, got {len(values)}, {level!r}")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def bootstrap_interval(values) -> tuple[float, float, float]:
    """The mean of a few independent values, and the percentiles 2.5 and 97.5 of the means of all their resamples.

    Of n values there are `n^n` resamples, and all are counted. The interval is too short: with five normal
    values it covers their mean in about 85 % of all cases.

    Raises:
        ValueError: for fewer than two values, or more than seven.
    """
    values = np.asarray(values, float)
    if not 2 <= len(values) <= 7:
        raise ValueError(f"values: expected two to seven, so that all resamples can be counted, got {len(values)}")
    resamples = np.array(list(product(values, repeat=len(values))))
    low, high = np.quantile(resamples.mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def interval_sign(values) -> int:
    """1 if the 95 % t-interval around the mean of independent values lies above 0, -1 if below, 0 if it holds 0."""
    _, low, high = mean_interval(values)
    return int(low > 0) - int(high < 0)
