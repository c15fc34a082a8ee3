"""The constant in Theorem 6 of Nguyen et al. (2025), `|f_G - f_*| >= constant * L_3(G, G_*)` near G_*.

To first order it is the smallest ratio of two norms of a tangent: found by ascent, and certified from below. At a
distance it is searched for among the measures themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure, expert_profile, mixed, preactivations, regression_function
from moe_theory.models.routers import Router
from moe_theory.streams import torch_stream
from moe_theory.theory.identifiability import numerical_nullity

STARTS, STEPS = 50, 300  # of the ascent

#: What two norms a tangent or a measure has: how much the function changes, and how much the parameters do.
Price = Callable[[Tensor], tuple[Tensor, Tensor]]


class Constant(NamedTuple):
    """The smallest ratio of `|J delta|` to a weighted sum of block norms of delta."""

    found: float  # an upper bound on the constant
    certified: float  # a proved lower bound on it
    direction: Float[Tensor, " p"]  # the delta of `found`


def lower_bound_constant(
    J: Float[Tensor, "n p"],
    blocks: list[tuple[list[int], float]],
    basis: Float[Tensor, "p m"] | None = None,
) -> Constant:
    """`min |J delta| / (sqrt(n) N(delta))` over the span of `basis`, `N(delta) = sum_blocks weight |delta_block|`.

    On the ellipsoid `|J delta| <= sqrt(n)`, `delta = M y` with `|y| <= 1`. N is convex, so it climbs when
    y is replaced by the maximizer of N's linearization; the best of several starts is kept. The certificate:
    N is at most the sum of the blocks' spectral norms, and at most `sqrt(number of blocks)` times the
    spectral norm of all blocks together, each block of rows of M with its weight. ValueError if the blocks do not name
    every column once, or J has not full rank on the span.
    """
    if sorted(i for block, _ in blocks for i in block) != list(range(J.shape[1])):
        raise ValueError(f"blocks: expected each of the {J.shape[1]} columns once")
    M = whitened(J, torch.eye(J.shape[1], dtype=J.dtype, device=J.device) if basis is None else basis)
    parts = [weight * M[block] for block, weight in blocks]
    together = float(torch.linalg.matrix_norm(torch.cat(parts), 2)) * len(parts) ** 0.5
    apart = sum(float(torch.linalg.matrix_norm(part, 2)) for part in parts)
    draws = torch.randn(STARTS, M.shape[1], generator=torch_stream(0, "start"), dtype=J.dtype)
    y = torch.cat([torch.linalg.svd(torch.cat(parts)).Vh[:10], draws.to(J.device)])
    for _ in range(STEPS):
        y = y / y.norm(dim=1, keepdim=True)  # pyright: ignore[reportAttributeAccessIssue]
        y = sum(torch.nn.functional.normalize(y @ part.T) @ part for part in parts)
    y = y / y.norm(dim=1, keepdim=True)  # pyright: ignore[reportAttributeAccessIssue]
    reached = sum((y @ part.T).norm(dim=1) for part in parts)
    best = int(reached.argmax())  # pyright: ignore[reportAttributeAccessIssue]
    return Constant(1 / float(reached[best]), 1 / min(apart, together), M @ y[best])


def whitened(J: Float[Tensor, "n p"], basis: Float[Tensor, "p m"]) -> Float[Tensor, "p m"]:
    """M with the span of `basis` and `|J M y| = sqrt(n) |y|`; ValueError if J has not full rank there."""
    A = J @ basis
    if numerical_nullity(A):
        raise ValueError("J: expected full rank, got a null direction, where the constant is 0")
    return basis @ torch.linalg.inv(torch.linalg.qr(A / len(J) ** 0.5).R)


def loss_blocks(G: MixingMeasure) -> list[tuple[list[int], float]]:
    """The blocks of L_3 (Eq. 12) near G for `lower_bound_constant`, columns as in `jacobian`.

    To first order `L_3 = sum_j exp(beta0_j) (|dbeta0_j| + |dbeta1_j| + |deta_j|)`, or with ds_j for dbeta1_j.
    """
    k, d = G.beta1.shape
    beta0, beta1, eta = torch.arange(k * (2 * d + 2)).split([k, k * d, k * (d + 1)])
    columns = zip(beta0.view(k, 1), beta1.view(k, d), eta.view(k, d + 1), G.beta0.exp().tolist(), strict=True)
    return [(block.tolist(), weight) for *blocks, weight in columns for block in blocks]


def centred_ratio(
    G_star: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str, delta: Float[Tensor, " p"]
) -> tuple[Tensor, Tensor]:
    """`(|f_G - f_*|, L_3(G, G_*))` for G = G_* + delta in `(beta0, s, eta)`, centred; both differentiable in delta.

    G_star is centred. The norm is the root mean square over x. L_3 is taken with s for beta1, every atom in
    the cell of its own atom of G_star.
    """
    k, d = G_star.beta1.shape
    by_beta0, by_s, by_eta = delta.split([k, k * d, k * (d + 1)])
    s_star, w_star = router.embedding(G_star.beta1), G_star.beta0.exp()
    beta0, s, eta = G_star.beta0 + by_beta0, s_star + by_s.view(k, d), G_star.eta + by_eta.view(k, d + 1)
    w = torch.softmax(beta0, 0)
    s = s - w @ s
    phi, u = expert_profile(expert), router.feature(x)
    f = mixed(u @ s.T + beta0, preactivations(G_star.with_(eta=eta), x), phi)
    f_star = regression_function(G_star, x, router, expert)
    loss = (w - w_star).abs().sum() + w @ ((s - s_star).norm(dim=1) + by_eta.view(k, d + 1).norm(dim=1))
    return (f - f_star).square().mean().sqrt(), loss


def smallest_ratio(
    G_star: MixingMeasure,
    x: Float[Tensor, "n d"],
    router: Router,
    expert: str,
    radius: float,
    basis: Float[Tensor, "p m"],
    starts: Float[Tensor, "a m"],
) -> Float[np.ndarray, "a 2"]:
    """Local minima of `|f_G - f_*| / L_3` over `G = G_* + delta`, centred, `|delta| = radius`.

    By BFGS in y, `delta = radius B y / |B y|`, B the basis; that of `whitened` makes the function's change about `|y|`.
    Of each descent L_3 and the ratio at the end are given.
    """
    check.positive("radius", radius)

    def at(y: Tensor) -> tuple[Tensor, Tensor]:
        delta = basis @ y
        return centred_ratio(G_star, x, router, expert, radius * delta / delta.norm())

    return np.array([descended(at, y / y.norm())[1:] for y in starts])


def descended(price: Price, start: Float[Tensor, " m"]) -> tuple[Float[Tensor, " m"], float, float]:
    """A local minimum of `change / loss`, `price(y) = (change, loss)`, by BFGS: where it is, loss and ratio there."""

    def logarithm(y: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.from_numpy(y).requires_grad_()
        change, loss = price(at)
        value = change.log() - loss.log()
        value.backward()
        return value.item(), at.grad.numpy()  # pyright: ignore[reportOptionalMemberAccess]

    found = minimize(logarithm, start.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": 300})
    end = torch.from_numpy(found.x)
    change, loss = price(end)
    return end, float(loss), float(change / loss)
