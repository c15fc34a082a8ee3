"""A step of the engine taken apart: how long each part takes, and how much work it holds.

Operations and bytes are counted by formula from the code of `moe_theory.training.engine` and
`grouped`, for the algorithm as written with cubic experts. A part's time is an increment: the same step is broken off
before each of the functions in `BOUNDARIES`, and the next part is what the next one takes longer.
So the parts sum to the step, and no clock runs inside of it.
"""

from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from time import thread_time
from unittest.mock import patch

import numpy as np

from moe_theory.training import engine
from moe_theory.training.grouped import Experts

FLOAT, LONG, BOOL = 4, 8, 1

#: What a step does, in order, and the function that begins with the next part; the last part ends with the step.
BOUNDARIES = {
    "routing noise": (engine, "forward"),
    "router, forward": (engine, "dispatch"),
    "choice": (engine, "softmax_"),
    "softmax": (Experts, "forward"),
    "known patches": (Experts, "_grouped"),
    "rows by expert": (Experts, "_dense"),
    "experts, forward": (engine, "loss_and_slope"),
    "loss": (engine, "to_logits"),
    "router, back": (Experts, "gradient"),
    "experts, back": (Experts, "_known_gradient"),
    "known patches, back": (engine, "gradient_norm"),
    "update": None,
}

#: The parts of each curve of growth.
CURVES = {
    "noise, choice, softmax": ("routing noise", "choice", "softmax"),
    "router": ("router, forward", "router, back"),
    "experts": ("known patches", "rows by expert", "experts, forward", "experts, back", "known patches, back"),
    "loss, update": ("loss", "update"),
}


class BrokenOff(Exception):
    """Ends a step early."""


@contextmanager
def broken_off(boundary):
    """While entered, a step ends where that function would be called."""

    def end(*args, **kwargs):
        raise BrokenOff

    with patch.object(*boundary, end) if boundary else nullcontext():
        yield


def seconds(step) -> float:
    """The processor's time for a step, whole or broken off."""
    start = thread_time()
    with suppress(BrokenOff):
        step()
    return thread_time() - start


def interleaved(steps: dict, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each of the `(step, boundary)` in every round, each after a whole step that is not timed."""
    found = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (step, boundary) in steps.items():
            step()
            with broken_off(boundary):
                found[name].append(seconds(step))
    return {name: np.array(s) for name, s in found.items()}


def increments(until: dict[str, float]) -> dict[str, float]:
    """The time of each part, from the times until its end; what noise turns around counts as nothing."""
    whole = until["update"]
    ends = np.maximum.accumulate(np.minimum([0.0, *(until[part] for part in BOUNDARIES)], whole))
    return {part: float(b - a) for part, (a, b) in zip(BOUNDARIES, pairwise(ends), strict=True)}


def curves(parts: dict[str, float]) -> dict[str, float]:
    """The parts gathered into the curves of growth."""
    return {name: sum(parts[p] for p in members) for name, members in CURVES.items()}


def counted(n: int, M: int, J: int, d: int, P: int, K: int) -> dict[str, tuple[int, int]]:
    """For each part of a step: floating-point operations, and bytes read and written.

    Every call reads its arguments and writes its result once. With h = nM logits, q = (P-3)n noise
    patches in rows of length d, z = qJ filter answers, and W = MJd weights, a step holds

    - routing noise: h draws, written;
    - router: 2 d h forward, 2 d h back; noise added; the choice's and the softmax's part of the logits' gradient;
    - choice: a maximum, a comparison, and the places of the largest, in the order of the experts;
    - softmax: maximum, difference, exponential, sum, quotient; the chosen entries;
    - known patches: 2 (2K) h for the answers of all experts, and as many back, of which each example takes one;
    - rows by expert: the noise patches, read as they lie and written to M places in turn;
    - experts: 2 d z forward, 2 d z back; z^3 and its sum over filters; 3 z^2 times each example's weight;
    - loss: margins, their losses and slopes, a dozen numbers per example;
    - update: norms, quotients, and the two parameters.
    """
    h, q, W, S = n * M, (P - 3) * n, M * J * d, 2 * K
    rows, z, tables = q * d, q * J, M * J * S
    return {
        "routing noise": (h, FLOAT * h),
        "router, forward": (2 * d * h + h, FLOAT * (n * d + h + 3 * h)),
        "choice": (2 * h, FLOAT * (2 * h + 2 * n) + 2 * BOOL * h + LONG * 3 * n),
        "softmax": (5 * h, FLOAT * 8 * h + (LONG + 2 * FLOAT) * n),
        "known patches": (2 * S * h + 2 * S * W, FLOAT * (S * n + 2 * h + 2 * n + W + 4 * tables) + LONG * n),
        "rows by expert": (0, FLOAT * 2 * rows + LONG * 5 * n),
        "experts, forward": (2 * d * z + 4 * z, FLOAT * (rows + 4 * z + 4 * n + 3 * W)),
        "loss": (10 * n, FLOAT * 20 * n + 2 * LONG * n),
        "router, back": (2 * d * h + 2 * h + 5 * n, FLOAT * (n * d + 3 * h + 14 * n) + 2 * LONG * n),
        "experts, back": (2 * d * z + 2 * z + 2 * n, FLOAT * (rows + 5 * z + 6 * n + W)),
        "known patches, back": (2 * S * h + 2 * S * W, FLOAT * (S * n + 2 * h + n + 4 * W + 6 * tables) + LONG * n),
        "update": (5 * W + 2 * d * M, FLOAT * (9 * W + 5 * d * M)),
    }


def needed(n: int, M: int, J: int, d: int, P: int) -> tuple[int, int]:
    """What no program spares: the products' operations, and the patch sums, noise patches and labels read once."""
    return 4 * d * n * M + 4 * d * (P - 3) * n * J, FLOAT * n * (d + (P - 3) * d + 1)


def work(parts_ms: dict[str, float], counts: dict[str, tuple[int, int]], GFLOP: float, GB: float) -> dict[str, dict]:
    """Time, operations, bytes of each part, and its bound: each limit alone, the larger of the two."""
    return {
        part: {"ms": ms, "operations": ops, "bytes": moved, "bound_ms": 1e-6 * max(ops / GFLOP, moved / GB)}
        for part, ms, (ops, moved) in ((p, parts_ms[p], counts[p]) for p in BOUNDARIES)
    }
