"""Routers whose rows start at samples of a mixture of Gaussians (Dikkala et al. 2023, Theorem 2, Appendix E).

k equally likely clusters `N(mu_c, I)` in d dimensions, the mu_c being `mean`. An expert whose row w is a sample of
cluster c, its `home`, is a specialist of c. For an input of c the *gap* is its logit for a specialist of c less that
for one of another cluster c'. Logits are `w.x`, or with `bias` `w.x - |w|^2/2`, see `nearest_row_bias`.
"""

import math
from fractions import Fraction

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check


def all_collected(k: int, experts: int) -> float:
    """`sum_i (-1)^i C(k, i)(1 - i/k)^e`: probability that e samples meet all of k equally likely clusters; exact."""
    check.integer("k", k, 1)
    check.integer("experts", experts, 0)
    hits = sum((-1) ** i * math.comb(k, i) * (k - i) ** experts for i in range(k + 1))
    return float(Fraction(hits, k**experts))


def experts_needed(k: int, miss: float) -> int:
    """Least number of experts with which one of k clusters has no specialist with probability at most `miss` < 1."""
    if not 0 < check.positive("miss", miss) < 1:
        raise ValueError(f"miss: expected a probability in (0, 1), got {miss!r}")
    low, high = 0, 1
    while all_collected(k, high) < 1 - miss:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if all_collected(k, middle) < 1 - miss else (low, middle)
    return high


def farthest_first(x: Float[Tensor, "n d"], rows: int) -> Int[Tensor, " rows"]:
    """Indices of `rows` <= n inputs: the first one, then over and over the input farthest from all chosen ones."""
    if check.integer("rows", rows, 1) > len(x):
        raise ValueError(f"rows: expected at most the {len(x)} inputs, got {rows}")
    chosen, distance = [0], (x - x[0]).norm(dim=1)
    while len(chosen) < rows:
        chosen.append(int(distance.argmax()))
        distance = distance.minimum((x - x[chosen[-1]]).norm(dim=1))
    return torch.tensor(chosen)


def nearest_row_bias(w: Float[Tensor, "M d"]) -> Float[Tensor, " M"]:
    """`-|w_m|^2 / 2`: added to the logits `w_m.x` it makes the largest logit that of the row nearest to x."""
    return -w.square().sum(1) / 2


def logits(x: Float[Tensor, "n d"], w: Float[Tensor, "M d"], *, bias: bool) -> Float[Tensor, "n M"]:
    """`w_m.x`, with the bias less `|w_m|^2 / 2`."""
    return x @ w.T + (nearest_row_bias(w) if bias else 0)


def gap_moments(mu: Float[Tensor, " d"], other: Float[Tensor, " d"]) -> tuple[float, float]:
    """Mean `|mu|^2 - mu.mu'` and variance `|mu - mu'|^2 + 2 |mu|^2 + 2 d` of the gap without bias, mu' the other."""
    delta = mu - other
    return float(mu @ delta), float(delta @ delta + 2 * mu @ mu + 2 * len(mu))


def log_moment(t: Float[Tensor, " T"], mean: Float[Tensor, "k d"], *, bias: bool) -> Float[Tensor, "T k k"]:
    """`log E exp(-t gap)`, t >= 0, for every pair of clusters, the input's own one first; infinite without a mean.

    With `delta = mu_c - mu_c'` it is `(t^2 (|mu_c|^2 + |delta|^2/2) - t mu_c.delta) / r - (d/2) log r`, `r = 1 - 2t^2`;
    with the bias `-(t/2)(1 - 2t)|delta|^2 / r - (d/2) log r`, `r = 1 - 3t^2`.
    """
    inner = mean @ mean.T
    square = inner.diagonal()
    delta2 = square[:, None] + square - 2 * inner
    t = t[:, None, None]
    r = 1 - (3 if bias else 2) * t**2
    if bias:
        exponent = -t / 2 * (1 - 2 * t) * delta2
    else:
        exponent = t**2 * (square[:, None] + delta2 / 2) - t * (square[:, None] - inner)
    value = exponent / r - mean.shape[1] / 2 * r.clamp(min=0).log()
    return value.where(r > 0, math.inf)


