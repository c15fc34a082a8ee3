"""L and beta behind two blocks, as more experts are selected: smooth2025, Lemma 1, which is about any number of blocks.

Each row is one example and one draw of all weights; see `theory.tanh_blocks.behind_two_blocks`.
"""

from torch.func import grad

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.curvature import largest_curvature
from moe_theory.theory.tanh_blocks import behind_two_blocks

SELECTED, CORRELATIONS, REPETITIONS = (2, 4, 8, 16, 32), (1.0, 0.5, 0.0), 100
FIRST_SEED = 40_000
SMOKE = {}  # a row takes a second as it is


def grid() -> list[dict]:
    """Every correlation of the experts, outputs as they are or divided by their size, every K, a hundred draws."""
    return [
        dict(rho=rho, normalized=normalized, k=k, rep=rep)
        for rho in CORRELATIONS
        for normalized in (0, 1)
        for k in SELECTED
        for rep in range(REPETITIONS)
    ]


def row(key: dict) -> dict:
    """L: norm of the gradient; beta: the largest |eigenvalue| of the Hessian; in the parameters of both blocks."""
    loss, w = behind_two_blocks(key["k"], key["rho"], bool(key["normalized"]), FIRST_SEED + key["rep"])
    return rounded(dict(L=float(grad(loss)(w).norm()), beta=abs(largest_curvature(loss, w).value)), 6)
