"""Figures 2 and 3 of Dikkala et al. (2023): 64 Gaussians in 24 dimensions, a constant label for each.

The paper names the sizes of the networks, the optimizers and their rates. The means, the numbers of samples, steps and
examples of a step, and the scale at which the routers start are ours. A row holds a whole training; `live` takes its
first steps again.
"""

import itertools

import torch
from torch import nn

from moe_theory.experiments.registry import rounded
from moe_theory.measure.sparsity import average_sparsity, norm_ratio, shuffled
from moe_theory.models.soft import DenseNets, SoftMoE
from moe_theory.tasks.gaussians import Examples, GaussianMixture
from moe_theory.training.batched import losses, train

SEEDS, SIZES, N_TEST, BATCH = range(5), (256, 1024, 4096, 16384), 4096, 64
DIGITS = 5  # significant, of stored losses
K, D, OUTPUTS, WIDTH, DEPTH = 64, 24, 10, 96, 3
EARLY = {"constant": 200, "mlp": 20}  # steps after which `early` is measured
RATES = {"constant": dict(rate=3.2e-4, router_rate=3.2e-3), "mlp": dict(rate=1e-2, router_rate=1e-1, optimizer="sgd")}


def constant() -> list[dict]:
    """Figure 2: over the number of samples, over the number of experts, and a larger start and a longer training."""
    point = dict(n=SIZES[-1], experts=K, start=0.1, steps=12_000, seeds=[*SEEDS])
    samples = [{**point, "n": n} for n in SIZES]
    experts = [{**point, "experts": M} for M in (8, 16, 32, 128)]
    return [*samples, *experts, {**point, "start": 1.0}, {**point, "steps": 24_000}]


def mixtures() -> list[dict]:
    """Figure 3: experts of depth 3, routers that learn and routers that are frozen, some of these for longer."""
    rows = [dict(n=n, frozen=frozen, steps=600, seed=s) for n, s, frozen in _points((False, True))]
    longer = [(SIZES[0], True), (SIZES[2], False)]
    return rows + [dict(n=n, frozen=frozen, steps=3000, seed=0) for n, frozen in longer]


def dense() -> list[dict]:
    """Figure 3: dense networks with as many parameters as an expert, and as many as all of them."""
    return [dict(n=n, width=width, steps=600, seed=s) for n, s, width in _points((dense_width(1), dense_width(K)))]


def _points(models) -> list[tuple]:
    return list(itertools.product((SIZES[0], SIZES[2]), SEEDS, models))


def smoke(rows: list[dict]) -> list[dict]:
    """Two rows, a few steps each."""
    return [{**key, "n": n, "steps": 210} for key, n in zip(rows[:2], (64, 128), strict=True)]


def parameters(*sizes: int) -> int:
    """Weights and biases of layers between such sizes."""
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


def dense_width(experts: int) -> int:
    """The width at which a dense network, one layer deeper than an expert, has as many parameters as `experts`."""
    goal = experts * parameters(D, *[WIDTH] * (DEPTH - 1), OUTPUTS)
    return min(range(1, 1000), key=lambda w: abs(parameters(D, *[w] * DEPTH, OUTPUTS) - goal))


def data(n: int, seeds) -> tuple[list[Examples], list[Examples]]:
    """Training and test sets, a mixture of Gaussians of its own for each seed."""
    tasks = [GaussianMixture(K, D, outputs=OUTPUTS, seed=s) for s in seeds]
    return [t.sample(n, 2 * s) for t, s in zip(tasks, seeds, strict=True)], [
        t.sample(N_TEST, 2 * s + 1) for t, s in zip(tasks, seeds, strict=True)
    ]


def trained(key: dict, until: int | None = None) -> tuple[nn.Module, list[Examples], list[Examples], list[float]]:
    """The networks of a row after all its steps or the first `until`, their data, and their early test losses."""
    seeds = key.get("seeds") or [key["seed"]]
    kind = "constant" if "start" in key else "mlp"
    if "width" in key:
        networks = DenseNets([D, *[key["width"]] * DEPTH, OUTPUTS], seeds)
    else:
        layers = dict(expert_layers=DEPTH if kind == "mlp" else 0, width=WIDTH)
        networks = SoftMoE(D, OUTPUTS, key.get("experts", K), seeds=seeds, **layers)
        with torch.no_grad():
            networks.router.W[0].mul_(key.get("start", 1.0))
    examples, test = data(key["n"], seeds)
    how = dict(RATES[kind], frozen=[key.get("frozen", False)] * len(seeds))
    steps = train(networks, examples, steps=until or key["steps"], batch=BATCH, seeds=seeds, **how)
    for _ in itertools.islice(steps, EARLY[kind]):
        pass
    early = rounded(losses(networks, test), DIGITS)
    for _ in steps:
        pass
    return networks, examples, test, early


def row(key: dict) -> dict:
    """Means of squared errors and what the routers do, a number for each seed.

    `routed` and `routed_train`: every input goes to one expert, on test and on training examples; `weighted` and
    `weighted_train`: the experts are weighted as in training. `used`: experts that some test input goes to.
    """
    networks, examples, test, early = trained(key)
    values = {
        "early": early,
        "routed": rounded(losses(networks, test), DIGITS),
        "routed_train": rounded(losses(networks, examples), DIGITS),
    }
    if isinstance(networks, DenseNets):
        return values
    values |= {
        "weighted": rounded(losses(networks, test, weighted=True), DIGITS),
        "weighted_train": rounded(losses(networks, examples, weighted=True), DIGITS),
    }
    with torch.no_grad():
        x = torch.stack([part.x for part in test])
        pi, used = networks.probabilities(x), networks.chosen(x)
        W = networks.router.W[0].detach()[:, 0]
    seeds = key.get("seeds") or [key["seed"]]
    mixed = [(part.x @ shuffled(w, s).T).softmax(-1) for part, w, s in zip(test, W, seeds, strict=True)]
    return values | {
        "sparsity": [round(average_sparsity(p, part.cluster), 4) for p, part in zip(pi, test, strict=True)],
        "shuffled": [round(average_sparsity(p, part.cluster), 4) for p, part in zip(mixed, test, strict=True)],
        "used": [len(u.unique()) for u in used],
        "norm_ratio": [round(norm_ratio(w), 5) for w in W],
    }


def live(key: dict) -> dict:
    """The test losses after the first steps."""
    return {"early": trained(key, EARLY["constant" if "start" in key else "mlp"])[-1]}
