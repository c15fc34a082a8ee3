"""How few experts a cluster is sent to (Dikkala et al. 2023, 2.1 and C.1)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream


def average_sparsity(pi: Float[Tensor, "n M"], cluster: Int[Tensor, " n"]) -> float:
    """`E_c exp H(E_(x in C_c) pi(x))`: the number of experts that a cluster uses, from 1 to M, in the mean.

    The paper's display has the entropy H itself; its numbers are those of exp H.

    Raises:
        ValueError: for gates that are no probabilities, or another number of clusters than rows.
    """
    if len(cluster) != len(pi):
        raise ValueError(f"cluster: expected {len(pi)} entries, one for each row of pi, got {len(cluster)}")
    if (check.finite("pi", pi) < 0).any() or (pi.sum(-1) - 1).abs().max() > 1e-4:
        raise ValueError(f"pi: expected rows of probabilities, got sums of {pi.sum(-1).min()} to {pi.sum(-1).max()}")
    pi, (_, at) = pi.detach().double(), cluster.unique(return_inverse=True)
    total = pi.new_zeros(int(at.max()) + 1, pi.shape[1]).index_add_(0, at, pi)
    mean = total / at.bincount()[:, None]
    return float(torch.special.entr(mean).sum(-1).exp().mean())


def shuffled(W: Float[Tensor, "M d"], seed: int) -> Float[Tensor, "M d"]:
    """A router's weights with their columns in random order: the baseline of 2.1."""
    return W[:, torch.from_numpy(stream(seed, "shuffle").permutation(W.shape[1])).to(W.device)]


def norm_ratio(W: Float[Tensor, "M d"]) -> float:
    """`E |W_i|^2 / (E |W_i|)^2` over the rows: 1 if all norms are equal, M if one alone is not zero (C.1).

    Raises:
        ValueError: if all rows are zero.
    """
    norm = W.detach().double().norm(dim=1)
    if not norm.any():
        raise ValueError("W: expected a row that is not zero, got none")
    return float(norm.square().mean() / norm.mean().square())
