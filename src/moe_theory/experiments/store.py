"""Rows on disk, one CSV per experiment, and the runs that fill it.

A store is made of blocks. A block is a provenance line (`# ` and one JSON object) and the rows that
were computed under it, each with its device, its seconds and a checksum; the column names stand below
the first provenance line. A run whose code, libraries or grid are not those of the last block opens
a new one. Rows are appended as they finish, and put in the order of the grid once all are there.
"""

import csv
import hashlib
import io
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pandas as pd
from tqdm import tqdm

from moe_theory import __version__
from moe_theory import _validate as check
from moe_theory.experiments.backends import BACKENDS
from moe_theory.experiments.registry import EXPERIMENTS, Experiment, experiment

RESULTS = Path(__file__).parents[1] / "results"
SMOKE = Path("_build/smoke")
LIBRARIES = ("torch", "numpy", "scipy")
LOG = logging.getLogger(__name__)


def run(name: str, jobs: int = 1, backend: str = "loky", profile: str = "paper", folder: Path | None = None) -> None:
    """Compute the rows of an experiment that its store does not hold yet, storing each as it finishes.

    Args:
        name: a key of `EXPERIMENTS`.
        jobs: rows computed at the same time, each in a process of its own with one thread.
        backend: `loky` for processes of this machine, `dask` or `ray` for a cluster.
        profile: `paper` for the full grid, `smoke` for the small one.
        folder: where the store lies; by default `RESULTS` for `paper` and `SMOKE` for `smoke`.

    Raises:
        ValueError: for an argument outside its range, a backend that is not installed, a store that
            another run is writing, or one that is damaged or of another experiment, profile or grid.
        RuntimeError: at the end, if rows failed; it names them. The others are stored.
    """
    e = experiment(name)
    grid = e.rows(profile)
    check.integer("jobs", jobs, 1)
    finished = BACKENDS[check.choice("backend", backend, BACKENDS)]
    path = _path(e, profile, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as file:
        store = _resume(file, path, e, profile)
        provenance = _provenance(e, profile)
        todo = [key for key in grid if _identity(key, key) not in store.rows]
        failed = []
        results = finished(e.row, todo, jobs) if todo else ()
        with tqdm(total=len(grid), initial=len(store.rows), desc=f"{name} -> {path}", unit="row") as bar:
            for key, row, error in results:
                if error:
                    LOG.error("%s: row %s failed\n%s", path, key, error)
                    failed.append(f"{key}: {error.strip().splitlines()[-1]}")
                else:
                    _append(file, store, provenance, list(key), row)
                    bar.update()
        if failed:
            raise RuntimeError("\n  ".join([f"{path}: {len(failed)} rows failed, the others are stored", *failed]))
        _put_in_order(path, store, grid)


def load(name: str, folder: Path | None = None) -> pd.DataFrame:
    """The stored paper rows of an experiment, in the order of its grid.

    Raises:
        ValueError: for an unknown name, or a store that is missing, incomplete, damaged, or of
            another experiment, profile or grid.
    """
    e = experiment(name)
    path = _path(e, "paper", folder)
    store = _read(path, e, "paper")
    if not store.rows:
        raise ValueError(f"{path.name}: no stored rows; run `python -m moe_theory.experiments run {name}`")
    missing = [key for key in e.grid if _identity(key, key) not in store.rows]
    if missing:
        raise ValueError(f"{path.name}: {len(missing)} of {len(e.grid)} rows missing, the first {missing[0]}")
    lines = [_line(store.columns), *(_line(store.rows[_identity(key, key)].values) for key in e.grid)]
    return pd.read_csv(io.StringIO("".join(lines)), usecols=store.columns[:-1])


def recompute(name: str, **which) -> pd.DataFrame:
    """Compute the cheap part of one row again and set it beside the stored values.

    Args:
        name: a key of `EXPERIMENTS`.
        which: columns and values that pick exactly one row of the grid.

    Returns:
        A frame with rows `stored` and `recomputed`.

    Raises:
        ValueError: if `which` picks no row or more than one, and as `load`.
    """
    e = experiment(name)
    picked = [key for key in e.grid if all(key.get(k) == v for k, v in which.items())]
    if len(picked) != 1:
        raise ValueError(f"which: expected to pick one row of {name!r}, but {which} picks {len(picked)}")
    rows, key = load(name), pd.Series(picked[0])
    read = rows[list(key.index)]  # a column that mixes numbers and words is read as words
    (stored,) = rows[((read == key) | (read.astype(str) == key.astype(str))).all(axis=1)].to_dict("records")
    again = e.live(picked[0])
    return pd.DataFrame([{k: stored[k] for k in again}, again], index=["stored", "recomputed"])


def status(folder: Path | None = None) -> pd.DataFrame:
    """For every experiment: paper rows stored, rows in the grid, seconds the stored rows took.

    Raises:
        ValueError: for a store that is damaged, or of another experiment, profile or grid.
    """
    lines = []
    for e in EXPERIMENTS.values():
        store = _read(_path(e, "paper", folder), e, "paper")
        seconds = sum(float(row.values[store.columns.index("seconds")]) for row in store.rows.values())
        lines.append(dict(experiment=e.name, stored=len(store.rows), rows=len(e.grid), seconds=seconds, about=e.about))
    return pd.DataFrame(lines)


# What lies on disk.


class _Row(NamedTuple):
    block: int
    values: list[str]


@dataclass
class _Store:
    provenance: list[dict] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: dict[tuple[str, ...], _Row] = field(default_factory=dict)


def _path(e: Experiment, profile: str, folder: Path | None) -> Path:
    return Path(folder or (RESULTS if profile == "paper" else SMOKE)) / f"{e.name}.csv"


def _identity(row: dict, columns: list[str] | dict) -> tuple[str, ...]:
    return tuple(str(row[c]) for c in columns)


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=RESULTS, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _provenance(e: Experiment, profile: str) -> dict:
    return {
        "experiment": e.name,
        "profile": profile,
        "configuration": e.configuration(profile),
        "key": list(e.grid[0]),
        "moe_theory": __version__,
        "commit": _commit(),
        **{name: version(name) for name in LIBRARIES},
    }


def _checksum(values: list[str]) -> str:
    return hashlib.sha256("\x1f".join(values).encode()).hexdigest()[:12]


def _line(values: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _head(provenance: dict) -> str:
    return f"# {json.dumps(provenance)}\n"


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The store, open for appending; no other run gets it before this process has let go or died."""
    import fcntl  # not on Windows, where rows can be read but not computed

    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise ValueError(f"{path}: another run is writing this store; wait until it has ended, or stop it")
        try:
            yield file
        finally:
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


def _resume(file: BinaryIO, path: Path, e: Experiment, profile: str) -> _Store:
    """What is stored, less a last row that a kill left unfinished."""
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    store = _parse(content[:end], path.name, e, profile)
    if end < len(content):
        LOG.warning("%s: the last row is unfinished; it is dropped and computed again", path)
        file.truncate(end)
    return store


def _append(file: BinaryIO, store: _Store, provenance: dict, key: list[str], row: dict) -> None:
    """Store one row, with the lines that must stand above it, in one write and a sync."""
    columns = [*row, "checksum"]
    values = [str(v) for v in row.values()]
    if columns != (store.columns or columns):
        raise ValueError(f"{file.name}: expected the columns {store.columns}, got {columns}")
    if any(mark in v for v in values for mark in "\n\r"):
        raise ValueError(f"{file.name}: expected values without line breaks, got {row}")
    above = ""
    if store.provenance[-1:] != [provenance]:
        store.provenance.append(provenance)
        above = _head(provenance)
    if not store.columns:
        store.columns = columns
        above += _line(columns)
    stored = _Row(len(store.provenance) - 1, [*values, _checksum(values)])
    store.rows[_identity(row, key)] = stored
    file.write((above + _line(stored.values)).encode())
    file.flush()
    os.fsync(file.fileno())


def _put_in_order(path: Path, store: _Store, grid: list[dict]) -> None:
    """Rewrite a complete store with the rows of each block in the order of the grid, if they are not."""
    rows = [store.rows[_identity(key, key)] for key in grid]
    text = ""
    for block, provenance in enumerate(store.provenance):
        text += _head(provenance) + (_line(store.columns) if block == 0 else "")
        text += "".join(_line(row.values) for row in rows if row.block == block)
    if text.encode() != path.read_bytes():
        new = path.with_suffix(".csv.new")
        with open(new, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


def _read(path: Path, e: Experiment, profile: str) -> _Store:
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        raise ValueError(f"{path.name}: expected a line break after the last row; the file is truncated")
    return _parse(content, path.name, e, profile)


def _parse(content: bytes, file: str, e: Experiment, profile: str) -> _Store:
    """The rows of a store; ValueError for one that is damaged or of another experiment, profile or grid."""
    store = _Store()
    for line in content.decode(errors="replace").split("\n")[:-1]:
        if line.startswith("# "):
            store.provenance.append(_parse_head(line, file, e, profile))
        elif not store.provenance:
            raise ValueError(f"{file}: expected a line with the provenance first, got {line!r}")
        elif not store.columns:
            store.columns = _parse_columns(line, file, e, store.provenance[0])
        else:
            values = _parse_row(line, len(store.rows) + 1, file, store.columns)
            identity = _identity(dict(zip(store.columns, values, strict=True)), e.grid[0])
            if identity in store.rows:
                raise ValueError(f"{file}: row {len(store.rows) + 1} is there twice, {identity}")
            store.rows[identity] = _Row(len(store.provenance) - 1, values)
    _check_grid(store, file, e, profile)
    return store


def _parse_head(line: str, file: str, e: Experiment, profile: str) -> dict:
    try:
        head = json.loads(line.removeprefix("# "))
        made_for = (head["experiment"], head.get("profile", "paper"), head["configuration"])[:2]
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file}: expected provenance with an experiment and a configuration, got {line!r}") from None
    if made_for != (e.name, profile):
        raise ValueError(f"{file}: expected {profile} rows of {e.name!r}, got {made_for[1]} rows of {made_for[0]!r}")
    return head


def _parse_columns(line: str, file: str, e: Experiment, provenance: dict) -> list[str]:
    columns = next(csv.reader([line]))
    if columns[-3:] != ["device", "seconds", "checksum"]:
        raise ValueError(f"{file}: expected columns that end with device, seconds, checksum, got {columns}")
    added = [c for c in e.grid[0] if c not in provenance.get("key", columns)]
    removed = [c for c in provenance.get("key", ()) if c not in e.grid[0]]
    if added or removed:
        raise ValueError(f"{file}: made for another grid; grid columns added: {added}, removed: {removed}")
    return columns


def _parse_row(line: str, number: int, file: str, columns: list[str]) -> list[str]:
    values = next(csv.reader([line]))
    if len(values) != len(columns) or _checksum(values[:-1]) != values[-1]:
        raise ValueError(f"{file}: row {number} does not match its checksum; it was edited or cut")
    return values


def _check_grid(store: _Store, file: str, e: Experiment, profile: str) -> None:
    """Refuse rows that are not in the grid. A grid that grew is not refused: its new rows are missing."""
    grid = {_identity(key, key) for key in e.rows(profile)}
    extra = [dict(zip(e.grid[0], row, strict=True)) for row in store.rows if row not in grid]
    if extra:
        wanted = dict(zip(e.grid[0], map(set, zip(*grid, strict=True)), strict=True))
        stored = {c: {r[c] for r in extra} for c in wanted}
        differ = [f"{c} stored {sorted(stored[c])}, in the grid {sorted(wanted[c])}" for c in wanted]
        raise ValueError(
            f"{file}: made for another grid; stored rows not in the grid: {len(extra)}, the first {extra[0]}; "
            + "; ".join(text for c, text in zip(wanted, differ, strict=True) if stored[c] - wanted[c])
        )
    if len(store.rows) == len(grid) and store.provenance[-1]["configuration"] != e.configuration(profile):
        raise ValueError(
            f"{file}: made for configuration {store.provenance[-1]['configuration']}, but the grid of {e.name!r} is "
            f"{e.configuration(profile)}: the same rows in another order, or a provenance that was edited"
        )
