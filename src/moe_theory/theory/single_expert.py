"""What one additive expert `F(x) = sum_p f(x_p)` can reach (Chen et al. 2022, Theorem 4.1, Appendix B).

On the patch task `F = f(y alpha v_k) + f(beta c_k) + f(epsilon gamma v_k') + sum f(noise)`. An expert is blind (to
centres) if f(beta c_k) is the same for all k; twice the error is then the least.
"""

import itertools
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.experts import PatchCNN
from moe_theory.tasks.patches import NOISE, PatchBatch, PatchTask

LARGEST = 20.0  # |f| that `best_additive_accuracy` allows, in units of the margin


def four_points(task: PatchTask, batch: PatchBatch) -> tuple[Float[Tensor, "n 4 P d"], Float[Tensor, "n 4"]]:
    """The four examples of Appendix B built from each example of a batch, and their labels.

    From (k, k', y, alpha, beta, gamma, noise): the example with epsilon = -y, its mirror image with
    all label signals negated, and both again with (k, alpha) and (k', gamma) exchanged. If alpha and
    gamma share a law, all four are equally likely.
    """
    at, of, y = batch.cluster, batch.other, batch.y
    v, c = task.v.to(batch.x), task.c.to(batch.x)
    signal, noise = (y * batch.alpha)[:, None] * v[at], (y * batch.gamma)[:, None] * v[of]
    xi = [batch.patch(role) for role in range(NOISE, batch.x.shape[1])]

    def example(s: Tensor, k: Tensor, t: Tensor) -> Tensor:
        return torch.stack([s, batch.beta[:, None] * c[k], t, *xi], 1)

    points = [
        example(signal, at, -noise),
        example(-signal, at, noise),
        example(noise, of, -signal),
        example(-noise, of, signal),
    ]
    return torch.stack(points, 1), torch.stack([y, -y, y, -y], 1)


def tight_witness(K: int) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
    """An additive expert that attains 7/8 exactly, for any strengths.

    `f(s v_k) = sign(s) w_k`, `f(s c_k) = f_center_k`, and 0 on noise. In order of rising w, the gap
    below each w_k exceeds the sum of all gaps above it, and f_center_k lies strictly between that sum
    and that gap; also f_center_k < w_k. All entries are integers, in float64, and every |F| is at least 1.

    Args:
        K: number of clusters, 2 to 50 (beyond, the integers leave float64).
    """
    if check.integer("K", K, 2) > 50:
        raise ValueError(f"K: expected at most 50, where 2^K is exact in float64, got {K}")
    sum_above = torch.tensor([2.0 ** (K - k) - 2 for k in range(K)], dtype=torch.float64)
    return 2 * 2.0**K - 2 - sum_above, sum_above + 1


def witness_margins(w: Float[Tensor, " K"], f_center: Float[Tensor, " K"]) -> Float[Tensor, "K K 2 2"]:
    """`y F` for every (k, k', y, epsilon y): `w_k + epsilon y w_k' + y f_center_k`.

    The third axis is y = +1, -1, the fourth epsilon y = +1, -1; the diagonal k = k', which never
    occurs, is NaN.
    """
    sign = w.new_tensor([1.0, -1.0])
    margin = w[:, None, None, None] + sign * w[None, :, None, None] + (sign[:, None] * f_center[:, None, None])[:, None]
    same = torch.arange(len(w), device=w.device)
    margin[same, same] = torch.nan
    return margin


def ceiling(alpha: tuple[float, float], gamma: tuple[float, float], *, blind: bool = False) -> float:
    """The best accuracy of any additive expert when alpha and gamma are uniform on two intervals.

    `1 - P(alpha in I) P(gamma in I) / 8` with I the overlap of the intervals: 7/8 for equal laws,
    0.925 in settings 1 and 2, 1 for disjoint ones. Blind to centres: 3/4, 0.85 and 1. Intervals have 0 < low < high.
    """
    for name, value in (("alpha", alpha), ("gamma", gamma)):
        low, high = check.strength_range(name, value)
        if low == high:
            raise ValueError(f"{name}: expected low < high, got {value!r}")
    overlap = max(0.0, min(alpha[1], gamma[1]) - max(alpha[0], gamma[0]))
    return 1 - overlap**2 / (8 * (alpha[1] - alpha[0]) * (gamma[1] - gamma[0])) * (1 + blind)


def error_floor(p: Float[np.ndarray, " S"], q: Float[np.ndarray, " S"], *, blind: bool = False) -> float:
    """Lower bound on the error of any additive expert, strengths on a grid with laws p and q.

    `1/8 sum_{a,b} min(p_a q_b, p_b q_a) = (1 - TV(p x q, q x p)) / 8`; 1/8 for p = q (Theorem 4.1).
    Twice that for experts blind to centres, which some of them attain.
    """
    forward = np.outer(p, q)
    return float(np.minimum(forward, forward.T).sum() / 8 * (1 + blind))


def best_additive_accuracy(
    p: Float[np.ndarray, " S"], q: Float[np.ndarray, " S"], K: int = 2, *, blind: bool = False
) -> float:
    """The best accuracy of any additive expert on a grid of strengths, by mixed-integer programming.

    The unknowns are f(s_i v_k), f(-s_i v_k), f(c_k) and, for each configuration of the data, whether
    it is answered with margin at least 1. Noise patches and the law of beta play no part: f there only
    shifts F independently of the rest. No step of the proof of Theorem 4.1 is used. The laws of alpha and gamma on one
    grid are p and q; RuntimeError if the solver does not prove optimality.
    """
    return _best_additive(p, q, K, blind)[0]


