"""How fast routers and experts are learned at the paper's size (Nguyen et al. 2025, Figures 1 and 2, Theorems 1 and 3).

Two procedures: the estimator of Eq. 3, and the paper's own (E.1: ten epochs of stochastic gradient
descent at rate 0.1 from near the truth). Two truths: the paper's, whose last two routers are zero, and
the same one with none set to zero, to which the theory of the cosine router applies.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.scaling import Exponent, by_size, exponent_by_size, exponent_difference, fit_exponent, log_slope
from moe_theory.measure.voronoi import aligned, error_parts, voronoi_loss
from moe_theory.models.mixture import (
    MixingMeasure,
    draw_measure,
    expert_profile,
    mixed,
    preactivations,
    regression_function,
)
from moe_theory.models.routers import ROUTERS, Router
from moe_theory.streams import torch_stream
from moe_theory.tasks.regression import sample_regression, uniform_inputs
from moe_theory.theory.fisher import descent_law
from moe_theory.training.least_squares import least_squares
from moe_theory.training.sgd import stochastic_descent, stochastic_descents

SIZES = (1_000, 2_154, 4_642, 10_000, 21_544, 46_416, 100_000)
FROM = 10_000  # the least size from which exponents of least squares in d = 32 are fitted
REPETITIONS, D, K, TRUTH_SEED = 20, 32, 8, 0
COMPARED = ("linear", "cosine", "perturbed")  # the routers of the grids: a new one does not change what is stored
NEAR, FAR = 0.1, 1.0  # standard deviation of a start about the truth, in those of the truth's parameters
EPOCHS, RATE = 10, 0.1  # of E.1
DRAWS = 60  # from the law of the losses after so many steps
TOGETHER, LARGEST = 10, 21_544  # repetitions and size of `batches`, for their cost
N_STARTS = 10  # data sets of size FROM that are fitted from far starts
N_FRESH = 20_000  # inputs on which the error of the regression function is measured
DIGITS = 6  # of what is stored
SMOKE = dict(n=700)


class Figure(NamedTuple):
    """What a figure of the paper fits to what: routers compared, router of the truth, experts, atoms, loss."""

    routers: tuple[str, str]
    true_router: str | None  # None: that of the fit
    expert: str
    k: int  # atoms that are fitted
    loss: str  # the Voronoi loss that is plotted


FIGURES = {
    "1a": Figure(("cosine", "perturbed"), None, "relu", K, "L3"),
    "1b": Figure(("cosine", "perturbed"), None, "relu", K + 1, "L2"),
    "2a": Figure(("cosine", "perturbed"), "linear", "relu", K, "L3"),
    "2b": Figure(("linear", "perturbed"), "linear", "quadratic", K, "L3"),
}

#: Readings of what E.1 leaves open, the batch and how near "near" is.
READINGS = {
    "one batch, start at 0.0001": dict(near=1e-4, batch="all"),
    "one batch, start at 0.01": dict(near=1e-2, batch="all"),
    "batches of 100, start at 0.1": dict(near=NEAR, batch=100),
}
#: Two more, of `batches`; the three were read first.
READINGS |= {f"batches of 100, start at {near:g}": dict(near=near, batch=100) for near in (1e-2, 1e-4)}

#: Columns of `lse` that `contrast` compares, in words.
WORDS = {
    "L3": "loss, norms of the start",
    "L3_uniform": "loss, norms uniform",
    "L3_one": "loss, norms 1",
    "L3_aligned": "loss modulo the null space",
    "contribution": "contributions",
    "expert": "experts",
}


def lse() -> list[dict]:
    """The estimator, exact-specified: three routers at the regular truth; at the paper's two of them, from FROM on."""
    keys = [dict(truth="regular", router=r) for r in COMPARED]
    keys += [dict(truth="paper", router=r) for r in FIGURES["1a"].routers]
    rows = [dict(**key, n=n, rep=rep) for n in SIZES for rep in range(REPETITIONS) for key in keys]
    return [row for row in rows if row["truth"] == "regular" or row["n"] >= FROM]


