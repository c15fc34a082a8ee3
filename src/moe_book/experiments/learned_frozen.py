"""Learned and frozen routers over the number of examples (Dikkala et al. 2023, Figures 3, 4 and 6).

A row is one training. The models of one seed have one task, training set, test set and order of examples; mixtures
start from the same weights. The paper names the sizes of networks, the optimizers and their rates (C.1); the means,
the numbers of samples, steps and examples of a step, and the scale at which routers start are ours.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.sparsity import average_sparsity, norm_ratio, shuffled
from moe_theory.models.soft import DenseNets, SoftMoE
from moe_theory.tasks.gaussians import Examples, GaussianMixture
from moe_theory.tasks.subspaces import SubspaceTask
from moe_theory.training.batched import losses, train

SEEDS, K, D, WIDTH, DEPTH = range(5), 64, 24, 96, 3
STEPS, BATCH, N_TEST, N_TRAIN = 2_000, 64, 4_096, 4_096
LIVE = 20  # steps that a recomputation takes
AT = (500, 1_000, STEPS)  # steps after which losses are measured
DIGITS = 5  # significant, of stored values
SHARP = 1_000.0  # a frozen router times this has gates 0 or 1: it is trained as it is tested
SMOKE = dict(n=64, steps=LIVE)

SGD = dict(optimizer="sgd", rate=1e-2, router_rate=1e-1)
ADAM = dict(optimizer="adam", rate=1e-3, router_rate=3.2e-3)


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its task from a seed, outputs, layers of the router, and the optimizer with its rates."""

    task: Callable[[int], GaussianMixture | SubspaceTask]
    outputs: int
    router_layers: int
    how: dict


FIGURES = {
    "constant": Figure(lambda seed: GaussianMixture(K, D, seed=seed), 10, 1, SGD),
    "linear": Figure(lambda seed: GaussianMixture(K, D, outputs=1, label="linear", seed=seed), 1, 1, SGD),
    "subspaces": Figure(lambda seed: SubspaceTask(K, 8, D, seed=seed), 1, DEPTH, ADAM),
}


def constant() -> list[dict]:
    """Figure 3: a constant label to a Gaussian; the last row is that of `short`."""
    return [*_grid("constant", ("learned", "frozen"), (256, 1_024, 4_096, 16_384)), short()]


def short() -> dict:
    """The row of Figure 3 that a chapter computes again to its end, in seconds: a learned router, a quarter as long."""
    return dict(figure="constant", model="learned", n=256, start=1.0, steps=AT[0], seed=0)


def linear() -> list[dict]:
    """Figure 4: a linear function to a Gaussian; beside the paper, routers that are trained as they are tested."""
    sharp = _grid("linear", ("sharp",), (1_024, 16_384))
    return _grid("linear", ("learned", "frozen"), (256, 1_024, 4_096, 16_384)) + sharp


def subspaces() -> list[dict]:
    """Figure 6: routers that start with sharper gates; with the most examples also as they are, and as tested."""
    most = [16_384]
    rows = _grid("subspaces", ("learned", "frozen"), (1_024, 4_096, *most), start=16.0)
    return rows + _grid("subspaces", ("learned", "frozen"), most) + _grid("subspaces", ("sharp",), most, start=16.0)


def dense() -> list[dict]:
    """Dense networks with the parameters of one expert (`small`) and of all (`large`, Figure 3 only)."""
    sizes = (256, 1_024, 4_096, 16_384)
    return _grid("constant", ("small", "large"), sizes) + _grid("linear", ("small",), sizes)


def _grid(figure: str, models, sizes, start: float = 1.0) -> list[dict]:
    every = itertools.product(SEEDS, sizes, models)
    return [dict(figure=figure, model=m, n=n, start=start, steps=STEPS, seed=s) for s, n, m in every]


def parameters(*sizes: int) -> int:
    """Weights and biases of layers between such sizes."""
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


def dense_width(experts: int, outputs: int) -> int:
    """The width at which a dense network, one layer deeper than an expert, has as many parameters as `experts`."""
    goal = experts * parameters(D, *[WIDTH] * (DEPTH - 1), outputs)
    return min(range(1, 1000), key=lambda w: abs(parameters(D, *[w] * DEPTH, outputs) - goal))


def network(key: dict) -> nn.Module:
    """The network of a row before its training; `start` times the logits of a mixture, `SHARP` if it is sharp."""
    figure, seeds = FIGURES[key["figure"]], [key["seed"]]
    if key["model"] in ("small", "large"):
        width = dense_width({"small": 1, "large": K}[key["model"]], figure.outputs)
        return DenseNets([D, *[width] * DEPTH, figure.outputs], seeds)
    layers = dict(expert_layers=DEPTH, router_layers=figure.router_layers, width=WIDTH)
    moe = SoftMoE(D, figure.outputs, K, seeds=seeds, **layers)
    with torch.no_grad():
        moe.router.W[-1].mul_(key["start"] * (SHARP if key["model"] == "sharp" else 1))
    return moe


def data(key: dict) -> tuple[Examples, Examples]:
    """Training and test set of a row."""
    task, seed = FIGURES[key["figure"]].task(key["seed"]), key["seed"]
    return task.sample(key["n"], 2 * seed + 1), task.sample(N_TEST, 2 * seed + 2)


def row(key: dict) -> dict:
    """Mean squared errors after the steps `AT`, and what the router does in the end.

    `routed`: every input goes to one expert, as in the paper's tests; `weighted`: experts are weighted as in training,
    both lists over `AT`; `first`: the two after the first steps. `routed_train`, `weighted_train`: in the end, on the
    first `N_TRAIN` examples of the training.
    """
    (examples, test), net = data(key), network(key)
    how = dict(FIGURES[key["figure"]].how, steps=key["steps"], batch=BATCH, seeds=[key["seed"]])
    if isinstance(net, SoftMoE):
        how["frozen"] = [key["model"] != "learned"]
    else:
        del how["router_rate"]
    course = {}
    for step, _ in enumerate(train(net, [examples], **how), 1):
        if step in (LIVE, *AT):
            course[step] = _both(net, test)
    first, *later = course.values()
    routed, weighted = map(list, zip(*later, strict=True)) if later else ([], [])
    seen = type(examples)(*(part[:N_TRAIN] for part in examples))
    values = dict(zip(("routed_train", "weighted_train"), _both(net, seen), strict=True))
    values |= routing(net, test, key["seed"]) if isinstance(net, SoftMoE) else {}
    return rounded({"first": first, "routed": routed, "weighted": weighted} | values, DIGITS)


def _both(net: nn.Module, examples: Examples) -> list[float]:
    return [float(losses(net, [examples], weighted=weighted)) for weighted in (False, True)]


@torch.no_grad()
def routing(moe: SoftMoE, test: Examples, seed: int) -> dict:
    """Average sparsity, that of the router with its inputs' coordinates shuffled, experts used, and ratio of norms.

    Shuffled are the columns of the first layer, which read the input; the norms are those of the rows of the last.
    """
    first, x = moe.router.W[0], test.x[None]
    values = {"sparsity": average_sparsity(moe.probabilities(x)[0], test.cluster)}
    values |= {"used": len(moe.chosen(x).unique()), "norm_ratio": norm_ratio(moe.router.W[-1][0, 0])}
    learned = first.clone()
    first[0, 0] = shuffled(learned[0, 0], seed)
    values["shuffled"] = average_sparsity(moe.probabilities(x)[0], test.cluster)
    first.copy_(learned)
    return values


def live(key: dict) -> dict:
    """The losses after a row's first steps."""
    return {"first": row({**key, "steps": LIVE})["first"]}
