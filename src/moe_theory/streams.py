"""The random streams of the package: one for each seed and purpose, and no two purposes on one stream.

They are drawn on the CPU, so a seed means the same numbers on every device.
"""

import numpy as np
import torch

from moe_theory import _validate as check

#: Recorded with every stored result; one without it was computed before there were streams by purpose.
CONVENTION = "SeedSequence by purpose"

#: What random numbers are drawn for.
PURPOSES = {
    "signals": "the orthonormal signals of a patch task",
    "examples": "the examples of a task",
    "weights": "a model's initial weights",
    "routing noise": "noise added to logits in training",
    "test noise": "noise added to logits in an evaluation; a stream for each step at which one is made",
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
    return torch.Generator().manual_seed(int(state >> 1))