def bounds() -> list[dict]:
    """The perturbed router at the regular truth, from FROM on, in a smaller and in a larger parameter space."""
    sizes = [n for n in SIZES if n >= FROM]
    keys = [dict(truth="regular", router="perturbed", bound=bound) for bound in (0.5, 2.0)]
    return [dict(**key, n=n, rep=rep) for n in sizes for rep in range(REPETITIONS // 2) for key in keys]


def starts() -> list[dict]:
    """One size of the regular truth, from a near and from a far start."""
    return [dict(truth="regular", router=r, n=FROM, rep=i) for r in COMPARED for i in range(N_STARTS)]


def sgd() -> list[dict]:
    """Figures 1 and 2 by the paper's procedure; 1a at the regular truth, too, and from one more distance."""
    pairs = [dict(figure=f, truth="paper", router=r) for f, figure in FIGURES.items() for r in figure.routers]
    keys = [{**pair, **how} for pair in pairs for how in list(READINGS.values())[:3]]
    regular = [dict(near=near, batch="all") for near in (1e-4, 1e-3, 1e-2)]
    keys += [dict(figure="1a", truth="regular", router=r, **how) for r in FIGURES["1a"].routers for how in regular]
    return [dict(**key, n=n, rep=rep) for n in SIZES for rep in range(REPETITIONS) for key in keys]


def batches() -> list[dict]:
    """Figures 1 and 2 by batches of 100 from the two nearer starts, up to `LARGEST`; `TOGETHER` make a row."""
    pairs = [dict(figure=f, router=r) for f, figure in FIGURES.items() for r in figure.routers]
    more = list(READINGS.values())[3:]
    return [dict(**pair, **how, n=n, reps=TOGETHER) for n in SIZES if n <= LARGEST for how in more for pair in pairs]


def truth(name: str) -> MixingMeasure:
    """The true measure of E.1: 8 experts in d = 32; "paper" sets routers 7 and 8 to zero, "regular" does not."""
    G = draw_measure(K, D, TRUTH_SEED, router_scale=0.1)
    if name == "regular":
        return G
    last = torch.arange(K) >= 6
    return G.with_(beta0=G.beta0.masked_fill(last, 0), beta1=G.beta1.masked_fill(last[:, None], 0))


def true_function(G: MixingMeasure, router: Router, expert: str, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """f_G, where a zero vector that has no embedding counts as 0, the convention of numerical libraries."""
    zero = (G.beta1 == 0).all(1)
    if not (router.sphere and zero.any()):
        return regression_function(G, x, router, expert)
    s = torch.zeros_like(G.beta1)
    s[~zero] = router.embedding(G.beta1[~zero])
    return mixed(router.feature(x) @ s.T + G.beta0, preactivations(G, x), expert_profile(expert))


def near(G: MixingMeasure, k: int, scale: float, seed: int) -> tuple[MixingMeasure, Int[Tensor, " k"]]:
    """A start of k atoms about G, and the atom of G each comes from; atoms beyond those of G split one in two.

    Every parameter moves by `scale` times the standard deviation it has in the truth of E.1.
    """
    rng = torch_stream(seed, "near")
    cell = torch.arange(k)
    for extra in range(len(G), k):
        cell[extra] = int(torch.randint(len(G), (1,), generator=rng))
    unit = scale / math.sqrt(G.d)
    move = unit * torch.randn(k, 2 * G.d + 2, generator=rng, dtype=G.eta.dtype)
    weight = G.beta0[cell] - torch.bincount(cell)[cell].to(G.eta).log()
    beta1 = G.beta1[cell] + 0.1 * move[:, 1 : G.d + 1]
    return MixingMeasure(weight + 0.1 * move[:, 0], beta1, G.eta[cell] + move[:, G.d + 1 :]), cell


def normalized(G: MixingMeasure, G_star: MixingMeasure) -> MixingMeasure:
    """G with its beta0 shifted so that its total weight is that of G_star: the shift changes no function."""
    return G.with_(beta0=G.beta0 - G.beta0.logsumexp(0) + G_star.beta0.logsumexp(0))


def losses(G: MixingMeasure, G_star: MixingMeasure) -> dict[str, float]:
    """The paper's Voronoi losses of the parameters as they stand."""
    return {kind: voronoi_loss(G, G_star, kind) for kind in ("L2", "L3")}


def over_norms(G: MixingMeasure, G_star: MixingMeasure, router: Router, *, seed: int) -> dict[str, float]:
    """L_3 of measures with the same function: norms of beta1 uniform in (0, 1), or 1; and `aligned` with the truth.

    Under a router that knows the norms the first two are the loss of G itself.
    """
    norms = torch.ones_like(G.beta0) if router.sphere else G.beta1.norm(dim=1)
    drawn = torch.rand(len(G), generator=torch_stream(seed, "norms"), dtype=norms.dtype) if router.sphere else norms
    unit = G.beta1 / G.beta1.norm(dim=1, keepdim=True)
    equal = {"uniform": G.with_(beta1=drawn[:, None] * unit), "one": G.with_(beta1=norms[:, None] * unit)}
    equal["aligned"] = aligned(G, G_star, router)
    return {f"L3_{name}": voronoi_loss(H, G_star, "L3") for name, H in equal.items()}


def parts(G: MixingMeasure, G_star: MixingMeasure, router: Router, cell: Int[Tensor, " k"]) -> dict[str, float]:
    """`error_parts`; under the cosine router over the atoms whose router is not zero in the truth."""
    if not router.sphere or (G_star.beta1 != 0).any(1).all():
        return error_parts(G, G_star, router, cell)
    good = (G_star.beta1 != 0).any(1)
    kept, number = good[cell], good.long().cumsum(0) - 1
    return error_parts(_atoms(G, kept), _atoms(G_star, good), router, number[cell[kept]])


def _atoms(G: MixingMeasure, which: Tensor) -> MixingMeasure:
    return MixingMeasure(G.beta0[which], G.beta1[which], G.eta[which])


def _problem(key: dict) -> tuple[MixingMeasure, Router, Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Truth, fitted router, true function and data of a row of Figure 1."""
    G, router = truth(key["truth"]), ROUTERS[key["router"]]()
    f = partial(true_function, G, router, "relu")
    return G, router, f, *sample_regression(f, key["n"], D, 1 + key["rep"])


def lse_row(key: dict) -> dict:
    """The estimator of Eq. 3 on one data set, from a near start; parameters in |beta1| <= `bound`, or 1."""
    G, router, f, x, y = _problem(key)
    start, cell = near(G, K, NEAR, 1000 + key["rep"])
    bound = key.get("bound", 1.0)
    found = least_squares(x[None], y[None], [start], router, radius=bound)
    end = normalized(found.G[0], G)
    fresh = uniform_inputs(N_FRESH, D, 999)
    error = regression_function(end, fresh, router) - f(fresh)
    values = dict(
        steps=int(found.steps[0]),
        gain=float(found.gain[0]),
        promise=float(found.promise[0]),
        sse=float(found.sse[0]),
        sse_truth=float((y - f(x)).square().sum()),
        regression=float(error.square().mean().sqrt()),
        at_bound=int((end.beta1.norm(dim=1) > bound - 1e-6).sum()),
    )
    found_losses = losses(end, G) | over_norms(end, G, router, seed=key["rep"])
    return rounded(values | found_losses | parts(end, G, router, cell), DIGITS)


def starts_row(key: dict) -> dict:
    """The same from a near start and from a far one: their sums of squares, and how far apart they end."""
    G, router, _, x, y = _problem(key)
    pair = [near(G, K, scale, 1000 + key["rep"])[0] for scale in (NEAR, FAR)]
    found = least_squares(x.expand(2, *x.shape), y.expand(2, len(y)), pair, router, radius=1.0)
    fresh = uniform_inputs(N_FRESH, D, 999)
    ends = [regression_function(end, fresh, router) for end in found.G]
    values = dict(
        near=float(found.sse[0]),
        far=float(found.sse[1]),
        functions=float((ends[0] - ends[1]).square().mean().sqrt()),
        experts=float((found.G[0].eta - found.G[1].eta).norm()),
    )
    return rounded(values, DIGITS)


def _descent(key: dict, G: MixingMeasure, rep: int) -> tuple:
    """True function, data, start and the cells of its atoms in one repetition of a figure."""
    figure = FIGURES[key["figure"]]
    f = partial(true_function, G, ROUTERS[figure.true_router or key["router"]](), figure.expert)
    return f, *sample_regression(f, key["n"], D, 1 + rep), *near(G, figure.k, key["near"], 1000 + rep)


def sgd_row(key: dict) -> dict:
    """The paper's procedure on one data set of one figure; losses before and after, and the errors taken apart.

    With `epochs` in the key, so many of them.
    """
    figure, G, router, n = FIGURES[key["figure"]], truth(key["truth"]), ROUTERS[key["router"]](), key["n"]
    f, x, y, start, cell = _descent(key, G, key["rep"])
    batch = n if key["batch"] == "all" else key["batch"]
    how = dict(epochs=key.get("epochs", EPOCHS), rate=RATE, batch=batch, seed=2000 + key["rep"])
    end = stochastic_descent(x, y, start, router, figure.expert, **how)
    fresh = uniform_inputs(N_FRESH, D, 999)
    error = regression_function(end, fresh, router, figure.expert) - f(fresh)
    before = {f"{name}_start": value for name, value in losses(start, G).items()}
    values = dict(regression=float(error.square().mean().sqrt()))
    return rounded(values | before | losses(end, G) | parts(end, G, router, cell), DIGITS)


def batches_row(key: dict) -> dict:
    """The first `reps` repetitions of a row of `sgd`, descended together; losses by repetition."""
    figure, G, router, reps = FIGURES[key["figure"]], truth("paper"), ROUTERS[key["router"]](), range(key["reps"])
    _, x, y, starts, _ = zip(*(_descent(key, G, rep) for rep in reps), strict=True)
    how = dict(epochs=EPOCHS, rate=RATE, batch=key["batch"], seeds=[2000 + rep for rep in reps])
    ends = stochastic_descents(torch.stack(x), torch.stack(y), list(starts), router, figure.expert, **how)
    before, after = ([losses(one, G) for one in some] for some in (starts, ends))
    found = {f"{kind}_start": [one[kind] for one in before] for kind in ("L2", "L3")}
    return rounded(found | {kind: [one[kind] for one in after] for kind in ("L2", "L3")}, DIGITS)


def by_repetition(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `batches` as rows of `sgd`, one for each repetition."""
    kinds = ["L2_start", "L3_start", "L2", "L3"]
    single = rows.assign(truth="paper", rep=[list(range(reps)) for reps in rows["reps"]]).explode(["rep", *kinds])
    return single.astype(dict.fromkeys(kinds, float) | dict(rep=int))


def checked(figures: tuple[str, ...]) -> list[dict]:
    """Keys of rows of `sgd` that a chapter computes again: of each router and start one with few examples at least."""
    at = ((1e-4, 1_000), (1e-4, 4_642), (1e-2, 2_154), (NEAR, 1_000))
    return [
        dict(figure=f, truth="paper", router=r, near=near, n=n, rep=0)
        for f in figures
        for r in FIGURES[f].routers
        for near, n in at
    ]


def approximation(figure: str, kind: str, seed: int) -> tuple[float, float]:
    """The best fit of a router without noise to data from the paper's truth under the linear one, from a near start.

    Returns:
        Its loss L_3, and the distance of its function from the true one.
    """
    G, x, expert = truth("paper"), uniform_inputs(5_000, D, seed + 1), FIGURES[figure].expert
    y, (start, _) = regression_function(G, x, ROUTERS["linear"](), expert), near(G, K, NEAR, seed)
    fit = least_squares(x[None], y[None], [start], ROUTERS[kind](), expert, tolerance=1e-3, steps=40)
    return losses(normalized(fit.G[0], G), G)["L3"], float((fit.sse[0] / len(x)).sqrt())


def slopes(rows: pd.DataFrame, figure: str) -> dict[str, dict[str, Exponent]]:
    """By reading and router, the power of n of the mean loss that a figure plots, from rows like those of `sgd`."""
    rows, found = rows[(rows["figure"] == figure) & (rows["truth"] == "paper")], {}
    for name, how in READINGS.items():
        read = rows[(rows["near"] == how["near"]) & (rows["batch"].astype(str) == str(how["batch"]))]
        by_router = {r: read[read["router"] == r] for r in FIGURES[figure].routers}
        loss = FIGURES[figure].loss
        found[name] = {r: exponent_by_size(some, loss, power=1) for r, some in by_router.items()}
    return found


def side_by_side(
    found: dict[str, dict[str, dict[str, Exponent]]], parts: tuple[str, ...], targets: list[dict[str, float]]
) -> pd.DataFrame:
    """Slopes of parts of a figure as text: the paper's line, then one for each reading.

    Args:
        found: by part, its `slopes`; parts: which of them; targets: of each part the paper's slope by router.
    """
    rows = {}
    for part, target in zip(parts, targets, strict=True):
        rows[part, "paper"] = {r: f"{slope:.2f}" for r, slope in target.items()}
        rows |= {(part, name): {r: str(e) for r, e in of.items()} for name, of in found[part].items()}
    return pd.DataFrame(rows).T.rename_axis(["part", "reading"]).fillna("–")


def compare_targets(found: list[dict[str, dict[str, Exponent]]], targets: list[dict[str, float]]) -> dict[str, float]:
    """By reading, how far the slope of a router is from the paper's, the farthest over routers and parts of a figure.

    Args:
        found: `slopes` of each part; targets: of each part the paper's slope by router.
    """
    return {
        name: max(abs(slope[name][r].slope - of[r]) for slope, of in zip(found, targets, strict=True) for r in of)
        for name in READINGS
    }


def contrast(rows: pd.DataFrame, column: str) -> dict[str, Exponent]:
    """Powers of n of the mean of a column by Figure 1's routers, from rows of `lse` with n >= FROM.

    And their difference, first less second, over the same data.
    """
    pairs = {r: by_size(rows[(rows["router"] == r) & (rows["n"] >= FROM)], column) for r in FIGURES["1a"].routers}
    (n, first), (_, second) = pairs.values()
    fits = {r: fit_exponent(*pair, power=1) for r, pair in pairs.items()}
    return fits | {"difference": exponent_difference(n, first, second, power=1)}


class Law(NamedTuple):
    """What `descent_law` says of ten steps on all examples near the regular truth: A and R."""

    keeps: Float[Tensor, "p p"]
    noise: Float[Tensor, "p p"]

    @classmethod
    def of(cls, router: Router, seed: int = 0, steps: int = EPOCHS) -> "Law":
        """The law under a router, its Hessian averaged over inputs drawn by the seed."""
        return cls(*descent_law(truth("regular"), uniform_inputs(N_FRESH, D, seed), router, rate=RATE, steps=steps))

    def losses(self, near_by: float, seed: int = 0) -> Float[Tensor, "sizes draws"]:
        """L_3 after the steps at every size. Nothing is fitted: a start is drawn as for a row, and so is the noise.

        Args:
            near_by: distance of the start, in the unit of `near`; seed: of the draws.
        """
        G, found = truth("regular"), []
        for rep in range(DRAWS):
            start, _ = near(G, K, near_by, 5000 + DRAWS * seed + rep)
            kept = G.flat() + self.keeps @ (start.flat() - G.flat())
            z = torch.randn(len(kept), generator=torch_stream(seed, "regression", rep), dtype=kept.dtype)
            ends = [MixingMeasure.of(kept + self.noise @ z / math.sqrt(n), K) for n in SIZES]
            found.append([voronoi_loss(end, G, "L3") for end in ends])
        return torch.tensor(found).T

    def slope(self, near_by: float, seed: int = 0) -> float:
        """The power of n of the mean of these losses."""
        return float(log_slope(SIZES, self.losses(near_by, seed).mean(1)))
