"""Router vectors as their function knows them: up to a vector common to all, and the numbers of the experts."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.theory.smoothing import _one_thread


class Comparison(NamedTuple):
    """Distances of two routers, relative to the root mean square of their norms.

    Attributes:
        raw: of the vectors as they are.
        centred: with the mean vector of each taken off, which no softmax sees.
        matched: the same, with the second one's experts in the order `order`, in which they are nearest.
        order: numbers of the second one's experts.
    """

    raw: float
    centred: float
    matched: float
    order: tuple[int, ...]


def centred(W: Float[Tensor, "M d"]) -> Float[Tensor, "M d"]:
    """Router vectors less their mean: the same softmax, with logits that sum to 0."""
    return W - W.mean(0)


def gauge_share(W: Float[Tensor, "M d"]) -> float:
    """Share of the squared norm of router vectors that their mean takes: what a softmax does not see of them."""
    W = check.finite("W", torch.as_tensor(W)).double()
    return float(len(W) * W.mean(0).square().sum() / W.square().sum()) if W.any() else 0.0


@_one_thread()
def compare_routers(W: Float[Tensor, "M d"], V: Float[Tensor, "M d"]) -> Comparison:
    """How far two checkpoints or seeds of one router are apart, as vectors and as functions of a softmax.

    The mean row is what no softmax sees of linear scores, over all experts or over the selected. Of two routers with
    other scores, such as cosines, other directions have no effect, and a distance of 0 is not all that makes them one.

    Args:
        W, V: router vectors, a row for each expert.

    Raises:
        ValueError: for matrices of different shape, NaN or infinite entries, or two routers that are zero.
    """
    W, V = (check.finite(name, torch.as_tensor(t).detach()).double() for name, t in (("W", W), ("V", V)))
    if W.ndim != 2 or W.shape != V.shape:
        raise ValueError(f"V: expected a matrix of the shape of W, {tuple(W.shape)}, got {tuple(V.shape)}")
    size = float(((W.square().sum() + V.square().sum()) / 2).sqrt())
    if not size:
        raise ValueError("W, V: expected router vectors other than zero, got none")
    A, B = centred(W), centred(V)
    order = linear_sum_assignment(torch.cdist(A, B).square().numpy(force=True))[1]
    distances = (float((one - other).norm()) / size for one, other in ((W, V), (A, B), (A, B[order])))
    return Comparison(*distances, tuple(order.tolist()))  # pyright: ignore[reportCallIssue]
