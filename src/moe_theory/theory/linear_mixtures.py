"""Two mixtures of linear experts that solve the patch task of Chen et al. (2022) without training.

A linear expert sees of an example only s, the sum of its patches, and so does the router: a mixture is a router
`theta` (M, d) and a map `w` (M, d), its answer <w_m, s> with m the largest of <theta_m, s>.
"""

import itertools
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.tasks.patches import NOISE, PatchBatch


def sign_vectors(K: int) -> Float[Tensor, "M K"]:
    """The M = 2^(K-1) vectors of K signs whose product is 1, float64.

    Raises:
        ValueError: for K < 1.
    """
    signs = itertools.product((1.0, -1.0), repeat=check.integer("K", K, 1))
    return torch.tensor([tau for tau in signs if math.prod(tau) == 1], dtype=torch.float64)


def two_ways(batch: PatchBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """`theta` and `w`: by cluster, `c_k` and `v_k`; by sign, `sum_l tau_l v_l` and `sum_l tau_l c_l` for each tau."""
    tau = sign_vectors(len(batch.v)).to(batch.v)
    return {"by cluster": (batch.c, batch.v), "by sign": (tau @ batch.v, tau @ batch.c)}


def disturbance(batch: PatchBatch) -> Float[Tensor, " n"]:
    """z of each example: the largest |<u, sum of its noise patches>| over the 2K signals u."""
    noise = (batch.x * (batch.role >= NOISE)[:, :, None]).sum(1)
    return (noise @ torch.cat([batch.v, batch.c]).T).abs().amax(1)


def covered(batch: PatchBatch) -> dict[str, Bool[Tensor, " n"]]:
    """Which examples the theorem says a mixture gets right: z below a limit, which the feature noise does not enter.

    By cluster the limit is min(alpha, beta / 2), by sign min(alpha / 2, beta / K).
    """
    z, K = disturbance(batch), len(batch.v)
    limits = {"by cluster": (batch.alpha, batch.beta / 2), "by sign": (batch.alpha / 2, batch.beta / K)}
    return {way: z < torch.minimum(*limit) for way, limit in limits.items()}