def least_errors(strengths: int, K: int = 2) -> tuple[float, int]:
    """On how many of the equally likely configurations the best additive expert errs, and how many these are.

    By the program of `best_additive_accuracy`, for K >= 2 clusters and alpha and gamma uniform on `strengths` values.
    """
    law = np.full(check.integer("strengths", strengths, 1), 1 / strengths)
    accuracy, n = _best_additive(law, law, K, False)
    return n * (1 - accuracy), n


def _best_additive(p: np.ndarray, q: np.ndarray, K: int, blind: bool) -> tuple[float, int]:
    check.integer("K", K, 2)
    for name, law in (("p", p), ("q", q)):
        if np.shape(law) != np.shape(p) or np.ndim(law) != 1 or np.min(law) < 0 or not abs(np.sum(law) - 1) < 1e-9:
            raise ValueError(f"{name}: expected probabilities on the grid of both laws, of sum 1, got {law!r}")
    S = len(p)
    signals, configurations, weights = 2 * K * S, [], []
    for k, other in itertools.permutations(range(K), 2):
        for a, b, y, epsilon in itertools.product(range(S), range(S), (1, -1), (1, -1)):
            row = np.zeros(signals + K)
            row[(k * S + a) * 2 + (y < 0)] += y
            row[(other * S + b) * 2 + (epsilon < 0)] += y
            row[signals + k] += y
            configurations.append(row)
            weights.append(p[a] * q[b] / (4 * K * (K - 1)))
    n = len(weights)
    sizes, slack = (signals + K, n), 3 * LARGEST + 1
    rule = LinearConstraint(np.hstack([np.array(configurations), -slack * np.eye(n)]), lb=1 - slack)
    rising = np.diff(np.eye(signals + K + n)[signals : signals + K], axis=0)
    found = milp(
        np.concatenate([np.zeros(signals + K), -np.array(weights)]),
        constraints=[rule, LinearConstraint(rising, lb=0, ub=0 if blind else np.inf)],
        integrality=np.repeat([0, 1], sizes),
        bounds=Bounds(np.repeat([-LARGEST, 0], sizes), np.repeat([LARGEST, 1], sizes)),
    )
    if found.status != 0:
        raise RuntimeError(f"the mixed-integer program was not solved to optimality: {found.message}")
    return float(-found.fun), n


def witness_cnn(task: PatchTask, width: float = 0.05, *, blind: bool = False) -> PatchCNN:
    """A two-layer ReLU patch CNN whose accuracy approaches `ceiling` as width -> 0 and d -> infinity.

    Its response to a label signal of strength s is a staircase: w_k of `tight_witness` where alpha
    and gamma overlap, more where only alpha can be, 0 where only gamma can be, below both laws, and
    on noise patches short enough; its steps are ramps of the given width > 0 in units of strength, two ReLUs each.
    Blind to centres it is without the filters on centres.
    """
    check.positive("width", width)
    w, f_center = tight_witness(task.K)
    certain = 4 * float(w.max())
    edges = sorted({*task.alpha, *task.gamma})

    def level(s: float, w_k: float) -> float:
        in_alpha, in_gamma = (lo < s < hi for lo, hi in (task.alpha, task.gamma))
        return 0.0 if not in_alpha else w_k if in_gamma else certain

    filters = []  # (direction, offset, output weight) of relu(<direction, x> - offset)
    for k in range(task.K):
        middles = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(edges)), edges[-1] + 1]
        jumps = np.diff([level(s, float(w[k])) for s in middles])
        for edge, jump in zip(edges, jumps, strict=True):
            filters += _ramp(task.v[k], edge, jump, width, 1) + _ramp(-task.v[k], edge, jump, width, -1)
        filters += [] if blind else _ramp(task.c[k], task.beta[0], float(f_center[k]), width, 1)
    return _relu_cnn(filters)


def without_centers(F: PatchCNN, task: PatchTask, batch: PatchBatch) -> Float[Tensor, " n"]:
    """What an additive expert answers once its response to the centre, `f(beta c_k)`, is its mean over all k."""
    centers = batch.beta[:, None, None] * task.c.to(batch.x)
    response = F(centers.flatten(0, 1)[:, None]).reshape(len(batch), task.K)
    return F(batch.x) + response.mean(1) - response.gather(1, batch.cluster[:, None])[:, 0]


def _ramp(direction: Tensor, edge: float, jump: float, width: float, sign: int) -> list[tuple[Tensor, float, float]]:
    """`sign` times a step of height `jump`; a rise is complete at the edge, a fall begins there."""
    if jump == 0:
        return []
    start = edge - width if jump > 0 else edge
    return [(direction, start, sign * jump / width), (direction, start + width, -sign * jump / width)]


def _relu_cnn(filters: list[tuple[Tensor, float, float]]) -> PatchCNN:
    """The `PatchCNN` of these filters; ReLU being homogeneous, only the sign of an output weight is left."""
    filters = sorted(filters, key=lambda one: one[2] < 0)
    like: dict[str, Any] = dict(dtype=torch.float64, device=filters[0][0].device)
    cnn = PatchCNN(len(filters[0][0]), len(filters), "relu", seed=0).to(**like)
    size = torch.tensor([abs(out) for _, _, out in filters], **like)
    cnn.w.data = size[:, None] * torch.stack([direction for direction, _, _ in filters])
    cnn.b.data = -size * torch.tensor([offset for _, offset, _ in filters], **like)
    cnn.a = torch.sign(torch.tensor([out for _, _, out in filters], **like))
    return cnn
