"""Run mutants: each in a process of its own, which sees the changed copy and draws no figures.

This module is imported in that process before the change takes effect, so it imports no other module
of the package but the light ones it must.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context

#: What a check raises. Any other exception says that the mutant itself is badly made.
REFUSALS = (AssertionError, ValueError)
PATIENCE = 300  # seconds until a mutant that does not end counts as broken
PRELOADED = ["torch.func", "pandas", "scipy.stats", "scipy.optimize", "scipy.integrate", "seaborn", "sympy", "yaml"]


@dataclass(frozen=True)
class Task:
    """What a process needs to know: the cells up to the card, and the change."""

    id: str
    cells: tuple[str, ...]
    module: str = ""  # whose source is replaced
    source: str = ""
    experiment: str = ""  # whose rows are changed
    do: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        outcome: `refused` by the card, `refused before` it, `survived`, or `broken` if it could not be run.
        by: the code cell, counted from 1, that refused; empty for a survivor.
        why: the first line of the refusal.
    """

    id: str
    outcome: str
    by: str
    why: str
    seconds: float


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from changed source; its cached bytecode, which is of the unchanged one, is passed over."""

    def __init__(self, name: str, path: str, source: str):
        super().__init__(name, path)
        self.changed = source

    def get_code(self, fullname):
        return compile(self.changed, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str):
        self.module, self.source = module, source

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(name, spec.origin, self.source)
        return spec


def _change_rows(experiment: str, do: str) -> None:
    """Every load of the experiment's rows, by the chapter and by `recompute`, gives the changed ones."""
    import numpy as np
    import pandas as pd

    from moe_theory import experiments
    from moe_theory.experiments import store

    whole = store.load

    def load(name, *args, **kwargs):
        rows = whole(name, *args, **kwargs)
        if name == experiment:
            before, names = rows.copy(), {"rows": rows, "np": np, "pd": pd}
            exec(do, names)
            rows = names["rows"]
            if rows.equals(before):
                raise NameError(f"the rows of {experiment} are unchanged")
        return rows

    store.load = experiments.load = load


def _draw_nothing() -> None:
    import matplotlib.pyplot as plt

    from moe_theory import figures

    figures.show = lambda figure, caption, alt: plt.close(figure)
    figures.table = lambda frame, caption, digits=2: None


def _execute(task: Task) -> tuple[str, str, str]:
    names = {"__name__": "__main__", "display": lambda *shown: None}
    for number, source in enumerate(task.cells, 1):
        try:
            exec(compile(source, f"cell {number}", "exec"), names)
        except Exception as error:
            refused = "refused" if number == len(task.cells) else "refused before"
            why = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            return refused if isinstance(error, REFUSALS) else "broken", f"cell {number}", why
    return "survived", "", ""


def _out_of_time(number, frame):
    raise TimeoutError(f"not done after {PATIENCE} s")


def attempt(task: Task) -> Outcome:
    """Run one task; to be called in a process that has imported nothing of the package but this module."""
    import torch

    torch.set_num_threads(1)
    start = time.perf_counter()
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(PATIENCE)
    if task.module:
        if task.module in sys.modules:
            raise RuntimeError(f"{task.module} was imported before it could be changed")
        sys.meta_path.insert(0, _Finder(task.module, task.source))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            _draw_nothing()
            if task.experiment:
                _change_rows(task.experiment, task.do)
        except Exception as error:
            outcome = "broken", "before the first cell", repr(error)[:300]
        else:
            outcome = _execute(task)
    signal.alarm(0)
    return Outcome(task.id, *outcome, round(time.perf_counter() - start, 1))


def attempts(tasks: list[Task], jobs: int) -> Iterator[Outcome]:
    """Run tasks, `jobs` at a time, one thread and one fresh process each; outcomes come as they finish."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="Agg")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # libraries, loaded once: a fresh process costs little
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(attempt, tasks, chunksize=1)
