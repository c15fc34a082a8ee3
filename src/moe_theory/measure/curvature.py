"""Curvature of a loss from exact Hessian-vector products; no differences are taken."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.func import grad, vjp

from moe_theory import _validate as check
from moe_theory.streams import stream


class Curvature(NamedTuple):
    """An eigenvalue of a Hessian.

    Attributes:
        value: with its sign.
        residual: `|H v - value v|` for the unit vector v that was found; some eigenvalue is within that of `value`.
    """

    value: float
    residual: float


def largest_curvature(
    loss: Callable[[Tensor], Tensor], w: Float[Tensor, "p"], *, seed: int = 0, tolerance: float = 1e-6
) -> Curvature:
    """The eigenvalue of largest absolute value of the Hessian of `loss` at `w`, by the Lanczos method (ARPACK).

    Args:
        loss: a function of p >= 2 parameters to one number; w: the parameters.
        seed: of the vector that the method starts from.
        tolerance: relative accuracy.

    Raises:
        ValueError: for parameters that are not finite or fewer than two, or a tolerance that is not positive.
    """
    check.finite("w", w)
    check.positive("tolerance", tolerance)
    if w.ndim != 1 or len(w) < 2:
        raise ValueError(f"w: expected a vector of at least two parameters, got the shape {tuple(w.shape)}")

    pull_back = vjp(grad(loss), w)[1]  # H is symmetric: what v is pulled back to is H v

    def product(v: np.ndarray) -> np.ndarray:
        return pull_back(torch.as_tensor(v, dtype=w.dtype).reshape(-1))[0].detach().numpy()

    start = stream(seed, "start").normal(size=len(w))
    if not product(start).any():  # then the Hessian is zero, and ARPACK has nothing to start from
        return Curvature(0.0, 0.0)
    H = LinearOperator((len(w), len(w)), matvec=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    values, vectors = eigsh(H, k=1, which="LM", v0=start, tol=tolerance, ncv=min(len(w), 20))
    value, v = float(values[0]), vectors[:, 0]
    return Curvature(value, float(np.linalg.norm(product(v) - value * v)))
