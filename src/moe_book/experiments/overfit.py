"""One expert too many: what is slower than parametric, and what is not learned at all (Nguyen et al. 2025, Table 1).

A small problem, k* = 3 experts in d = 4, where the asymptotic laws show; and, without any noise, how
fast the function notices that one expert has been split into two.
"""

import math

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.optimize import least_squares as scipy_least_squares
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.rates import COMPARED, DIGITS, NEAR, REPETITIONS, SIZES, losses, near, normalized
from moe_theory.measure.scaling import log_slope
from moe_theory.measure.voronoi import error_parts, voronoi_cells
from moe_theory.models.mixture import MixingMeasure, draw_measure, regression_function
from moe_theory.models.routers import ROUTERS, Router
from moe_theory.streams import torch_stream
from moe_theory.tasks.regression import sample_regression, uniform_inputs
from moe_theory.training.least_squares import evaluate, least_squares, problems, unknowns

K, D, TRUTH_SEED = 3, 4, 1
SCALES = {"linear": 1.0, "cosine": 0.3, "perturbed": 0.3}  # of the routers, so that their scores vary alike
N_FRESH = 20_000
SPLITS = ("along", "router", "across", "free")
GAPS = (0.4, 0.2, 0.1, 0.05, 0.025)
N_CONTACT, STARTS, EXACT = 2_000, 3, 1e-12
ROOM = 1.0  # how far each parameter of the mean measure may move: compactness, without which weights run to 0
SMOKE = dict(n=500)


def small() -> list[dict]:
    """Fits of smooth experts by three routers; one too many, smooth ones and ReLU by the perturbed router."""
    exact = [(dict(router=r, phi="tanh", k=K), 5 * REPETITIONS) for r in COMPARED]
    over = [(dict(router="perturbed", phi=e, k=K + 1), REPETITIONS) for e in ("tanh", "relu")]
    return [dict(**key, n=n, rep=rep) for key, reps in exact + over for n in SIZES[:-1] for rep in range(reps)]


def contact() -> list[dict]:
    """The best split of the first of two experts, by direction and distance, without noise."""
    experts = ("linear", "quadratic", "relu", "tanh")
    return [dict(router=r, expert=e, split=s, gap=g) for r in COMPARED for e in experts for s in SPLITS for g in GAPS]


def small_truth(router: str) -> MixingMeasure:
    """The truth of the small problem; its scores vary alike under the three routers."""
    return draw_measure(K, D, TRUTH_SEED, router_scale=SCALES[router], expert_scale=2.0)


def embedded(G: MixingMeasure, router: Router) -> MixingMeasure:
    """G with the embeddings in place of beta1: atoms as the function sees them."""
    return G.with_(beta1=router.embedding(G.beta1))


def small_row(key: dict) -> dict:
    """The estimator on one data set; with one atom too many the best of three starts, each splitting another expert."""
    router, expert, n, G = ROUTERS[key["router"]](), key["phi"], key["n"], small_truth(key["router"])
    x, y = sample_regression(lambda x: regression_function(G, x, router, expert), n, D, 1 + key["rep"])
    starts = [_split_start(G, key["k"], j, 1000 + 10 * key["rep"] + j) for j in range(K)][: 1 if key["k"] == K else K]
    B = len(starts)
    found = least_squares(
        x.expand(B, n, D), y.expand(B, n), starts, router, expert, radius=10.0, tolerance=0.01, steps=100
    )
    best = int(found.sse.argmin())
    end = normalized(found.G[best], G)
    cell = voronoi_cells(embedded(end, router), embedded(G, router))
    fresh = uniform_inputs(N_FRESH, D, 999)
    error = regression_function(end, fresh, router, expert) - regression_function(G, fresh, router, expert)
    values = dict(
        steps=int(found.steps[best]),
        promise=float(found.promise[best]),
        sse=float(found.sse[best]),
        sse_other=float(found.sse.median()),
        regression=float(error.square().mean().sqrt()),
        lightest=float(end.beta0.softmax(0).min()),
        covered=len(set(cell.tolist())) == len(G),
    )
    if not values["covered"]:
        cell = torch.tensor([*range(K), best][: key["k"]])
    return rounded(values | losses(end, G) | error_parts(end, G, router, cell), DIGITS)


def _split_start(G: MixingMeasure, k: int, j: int, seed: int) -> MixingMeasure:
    """A near start; with one atom more than G, atom j of G is the one in two."""
    start, _ = near(G, len(G), NEAR, seed)
    if k == len(G):
        return start
    other, _ = near(G, len(G), NEAR, seed + 500_000)
    half = start.beta0.clone()
    half[j] -= math.log(2)
    return MixingMeasure(
        torch.cat([half, half[j : j + 1]]),
        torch.cat([start.beta1, other.beta1[j : j + 1]]),
        torch.cat([start.eta, other.eta[j : j + 1]]),
    )


