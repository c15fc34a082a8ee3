"""Stability of SGD on linear experts behind a frozen router that draws sets (smooth2025, Theorem 2, repaired).

The loss is one of `F = sum_m gate_m <theta_m, x>`, logistic where nothing else is said. Expectations over batches and
sets are means over many runs that differ in both; two data sets are compared run by run, on the same batches and
routing noise.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory.models.rules import gumbel, topk_set
from moe_theory.streams import torch_stream
from moe_theory.theory import plackett_luce as pl
from moe_theory.theory.uniform_stability import LOGISTIC, Loss, huber_witness

DATA, NEIGHBOURS = (0, 1, 2, 3), ((4, 1, 2, 3), (5, 1, 2, 3))  # indices of points; the neighbours differ in the first


class Problem(NamedTuple):
    """Six points, M experts with fixed logits, and what R runs of N steps draw."""

    x: Float[Tensor, "u d"]
    y: Float[Tensor, " u"]
    h: Float[Tensor, " M"]
    index: Int[Tensor, "R N"]  # which of the four data each step visits
    noise: Float[Tensor, "R visits M"]  # Gumbel noise of each step, and of the evaluation


def random_points(rng: torch.Generator) -> tuple[Loss, Float[Tensor, "6 2"], Float[Tensor, "6"]]:
    """The logistic loss, six random unit vectors in the plane, and the signs of their first coordinates."""
    x = torch.nn.functional.normalize(torch.randn(6, 2, generator=rng, dtype=torch.float64), dim=1)
    return LOGISTIC, x, torch.where(x[:, 0] > 0, 1.0, -1.0).double()


def draw_problem(runs: int, steps: int, *, seed: int) -> Problem:
    """`random_points`, six experts with logits of standard deviation 1/2, batches of one example, Gumbel noise."""
    rng = torch_stream(seed, "examples")
    _, x, y = random_points(rng)
    h = 0.5 * torch.randn(6, generator=rng, dtype=torch.float64)
    index = torch.randint(len(DATA), (runs, steps), generator=rng)
    return Problem(x, y, h, index, gumbel((runs, steps + 1, 6), rng, h.dtype))


def trained(
    problem: Problem, data: tuple[int, ...], gates: Float[Tensor, "R visits M"], alpha: float, loss: Loss
) -> Float[Tensor, "R M d"]:
    """The experts after N steps of SGD from 0, for each run."""
    x, y = problem.x, problem.y
    theta = x.new_zeros(*gates[:, 0].shape, x.shape[1])
    for t in range(problem.index.shape[1]):
        i, pi = torch.tensor(data)[problem.index[:, t]], gates[:, t]
        F = torch.einsum("rm,rmd,rd->r", pi, theta, x[i])
        theta = theta - alpha * (loss.slope(F, y[i])[:, None, None] * pi[:, :, None] * x[i][:, None])
    return theta


def stability(problem: Problem, gates: Float[Tensor, "R visits M"], alpha: float) -> tuple[float, float]:
    """Largest mean change of a loss when the first example is exchanged, and by how much the training loss fell.

    The last gates are those of the evaluation.
    """

    def read(data: tuple[int, ...]) -> Float[Tensor, "R u"]:
        theta = trained(problem, data, gates, alpha, LOGISTIC)
        return LOGISTIC.value(torch.einsum("rm,rmd,pd->rp", gates[:, -1], theta, problem.x), problem.y)

    first = read(DATA)
    eps = max(float((first - read(other)).abs().mean(0).max()) for other in NEIGHBOURS)
    return eps, math.log(2) - float(first[:, list(DATA)].mean())


def mean_gates(h: Float[Tensor, " M"], members: Bool[Tensor, "S M"], gate: str) -> Float[Tensor, " M"]:
    """`E gate_m` over all sets of `members`, exactly; `gate` is one of `plackett_luce.GATES`."""
    return pl.set_probability(h, members) @ pl.set_gates(h, members, gate)


def overlap(h: Float[Tensor, " M"], k: int, gate: str) -> float:
    """`sum_m (E gate_m)^2`, the mean of `sum_m gate^S_m gate^T_m` over independent draws S and T of k experts."""
    return float(mean_gates(h, pl.subsets(len(h), k), gate).square().sum())


def fixed_step_bound(alpha: float, gates: Float[Tensor, "*batch M"], N: int, n: int) -> float:
    """`2 alpha N / n max sum_j gate_j^2` for lambda_1 = G = 1; the maximum is over the gates given."""
    return 2 * alpha * N / n * float(gates.square().sum(-1).max())


def anew_bound(problem: Problem, k: int, gates_of: Callable, gate: str, alpha: float) -> float:
    """`2 alpha N / n |E gate| max |gate|` for lambda_1 = G = 1 and sets drawn anew, the maximum over the draws.

    `gates_of(h, k, noise)` has the gates, `gate` is their name among `plackett_luce.GATES`.
    """
    drawn = gates_of(problem.h.expand(problem.noise.shape), k, problem.noise)
    sizes = overlap(problem.h, k, gate) ** 0.5 * float(drawn.norm(dim=-1).max())
    return 2 * alpha * problem.index.shape[1] / len(DATA) * sizes


def spread_bound(problem: Problem, k: int, alpha: float) -> float:
    """`2 alpha N / n e^(3 Delta / 2) / sqrt(k M)`, which `anew_bound` with gates over the selected set is at most."""
    M, width = len(problem.h), float(problem.h.max() - problem.h.min())
    return 2 * alpha * problem.index.shape[1] / len(DATA) * math.exp(1.5 * width) / (k * M) ** 0.5


def equal_logits(x: Float[Tensor, "6 d"], y: Float[Tensor, "6"], M: int, N: int, rng: torch.Generator) -> Problem:
    """M experts with equal logits: all 4^N sequences of visits, each with noise of its own."""
    index = torch.cartesian_prod(*[torch.arange(len(DATA))] * N).reshape(-1, N)
    return Problem(x, y, x.new_zeros(M), index, gumbel((len(index), N + 1, M), rng, x.dtype))


def fresh_stability(problem: Problem, k: int, alpha: float, loss: Loss) -> float:
    """`stability` for equal logits with gates 1/k on sets drawn anew at each visit and for the evaluation.

    A layer is read with its last set and all M cyclic shifts of it: each is a set as random as the first, so the
    mean is the same, with less noise.
    """
    gates = topk_set(problem.noise, k).to(problem.x.dtype) / k
    shifted = torch.stack([gates[:, -1].roll(s, 1) for s in range(gates.shape[2])])

    def read(data):
        answers = trained(problem, data, gates, alpha, loss) @ problem.x.T
        return loss.value(torch.einsum("srm,rmp->srp", shifted, answers), problem.y)

    first = read(DATA)
    return max(float((first - read(other)).abs().mean((0, 1)).max()) for other in NEIGHBOURS)


def fresh_bound(alpha: float, curvature: float, k: int, M: int, N: int, n: int) -> float:
    """The smaller of the two bounds on that for a loss of slope at most 1 and `curvature` at most, Jacobians at most 1.

    `2 alpha N / n` times `1 / sqrt(k M)`, or times `((1 + q)^N - 1) / (q N M)` with `q = alpha curvature (k - 1) /
    (k M)`.
    """
    q = alpha * curvature * (k - 1) / (k * M)
    growth = math.expm1(N * math.log1p(q)) / (q * N) if k > 1 else 1.0
    return 2 * alpha * N / n * min((k * M) ** -0.5, growth / M)


def fresh_bound_by_sets(alpha: float, curvature: float, k: int, M: int, N: int, n: int) -> float:
    """The same from all sets of k experts: norms of gates, and powers of a mean matrix in place of their sum.

    A visit with the set T lets what j of T is apart grow by `alpha curvature / k^2` times what each other i of T is.
    """
    gates = pl.subsets(M, k).double() / k
    together = gates.T @ gates / len(gates)  # P(i and j are drawn) / k^2
    visit = torch.eye(M, dtype=gates.dtype) + alpha * curvature * (together - together.diag().diag())
    apart = sum(torch.linalg.matrix_power(visit, t)[:, 0].sum() for t in range(N))
    one, two = gates.mean(0).norm() * gates.norm(dim=1).max(), apart * gates.mean(0).max() / N
    return 2 * alpha * N / n * float(torch.minimum(one, two))


def fresh_sweep(
    loss: Loss, x: Float[Tensor, "6 d"], y: Float[Tensor, "6"], M: int, N: int, share_of: Callable, rng: torch.Generator
) -> list[dict[str, float]]:
    """For k = 1, 2, 4, ..., M, with steps of `share_of(k) / curvature`: `eps`, the stability; `bound`, its bound; and
    `lead`, what `fresh_witness` has."""
    problem, rows = equal_logits(x, y, M, N, rng), []
    for k in (2**i for i in range(M.bit_length())):
        alpha, n = share_of(k) / loss.curvature, len(DATA)
        eps, bound = fresh_stability(problem, k, alpha, loss), fresh_bound(alpha, loss.curvature, k, M, N, n)
        rows.append(dict(K=k, M=M, N=N, eps=eps, bound=bound, lead=2 * alpha * N / (n * M)))
    return rows


def fresh_witness(N: int) -> tuple[Loss, Tensor, Tensor]:
    """Points on which N steps have `2 alpha N / (n M)` exactly: those of `huber_witness`, the first one exchanged."""
    loss, x, y, *_ = huber_witness(N)
    order = [0, 0, 1, 2, 1, 1]
    return loss, x[0, order], y[0, order]
