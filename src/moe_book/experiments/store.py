"""The rows of an experiment: in SQLite while a run is under way, in one CSV when they are complete.

While `NAME.sqlite` is there it is the store. It holds each row as JSON, one transaction a row, and
the provenance that the row belongs to. When the last row is there all are written to `NAME.csv`, in the
order of the grid, with the SHA-256 of that file, the kinds of its columns and the provenances in the
manifest, and the database goes.
"""

import csv
import hashlib
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
from moe_book.experiments.backends import BACKENDS
from moe_book.experiments.registry import EXPERIMENTS, Experiment, experiment, identity, text
from moe_book.manifest import RESULTS
from moe_book.provenance import provenance
from moe_theory import _validate as check
from moe_theory.streams import CONVENTION, EARLIER, EARLIER_CONVENTION

SMOKE = Path("_build/smoke")
LOG = logging.getLogger(__name__)
SCHEMA = (
    "CREATE TABLE provenance (id INTEGER PRIMARY KEY, record TEXT NOT NULL UNIQUE)",
    "CREATE TABLE stored (key TEXT PRIMARY KEY, cells TEXT NOT NULL, "
    "provenance INTEGER NOT NULL REFERENCES provenance, sha256 TEXT NOT NULL)",
)
KINDS = {  # of a column: the types of its cells, and how they are read back; the first that fits
    "truth": ({bool}, lambda cell: cell == "True"),
    "number": ({int, float}, json.loads),
    "list": ({list}, json.loads),
    "word": ({bool, int, float, list, str, type(None)}, str),
}


