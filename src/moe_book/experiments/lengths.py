"""How well least squares finds the length of a perturbed router's vector (Nguyen et al. 2025, Eq. 8), in the plane."""

import torch

from moe_book.experiments.catalogue import rounded
from moe_theory.models.mixture import MixingMeasure, regression_function
from moe_theory.models.routers import Perturbed
from moe_theory.streams import torch_stream
from moe_theory.tasks.regression import NOISE
from moe_theory.theory.identifiability import shifted
from moe_theory.training.least_squares import least_squares

TAUS, REPETITIONS, N, SIGMA = (1.0, 0.1, 0.01), 240, 10_000, NOISE
SMOKE = dict(n=1_000)


def plane() -> MixingMeasure:
    """A truth of three experts tanh(a.x + b) with d = 2, whose first router vector has length 1."""
    angle = torch.tensor([0.2, 1.2, 2.2], dtype=torch.float64)
    length = torch.tensor([1.0, 0.8, 1.2], dtype=torch.float64)
    return MixingMeasure(
        beta0=torch.tensor([0.3, -0.2, 0.0], dtype=torch.float64),
        beta1=length[:, None] * torch.stack([angle.cos(), angle.sin()], 1),
        eta=torch.tensor([[2.0, 1.0, 0.5], [-1.5, 1.0, 1.0], [0.5, -2.0, -1.0]], dtype=torch.float64),
    )


def grid() -> list[dict]:
    """Data sets of their own for every tau."""
    return [dict(tau=tau, n=N, rep=rep) for tau in TAUS for rep in range(REPETITIONS)]


def row(key: dict) -> dict:
    """`length` is |s_1| of the fit, moved so that s_3 is the true one: f sees the s_i up to a common shift.

    `largest` is that of the fit's own |s_i|; `converged` is what `least_squares` says of the fit.
    """
    G, router = plane(), Perturbed(key["tau"])
    x, noise = (torch_stream(key["rep"], "regression", TAUS.index(key["tau"]), part) for part in (0, 1))
    x = 2 * torch.rand(key["n"], G.d, generator=x, dtype=torch.float64) - 1
    y = regression_function(G, x, router, "tanh")
    y = y + SIGMA * torch.randn(key["n"], generator=noise, dtype=torch.float64)
    s = router.embedding(G.beta1)
    start = shifted(G, -(s[0] + s[2]) / 2, router)  # the same function, all embeddings well inside the ball
    fit = least_squares(x[None], y[None], [start], router, "tanh", radius=1e6 * key["tau"])
    found = router.embedding(fit.G[0].beta1)
    values = {"length": (found[0] - found[2] + s[2]).norm(), "largest": found.norm(dim=1).max()}
    return rounded(values, 8) | {"converged": bool(fit.converged[0])}
