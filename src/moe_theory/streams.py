"""The random streams of the package: one for each seed and purpose, and no two purposes on one stream.

They are drawn on the CPU, so a seed means the same numbers on every device.
"""

import numpy as np
import torch

from moe_theory import _validate as check

#: How stored rows were drawn, as their provenance says; rows without a word on it are of the second kind.
CONVENTION, EARLIER_CONVENTION = "SeedSequence by purpose", "one generator for a seed"

#: What still draws from one generator for a seed, or for a seed and a number: their stored rows were made so,
#: and come over to streams by purpose when those rows are computed anew.
EARLIER = {
    "moe_book.experiments.sparse_runs",
    "moe_theory.measure.stability",
    "moe_theory.models.mixture",
    "moe_theory.models.routers",
    "moe_theory.models.sparse",
    "moe_theory.tasks.gaussians",
    "moe_theory.tasks.regression",
    "moe_theory.tasks.text",
}

#: What random numbers are drawn for.
PURPOSES = {
    "signals": "the orthonormal signals of a patch task",
    "examples": "the examples of a task",
    "classes": "the means and scales of Gaussian classes",
    "texts": "which texts are taken",
    "inputs": "inputs without labels",
    "regression": "inputs of a regression, and the noise of its labels",
    "measure": "a mixing measure",
    "norms": "norms of router vectors that no function depends on",
    "near": "a mixing measure near another",
    "weights": "a model's initial weights",
    "router weights": "those of a router that does not start at zero",
    "outer weights": "those of the layers around a mixture",
    "target": "the network that others are to learn",
    "order": "the order of the examples in a training",
    "shuffle": "the order of the columns of a shuffled router",
    "pretraining": "the batches of a pretraining",
    "training": "the batches and the routing noise of a training",
    "batches": "the batches and the routing noise of the estimators of stability",
    "stage": "the routing noise of a loss that is reported",
    "kept mass": "the routing noise in a mean mass of gates",
    "start": "the start of a search",
    "race": "the starts of a race without a layer, and the noise of examples that are never made",
    "resampling": "bootstrap samples",
    "permutations": "labels in another order, under which a dispatch knows nothing of them",
    "probes": "the directions in which a layer's output is differentiated",
    "routing noise": "noise added to logits in training",
    "test noise": "noise added to logits in an evaluation; a stream for each step at which one is made",
    "hash": "the multipliers of a hash of inputs",
    "chapter": "what a chapter draws itself: its number, and one of its own for each use",
}


def _sequence(seed: int, purpose: str, at: tuple[int, ...]) -> np.random.SeedSequence:
    name = check.choice("purpose", purpose, PURPOSES).encode()
    key = (*name, *(check.integer("at", i, 0) for i in at))
    return np.random.SeedSequence(check.integer("seed", seed, 0), spawn_key=key)


def stream(seed: int, purpose: str, *at: int) -> np.random.Generator:
    """The generator of a seed and purpose, by `numpy.random.SeedSequence`; independent of all others.

    Args:
        seed: an integer >= 0.
        purpose: a key of `PURPOSES`.
        at: integers >= 0 that tell apart streams of one purpose, such as a step.

    Raises:
        ValueError: for a negative seed or an unknown purpose.
    """
    return np.random.default_rng(_sequence(seed, purpose, at))


def torch_stream(seed: int, purpose: str, *at: int) -> torch.Generator:
    """The same for torch's own functions, a generator on the CPU; it draws other numbers than `stream`."""
    (state,) = _sequence(seed, purpose, at).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state) >> 1)