def run(name: str, *, jobs: int = 1, backend: str = "loky", profile: str = "paper", folder: Path | None = None) -> None:
    """Compute the rows of an experiment that its store does not hold yet, storing each as it finishes.

    Args:
        name: a key of `EXPERIMENTS`.
        jobs: rows computed at the same time, each in a process of its own with one thread.
        backend: `loky` for processes of this machine, `dask` for a cluster.
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
    failed = []
    with _opened(path, e, profile) as (db, done):
        todo = [key for key in grid if identity(key) not in done]
        record = json.dumps(_provenance(e, profile))
        bar = tqdm(total=len(grid), initial=len(done), desc=f"{name} -> {path}", unit="row")
        with bar, closing(finished(e.row, todo, jobs) if todo else (row for row in ())) as results:
            for key, cells, error in results:
                if error:
                    LOG.error("%s: row %s failed\n%s", path, key, error)
                    failed.append(f"{key}: {error.strip().splitlines()[-1]}")
                else:
                    _insert(db, path, identity(key), cells, record)
                    bar.update()
        if failed:
            raise RuntimeError("\n  ".join([f"{path}: {len(failed)} rows failed, the others are stored", *failed]))
        _complete(path, _under_way(db, path, e, profile), grid)
        _running(path).unlink()


def load(name: str, folder: Path | None = None) -> pd.DataFrame:
    """The stored paper rows of an experiment, in the order of its grid.

    Args:
        name: a key of `EXPERIMENTS`; `python -m moe_book.experiments list` shows them.
        folder: where the stores lie; by default those that come with the package.

    Raises:
        ValueError: for an unknown name, or a store that is missing, incomplete, not bit for bit the one
            that was written, or of another experiment, profile or grid.
    """
    e = experiment(name)
    path = _path(e, "paper", folder)
    if not path.exists():
        what = "not all rows are stored yet" if _running(path).exists() else "no stored rows"
        raise ValueError(f"{path.name}: {what}; run `python -m moe_book.experiments run {name}`")
    rows = _written(path, e, "paper").rows
    missing = [key for key in e.grid if identity(key) not in rows]
    if missing:
        raise ValueError(f"{path.name}: {len(missing)} of {len(e.grid)} rows missing, the first {missing[0]}")
    if list(rows) != [identity(key) for key in e.grid]:
        raise ValueError(f"{path.name}: made for another grid, the same rows in another order; `run` sorts them")
    return pd.DataFrame([row.cells for row in rows.values()])


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
    rows, key = load(name).to_dict("records"), picked[0]
    # a column that mixes numbers and words is read as words
    (stored,) = (row for row in rows if all(row[c] == v or str(row[c]) == str(v) for c, v in key.items()))
    again = e.live(key)
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


def status(folder: Path | None = None) -> pd.DataFrame:
    """For every experiment: paper rows stored, rows in the grid, seconds the stored rows took, and how many of them
    were drawn before every purpose had a random stream of its own (`earlier`): computed again they are other draws.

    A store that is damaged, or of another experiment, profile or grid, has `refused` for the number of
    its rows and the reason, which names the file, in place of what the experiment is about.

    Args:
        folder: where the stores lie; by default those that come with the package.
    """
    lines = []
    for e in EXPERIMENTS.values():
        path = _path(e, "paper", folder)
        line = dict(experiment=e.name, stored="refused", rows=len(e.grid), seconds=0.0, earlier=0)
        try:
            with closing(sqlite3.connect(_running(path) if _running(path).exists() else ":memory:")) as db:
                records, rows = _under_way(db, path, e, "paper")
            earlier = sum(records[row.provenance].get("streams") != CONVENTION for row in rows.values())
            seconds = sum(row.cells["seconds"] for row in rows.values())
            line |= dict(stored=len(rows), seconds=seconds, earlier=earlier, about=e.about)
        except ValueError as error:
            line |= dict(about=str(error))
        lines.append(line)
    return pd.DataFrame(lines)


class _Row(NamedTuple):
    cells: dict
    provenance: int  # which of the records below


class _Stored(NamedTuple):
    records: list[dict]
    rows: dict[str, _Row]  # by the identity of their keys


def _path(e: Experiment, profile: str, folder: Path | None) -> Path:
    return Path(folder or (RESULTS if profile == "paper" else SMOKE)) / f"{e.name}.csv"


def _running(path: Path) -> Path:
    return path.with_suffix(".sqlite")


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
def _opened(path: Path, e: Experiment, profile: str) -> Iterator[tuple[sqlite3.Connection, dict[str, _Row]]]:
    """The database, with the rows that are stored so far; no other run gets it meanwhile."""
    file, held, before = _running(path), path.with_suffix(".lock"), None
    with closing(sqlite3.connect(held, timeout=0)) as lock, closing(sqlite3.connect(file)) as db:
        try:
            lock.execute("BEGIN EXCLUSIVE")  # until this process lets go or dies
        except sqlite3.OperationalError as error:
            raise ValueError(f"{path}: another run is writing this store ({error})") from None
        try:
            records, rows = _under_way(db, path, e, profile)
            if not db.execute("SELECT * FROM sqlite_schema").fetchall():
                db.executescript(";".join(("BEGIN", *SCHEMA)))
                for key, row in rows.items():
                    _add(db, key, json.dumps(row.cells), json.dumps(records[row.provenance]))
                db.commit()
                before = db.total_changes
            db.executescript("PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;")
            yield db, rows
        finally:
            if file.exists() and (before == db.total_changes or not file.stat().st_size):
                file.unlink()  # it holds nothing that the CSV does not
            held.unlink(missing_ok=True)


def _insert(db: sqlite3.Connection, path: Path, key: str, cells: str, record: str) -> None:
    columns, one = list(json.loads(cells)), db.execute("SELECT cells FROM stored LIMIT 1").fetchone()
    if one and list(json.loads(one[0])) != columns:
        raise ValueError(f"{path}: expected the columns {list(json.loads(one[0]))}, got {columns}")
    with db:  # one transaction
        _add(db, key, cells, record)


def _add(db: sqlite3.Connection, key: str, cells: str, record: str) -> None:
    db.execute("INSERT OR IGNORE INTO provenance SELECT count(*), ? FROM provenance", (record,))
    sealed = key, cells, _seal(key, cells, record), record
    db.execute("INSERT INTO stored SELECT ?, ?, id, ? FROM provenance WHERE record = ?", sealed)


def _seal(*texts: str) -> str:
    """SQLite itself finds a damaged page, not a damaged value."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.DatabaseError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: expected stored rows, got a file that is damaged or edited: {error!r}") from None


