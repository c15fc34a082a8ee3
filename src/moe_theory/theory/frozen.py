"""What a router that is never trained can do: how evenly it spreads, and the best that linear experts make of it."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check


def start_sparsity(v: float, M: int) -> float:
    """`M exp(-v (1 - 1/M) / 2)`: experts in use, `exp H`, if the M logits are independent N(0, v).

    It is exact to first order in v, and for every v as M grows.

    Args:
        v: variance of a logit, >= 0.
        M: number of experts.
    """
    return check.integer("M", M, 1) * math.exp(-check.not_negative("v", v) * (1 - 1 / M) / 2)


def best_frozen(pi: Float[Tensor, "n M"], x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> float:
    """The least mean squared error of `sum_m pi_m(x) (a_m.x + b_m)` over all a_m, b_m, the gates pi given.

    With fixed gates the mixture is linear in its experts, so this is least squares in the products of gates and
    inputs; the sum of squares is divided by the degrees of freedom that are left.

    Raises:
        ValueError: unless there are more examples than unknowns.
    """
    design = torch.einsum("nm,nd->nmd", pi, torch.cat([x, torch.ones_like(x[:, :1])], 1)).flatten(1)
    n, p = design.shape
    if n <= p:
        raise ValueError(f"pi: expected more rows than the {p} unknowns, got {n}")
    A, b = design.T @ design, design.T @ y
    solution = torch.cholesky_solve(b[:, None], torch.linalg.cholesky(A + 1e-9 * A.diagonal().mean() * torch.eye(p)))
    return float((y - design @ solution[:, 0]).square().sum() / (n - p))
