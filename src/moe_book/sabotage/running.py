"""Run mutants: each in a process of its own, which sees the changed copy and draws no figures.

A changed module has to be there before it is imported, so its mutant runs the claim's cells from the first in
a fresh process. A changed cell, or changed rows, matter only from the first cell that they touch. Up to there one
process runs the cells for all of them, and each mutant goes on from a fork of it.

This module is imported in those processes before a change takes effect, so it imports no other of the package.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context

#: What a check raises. Any other exception says that the mutant itself is badly made.
REFUSALS = (AssertionError, ValueError)
PATIENCE = 600  # seconds until a cell that does not end counts as broken
PRELOADED = ["torch.func", "pandas", "scipy.stats", "scipy.optimize", "scipy.integrate", "seaborn", "sympy", "yaml"]


@dataclass(frozen=True)
class Branch:
    """A mutant that goes on from a fork of its claim's process.

    Attributes:
        id: of the mutant.
        cells: code cells up to the card, changed; those that the card does not need are empty.
        start: index of the first cell that the change can touch.
        experiment, do: whose rows are changed, and how; empty for a changed cell.
    """

    id: str
    cells: tuple[str, ...]
    start: int
    experiment: str = ""
    do: str = ""


@dataclass(frozen=True)
class Task:
    """The cells of a claim to run, and what to change in them.

    Attributes:
        id: of the mutant, or of the claim if nothing is changed.
        cells: code cells up to the card; those that it does not need are empty.
        module, source: the module whose source is replaced; empty if nothing is changed.
        branches: the mutants that go on from forks.
    """

    id: str
    cells: tuple[str, ...]
    module: str = ""
    source: str = ""
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        outcome: `refused` by the card, `refused before` it, `survived`, or `broken` if it could not be run.
        by: the code cell, counted from 1, that refused; empty for a survivor.
        why: the first line of the refusal.
        seconds: processor time, for a branch from its fork on.
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
        assert spec and spec.origin, f"{name} was found before, to be read"
        spec.loader = _Loader(name, spec.origin, self.source)
        return spec


def _change_rows(branch: Branch, names: dict) -> list[str]:
    """Every load of the experiment's rows, by the chapter and by `recompute`, gives the changed ones.

    Returns a list that grows with each load of them.
    """
    import numpy as np
    import pandas as pd

    from moe_book import experiments
    from moe_book.experiments import store

    whole, loads = store.load, []

    def load(name, *args, **kwargs):
        rows = whole(name, *args, **kwargs)
        if name == branch.experiment:
            before, scope = rows.copy(), {"rows": rows, "np": np, "pd": pd}
            exec(branch.do, scope)
            rows = scope["rows"]
            if rows.equals(before):
                raise NameError(f"the rows of {name} are unchanged")
            loads.append(name)
        return rows

    store.load = experiments.load = load
    names.update({name: load for name, value in names.items() if value is whole})
    return loads


def _draw_nothing() -> None:
    import matplotlib.pyplot as plt

    from moe_book import figures

    figures.show = lambda figure, caption, alt: plt.close(figure)
    figures.table = lambda frame, caption, digits=2: None


def _out_of_time(number, frame):
    raise TimeoutError(f"not done after {PATIENCE} s")


Found = tuple[str, str, str]  # outcome, by, why


def _cell(cells: tuple[str, ...], index: int, names: dict) -> Found | None:
    """Run one cell; what refused if it raised."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(PATIENCE)
    try:
        exec(compile(cells[index], f"cell {index + 1}", "exec"), names)
    except Exception as error:
        refused = "refused" if index == len(cells) - 1 else "refused before"
        why = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        return refused if isinstance(error, REFUSALS) else "broken", f"cell {index + 1}", why
    finally:
        signal.alarm(0)
    return None


def _go_on(branch: Branch, names: dict) -> Found:
    loads = _change_rows(branch, names) if branch.experiment else [""]
    for index in range(branch.start, len(branch.cells)):
        if found := _cell(branch.cells, index, names):
            return found
    return ("survived", "", "") if loads else ("broken", "", f"no cell loads the rows of {branch.experiment}")


def _forked(id: str, run: Callable[[], Found]) -> Outcome:
    """What a function returns in a fork of this process, whose state it may change."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.write(writing, pickle.dumps(Outcome(id, *run(), round(time.process_time(), 1))))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(answer) if answer else Outcome(id, "broken", "", "its process died", 0.0)


def attempt(task: Task) -> list[Outcome]:
    """Run a task in a process that has imported nothing of the package but this module: the task's outcome first."""
    import torch

    torch.set_num_threads(1)
    start, names, found, branches = time.process_time(), {"__name__": "__main__"}, None, []
    names["display"] = lambda *shown: None
    if task.module:
        if task.module in sys.modules:
            raise RuntimeError(f"{task.module} was imported before it could be changed")
        sys.meta_path.insert(0, _Finder(task.module, task.source))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            _draw_nothing()
        except Exception as error:
            found = "broken", "before the first cell", repr(error)[:300]
        for index in range(len(task.cells)):
            branches += [_forked(b.id, lambda b=b: _go_on(b, names)) for b in task.branches if b.start == index]
            found = found or _cell(task.cells, index, names)
            if found:
                break
    found = found or ("survived", "", "")
    return [Outcome(task.id, *found, round(time.process_time() - start, 1)), *branches]


def attempts(tasks: list[Task], jobs: int) -> Iterator[Outcome]:
    """Run tasks, `jobs` at a time, one thread and one fresh process each; outcomes come as they finish."""
    os.environ.update(MOE_BOOK_STRICT="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="Agg")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # libraries, loaded once: a fresh process costs little
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for outcomes in pool.imap_unordered(attempt, tasks, chunksize=1):
            yield from outcomes
