"""Which experiments there are."""

import hashlib
import json
import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from moe_book import registries
from moe_theory import _validate as check

PROFILES = ("paper", "smoke")


def text(value) -> str:
    """A value as a result file has it: lists and numbers as JSON."""
    return json.dumps(value) if isinstance(value, list | float) else str(value)


def rounded(value, digits: int) -> Any:
    """Floats as a result file has them, with so many significant digits; counts and flags stay as they are.

    Args:
        value: a number, or a list, array, tensor or dict of values.
        digits: significant digits that are kept.
    """
    if isinstance(value, dict):
        return {name: rounded(v, digits) for name, v in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [rounded(v, digits) for v in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def peak_memory() -> int:
    """The most memory that this process has had, in KiB; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def identity(key: dict) -> str:
    """What tells one row of a grid from another, in a result file too, where 1 and "1" are the same."""
    return json.dumps({column: text(value) for column, value in sorted(key.items())})


@dataclass(frozen=True)
class Experiment:
    """Two grids and a function of one row.

    Attributes:
        name: also the stem of its result file.
        about: one line.
        grid: the rows to compute, each a dict of JSON values; together they are the configuration.
        smoke: a few rows with the same columns, so small that they take seconds: does the code run?
        row: computes one row: its values as a dict, from the row's dict alone.
        live: recomputes the part of a row that is cheap enough for a chapter.
        gpu: whether rows can be computed on a GPU.

    Raises:
        ValueError: for a grid that is empty, has two rows that are written alike (also if they differ in
            type, as 1 and "1" do), or whose rows differ in their columns.
    """

    name: str
    about: str
    grid: list[dict]
    smoke: list[dict]
    row: Callable[[dict], dict]
    live: Callable[[dict], dict]
    gpu: bool = False

    def __post_init__(self):
        for profile in PROFILES:
            rows = self.rows(profile)
            if not rows:
                raise ValueError(f"{self.name}: expected rows in the {profile} grid, got none")
            for row in rows:
                if list(row) != list(self.grid[0]):
                    raise ValueError(f"{self.name}: expected the columns {list(self.grid[0])} in {profile} row {row}")
            first = {}
            for i, row in enumerate(rows):
                if (j := first.setdefault(identity(row), i)) < i:
                    raise ValueError(
                        f"{self.name}: expected {profile} rows that read differently, got {rows[j]} and {row}"
                    )

    def rows(self, profile: str) -> list[dict]:
        """The grid of a profile: `paper` the one whose rows the book shows, `smoke` the small one."""
        return {"paper": self.grid, "smoke": self.smoke}[check.choice("profile", profile, PROFILES)]

    def configuration(self, profile: str = "paper") -> str:
        """Hash of a grid: the short name under which a store records what it was made for."""
        return hashlib.sha256(json.dumps(self.rows(profile), sort_keys=True).encode()).hexdigest()[:16]


def _made(
    name: str, about: str, module: str, grid: str, row: str, live: str | None = None, gpu: bool = False
) -> Experiment:
    """An experiment from its entry in experiments.yml; its smoke rows are the first and the last, made small."""
    of = import_module(f"{__package__}.{module}")
    rows = getattr(of, grid)()
    small = [{column: of.SMOKE.get(column, value) for column, value in key.items()} for key in (rows[0], rows[-1])]
    smoke = small[: 1 + (small[0] != small[1])]
    return Experiment(name, about, rows, smoke, getattr(of, row), getattr(of, live or row), gpu)


FILE = Path(__file__).with_name("experiments.yml")
FIELDS = dict.fromkeys(("about", "module", "grid", "row", "live"), str) | {"gpu": bool}


@cache
def entries() -> dict[str, dict]:
    """What experiments.yml says of each, nothing imported; ValueError for a slip."""
    found = registries.read(FILE)
    for name, entry in found.items():
        where = f"{FILE.name}: {name}"
        module = FILE.with_name(registries.checked(where, entry, FIELDS, optional=["live", "gpu"])["module"] + ".py")
        if not module.is_file():
            raise ValueError(f"{where}: module: expected one of {FILE.parent}, got {entry['module']!r}")
        words = {*re.findall(r"\w+", module.read_text(encoding="utf-8"))}
        if missing := {entry[field] for field in ("grid", "row", "live") if field in entry} - words:
            raise ValueError(f"{where}: {module.name} has no function {sorted(missing)}")
    return found


class _Experiments(UserDict):
    """Experiments by name; one is made, and its module imported, when it is first asked for."""

    def __init__(self):
        """They are read when the first is asked for."""

    @cached_property
    def data(self) -> dict[str, dict | Experiment]:
        return dict(entries())

    def __getitem__(self, name: str) -> Experiment:
        found = self.data[name]
        if isinstance(found, dict):
            found = self.data[name] = _made(name, **found)
        return found

    def abouts(self) -> dict[str, str]:
        """What each is about, nothing imported."""
        return {name: e["about"] if isinstance(e, dict) else e.about for name, e in self.data.items()}


EXPERIMENTS = _Experiments()


def experiment(name: str) -> Experiment:
    """The experiment of that name; ValueError names the ones there are."""
    return EXPERIMENTS[check.choice("experiment", name, EXPERIMENTS)]
