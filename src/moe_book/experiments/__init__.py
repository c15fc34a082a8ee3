"""The long computations: a grid, a function of one row, a resumable store.

Run them with `python -m moe_book.experiments run NAME`; read their rows with `load(NAME)`.
"""

from moe_book.experiments.catalogue import EXPERIMENTS, PROFILES, Experiment, experiment
from moe_book.experiments.store import load, recompute, recomputed_off, run, status

__all__ = [
    "EXPERIMENTS",
    "PROFILES",
    "Experiment",
    "experiment",
    "load",
    "recompute",
    "recomputed_off",
    "run",
    "status",
]
