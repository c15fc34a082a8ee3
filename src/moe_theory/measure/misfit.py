"""The sum of squares of a mixture as a function of one router vector in the plane."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.mixture import MixingMeasure, expert_profile, preactivations
from moe_theory.models.routers import Router

CHUNK = 100  # places for the vector at a time


def misfit(
    G: MixingMeasure,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    router: Router,
    side: Float[Tensor, " m"],
    *,
    expert: str,
    noise: float,
) -> Float[Tensor, "m m"]:
    """Sums of squares less the smallest of them, in units of the noise variance; beta1_1 is free, all else as in G.

    Args:
        G: the measure whose first router vector takes every place of a square grid, d = 2.
        x, y: inputs and responses.
        router, expert: what G is a mixture of.
        side: coordinates of the grid; the first coordinate of the vector runs along the second dimension returned.
        noise: standard deviation of the responses.

    Raises:
        ValueError: for inputs of another dimension than 2.
    """
    if G.d != 2:
        raise ValueError(f"G: expected inputs of dimension 2, got {G.d}")
    h, u = expert_profile(expert).value(preactivations(G, x)), router.feature(x)
    others = (u @ router.embedding(G.beta1[1:]).T + G.beta0[1:]).exp()
    above, below = (others * h[:, 1:]).sum(1, keepdim=True), others.sum(1, keepdim=True)
    squares = []
    for s in router.embedding(torch.cartesian_prod(side, side)).split(CHUNK):
        first = (u @ s.T + G.beta0[0]).exp()
        f = (first * h[:, :1] + above) / (first + below)
        squares.append((y[:, None] - f).square().sum(0) / noise**2)
    total = torch.cat(squares).view(len(side), len(side)).T
    return total - total.min()
