"""What can be said exactly when inputs come from Gaussians, each with a linear label of its own.

The best linear function, and the best function of all, for the tasks of Dikkala et al. (2023), 3.2 to 3.6: the two
ends of the scale on which a trained mixture stands.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.tasks.dictionary import DictionaryTask
from moe_theory.tasks.gaussians import GaussianMixture
from moe_theory.tasks.subspaces import SubspaceTask
from moe_theory.tasks.tokens import TokenTask


class Components(NamedTuple):
    """K equally likely Gaussians `N(m_k, S_k)` with `E(y | x, k) = a_k.x + offset_k`, `Var(y | x, k) = rest_k`."""

    mean: Float[Tensor, "K d"]
    covariance: Float[Tensor, "#K d d"]
    a: Float[Tensor, "K d"]
    offset: Float[Tensor, " K"]
    rest: Float[Tensor, " K"]


class BestLinear(NamedTuple):
    """The best linear function `a.x + b`: its mean squared error, and the variance of the label."""

    a: Float[Tensor, " d"]
    b: float
    error: float
    variance: float


def _same(variance: float, d: int) -> Float[Tensor, "1 d d"]:
    return variance * torch.eye(d, dtype=torch.float64)[None]


def of_tokens(task: TokenTask) -> Components:
    """One token of a task with linear output, its label over the `scale` of a sequence of one."""
    scale = task.scale / task.s**0.5
    zero = task.mean.new_zeros(len(task.mean))
    return Components(task.mean, _same(task.sigma**2, task.mean.shape[1]), task.w / scale, zero, zero)


def of_dictionary(task: DictionaryTask) -> Components:
    """A component for every set of atoms."""
    mean, zero = task.mean[task.subsets].sum(1), task.mean.new_zeros(len(task.subsets))
    if task.label == "input":
        a, offset = task.w[task.subsets].sum(1), zero
    else:
        a, offset = torch.zeros_like(mean), (task.w * task.mean).sum(1)[task.subsets].sum(1)
    return Components(mean, _same(task.variance, mean.shape[1]), a / task.scale, offset / task.scale, zero)


def atoms_in(task: DictionaryTask) -> Float[Tensor, "d c"]:
    """`E(x x^T)^(-1) E(x 1^T)`: its column k regresses on x, without intercept, whether the atom k is in it."""
    present = torch.zeros(len(task.subsets), len(task.mean), dtype=torch.float64).scatter(1, task.subsets, 1.0)
    center = present @ task.mean
    moment = center.T @ center / len(center) + _same(task.variance, center.shape[1])[0]
    return torch.linalg.solve(moment, center.T @ present / len(center))


def of_gaussians(task: GaussianMixture) -> Components:
    """The first output of a mixture with linear labels `w.(x - mu)`."""
    mean, w = task.mean.double(), task.target[:, 0].double()
    return Components(mean, _same(1.0, mean.shape[1]), w, -(w * mean).sum(1), mean.new_zeros(len(mean)))


def of_subspaces(task: SubspaceTask) -> Components:
    """Given z = x + eps and the subspace P: `E(w.x | z) = w.Pz / (1 + tau^2)`, and w.eps is w.z less w.x.

    So both labels leave the same, `|Pw|^2 tau^2 / (1 + tau^2)`, before they are divided by their scale.
    """
    P, square = task.basis @ task.basis.mT, task.tau**2
    inside = torch.einsum("kde,ke->kd", P, task.w)
    point = inside / (1 + square)
    a = point if task.label == "point" else task.w - point
    rest = inside.square().sum(1) * square / (1 + square) / task.scale**2
    zero = rest.new_zeros(len(rest))
    return Components(P.new_zeros(inside.shape), P + _same(square, len(P[0])), a / task.scale, zero, rest)


def best_linear(parts: Components) -> BestLinear:
    """Solves the normal equations `Cov(x) a = Cov(x, y)` from the moments of the components."""
    mean, S, a, offset, rest = parts
    y = (a * mean).sum(1) + offset
    Sa = torch.einsum("kde,ke->kd", S.expand(len(mean), -1, -1), a)
    x_bar, y_bar = mean.mean(0), y.mean()
    cov_x = S.mean(0) + mean.T @ mean / len(mean) - torch.outer(x_bar, x_bar)
    cov_xy = (Sa + mean * y[:, None]).mean(0) - x_bar * y_bar
    variance = (y.square() + (a * Sa).sum(1) + rest).mean() - y_bar**2
    best = torch.linalg.solve(cov_x, cov_xy)
    return BestLinear(best, float(y_bar - best @ x_bar), float(variance - best @ cov_xy), float(variance))


def posterior(parts: Components, x: Float[Tensor, "n d"]) -> Float[Tensor, "n K"]:
    """The probability of each component given the input, by Bayes' rule."""
    Q = torch.linalg.inv(parts.covariance)
    Qm = torch.einsum("kde,ke->kd", Q.expand(len(parts.mean), -1, -1), parts.mean)
    square = torch.einsum("nd,kde,ne->nk", x, Q, x) + (Qm * parts.mean).sum(1)
    return (x @ Qm.T - square / 2 - torch.logdet(parts.covariance) / 2).softmax(1)


def left_by_all(parts: Components, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """`Var(y | x)` at inputs x: what no function of x can explain; its mean is the least error of all."""
    pi = posterior(parts, x)
    answers = x @ parts.a.T + parts.offset
    mean = (pi * answers).sum(1)
    return (pi * (answers.square() + parts.rest)).sum(1) - mean.square()
