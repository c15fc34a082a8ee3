"""The rows of an experiment: in SQLite while a run is under way, in one CSV when they are complete.

While `NAME.sqlite` is there it is the store: each row as JSON with its provenance, one transaction a row. When the
last row is there all are written to `NAME.csv`, in the order of the grid, with the SHA-256 of that file, the kinds of
its columns and the provenances in the manifest, and the database goes.
"""

import csv
import io
import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from tqdm import tqdm

from moe_book import manifest
from moe_book.devices import named_device
from moe_book.experiments.backends import BACKENDS
from moe_book.experiments.catalogue import EXPERIMENTS, Experiment, experiment, identity, text
from moe_book.manifest import RESULTS
from moe_book.provenance import provenance
from moe_theory import _validate as check
from moe_theory.streams import CONVENTION, EARLIER, EARLIER_CONVENTION

SMOKE = Path("_build/smoke")
LOG = logging.getLogger(__name__)
SCHEMA = "CREATE TABLE IF NOT EXISTS stored (key TEXT PRIMARY KEY, cells TEXT NOT NULL, provenance TEXT NOT NULL)"
KINDS = {  # of a column: the types of its cells, and how they are read back; the first that fits
    "truth": ({bool}, lambda cell: cell == "True"),
    "number": ({int, float}, json.loads),
    "list": ({list}, json.loads),
    "word": ({bool, int, float, list, str, type(None)}, str),
}


