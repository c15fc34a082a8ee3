"""Run mutants: one process for a chapter, which goes through its cells, and for each mutant a fork of it.

A change matters from the first cell that executes it. Up to there the chapter's own process has run the cells; the
fork makes the change and goes on with those that the claim needs. A changed function has its code replaced, so that
whoever holds the function has the changed one.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from types import CodeType, FunctionType
from typing import Any

from moe_book.sabotage import operators, stored
from moe_book.sabotage.population import Mutant, paper_numbers
from moe_book.sabotage.sources import SOURCES, cells_of, code, function_node, module_tree
from moe_book.sabotage.tracing import trace

PRELOADED = ["torch.func", "pandas", "scipy.stats", "scipy.optimize", "scipy.integrate", "seaborn", "sympy", "yaml"]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        claim, key: of the mutant, or of the claim's control, which changes nothing.
        outcome: `refused` by the claim's box, `survived`, or `crashed` if an error came before the box.
        why: the first line of the refusal, or of the error with its cell.
        seconds: processor time from the fork on.
    """

    claim: str
    key: str
    outcome: str
    why: str
    seconds: float


class Refused(Exception):
    """The box of a claim refuses."""


def _watch_boxes() -> None:
    """What a box refuses becomes `Refused`, so that no other error is taken for it; nothing is drawn."""
    import matplotlib.pyplot as plt

    from moe_book import claims, figures

    settle = claims.settle

    def watched(claim_id, measured):
        try:
            return settle(claim_id, measured)
        except (AssertionError, ValueError) as error:
            raise Refused(f"{claim_id}: {str(error).removeprefix(f'{claim_id}: ')}") from None

    claims.settle = watched
    figures.show = lambda figure, caption, alt: plt.close(figure)
    figures.table = lambda frame, caption, digits=2: None


def _late(number, frame):
    raise TimeoutError("it does not end")


def _run_cell(source: str, index: int, names: dict, seconds: float) -> None:
    """Processor time counts, whatever else the machine does; a cell that waits for something has ten times as long."""
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, seconds), signal.ITIMER_REAL: (signal.SIGALRM, 10 * seconds)}
    for timer, (late, after) in timers.items():
        signal.signal(late, _late)
        signal.setitimer(timer, after)
    try:
        exec(compile(source, f"cell {index + 1}", "exec"), names)
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)


# --- making the change ----------------------------------------------------------------------------


def _changed_cell(source: str, m: Mutant) -> str:
    tree = ast.parse(source)
    (statement,) = m.where
    tree.body[statement] = operators.change(tree.body[statement], m.site)
    return ast.unparse(tree)