def pair_bound(mean: Float[Tensor, "k d"], *, bias: bool) -> Float[Tensor, "k k"]:
    """`min_t E exp(-t gap)` over 0 <= t <= 1: at least the mean weight of one expert of c' on inputs of c.

    Every t bounds it, so the minimum may be over some: 400 here.
    """
    return _log_pair_bound(mean, bias=bias).exp()


def _log_pair_bound(mean: Float[Tensor, "k d"], *, bias: bool) -> Float[Tensor, "k k"]:
    t = torch.arange(400, dtype=mean.dtype) / 400 * (3 if bias else 2) ** -0.5
    return log_moment(t, mean, bias=bias).amin(0)


def foreign_bound(mean: Float[Tensor, "k d"], specialists: Int[Tensor, " k"], *, bias: bool) -> float:
    """Bound on the mean total weight of foreign experts, over inputs and rows: `pair_bound` summed, averaged over c.

    `specialists` is their number in each cluster, at least one.
    """
    others = pair_bound(mean, bias=bias).fill_diagonal_(0)
    return float((others @ specialists.to(others)).clamp(max=1).mean())


def rate(separation: float) -> float:
    """I(s), with the bias: `max_t (log(1 - 3t^2) + t (1 - 2t) s^2 / (1 - 3t^2)) / 2`, positive for every s > 0.

    A foreign expert at the distance `s sqrt(d)`, s the separation, has at most the mean weight `exp(-I(s) d)`.
    """
    two = torch.tensor([[0.0], [check.positive("separation", separation)]], dtype=torch.float64)
    return -float(_log_pair_bound(two, bias=True)[0, 1])


def foreign_weight(
    x: Float[Tensor, "n d"], cluster: Int[Tensor, " n"], w: Float[Tensor, "M d"], home: Int[Tensor, " M"], *, bias: bool
) -> Float[Tensor, " n"]:
    """Total gate of the experts that are not specialists of an input's cluster."""
    return (logits(x, w, bias=bias).softmax(1) * (cluster[:, None] != home)).sum(1)


def shares(
    x: Float[Tensor, "n d"], cluster: Int[Tensor, " n"], w: Float[Tensor, "M d"], home: Int[Tensor, " M"], *, bias: bool
) -> tuple[float, float]:
    """Shares of the inputs whose largest logit is that of a specialist of their cluster, and of the nearest row."""
    sent = logits(x, w, bias=bias).argmax(1)
    nearest = torch.cdist(x, w).argmin(1)
    return float((home[sent] == cluster).double().mean()), float((sent == nearest).double().mean())


def descent_course(pi: Float[Tensor, "n M"], y: Float[Tensor, "n o"], eta: float, steps: int) -> Float[Tensor, "T M o"]:
    """Constant experts after 0, 1, ... steps of gradient descent from zero, with the gates pi as they are.

    The loss `(1/n) sum_i |sum_m pi_m(x_i) u_m - y_i|^2` is quadratic: `u <- u - 2 eta (P u - q)`, `P` the mean of
    `pi pi^T`, `q` that of `pi y^T`.
    """
    P, q = pi.T @ pi / len(pi), pi.T @ y / len(pi)
    u = [torch.zeros_like(q)]
    for _ in range(check.integer("steps", steps, 1)):
        u.append(u[-1] - 2 * check.positive("eta", eta) * (P @ u[-1] - q))
    return torch.stack(u)


def router_slope(
    x: Float[Tensor, "n d"], y: Float[Tensor, "n o"], pi: Float[Tensor, "n M"], u: Float[Tensor, "M o"]
) -> Float[Tensor, "M d"]:
    """Gradient of the same loss in the router's rows, `(2/n) sum_i pi_m (u_m - F).(F - y_i) x_i`, F being `pi.u`."""
    F = pi @ u
    off = F - y
    pull = pi * (off @ u.T - (F * off).sum(1, keepdim=True))
    return 2 * pull.T @ x / len(x)
