"""The long computations: a grid, a function of one row, a resumable store.

Run them with `python -m moe_theory.experiments run NAME`; read their rows with `load(NAME)`.
"""

from moe_theory.experiments.registry import EXPERIMENTS, PROFILES, Experiment, experiment
from moe_theory.experiments.store import load, recompute, recomputed_off, run, status

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
