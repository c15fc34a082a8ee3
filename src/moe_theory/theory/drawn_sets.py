"""Stability of SGD on linear experts behind a frozen router that draws sets (smooth2025, Theorem 2, repaired).

The loss is the logistic one of `F = sum_m gate_m <theta_m, x>`. Expectations over batches and sets are means over
many runs that differ in both; two data sets are compared run by run, on the same batches and routing noise.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory.models.rules import gumbel
from moe_theory.streams import torch_stream
from moe_theory.theory import plackett_luce as pl
from moe_theory.theory.uniform_stability import LOGISTIC

#: The first data set, and those that differ from it in the first example; indices of the points.
DATA, NEIGHBOURS = (0, 1, 2, 3), ((4, 1, 2, 3), (5, 1, 2, 3))


class Problem(NamedTuple):
    """Six points in the plane, six experts with fixed logits, and what R runs of N steps draw.

    Attributes:
        x, y: unit vectors, and the signs of their first coordinates.
        h: the frozen logits.
        index: which of the four data each step visits.
        noise: Gumbel noise of each step, and of the evaluation.
    """

    x: Float[Tensor, "u d"]
    y: Float[Tensor, " u"]
    h: Float[Tensor, " M"]
    index: Int[Tensor, "R N"]
    noise: Float[Tensor, "R visits M"]


def draw_problem(runs: int, steps: int, *, seed: int) -> Problem:
    """Random points, logits of standard deviation 1/2, batches of one example, standard Gumbel noise."""
    rng = torch_stream(seed, "examples")
    x = torch.nn.functional.normalize(torch.randn(6, 2, generator=rng, dtype=torch.float64), dim=1)
    h = 0.5 * torch.randn(6, generator=rng, dtype=torch.float64)
    index = torch.randint(len(DATA), (runs, steps), generator=rng)
    return Problem(
        x, torch.where(x[:, 0] > 0, 1.0, -1.0).double(), h, index, gumbel((runs, steps + 1, 6), rng, h.dtype)
    )


def final_losses(
    problem: Problem, data: tuple[int, ...], gates: Float[Tensor, "R visits M"], alpha: float
) -> Float[Tensor, "R u"]:
    """Losses at all points after N steps from 0, for each run; the last gates are those of the evaluation."""
    x, y = problem.x, problem.y
    theta = x.new_zeros(*gates[:, 0].shape, x.shape[1])
    for t in range(problem.index.shape[1]):
        i, pi = torch.tensor(data)[problem.index[:, t]], gates[:, t]
        F = torch.einsum("rm,rmd,rd->r", pi, theta, x[i])
        theta = theta - alpha * (LOGISTIC.slope(F, y[i])[:, None, None] * pi[:, :, None] * x[i][:, None])
    return LOGISTIC.value(torch.einsum("rm,rmd,pd->rp", gates[:, -1], theta, x), y)


def stability(problem: Problem, gates: Float[Tensor, "R visits M"], alpha: float) -> tuple[float, float]:
    """Largest mean change of a loss when the first example is exchanged, and by how much the training loss fell."""
    first = final_losses(problem, DATA, gates, alpha)
    others = [final_losses(problem, data, gates, alpha) for data in NEIGHBOURS]
    eps = max(float((first - other).abs().mean(0).max()) for other in others)
    return eps, math.log(2) - float(first[:, list(DATA)].mean())


def mean_gates(h: Float[Tensor, " M"], members: Bool[Tensor, "S M"], gate: str) -> Float[Tensor, " M"]:
    """`E gate_m` over all sets of `members`, exactly; `gate` is one of `plackett_luce.GATES`."""
    return pl.set_probability(h, members) @ pl.set_gates(h, members, gate)


def overlap(h: Float[Tensor, " M"], k: int, gate: str) -> float:
    """`sum_m (E gate_m)^2`, the mean of `sum_m gate^S_m gate^T_m` over independent draws S and T of k experts."""
    return float(mean_gates(h, pl.subsets(len(h), k), gate).square().sum())
