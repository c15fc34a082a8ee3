"""Figure 2 of Dikkala et al. (2023): 64 Gaussians in 24 dimensions, a constant label for each, constant experts.

The paper names the optimizer and its rates. The means, the numbers of samples, steps and examples of a step, and the
scale at which the routers start are ours. A row holds the whole training of some seeds; `live` takes its first steps
again, and the row of `short` is over in a second.
"""

import itertools

import torch

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.sparsity import average_sparsity, norm_ratio, shuffled
from moe_theory.models.soft import SoftMoE
from moe_theory.tasks.gaussians import Examples, GaussianMixture
from moe_theory.theory.specialists import farthest_first, nearest_row_bias
from moe_theory.training.batched import losses, train

SEEDS, SIZES, N_TEST, BATCH = range(5), (256, 1024, 4096, 16384), 4096, 64
DIGITS = 5  # significant, of stored losses
K, D, OUTPUTS = 64, 24, 10
EARLY = 200  # steps after which `early` is measured
RATES = dict(rate=3.2e-4, router_rate=3.2e-3)
SMOKE = dict(n=64, steps=EARLY + 10)


def constant() -> list[dict]:
    """Over the number of samples, over the number of experts, a larger start, a longer training, and a short one."""
    point = dict(n=SIZES[-1], experts=K, start=0.1, steps=12_000, seeds=[*SEEDS])
    samples = [{**point, "n": n} for n in SIZES]
    experts = [{**point, "experts": M} for M in (8, 16, 32, 128)]
    return [*samples, *experts, {**point, "start": 1.0}, {**point, "steps": 24_000}, short()]


def short() -> dict:
    """The row that a chapter computes again to its end."""
    return dict(n=SIZES[0], experts=8, start=0.1, steps=400, seeds=[0])


def data(n: int, seeds) -> tuple[list[Examples], list[Examples]]:
    """Training and test sets, a mixture of Gaussians of its own for each seed."""
    tasks = [GaussianMixture(K, D, outputs=OUTPUTS, seed=s) for s in seeds]
    return [t.sample(n, 2 * s) for t, s in zip(tasks, seeds, strict=True)], [
        t.sample(N_TEST, 2 * s + 1) for t, s in zip(tasks, seeds, strict=True)
    ]


def trained(key: dict, until: int | None = None) -> tuple[SoftMoE, list[Examples], list[Examples], list[float]]:
    """The mixtures of a row after all its steps or the first `until`, their data, and their early test losses."""
    seeds = key["seeds"]
    mixtures = SoftMoE(D, OUTPUTS, key["experts"], seeds=seeds)
    with torch.no_grad():
        mixtures.router.W[0].mul_(key["start"])
    examples, test = data(key["n"], seeds)
    steps = train(mixtures, examples, steps=until or key["steps"], batch=BATCH, seeds=seeds, **RATES)
    for _ in itertools.islice(steps, EARLY):
        pass
    early = rounded(losses(mixtures, test), DIGITS)
    for _ in steps:
        pass
    return mixtures, examples, test, early


def row(key: dict) -> dict:
    """Means of squared errors and what the routers do, a number for each seed: the `readings` on test examples, and

    `early`: the test losses after the first steps; `routed_train`, `weighted_train`: the losses on training examples;
    `shuffled`: the sparsity of the routers with their columns in another order; `norm_ratio`: that of their rows.
    """
    mixtures, examples, test, early = trained(key)
    W = mixtures.router.W[0].detach()[:, 0]
    mixed = [(part.x @ shuffled(w, s).T).softmax(-1) for part, w, s in zip(test, W, key["seeds"], strict=True)]
    values = readings(mixtures, test)
    return {
        "early": early,
        "routed": rounded(values["routed"], DIGITS),
        "routed_train": rounded(losses(mixtures, examples), DIGITS),
        "weighted": rounded(values["weighted"], DIGITS),
        "weighted_train": rounded(losses(mixtures, examples, weighted=True), DIGITS),
        "sparsity": [round(v, 4) for v in values["sparsity"]],
        "shuffled": [round(average_sparsity(p, part.cluster), 4) for p, part in zip(mixed, test, strict=True)],
        "used": values["used"],
        "norm_ratio": [round(norm_ratio(w), 5) for w in W],
    }


@torch.no_grad()
def readings(mixtures: SoftMoE, test: list[Examples]) -> dict[str, list]:
    """What each of R mixtures does on test examples of its own.

    `routed`: the loss with every input sent to one expert; `weighted`: with the experts weighted as in training;
    `sparsity`: experts that a cluster uses; `used`: experts that some input goes to.

    Args:
        mixtures: R of them.
        test: R sets of one size.
    """
    x = torch.stack([part.x for part in test])
    pi = mixtures.probabilities(x)
    return {
        "routed": losses(mixtures, test).tolist(),
        "weighted": losses(mixtures, test, weighted=True).tolist(),
        "sparsity": [average_sparsity(p, part.cluster) for p, part in zip(pi, test, strict=True)],
        "used": [len(chosen.unique()) for chosen in mixtures.chosen(x)],
    }


def three_starts(seed: int) -> dict[str, list]:
    """`readings` of three mixtures after 500 steps, at a higher rate, that differ in their routers' starts only.

    Near zero; at data (Theorem 2, but farthest first, a row a cluster); and so with the bias of the nearest row.

    Args:
        seed: draws clusters, examples and weights.
    """
    task = GaussianMixture(K, D, outputs=OUTPUTS, seed=seed)
    examples, test = task.sample(8_192, seed), task.sample(8_192, seed + 1_000_003)
    rows = examples.x[farthest_first(examples.x, K)]
    mixtures, seeds = SoftMoE(D, OUTPUTS, K, seeds=[seed] * 3), [seed] * 3
    with torch.no_grad():
        mixtures.router.W[0][0] *= 0.1
        mixtures.router.W[0][1:, 0] = rows
        mixtures.router.b[0][2, 0] = nearest_row_bias(rows)
    for _ in train(mixtures, [examples] * 3, steps=500, batch=BATCH, seeds=seeds, rate=1e-2, router_rate=3.2e-3):
        pass
    return readings(mixtures, [test] * 3)


def live(key: dict) -> dict:
    """The test losses after the first steps."""
    return {"early": trained(key, EARLY)[-1]}
