"""What stored rows hold as lists: histories, and dispatch tables n_km (Chen et al. 2022, Tables 4 to 6)."""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from moe_theory import _validate as check


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


def experts_in_use(n_km, share: float = 0.01) -> int:
    """How many experts get at least `share` of the examples of a dispatch table (K, M).

    Raises:
        ValueError: if `share` is not > 0.
    """
    n_m = np.asarray(n_km).sum(0)
    return int((n_m >= check.positive("share", share) * n_m.sum()).sum())
