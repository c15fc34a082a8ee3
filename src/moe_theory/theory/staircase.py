"""Figure 1 of smooth2025: two linear experts `theta_i x` with fixed equal gates, squared loss, target 0.

With both experts the gates of an input are (1/2, 1/2); with one, a fair coin makes them (1, 0) or (0, 1).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

START, ALPHA = (1.0, 0.5), 0.1  # where the runs start; nothing changes in multiples of it; step size of Appendix A


def walk(x: Float[Tensor, "r T b"], gates: Float[Tensor, "r T b 2"]) -> Float[Tensor, "r T+1 2"]:
    """Paths of theta under gradient descent on the mean of `(<gates, theta> x)^2` over the b inputs of a step."""
    theta = torch.tensor(START, dtype=x.dtype).expand(len(x), 2)
    path = [theta]
    for x_t, g in zip(x.unbind(1), gates.unbind(1), strict=True):
        slope = 2 * (g @ theta[..., None])[..., 0] * x_t.square()  # (r, b)
        theta = theta - ALPHA * (slope[..., None] * g).mean(1)
        path.append(theta)
    return torch.stack(path, 1)


def turns(path: Float[Tensor, "r t 2"]) -> Float[Tensor, "r t-2"]:
    """Angles between successive steps, in degrees."""
    step = path.diff(dim=1)
    a, b = step[:, :-1], step[:, 1:]
    cross = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return torch.rad2deg(torch.atan2(cross.abs(), (a * b).sum(2)))


def excess_length(path: Float[Tensor, "r t 2"]) -> Float[Tensor, " r"]:
    """Length of a path over its displacement."""
    steps = path.diff(dim=1)
    return steps.norm(dim=2).sum(1) / steps.sum(1).norm(dim=1)


def limiting_turn() -> float:
    """c, in degrees: the mean turn of top-1 is c / sqrt(b) for many inputs b a step, each with its own coin.

    A step has the direction `(theta_1 s_1, theta_2 s_2)`, where s_i, the part of `sum x^2 / b` that the coins give
    to expert i, has mean 1/6, and `delta = s_2 - s_1` the variance `E x^4 / b = 1 / (5 b)`. That turns its angle by
    `6 delta sin(2 phi) / 2`, and, since theta_i becomes `(1 - 2 ALPHA s_i) theta_i`, the mean angle of the next step
    the other way by `rho delta sin(2 phi) / 2`.
    """
    phi, rho = math.atan2(START[1], START[0]), 2 * ALPHA / (1 - ALPHA / 3)
    deviation = math.sin(2 * phi) / 2 * math.sqrt((6**2 + (6 + rho) ** 2) / 5)
    return math.degrees(math.sqrt(2 / math.pi) * deviation)
