"""Who is sent where: dispatch tables and their entropy (Chen et al. 2022, Eq. 6.1)."""

import torch
from jaxtyping import Int
from torch import Tensor

from moe_theory import _validate as check

#: Entries that a table may have, 8 GB of them: larger labels are no numbers of clusters.
LARGEST = 2**30


def _labels(name: str, value) -> Int[Tensor, " n"]:
    t = check.array(name, value)
    if t.ndim != 1 or t.numel() == 0 or t.is_floating_point() or t.is_complex() or int(t.min()) < 0:
        raise ValueError(f"{name}: expected a non-empty vector of integers >= 0, got {tuple(t.shape)} {t.dtype}")
    return t.long()


def dispatch_counts(
    cluster: Int[Tensor, " n"], expert: Int[Tensor, " n"], experts: int | None = None
) -> Int[Tensor, "K M"]:
    """The table n_{k,m}: examples of cluster k sent to expert m.

    Args:
        cluster: (n,) cluster of each example.
        expert: (n,) expert each example was sent to.
        experts: the number M of experts; by default one more than the largest that occurs.

    Raises:
        ValueError: if an argument is not a non-empty integer vector, their lengths differ, an
            expert is not among the M, or the table would have more than `LARGEST` entries.
    """
    cluster, expert = _labels("cluster", cluster), _labels("expert", expert)
    if len(cluster) != len(expert):
        raise ValueError(f"expert: expected {len(cluster)} entries, one for each of cluster, got {len(expert)}")
    K, M = int(cluster.max()) + 1, int(expert.max()) + 1
    if experts is not None:
        if check.integer("experts", experts, 1) < M:
            raise ValueError(f"experts: expected at least {M}, one more than the largest expert, got {experts}")
        M = experts
    if K * M > LARGEST:
        raise ValueError(f"cluster, expert: expected numbers counted from 0, got a table of {K} x {M}")
    return torch.bincount(cluster * M + expert, minlength=K * M).reshape(K, M)


def dispatch_entropy(cluster: Int[Tensor, " n"], expert: Int[Tensor, " n"]) -> float:
    """Eq. 6.1: `-sum_m n_m/n sum_k (n_km/n_m) log(n_km/n_m)`, in nats.

    It is the conditional entropy of the cluster given the expert: 0 when every expert sees one
    cluster, log K when every expert sees all clusters equally.

    Args:
        cluster: (n,) cluster of each example.
        expert: (n,) expert each example was sent to.

    Raises:
        ValueError: as `dispatch_counts`.
    """
    n_km = dispatch_counts(cluster, expert).double()
    n_m = n_km.sum(0)
    of_expert = torch.special.entr(n_km / n_m.clamp(min=1)).sum(0)
    return float((n_m / n_m.sum() * of_expert).sum())
