"""A small mixture fitted to one data set from several random starts, with or without a penalty on its logits."""

from itertools import combinations
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.mixture import MixingMeasure, draw_measure, gates, jacobian, regression_function
from moe_theory.models.routers import Linear

STEPS = 100
TRIES = 8  # starts drawn at a time, to find two that end at the lowest loss
MOST = 48


class Fit(NamedTuple):
    """Where a descent ended: the measure, and the mean squared error with the penalty."""

    G: MixingMeasure
    loss: float


def fit(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    start: MixingMeasure,
    expert: str,
    *,
    decay: float = 0.0,
    z_loss: float = 0.0,
) -> Fit:
    """Linear router: the mean squared error, plus `decay |(beta0, beta1)|^2`, plus `z_loss` times that of lse squared.

    lse is the logarithm of the sum of the exponentials of the logits of an input, as in the z-loss of large mixtures.
    By Levenberg-Marquardt steps `-(A^T A + damping I)^-1 A^T a`, `a` the residuals and A their Jacobian. Like those of
    gradient descent they have no part in the null space of A: without a penalty a common shift is never moved.
    (MINPACK's, as SciPy has them, move it: they pivot, and leave out columns where A lacks rank.)

    Args:
        x, y: the data; start: where the descent begins.
        expert: a key of `moe_theory.models.mixture.EXPERTS`.
        decay, z_loss: weights of the two penalties, >= 0.
    """
    (k, d), n, router = start.beta1.shape, len(x), Linear()
    r, eye = k * (d + 1), torch.eye(k * (2 * d + 2), dtype=x.dtype)

    def rows(p: Tensor) -> tuple[Tensor, Tensor]:
        G, to_eta = MixingMeasure.of(p, k), x.new_zeros(n, k * (d + 1))
        pi, lse = gates(G, x, router), torch.logsumexp(router.scores(G.beta0, G.beta1, x), 1)
        by_lse = torch.cat([pi, (pi[:, :, None] * x[:, None]).flatten(1), to_eta], 1)
        a = [(regression_function(G, x, router, expert) - y) / n**0.5, decay**0.5 * p[:r], (z_loss / n) ** 0.5 * lse]
        A = [jacobian(G, x, router, expert) / n**0.5, decay**0.5 * eye[:r], (z_loss / n) ** 0.5 * by_lse]
        return torch.cat(a), torch.cat(A)

    p, damping = start.flat(), 1e-2
    a, A = rows(p)
    for _ in range(STEPS):
        there = p - torch.linalg.solve(A.T @ A + damping * eye, A.T @ a)
        b, B = rows(there)
        p, a, A, damping = (there, b, B, damping / 3) if b @ b < a @ a else (p, a, A, 4 * damping)
        if damping > 1e6:
            break
    return Fit(MixingMeasure.of(p, k), float(a @ a))


def starts_of_one_minimum(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], k: int, expert: str, *, seed: int
) -> tuple[MixingMeasure, MixingMeasure]:
    """Two random starts whose fits end at the lowest loss found, to a millionth; of all such the farthest apart.

    TRIES starts are drawn, and again as many until two share the lowest loss, at most MOST. Apart is meant by the mean
    router vectors.

    Raises:
        ValueError: if no two fits end at the lowest loss.
    """
    fits = []
    while len(fits) < MOST:
        starts = [draw_measure(k, x.shape[1], 100 + 50 * seed + len(fits) + i, 2.0, 2.0) for i in range(TRIES)]
        fits += [(start, fit(x, y, start, expert).loss) for start in starts]
        lowest = min(loss for _, loss in fits)
        ends = [start for start, loss in fits if loss / lowest - 1 < 1e-6]
        if len(ends) > 1:
            return max(combinations(ends, 2), key=lambda pair: float((pair[0].beta1 - pair[1].beta1).mean(0).norm()))
    raise ValueError(f"seed: no two of {MOST} fits end at the lowest loss, {lowest}")
