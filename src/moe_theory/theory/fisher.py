"""What least squares can reach: standard errors from the Fisher information of the regression MoE."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.mixture import MixingMeasure, jacobian
from moe_theory.models.routers import Router
from moe_theory.tasks.regression import NOISE


def standard_errors(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu"
) -> dict[str, float]:
    """Limits of `sqrt(n)` times the root mean square of four parts of `error_parts`.

    With noise of variance sigma^2 = `NOISE`^2 the estimator's covariance is `sigma^2 (J^T J)^+` up to the null space
    of J, and the parts `expert`, `weight`, `contribution`, `direction` are made so that they do not depend on what
    is in it.

    Args:
        G: the truth, as many atoms as are fitted.
        x: inputs over which J^T J is averaged, many more than parameters.
        router, expert: of the truth and of what is fitted; expert is a key of `moe_theory.models.mixture.EXPERTS`.

    Raises:
        ValueError: for fewer inputs than parameters.
    """
    J = jacobian(G, x, router, expert)
    n, p = J.shape
    if n < p:
        raise ValueError(f"x: expected at least as many inputs as parameters, {p}, got {n}")
    covariance = NOISE**2 * torch.linalg.pinv(J.T @ J / n, hermitian=True, rtol=1e-12)
    maps = _parts(G, router)
    return {name: float((L @ covariance @ L.T).trace().sqrt()) for name, L in maps.items()}


def _parts(G: MixingMeasure, router: Router) -> dict[str, Float[Tensor, "m p"]]:
    """Linear maps from the errors (beta0, beta1, eta) to the parts."""
    k, d = G.beta1.shape
    like = dict(dtype=G.beta1.dtype, device=G.beta1.device)
    centre = torch.eye(k, **like) - 1 / k
    slopes = torch.block_diag(*router.slope(G.beta1))
    gauge = router.gauge(router.embedding(G.beta1))
    direction = torch.eye(k * d, **like) - torch.kron(torch.full((k, k), 1 / k, **like), gauge)
    blocks = {"weight": centre, "direction": direction @ slopes, "expert": torch.eye(k * (d + 1), **like)}
    sizes, maps, column = {"weight": k, "direction": k * d, "expert": k * (d + 1)}, {}, 0
    for name, size in sizes.items():
        maps[name] = torch.zeros(blocks[name].shape[0], k * (2 * d + 2), **like)
        maps[name][:, column : column + size] = blocks[name]
        column += size
    by_weight = torch.block_diag(*G.eta.split(1)).T @ centre
    maps["contribution"] = maps["expert"].clone()
    maps["contribution"][:, :k] = by_weight
    return maps
