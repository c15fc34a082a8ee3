"""Uniform stability of SGD (smooth2025, Theorems 1 and 3; Hardt, Recht and Singer 2016).

A loss here is a function of a linear score `<w, x>`, convex unless it says otherwise. On a universe of a few points
every data set, every neighbour and every sequence of batches can be enumerated, so `exact_stability` is the number
the theorems bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check


@dataclass(frozen=True)
class Loss:
    """`value(z, y)` of a score z and a response y, with its derivative `slope(z, y)` in z and the largest size of
    the `curvature`. Along every line the size of the slope has to be largest at an end for the constant that
    `exact_stability` returns to serve; it is not for `SIGMOID`, whose slope is at most 1/4 in size."""

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: float


SQUARES = Loss(lambda z, y: (z - y).square() / 2, lambda z, y: z - y, 1.0)
LOGISTIC = Loss(lambda z, y: torch.nn.functional.softplus(-y * z), lambda z, y: -y * torch.sigmoid(-y * z), 0.25)
#: Not convex, with values in [0, 1]: the probability that a logistic model gives to the wrong label.
SIGMOID = Loss(
    lambda z, y: torch.sigmoid(-y * z), lambda z, y: -y * torch.sigmoid(z) * torch.sigmoid(-z), 1 / (6 * 3**0.5)
)


def huber(L: float, beta: float) -> Loss:
    """Quadratic of curvature beta up to `|z - y| = L / beta`, of slope L or -L beyond."""
    L, beta = check.positive("L", L), check.positive("beta", beta)
    edge = L / beta

    def value(z: Tensor, y: Tensor) -> Tensor:
        r = z - y
        return torch.where(r.abs() <= edge, beta * r.square() / 2, L * (r.abs() - edge / 2))

    return Loss(value, lambda z, y: (beta * (z - y)).clamp(-L, L), beta)


def hill(L: float, beta: float) -> Loss:
    """`L y z` for y = 1 or -1; for y = 0 the top of a hill, `-beta z^2 / 2`, whose slope is at most L for
    `|z| <= L / beta`."""
    L, beta = check.positive("L", L), check.positive("beta", beta)
    return Loss(
        lambda z, y: torch.where(y == 0, -beta * z.square() / 2, L * y * z),
        lambda z, y: torch.where(y == 0, -beta * z, L * y),
        beta,
    )


def hardt_bound(L: Float[Tensor, " B"], alphas: Float[Tensor, "B T"], n: int) -> Float[Tensor, " B"]:
    """`(2 L^2 / n) sum_t alpha_t`, for convex L-Lipschitz beta-smooth losses and every `alpha_t <= 2 / beta`.

    smooth2025, Theorem 3, with the constants of Hardt et al. (2016): n is the number of data, whatever the batch.
    """
    return 2 * L.square() * alphas.sum(1) / check.integer("n", n, 1)


def nonconvex_bound(
    L: Float[Tensor, " B"], beta: Float[Tensor, " B"], alphas: Float[Tensor, "B T"], n: int
) -> Float[Tensor, " B"]:
    """Stability without convexity: L times r, with `r <- (1 + (1 - 1/n) alpha_t beta) r + 2 alpha_t L / n` from 0.

    For one step size it is `2 L^2 ((1 + (1 - 1/n) alpha beta)^T - 1) / (beta (n - 1))`, for n = 1 `2 L^2 alpha T`.
    """
    others, r = 1 - 1 / check.integer("n", n, 1), torch.zeros_like(L)
    for alpha in alphas.unbind(1):
        r = (1 + others * alpha * beta) * r + 2 * alpha * L / n
    return L * r


def smoothness_of(loss: Loss, x: Float[Tensor, "B u d"]) -> Float[Tensor, " B"]:
    """beta, the largest size of the curvature of `loss(<w, x>, y)` in w over the points x."""
    return loss.curvature * x.square().sum(2).amax(1)


def neighbours(points: int, n: int) -> Int[Tensor, "R points n"]:
    """All data sets of n points, as indices: `[r, a]` and `[r, b]` differ in their first point only, a against b.

    The other n - 1 run through all multisets; their order does not matter, for the batches are drawn uniformly.
    """
    check.integer("points", points, 2)
    rest = list(combinations_with_replacement(range(points), check.integer("n", n, 1) - 1))
    return torch.tensor([[(a, *r) for a in range(points)] for r in rest])


def _trained(loss, x, y, start, alphas, data, batch) -> tuple[Tensor, Tensor]:
    """Parameters (B, D, S, d) after all S sequences of batches, and the largest gradient (B,) on the way."""
    n = data.shape[1]
    members = [[float(i in chosen) / batch for i in range(n)] for chosen in combinations(range(n), batch)]
    members = x.new_tensor(members)  # (number of batches, n), rows sum to 1
    X, Y, norms = x[:, data], y[:, data, None].mT, x.norm(dim=2)[:, None, None]
    w = start[:, None, None].expand(-1, len(data), 1, -1)
    largest = x.new_zeros(len(x))
    for t in range(alphas.shape[1] + 1):
        slopes = loss.slope(w @ x.mT[:, None], y[:, None, None])
        largest = torch.maximum(largest, (slopes.abs() * norms).amax((1, 2, 3)))
        if t < alphas.shape[1]:
            parts = (loss.slope(w @ X.mT, Y)[..., None, :] * members).flatten(2, 3)
            w = w.repeat_interleave(len(members), 2) - alphas[:, t, None, None, None] * (parts @ X)
    return w, largest


def exact_stability(
    loss: Loss,
    x: Float[Tensor, "B u d"],
    y: Float[Tensor, "B u"],
    start: Float[Tensor, "B d"],
    alphas: Float[Tensor, "B T"],
    n: int,
    batch: int = 1,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Uniform stability (smooth2025, Eq. 1) of B problems, by enumeration: every data set of n of the u points,
    every neighbour of it, every sequence of batches, every point to be tested.

    A step averages a batch of the n data, drawn uniformly without replacement; the two runs see the same. ValueError
    for more than 2^20 sequences of batches.

    Returns:
        eps, and L: the largest norm of a gradient, over all points, where any of the runs has been. Along a segment
        it is largest at an end, so that L serves for the segment between two runs too.
    """
    if check.integer("batch", batch, 1) > check.integer("n", n, 1):
        raise ValueError(f"batch: expected at most n = {n}, got {batch}")
    sequences = math.comb(n, batch) ** alphas.shape[1]
    if sequences > 2**20:
        raise ValueError(f"alphas: expected at most 2^20 sequences of batches to enumerate, got {sequences}")
    if x.shape[2] > x.shape[1]:  # coordinates in the span of the points, all of start and of a run that a score sees
        Q, R = torch.linalg.qr(x.mT)
        x, start = R.mT, (start[:, None] @ Q)[:, 0]
    data = neighbours(x.shape[1], n)
    rows = max(1, 2**20 // (data.numel() * sequences))  # as many problems at once as keeps the memory small
    done = []
    for at in range(0, len(x), rows):
        part = [v[at : at + rows] for v in (x, y, start, alphas)]
        w, L = _trained(loss, *part, data.flatten(0, 1), batch)  # pyright: ignore[reportCallIssue]
        values = loss.value(part[0][:, None] @ w.mT, part[1][:, None, :, None]).unflatten(1, data.shape[:2])
        gaps = [(values[:, :, a] - values[:, :, b]).abs().mean(-1) for a, b in combinations(range(x.shape[1]), 2)]
        done.append((torch.stack(gaps).amax((0, 2, 3)), L))
    eps, L = zip(*done, strict=True)
    return torch.cat(eps), torch.cat(L)


def huber_witness(T: int, L: float = 1.0, a: float = 0.5) -> tuple[Loss, Tensor, Tensor, Tensor, Tensor]:
    """A problem on which `hardt_bound` is attained for every n: three points in two coordinates.

    Two of them, y = a and y = -a, see the first coordinate. With beta = (2T + 2) L / a and steps 2 / beta it stays
    where their losses have slope L or -L, so each draw of the point that differs pushes the two runs 2 alpha L
    apart and no step brings them together. The third sees the second coordinate, which stays 0: it pushes nothing,
    but has curvature beta there, so that no smaller beta serves on any region that contains the runs. Given are
    `(loss, x, y, start, alphas)`, as `exact_stability` takes them, B = 1.
    """
    T, L, a = check.integer("T", T, 1), check.positive("L", L), check.positive("a", a)
    beta = (2 * T + 2) * L / a
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    y = torch.tensor([[a, -a, 0.0]], dtype=torch.float64)
    return huber(L, beta), x, y, torch.zeros_like(x[:, 0]), torch.full((1, T), 2 / beta, dtype=torch.float64)


def hill_witness(T: int, L: float = 1.0, beta: float = 1.0) -> tuple[Loss, Tensor, Tensor, Tensor, Tensor]:
    """A problem on which `nonconvex_bound` is attained for every n: two ramps, of slope L and -L, and a hill.

    The runs start on top of it. A step on the hill drives them apart by the factor `1 + alpha beta`; each draw of
    the ramp that differs pushes them 2 alpha L apart. With `(1 + alpha beta)^T = 2` no run leaves `|w| <= L / beta`,
    where the slope of the hill is at most L. Given is the same as for `huber_witness`.
    """
    alpha = (2 ** (1 / check.integer("T", T, 1)) - 1) / check.positive("beta", beta)
    x, y = torch.ones(1, 3, 1, dtype=torch.float64), torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    return hill(L, beta), x, y, torch.zeros_like(x[:, 0]), torch.full((1, T), alpha, dtype=torch.float64)


def averaged_experts(x: Float[Tensor, "B u d"], K: int) -> Float[Tensor, "B u {K}*d"]:
    """The inputs on which a linear score is that of K linear experts with fixed gates 1 / K.

    `sum_k <theta_k, x> / K = <(theta_1, ..., theta_K), (x / K, ..., x / K)>`.
    """
    return x.repeat(1, 1, check.integer("K", K, 1)) / K


def routed_experts(x: Float[Tensor, "B u d"], pi: Float[Tensor, "B u M"]) -> Float[Tensor, "B u M*d"]:
    """The inputs on which a linear score is that of M linear experts with the gates pi of a frozen router.

    `sum_m pi_m(x) <theta_m, x> = <(theta_1, ..., theta_M), (pi_1(x) x, ..., pi_M(x) x)>`.
    """
    return (pi[..., None] * x[:, :, None]).flatten(2)


class Problems(NamedTuple):
    """B random problems, each of u points x (B, u, d) with responses y (B, u), a start w (B, d) and steps
    alphas (B, T)."""

    x: Float[Tensor, "B u d"]
    y: Float[Tensor, "B u"]
    w: Float[Tensor, "B d"]
    alphas: Float[Tensor, "B T"]


def random_problems(loss: Loss, number: int, T: int, rng: torch.Generator) -> Problems:
    """Standard normal points, five a problem, and starts, of dimension 1 to 4, filled up with zeros to 4; responses
    of `SQUARES` standard normal, of the others 1 or -1. All T steps of every other problem are 2 / beta, those of
    the others a share of it, each its own, uniform on [0.05, 1].
    """
    normal = lambda *shape: torch.randn(number, *shape, generator=rng, dtype=torch.float64)  # noqa: E731
    x, y, w = normal(5, 4), normal(5), normal(4)
    x = x * (torch.arange(4) < torch.randint(1, 5, (number, 1, 1), generator=rng))
    share = 0.05 + 0.95 * torch.rand(number, check.integer("T", T, 1), generator=rng, dtype=torch.float64)
    share[::2] = 1
    return Problems(x, y if loss is SQUARES else y.sign(), w, 2 * share / smoothness_of(loss, x)[:, None])