def lengths_off(router: str) -> Float[np.ndarray, " R"]:
    """What `radius` is at the start of each repetition of a row with k = K: distances of the lengths |beta1|."""
    G = small_truth(router)
    starts = [_split_start(G, K, 0, 1000 + 10 * rep) for rep in range(5 * REPETITIONS)]
    return np.array([float((start.beta1.norm(dim=1) - G.beta1.norm(dim=1)).norm()) for start in starts])


def contact_row(key: dict) -> dict:
    """The smallest `|f_G - f_G*|` over measures G in which expert 1 is two atoms of equal weight.

    The atoms are at `(s, eta) +- gap e` about a free mean, s the embedding. The unit vector e is one in the router,
    orthogonal to s*; along eta*; in the expert across eta*; or any vector orthogonal to s* in the
    router. What is free, e included, is optimized from several starts, the mean measure within `ROOM`
    of the truth (beyond it a penalty rises). Under the cosine router the two embeddings are then normalized.
    """
    router, expert = ROUTERS[key["router"]](), key["expert"]
    G = draw_measure(2, 3, TRUTH_SEED, router_scale=SCALES[key["router"]], expert_scale=2.0)
    x = uniform_inputs(N_CONTACT, G.d, 7)
    truth = unknowns(G, router)
    problem = problems(x[None], regression_function(G, x, router, expert)[None], router, expert)
    rng = torch_stream(11, "start")

    def residual(p: np.ndarray) -> np.ndarray:
        at = _pair(torch.from_numpy(p), truth, key["split"], key["gap"], router.sphere)
        outside = (torch.from_numpy(p[: truth.numel()]) - truth.flatten()).abs() - ROOM
        return torch.cat([evaluate(at[None], problem)[0][0], outside.clamp(min=0)]).numpy()

    found = []
    for start in _starts(truth[:, 0], key["split"], rng):
        begin = torch.cat([truth.flatten(), start]).numpy()
        end = scipy_least_squares(residual, begin, method="lm", xtol=1e-12, ftol=1e-12, gtol=1e-14, max_nfev=2_000)
        found.append(float(np.sqrt(np.sum(end.fun**2) / N_CONTACT)))
        if found[-1] < EXACT:
            break
    return rounded(dict(distance=min(found), agreeing=sum(r <= 1.01 * min(found) + EXACT for r in found)), DIGITS)


def order(rows: pd.DataFrame) -> float:
    """The power of the gap with which one kind of split is noticed in rows of `contact`, from the gaps 0.05 and 0.1.

    Infinite for one that is never noticed, to 1e-9.
    """
    if rows["distance"].max() < 1e-9:
        return math.inf
    near = rows[rows["gap"].between(0.05, 0.1)]
    return float(log_slope(near["gap"], near["distance"]))


def _starts(first: Float[Tensor, "2 q"], split: str, rng: torch.Generator) -> list[Tensor]:
    """Directions to start from: random ones; for a free split one of each of the other kinds as well."""
    draws = torch.randn(STARTS, first.numel() - 1, generator=rng, dtype=first.dtype)
    if split != "free":
        return list(draws)
    return [*(_direction(first, kind, draw) for kind, draw in zip(SPLITS[:STARTS], draws, strict=True)), draws[0]]


def _pair(p: Float[Tensor, " p"], truth: Float[Tensor, "2 k q"], split: str, gap: float, sphere: bool) -> Tensor:
    """The unknowns (2, k + 1, q) of `evaluate` from a free vector: a mean measure, then the direction of the split."""
    at, e = p[: truth.numel()].view_as(truth).clone(), _direction(truth[:, 0], split, p[truth.numel() :])
    first = torch.cat([at[0, 0, 1:], at[1, 0]])
    d = truth.shape[2] - 1
    rows = [torch.cat([at[0, 0, :1] - math.log(2), first + sign * gap * e]) for sign in (1, -1)]
    router = torch.stack([*(row[: d + 1] for row in rows), *at[0, 1:]])
    if sphere:
        router[:, 1:] = router[:, 1:] / router[:, 1:].norm(dim=1, keepdim=True)
    return torch.stack([router, torch.stack([*(row[d + 1 :] for row in rows), *at[1, 1:]])])


def _direction(first: Float[Tensor, "2 q"], split: str, draw: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """The unit vector e in (s, eta) of a split, from a free vector; `first` is atom 1 of the truth."""
    s, eta = first[0, 1:] / first[0, 1:].norm(), first[1] / first[1].norm()
    by_s, by_eta = draw[: len(s)], draw[len(s) :]
    by_s = by_s - by_s.dot(s) * s
    if split == "router":
        by_eta = torch.zeros_like(by_eta)
    elif split != "free":
        by_s = torch.zeros_like(by_s)
        by_eta = eta if split == "along" else by_eta - by_eta.dot(eta) * eta
    e = torch.cat([by_s, by_eta])
    return e / e.norm()
