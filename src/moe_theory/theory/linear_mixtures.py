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
from moe_theory.tasks.patches import NOISE, PatchBatch, PatchTask


def sign_vectors(K: int) -> Float[Tensor, "M K"]:
    """The M = 2^(K-1) vectors of K >= 1 signs whose product is 1, float64."""
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


def uncovered(task: PatchTask, way: str) -> tuple[float, float]:
    """Share of examples that are not covered: exactly, and its bound.

    The 2K inner products of signals and noise are independent N(0, 1/omega^2) with omega = sqrt(d/(P-3))/sigma_p, so
    the share is 1 - E[(2 Phi(omega b) - 1)^(2K)] with b the limit for z, and at most 4K Phi(-omega min b). The mean is
    over 1,600 midpoints of each strength, which are uniform, and keeps its digits where the share is tiny; the way is
    "by cluster" or "by sign", and P at least 4.
    """
    shares = {"by cluster": (1.0, 0.5), "by sign": (0.5, 1 / task.K)}
    share = shares[check.choice("way", way, shares)]
    if task.P < 4:
        raise ValueError(f"task: expected noise patches, P >= 4, got P={task.P}")
    middle = (torch.arange(1600, dtype=torch.float64) + 0.5) / 1600
    alpha, beta = (
        (low + (high - low) * middle).mul(a) for a, (low, high) in zip(share, (task.alpha, task.beta), strict=True)
    )
    omega = math.sqrt(task.d / (task.P - 3)) / task.sigma_p
    outside = torch.special.erfc(omega * torch.minimum(alpha[:, None], beta) / math.sqrt(2))
    least = omega * min(share[0] * task.alpha[0], share[1] * task.beta[0])
    return float(-torch.expm1(2 * task.K * torch.log1p(-outside)).mean()), 2 * task.K * math.erfc(least / math.sqrt(2))
