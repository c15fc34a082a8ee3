"""A step of the engine taken apart: how long each part takes, and how much work it holds.

Operations and bytes are counted by formula from the code of `moe_theory.training.engine`, for the
algorithm as written with cubic experts. Times are taken inside a real step, call by call.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from statistics import median
from time import thread_time
from unittest.mock import patch

from torch.overrides import TorchFunctionMode

from moe_theory.training import engine

FLOAT, LONG, SHORT, BOOL = 4, 8, 2, 1

#: Which part a call belongs to, by the function it stands in and its own name; the first match counts.
RULES = (
    ("uniform", "", "routing noise"),
    ("first_argmax", "", "choice"),
    ("forward", "add", "choice"),
    ("forward", "softmax", "softmax"),
    ("forward", "matmul", "router products"),
    ("gradients", "matmul", "router products"),
    ("grouped", "", None),
    ("Experts.forward", "bincount", "order by expert"),
    ("Experts.forward", "index_select", "gather rows"),
    ("Experts.forward", "mm", "expert products"),
    ("Experts.gradient", "matmul", "expert products"),
    ("Experts._known", "", "known patches"),
    ("Experts.", "", "activation"),
    ("<lambda>", "", "activation"),
    ("forward", "", "gate and loss"),
    ("gradients", "", "gate and loss"),
    ("log", "", "gate and loss"),
    ("loss_slope", "", "gate and loss"),
    ("", "", "update"),
)

#: The parts of each curve of growth.
CURVES = {
    "router products": ("router products",),
    "noise, choice, softmax": ("routing noise", "choice", "softmax"),
    "experts": ("order by expert", "gather rows", "expert products", "activation", "known patches"),
    "gate, loss, update": ("gate and loss", "update"),
}


def counted(n: int, M: int, J: int, d: int, P: int) -> dict[str, tuple[int, int]]:
    """For each part of a step: floating-point operations, and bytes read and written.

    Every call reads its arguments and writes its result once. With h = nM logits, q = (P-3)n noise
    patches in rows of length d, and z = qJ filter answers, a step holds

    - routing noise: h draws, written;
    - router products: 2 d h forward, 2 d h back; the patch sums are read and the logits written, or read;
    - choice: noise added, a maximum, a comparison, and a maximum of 16-bit integers;
    - softmax: maximum, difference, exponential, sum, quotient;
    - order by expert: the choices as 16-bit integers, sorted (its own passes not counted), and counted;
    - gather rows: the noise patches, read in that order and written side by side;
    - expert products: 2 d z forward, 2 d z back;
    - activation: z^3 and its sum over filters, 3 z^2 times each example's weight, two multiplications each;
    - known patches: 3 n products of a power of s and an entry of a table, forward and back;
    - gate and loss: about 20 numbers per example, and the logits' gradient;
    - update: norms, quotients, and the two parameters.
    """
    h, q, W = n * M, (P - 3) * n, M * J * d
    rows, z = q * d, q * J
    return {
        "routing noise": (h, FLOAT * h),
        "router products": (4 * d * h, FLOAT * 2 * (n * d + h)),
        "choice": (5 * h, (5 * FLOAT + 2 * SHORT + 2 * BOOL) * h + (2 * FLOAT + 2 * SHORT + 3 * LONG) * n),
        "softmax": (5 * h, FLOAT * 2 * h),
        "order by expert": (0, (2 * SHORT + 3 * LONG) * n),
        "gather rows": (0, FLOAT * 2 * rows + LONG * n),
        "expert products": (4 * d * z, FLOAT * 2 * (rows + z) + FLOAT * 4 * W),
        "activation": (7 * z + q, FLOAT * (13 * z + 2 * q + 8 * n + 5 * W) + LONG * 2 * n),
        "known patches": (14 * n, FLOAT * 30 * n + LONG * 15 * n),
        "gate and loss": (18 * n + h, FLOAT * (42 * n + 2 * h) + LONG * 2 * n),
        "update": (5 * W + 2 * d * M, FLOAT * (8 * W + 5 * d * M)),
    }


PARTS = tuple(counted(1, 1, 1, 1, 4))


class Stopwatch(TorchFunctionMode):
    """Adds up the seconds of every torch call made while it is entered, part by part.

    The clock runs only while torch works: what this class costs falls between the calls.
    """

    def __init__(self):
        super().__init__()
        self.seconds, self.calls = Counter(), 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        part = part_of(calling_function(), name)
        start = thread_time()
        result = function(*args, **(kwargs or {}))
        self.add(part, thread_time() - start)
        self.calls += not name.startswith("__")
        return result

    def add(self, part: str | None, seconds: float) -> None:
        if part is not None:
            self.seconds[part] += seconds

    @contextmanager
    def running(self):
        """Time a step. The order by expert is a call to numpy, which torch does not see: it is timed as a whole."""
        with self, patch.object(engine, "grouped", self.timed(engine.grouped, "order by expert")):
            yield

    def timed(self, function, part: str):
        def run(*args):
            start = thread_time()
            result = function(*args)
            self.add(part, thread_time() - start)
            return result

        return run


def calling_function() -> str:
    """Qualified name of the function outside of torch that made the call being handled."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"].startswith("torch"):
        frame = frame.f_back
    return frame.f_code.co_qualname


def part_of(function: str, call: str) -> str | None:
    """The part that a call belongs to; None for what is timed otherwise."""
    return next(part for where, what, part in RULES if function.startswith(where) and (not what or call == what))


def taken_apart(step, rounds: int) -> tuple[dict[str, float], int]:
    """Median milliseconds of each part over so many steps, and the number of torch calls in a step."""
    watches = [Stopwatch() for _ in range(rounds)]
    for watch in watches:
        with watch.running():
            step()
    return {part: 1e3 * median(w.seconds[part] for w in watches) for part in PARTS}, watches[-1].calls


def curves(parts_ms: dict[str, float]) -> dict[str, float]:
    """The parts gathered into the curves of growth."""
    return {name: sum(parts_ms[p] for p in members) for name, members in CURVES.items()}


def work(step_ms: float, parts_ms: dict[str, float], counts: dict[str, tuple[int, int]]) -> dict[str, dict]:
    """Time, operations and bytes of each part, and the time of a step that no torch call accounts for."""
    rows = {p: {"ms": parts_ms[p], "operations": counts[p][0], "bytes": counts[p][1]} for p in PARTS}
    return rows | {"between calls": {"ms": step_ms - sum(parts_ms.values()), "operations": 0, "bytes": 0}}
