"""Which functions of the two packages each cell of a chapter executes."""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType

from moe_book.sabotage.sources import SOURCES

#: Modules that judge, draw, read files or refuse bad input: their functions are not what a claim is about.
APPARATUS = [
    "claims",
    "evidence",
    "figures",
    "typeset",
    "registries",
    "glue",
    "manifest",
    "notebooks",
    "provenance",
    "sabotage",
    "_validate",
]
STORES = ("experiments.store", "experiments.catalogue", "experiments.backends", "experiments.__init__")


def functions_of(codes: set[CodeType]) -> list[str]:
    """`module:qualified.name` of code objects of the packages; what is defined inside a function counts as its."""
    found = set()
    for each in codes:
        path = Path(each.co_filename)
        if not path.is_relative_to(SOURCES) or path.suffix != ".py":
            continue
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
        name = each.co_qualname.split(".<")[0]
        inside = module.removeprefix("moe_book.").removeprefix("moe_theory.")
        if name.startswith("<") or inside.split(".")[0] in APPARATUS or inside in STORES:
            continue
        found.add(f"{module}:{name}")
    return sorted(found)


def _executed(run: Callable[[], None]) -> set[CodeType]:
    """The code of every Python function that is called while something runs."""
    codes: set[CodeType] = set()
    sys.setprofile(lambda frame, event, argument: codes.add(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return codes


def trace(cells: list[str], run: Callable[[int], None]) -> list[dict]:
    """Run the cells of a chapter one after another, in this process; what each executed, and how long it took.

    Args:
        cells: sources.
        run: runs the cell of an index; an error in it is not caught.

    Returns:
        For each cell its `functions`, and `seconds`, of which watching takes a part.
    """
    found = []
    for index in range(len(cells)):
        start, codes = time.perf_counter(), _executed(functools.partial(run, index))
        found.append({"functions": functions_of(codes), "seconds": round(time.perf_counter() - start, 1)})
    return found