def run(name: str, *, jobs: int = 1, backend: str = "loky", profile: str = "paper", device: str = "cpu") -> None:
    """Compute the rows of an experiment that its store does not hold yet, storing each as it finishes.

    Args:
        name: a key of `EXPERIMENTS`.
        jobs: rows computed at the same time, each in a process of its own with one thread.
        backend: `loky` for processes of this machine, `dask` for a cluster.
        profile: `paper` for the full grid, whose store lies in `RESULTS`, `smoke` for the small one, in `SMOKE`.
        device: `cpu`, or `cuda` for a GPU, which only experiments with `gpu` in experiments.yml can use. A store may
            have rows of both; each tells in its column `device`.

    Raises:
        ValueError: for an argument outside its range, a device that is not there, a backend that is not installed, a
            store that another run is writing, or one that is damaged or of another experiment, profile or grid.
        RuntimeError: at the end, if rows failed; it names them. The others are stored.
    """
    e = experiment(name)
    grid = e.rows(profile)
    check.integer("jobs", jobs, 1)
    if named_device("device", device).type != "cpu" and not e.gpu:
        raise ValueError(f"device: expected 'cpu' for {name}, which computes nothing on a GPU, got {device!r}")
    finished = BACKENDS[check.choice("backend", backend, BACKENDS)]
    path = _path(e, profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    with _alone(path):
        done = _rows(path, e, profile)
        todo = [key for key in grid if identity(key) not in done]
        if todo and done:
            _insert(path, done)
        columns, record = next((list(row.cells) for row in done.values()), None), _provenance(e, profile)
        bar = tqdm(total=len(grid), initial=len(done), desc=f"{name} -> {path}", unit="row")
        with bar, closing(finished(e.row, todo, jobs, device) if todo else (row for row in ())) as results:
            for key, cells, error in results:
                if error:
                    LOG.error("%s: row %s failed\n%s", path, key, error)
                    failed.append(f"{key}: {error.strip().splitlines()[-1]}")
                    continue
                row = _Row(json.loads(cells), record)
                if list(row.cells) != (columns := columns or list(row.cells)):
                    raise ValueError(f"{path}: expected the columns {columns}, got {list(row.cells)}")
                _insert(path, {identity(key): row})
                bar.update()
        if failed:
            raise RuntimeError("\n  ".join([f"{path}: {len(failed)} rows failed, the others are stored", *failed]))
        _complete(path, _rows(path, e, profile), grid)
        path.with_suffix(".sqlite").unlink(missing_ok=True)


def load(name: str) -> pd.DataFrame:
    """The stored paper rows of an experiment, in the order of its grid.

    Args:
        name: a key of `EXPERIMENTS`; `python -m moe_book.experiments list` shows them.

    Raises:
        ValueError: for an unknown name, or a store that is missing, incomplete, not bit for bit the one
            that was written, or of another experiment, profile or grid.
    """
    e = experiment(name)
    path = _path(e, "paper")
    if not path.exists():
        what = "not all rows are stored yet" if path.with_suffix(".sqlite").exists() else "no stored rows"
        raise ValueError(f"{path.name}: {what}; run `python -m moe_book.experiments run {name}`")
    rows = _written(path, e, "paper")
    if missing := [key for key in e.grid if identity(key) not in rows]:
        raise ValueError(f"{path.name}: {len(missing)} of {len(e.grid)} rows missing, the first {missing[0]}")
    return pd.DataFrame([rows[identity(key)].cells for key in e.grid])


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
    stored, again = load(name).to_dict("records")[e.grid.index(picked[0])], e.live(picked[0])
    return pd.DataFrame([{k: stored[k] for k in again}, again], index=["stored", "recomputed"])


def recomputed_off(name: str, columns: list[str], picks: list[dict]) -> float:
    """The largest relative distance of columns of rows computed again from the stored ones; NaN where one is NaN.

    Args:
        name: a key of `EXPERIMENTS`; columns: with numbers, none of them stored as 0.
        picks: for each row, columns and values that pick it.

    Raises:
        ValueError: as `recompute`.
    """
    pairs = [recompute(name, **which)[columns].to_numpy(float) for which in picks]
    return float(np.max([abs(again / stored - 1) for stored, again in pairs]))


def status() -> pd.DataFrame:
    """For every experiment: paper rows stored, rows in the grid, seconds the stored rows took, and how many of them
    were drawn before every purpose had a random stream of its own (`earlier`): computed again they are other draws.

    A store that is damaged, or of another experiment, profile or grid, has `refused` for the number of
    its rows and the reason, which names the file, in place of what the experiment is about.
    """
    lines = []
    for e in EXPERIMENTS.values():
        line = dict(experiment=e.name, stored="refused", rows=len(e.grid), seconds=0.0, earlier=0)
        try:
            rows = _rows(_path(e, "paper"), e, "paper")
            earlier = sum(row.provenance.get("streams") != CONVENTION for row in rows.values())
            seconds = sum(row.cells["seconds"] for row in rows.values())
            line |= dict(stored=len(rows), seconds=seconds, earlier=earlier, about=e.about)
        except ValueError as error:
            line |= dict(about=str(error))
        lines.append(line)
    return pd.DataFrame(lines)


class _Row(NamedTuple):
    cells: dict
    provenance: dict


_Rows = dict[str, _Row]  # by the identity of their keys


def _path(e: Experiment, profile: str) -> Path:
    return (RESULTS if profile == "paper" else SMOKE) / f"{e.name}.csv"


def _provenance(e: Experiment, profile: str) -> dict:
    return {
        "experiment": e.name,
        "profile": profile,
        "configuration": e.configuration(profile),
        "key": list(e.grid[0]),
        **provenance(),
        "streams": EARLIER_CONVENTION if e.row.__module__ in EARLIER else CONVENTION,
    }


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other run writes this store meanwhile."""
    held = path.with_suffix(".lock")
    with closing(sqlite3.connect(held, timeout=0)) as lock:
        try:
            lock.execute("BEGIN EXCLUSIVE")  # until this process lets go or dies
        except sqlite3.OperationalError as error:
            raise ValueError(f"{path}: another run is writing this store ({error})") from None
        try:
            yield
        finally:
            held.unlink(missing_ok=True)


def _insert(path: Path, rows: _Rows) -> None:
    """Put rows into the database, which is made for the first of them, in one transaction."""
    lines = [(key, json.dumps(row.cells), json.dumps(row.provenance)) for key, row in rows.items()]
    with closing(sqlite3.connect(path.with_suffix(".sqlite"))) as db, db:
        db.execute("BEGIN")
        db.execute(SCHEMA)
        db.executemany("INSERT OR IGNORE INTO stored VALUES (?, ?, ?)", lines)


def _rows(path: Path, e: Experiment, profile: str) -> _Rows:
    """The rows in the database; those of the CSV, if no run has taken them over yet."""
    file = path.with_suffix(".sqlite")
    try:
        with closing(sqlite3.connect(file if file.exists() else ":memory:")) as db:
            begun = db.execute("SELECT * FROM sqlite_schema").fetchall()
            found = db.execute("SELECT * FROM stored ORDER BY rowid").fetchall() if begun else []
        rows = {key: _Row(json.loads(cells), json.loads(record)) for key, cells, record in found}
    except (sqlite3.DatabaseError, ValueError) as error:
        raise ValueError(f"{file}: expected stored rows, got a file that is damaged: {error!r}; delete it") from None
    return _of_this_grid(file, rows, e, profile) if begun else _written(path, e, profile)


def _complete(path: Path, stored: _Rows, grid: list[dict]) -> None:
    rows = [stored[identity(key)] for key in grid]
    cells = [row.cells | key for row, key in zip(rows, grid, strict=True)]
    types = {c: {type(row[c]) for row in cells} for c in cells[0]}
    kinds = {c: next(kind for kind, (own, _) in KINDS.items() if found <= own) for c, found in types.items()}
    records = [*{json.dumps(row.provenance): row.provenance for row in stored.values()}.values()]
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow([*kinds, "provenance"])
    for row, values in zip(rows, cells, strict=True):
        table.writerow([*map(text, values.values()), records.index(row.provenance)])
    manifest.write(path.name, lines.getvalue().encode(), path.parent, columns=kinds, provenance=records)


def _written(path: Path, e: Experiment, profile: str) -> _Rows:
    """The rows of the CSV, which are those of the manifest; none if there is no CSV."""
    if not path.exists():
        return {}
    content, about = manifest.read(path.name, path.parent)
    records, read = about["provenance"], {c: KINDS[kind][1] for c, kind in about["columns"].items()}
    rows = {}
    for row in csv.DictReader(io.StringIO(content.decode(), newline="")):
        key = {c: row[c] for c in records[-1]["key"]}
        rows[identity(key)] = _Row({c: read[c](row[c]) for c in read}, records[int(row["provenance"])])
    return _of_this_grid(path, rows, e, profile)


def _of_this_grid(file: Path, rows: _Rows, e: Experiment, profile: str) -> _Rows:
    """Refuse rows that are not in the grid. A grid that grew is not refused: its new rows are missing."""
    for record in (row.provenance for row in rows.values()):
        if (found := f"{record['profile']} rows of {record['experiment']!r}") != f"{profile} rows of {e.name!r}":
            raise ValueError(f"{file}: expected {profile} rows of {e.name!r}, got {found}")
    if extra := [json.loads(row) for row in rows.keys() - set(map(identity, e.rows(profile)))]:
        raise ValueError(
            f"{file}: made for another grid than that of {list(e.grid[0])}; stored rows that are not in it: "
            f"{len(extra)}, such as {extra[0]}"
        )
    return rows
