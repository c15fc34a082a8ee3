"""How much of a router's weight lies where the signal is (Dikkala et al. 2023, Section 3.1, last paragraph).

Named in the paper: 64 clusters, 24 of 240 dimensions relevant, constant experts, labels of ten numbers, Adam and its
rates (C.1). Not named there, and chosen here before any stored row was computed: the law and scale of the means (the
default of `GaussianMixture`), initial weights (the default of `SoftMoE`), 50,000 examples, batches of 256, the number
of steps, and lambda = 1e-5. The number of experts is not named either: 64, as in the paper's Figure 2, and 256. The
last three groups of `grid` change one of these choices at a time.

`decays` has other choices, made on seeds that it does not hold: those of `WIDE`, over lambda.
"""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_theory.models.soft import SoftMoE
from moe_theory.tasks.gaussians import GaussianMixture
from moe_theory.theory.spurious import relevant_share
from moe_theory.training.batched import losses, train

SEEDS, K, RELEVANT, D, OUTPUTS = range(5), 64, 24, 240, 10
BATCH, RATE, ROUTER_RATE, TEST, LIVE = 256, 3.2e-4, 3.2e-3, 4_000, 50
AT = (0, LIVE, 250, 500, *range(1_000, 10_001, 1_000))  # steps after which it is measured
BASE = dict(experts=64, decay=0.0, frozen=False, scale=3.0, init=1.0, n=50_000, steps=5_000)
RUNS = (
    {},
    {"decay": 1e-5},
    {"frozen": True, "steps": 3_000},
    {"experts": 256, "steps": 3_000},
    {"experts": 256, "decay": 1e-5, "steps": 3_000},
    {"scale": 1.5, "steps": 3_000},
    {"init": 0.25, "steps": 3_000},
    {"n": 5_000, "steps": 3_000},
)


def grid() -> list[dict]:
    """Five seeds for each of `RUNS`; a seed draws clusters, examples, initial weights and batches."""
    return [BASE | run | {"seed": seed} for run in RUNS for seed in SEEDS]


#: Eight experts to a cluster; means half as far apart; the start of PyTorch's linear
#: layers, a third of the variance; and batches and steps enough for Adam's rate to carry an expert to its label.
WIDE = {"experts": 512, "scale": 1.5, "init": 0.577, "batch": 512, "steps": 9_000}
DECAYS, WIDE_SEEDS = (0.0, 1e-6, 3e-6, 1e-5), SEEDS
SMOKE = dict(n=500, steps=LIVE)


def decays() -> list[dict]:
    """`WIDE` over lambda."""
    return [BASE | WIDE | {"decay": decay, "seed": seed} for seed in WIDE_SEEDS for decay in DECAYS]


def row(key: dict) -> dict:
    """A course, lists over `AT`: `relevant` and `spurious`, sums of squares of the router's weights; `loss`, on
    `TEST` fresh examples with every input sent to one expert; and `separation` of the clusters.
    """
    task = GaussianMixture(K, RELEVANT, spurious=D - RELEVANT, scale=key["scale"], seed=key["seed"])
    data, test = task.sample(key["n"], key["seed"]), task.sample(TEST, 1_000 + key["seed"])
    network = SoftMoE(D, OUTPUTS, key["experts"], seeds=[key["seed"]])
    with torch.no_grad():
        network.router.W[0].mul_(key["init"])
    how = dict(steps=key["steps"], batch=key.get("batch", BATCH), rate=RATE, router_rate=ROUTER_RATE)
    how |= dict(seeds=[key["seed"]], decay=[key["decay"]], frozen=[key["frozen"]])
    course = [measured(network, test)]
    for step, _ in enumerate(train(network, [data], **how), 1):
        if step in AT:
            course.append(measured(network, test))
    columns = map(list, zip(*course, strict=True))
    found = dict(zip(("relevant", "spurious", "loss"), columns, strict=True))
    return found | {"separation": rounded(task.separation, 6)}


def measured(network: SoftMoE, test) -> tuple[float, float, float]:
    """Square of the router's weights in the relevant directions, in the others, and the loss on `test`."""
    W: Tensor = network.router.W[0].detach()[0, 0]
    total = float(W.double().square().sum())
    relevant = float(relevant_share(W.double(), RELEVANT)) * total
    return tuple(rounded([relevant, total - relevant, float(losses(network, [test])[0])], 6))


def live(key: dict) -> dict:
    """The first `LIVE` steps of a row."""
    return row({**key, "steps": LIVE})


def courses(rows: pd.DataFrame, **changes) -> dict[str, Float[np.ndarray, "seeds steps"]]:
    """Over `AT`, for each seed: `relevant`, `spurious`, `loss` and the `share` of the first of the two squares.

    Args:
        rows: stored ones of either grid.
        changes: values other than those of `BASE`, for any of its choices but the number of steps.
    """
    key = {name: value for name, value in (BASE | changes).items() if name != "steps"}
    of = rows[(rows[list(key)] == list(key.values())).all(axis=1)].sort_values("seed")  # pyright: ignore
    if of.empty:
        raise ValueError(f"changes: expected choices of a stored row, got {changes}")
    course = {name: np.array(of[name].tolist()) for name in ("relevant", "spurious", "loss")}
    return course | {"share": course["relevant"] / (course["relevant"] + course["spurious"])}


def distance(pair: pd.DataFrame) -> float:
    """Largest relative distance between the steps computed again and those stored, in what `recompute` returns."""
    again = pair[["relevant", "spurious", "loss"]].T
    off = [np.array(now) / stored[: len(now)] - 1 for stored, now in again.itertuples(index=False)]
    return float(np.abs(off).max())