def _changed_code(function: str, m: Mutant) -> CodeType:
    """The code of a function with a mutant's change, compiled where it stands in its module."""
    module, name = function.split(":")
    tree, node = module_tree(module), function_node(function)
    index = next(i for i, part in enumerate(ast.walk(tree)) if part is node)
    found = compile(operators.replaced(tree, index, operators.change(node, m.site)), "changed", "exec")
    for part in name.split("."):
        found = next(c for c in found.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return found


def _function(name: str) -> FunctionType:
    """The function object of `module:qualified.name`, whatever wraps it."""
    module, path = name.split(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
        for inside in ("__func__", "fget", "func"):
            found = getattr(found, inside, found) if not inspect.isfunction(found) else found
    return inspect.unwrap(found)


def _change_runs(m: Mutant, names: dict) -> None:
    """Every load of an experiment's runs, by the chapter and by `recompute`, gives the changed ones."""
    from moe_book import experiments
    from moe_book.experiments import store

    whole, changed = store.load, m.place.removeprefix("runs ")
    keys = list(experiments.experiment(changed).grid[0])

    def load(name, *args, **kwargs):
        rows = whole(name, *args, **kwargs)
        return stored.changed_runs(rows, m.operator, m.where[0], keys) if name == changed else rows

    store.load = experiments.load = load
    names.update({name: load for name, value in names.items() if value is whole})


def _change_numbers(m: Mutant) -> None:
    from moe_book import claims

    row = claims.registry()[m.claim]
    row.update(stored.changed_numbers(paper_numbers(m.claim), m.operator, m.where))
    try:
        claims.validate(row)  # as when the registry is read
    except ValueError as error:
        raise Refused(f"{m.claim}: {error}") from None


def _changed(m: Mutant, names: dict) -> tuple[str, ...]:
    """Make a mutant's change in this process; the cells of its claim, of which one may be changed."""
    cells = list(cells_of(m.claim))
    if m.kind == "control":
        return cells_of(m.claim)
    if m.place.startswith("cell "):
        cells[m.start] = _changed_cell(cells[m.start], m)
    elif m.place.startswith("runs "):
        _change_runs(m, names)
    elif m.place == "paper":
        _change_numbers(m)
    else:
        _function(m.place).__code__ = _changed_code(m.place, m)
    return tuple(cells)


# --- running --------------------------------------------------------------------------------------


def _go_on(m: Mutant, names: dict, patience: list[int]) -> tuple[str, str]:
    index = m.start
    try:
        cells = _changed(m, names)
        for index in range(m.start, len(cells)):
            if cells[index]:
                _run_cell(cells[index], index, names, patience[index])
    except Refused as refusal:
        mine = str(refusal).startswith(f"{m.claim}:")
        return "refused" if mine else "crashed", str(refusal).split("\n")[0][:200]
    except BaseException as error:
        why = f"cell {index + 1}: {type(error).__name__}: {error}".replace(str(SOURCES), "…")
        return "crashed", why.split("\n")[0][:200]
    return "survived", ""


def _forked(claim: str, key: str, run: Callable[[], tuple[str, str]]) -> Outcome:
    """What a function returns in a fork of this process, whose state it may change."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            start = time.process_time()
            outcome, why = run()
            os.write(writing, pickle.dumps(Outcome(claim, key, outcome, why, round(time.process_time() - start, 1))))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(answer) if answer else Outcome(claim, key, "crashed", "its process died", 0.0)


@contextlib.contextmanager
def _chapter() -> Iterator[dict]:
    """The names of a chapter that runs in this process, its boxes watched and its printing dropped."""
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _watch_boxes()
        yield {"__name__": "__main__", "display": lambda *shown: None}


def traced(chapter: str) -> list[dict]:
    """What each cell of a chapter executes; see `tracing.trace`."""
    cells = code(chapter)
    with _chapter() as names:
        return trace(cells, lambda index: _run_cell(cells[index], index, names, 600))


def attempted(chapter: str, mutants: list[Mutant], seconds: list[float], report: Callable[[Outcome], None]) -> None:
    """Run a chapter's cells as far as some mutants need them, and each mutant in a fork.

    Args:
        chapter: stem of the notebook.
        mutants: of claims of the chapter.
        seconds: that each cell takes.
        report: is called with each outcome as it is there.
    """
    patience = [20 + int(5 * s) for s in seconds]
    wanted = {claim: cells_of(claim) for claim in dict.fromkeys(m.claim for m in mutants)}
    last = {claim: max(m.start for m in mutants if m.claim == claim) for claim in wanted}
    with _chapter() as names:
        for index, source in enumerate(code(chapter)):
            for m in mutants:
                if m.start == index:
                    report(_forked(m.claim, m.key, functools.partial(_go_on, m, names, patience)))
            if any(index < last[claim] and index < len(cells) and cells[index] for claim, cells in wanted.items()):
                _run_cell(source, index, names, 10 * patience[index])


def _work(task: tuple) -> None:
    work, arguments, pipe = task
    try:
        pipe.put((arguments[0], work(*arguments, *((pipe.put,) if work is attempted else ()))))
    except BaseException as error:
        pipe.put((arguments[0], f"{type(error).__name__}: {error}"))


def at_once(tasks: list[tuple], jobs: int) -> Iterator[Any]:
    """Outcomes as they come, and for each task, when it ends, the pair of its chapter and what it returned.

    Args:
        tasks: pairs of `traced` or `attempted` and its arguments but the last.
        jobs: processes at the same time, one thread and one fresh process each.
    """
    os.environ.update(MOE_BOOK_STRICT="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MPLBACKEND="Agg")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # libraries, loaded once: a fresh process costs little
    with context.Manager() as manager, context.Pool(jobs, maxtasksperchild=1) as pool:
        pipe, left = manager.Queue(), len(tasks)
        done = pool.map_async(_work, [(*task, pipe) for task in tasks], chunksize=1)
        while left:
            found = pipe.get()
            left -= isinstance(found, tuple)
            yield found
        done.wait()