def _under_way(db: sqlite3.Connection, path: Path, e: Experiment, profile: str) -> _Stored:
    """The rows in the database; those of the CSV, if no run has taken them over yet."""
    file = _running(path)
    with _refusing(file):
        tables = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema WHERE sql NOT NULL")]
        problems = [problem for (problem,) in db.execute("PRAGMA integrity_check") if problem != "ok"]
        if problems or tables not in ([], [*SCHEMA]):
            raise LookupError(problems, tables)
        if tables:
            records = [record for (record,) in db.execute("SELECT record FROM provenance ORDER BY id")]
            found = db.execute("SELECT * FROM stored ORDER BY rowid").fetchall()
            if bad := [key for key, cells, block, seal in found if seal != _seal(key, cells, records[block])]:
                raise LookupError(f"rows that are not those that were stored: {bad}")
            rows = {key: _Row(json.loads(cells), block) for key, cells, block, _ in found}
            stored = _Stored([json.loads(record) for record in records], rows)
    return _of_this_grid(file, stored, e, profile) if tables else _written(path, e, profile)


def _complete(path: Path, stored: _Stored, grid: list[dict]) -> None:
    rows = [stored.rows[identity(key)] for key in grid]
    cells = [row.cells | key for row, key in zip(rows, grid, strict=True)]
    types = {c: {type(row[c]) for row in cells} for c in cells[0]}
    kinds = {c: next(kind for kind, (own, _) in KINDS.items() if found <= own) for c, found in types.items()}
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow([*kinds, "provenance"])
    table.writerows([*map(text, row.values()), block] for row, (_, block) in zip(cells, rows, strict=True))
    manifest.write(path.name, lines.getvalue().encode(), path.parent, columns=kinds, provenance=stored.records)


def _written(path: Path, e: Experiment, profile: str) -> _Stored:
    """The rows of the CSV, which are those of the manifest; none if there is no CSV."""
    if not path.exists():
        return _Stored([], {})
    content, about = manifest.read(path.name, path.parent)
    rows = {}
    with _refusing(path):
        records, read = about["provenance"], {c: KINDS[kind][1] for c, kind in about["columns"].items()}
        for row in csv.DictReader(io.StringIO(content.decode(), newline="")):
            key = {c: row[c] for c in records[-1]["key"]}
            rows[identity(key)] = _Row({c: read[c](row[c]) for c in read}, int(row["provenance"]))
    return _of_this_grid(path, _Stored(records, rows), e, profile)


def _of_this_grid(file: Path, stored: _Stored, e: Experiment, profile: str) -> _Stored:
    """Refuse rows that are not in the grid. A grid that grew is not refused: its new rows are missing."""
    for made_for in {(record["experiment"], record["profile"]) for record in stored.records} - {(e.name, profile)}:
        raise ValueError(f"{file}: expected {profile} rows of {e.name!r}, got {made_for[1]} rows of {made_for[0]!r}")
    known = set(map(identity, e.rows(profile)))
    if extra := [json.loads(row) for row in stored.rows if row not in known]:
        foreign = {cell for row in extra for cell in row.items()} - {
            c for row in known for c in json.loads(row).items()
        }
        raise ValueError(
            f"{file}: made for another grid than that of {list(e.grid[0])}; stored rows that are not in it: "
            f"{len(extra)}, the first {extra[0]}; stored values that it does not have: {sorted(foreign)}"
        )
    return stored
