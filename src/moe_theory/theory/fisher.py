"""What least squares can reach: standard errors from the Fisher information of the regression MoE."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from moe_theory import _validate as check
from moe_theory.models.mixture import MixingMeasure, jacobian
from moe_theory.models.routers import Router
from moe_theory.tasks.regression import NOISE


def standard_errors(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu"
) -> dict[str, float]:
    """Limits of `sqrt(n)` times the root mean square of four parts of `error_parts`, and of the function.

    With noise of variance sigma^2 = `NOISE`^2 the estimator's covariance is `sigma^2 (J^T J)^+` up to the null space
    of J, and the parts `expert`, `weight`, `contribution`, `direction` are made so that they do not depend on what
    is in it. `regression` is the error of the function, with the square `sigma^2 rank J`.

    Args:
        G: the truth, as many atoms as are fitted.
        x: inputs over which J^T J is averaged, many more than parameters; ValueError for fewer.
        router, expert: of the truth and of what is fitted; expert is a key of `moe_theory.models.mixture.EXPERTS`.
    """
    J = _tall_jacobian(G, x, router, expert)
    information = J.T @ J / len(J)
    covariance = NOISE**2 * torch.linalg.pinv(information, hermitian=True, rtol=1e-12)
    found = {name: float((L @ covariance @ L.T).trace().sqrt()) for name, L in _parts(G, router).items()}
    return found | {"regression": float((information * covariance).sum().sqrt())}


def polar_errors(G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str) -> Float[Tensor, " m"]:
    """Limits of `sqrt(n)` times the standard errors of `log |beta1_1|` and of its angle, inputs in the plane.

    Weight and router vector of the last expert are known: otherwise no vector's error is finite, since the common
    shift of all is not determined. On a sphere there is no length to estimate, and only the second number.

    G, x, router and expert are as for `standard_errors`, with all router vectors nonzero and d = 2.
    """
    k, d = G.beta1.shape
    if d != 2:
        raise ValueError(f"G: expected inputs of dimension 2, got {d}")
    J = jacobian(G, x, router, expert)
    free = G.beta1[:-1]
    polar = torch.stack([free, torch.stack([-free[:, 1], free[:, 0]], 1)], 1)[:, int(router.sphere) :]
    by_polar = torch.einsum("nid,imd->nim", J[:, k : 3 * k].unflatten(1, (k, 2))[:, :-1], polar)
    J = torch.cat([by_polar.flatten(1), J[:, : k - 1], J[:, 3 * k :]], 1)
    scale = J.norm(dim=0)
    spread = torch.linalg.inv(torch.linalg.qr(J / scale).R).norm(dim=1) / scale
    return NOISE * math.sqrt(len(x)) * spread[: polar.shape[1]]


def descent_law(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu", *, rate: float, steps: int
) -> tuple[Float[Tensor, "p p"], Float[Tensor, "p p"]]:
    """(A, R) such that gradient descent on all n examples turns an error `D` near G into `A D + R z / sqrt(n)`.

    With `H = 2 J^T J / n` a step of the mean squared error takes D to `D - rate (H D - 2 J^T eps / n)`, hence
    `A = (1 - rate H)^T` and, as `J^T eps` has covariance `sigma^2 J^T J`, `R = sigma (2 / H)^(1/2) (1 - A)`,
    zero where H is; z is standard normal in R^p. As T grows `R R^T` comes to the covariance of least squares.

    G, x, router and expert are as for `standard_errors`; T is the number of steps.
    """
    J = _tall_jacobian(G, x, router, expert)
    h, Q = torch.linalg.eigh(2 * J.T @ J / len(J))
    keeps = (1 - check.positive("rate", rate) * h) ** check.integer("steps", steps, 1)
    noise = torch.where(h > 1e-12 * h[-1], NOISE * (2 / h.clamp_min(1e-300)).sqrt() * (1 - keeps), 0)
    return (Q * keeps) @ Q.T, (Q * noise) @ Q.T


def _tall_jacobian(G: MixingMeasure, x: Tensor, router: Router, expert: str) -> Float[Tensor, "n p"]:
    """The Jacobian; ValueError for fewer inputs than parameters."""
    J = jacobian(G, x, router, expert)
    if len(J) < J.shape[1]:
        raise ValueError(f"x: expected at least as many inputs as parameters, {J.shape[1]}, got {len(J)}")
    return J


def _parts(G: MixingMeasure, router: Router) -> dict[str, Float[Tensor, "m p"]]:
    """Linear maps from the errors (beta0, beta1, eta) to the parts."""
    k, d = G.beta1.shape
    like: dict[str, Any] = dict(dtype=G.beta1.dtype, device=G.beta1.device)
    centre = torch.eye(k, **like) - 1 / k
    slopes = torch.block_diag(*router.slope(G.beta1))
    gauge = router.gauge(router.embedding(G.beta1))
    direction = torch.eye(k * d, **like) - torch.kron(torch.full((k, k), 1 / k, **like), gauge)
    expert = pad(torch.eye(k * (d + 1), **like), (k + k * d, 0))
    contribution = expert.clone()
    contribution[:, :k] = torch.block_diag(*G.eta.split(1)).T @ centre
    return {
        "weight": pad(centre, (0, k * (2 * d + 1))),
        "direction": pad(direction @ slopes, (k, k * (d + 1))),
        "expert": expert,
        "contribution": contribution,
    }
