"""The mixture whose router and experts share their weights, and k-means (Dikkala et al. 2023, Lemma 1)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check


def nearest(x: Float[Tensor, "n d"], u: Float[Tensor, "M d"]) -> Int[Tensor, " n"]:
    """`a(x) = argmin_j |x - u_j|`, the expert that an input is sent to."""
    return torch.cdist(x, u).argmin(1)


def quantization_loss(x: Float[Tensor, "n d"], u: Float[Tensor, "M d"]) -> Float[Tensor, ""]:
    """`(1/n) sum_i |x_i - u_(a(i))|^2`: loss of the mixture `f(x) = u_(a(x))` with target x, objective of k-means."""
    return (x - u[nearest(x, u)]).square().sum(1).mean()


def cells(x: Float[Tensor, "n d"], u: Float[Tensor, "M d"]) -> tuple[Float[Tensor, " M"], Float[Tensor, "M d"]]:
    """Numbers n_j of the inputs in the cells, none between two, and their means; an empty cell has its center."""
    at = nearest(x, u)
    n = torch.bincount(at, minlength=len(u)).to(x)
    mean = torch.zeros_like(u).index_add_(0, at, x) / n.clamp(min=1)[:, None]
    return n, torch.where(n[:, None] > 0, mean, u)


def gradient_step(
    x: Float[Tensor, "n d"], u: Float[Tensor, "M d"], eta: float | Float[Tensor, "M 1"]
) -> Float[Tensor, "M d"]:
    """`u_j + (2 eta n_j / n)(mean_j - u_j)`: a step of gradient descent on `quantization_loss`."""
    n, mean = cells(x, u)
    return u + 2 * eta * n[:, None] / len(x) * (mean - u)


def drop(x: Float[Tensor, "n d"], u: Float[Tensor, "M d"], eta: float) -> float:
    """`sum_j (n_j/n)(1 - (1 - 2 eta n_j/n)^2) |mean_j - u_j|^2`, by which a step lowers the loss at least.

    It lowers it by exactly that much if no input changes its cell.
    """
    n, mean = cells(x, u)
    share = n / len(x)
    left = (1 - 2 * check.positive("eta", eta) * share).square()
    return float((share * (1 - left) * (mean - u).square().sum(1)).sum())
