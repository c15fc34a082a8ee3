"""Rows on disk: one CSV per experiment, its provenance in the first line, a checksum on every row."""

import csv
import hashlib
import io
import json
import os
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import joblib
import pandas as pd
import torch
from tqdm import tqdm

from moe_theory import __version__
from moe_theory.experiments.registry import EXPERIMENTS, Experiment, experiment

RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = ("torch", "numpy", "scipy")


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=RESULTS, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _provenance(e: Experiment) -> dict:
    return {
        "experiment": e.name,
        "configuration": e.configuration,
        "moe_theory": __version__,
        "commit": _commit(),
        **{name: version(name) for name in LIBRARIES},
    }


def _checksum(values: list[str]) -> str:
    return hashlib.sha256("\x1f".join(values).encode()).hexdigest()[:12]


def _line(values: list) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _append(path: Path, text: str) -> None:
    """One write and a sync, so that a row is there whole or not at all."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, e: Experiment) -> list[dict]:
    """The rows of a store, as strings; ValueError for another configuration, an edited or a cut row."""
    head, _, body = path.read_text().partition("\n")
    made_for = json.loads(head.removeprefix("# "))["configuration"]
    if made_for != e.configuration:
        raise ValueError(
            f"{path.name}: made for configuration {made_for}, but the grid of {e.name!r} is {e.configuration}"
        )
    if not body.endswith("\n"):
        raise ValueError(f"{path.name}: expected a line break after the last row; the file is truncated")
    rows = list(csv.DictReader(io.StringIO(body)))
    for number, r in enumerate(rows, 1):
        *values, checksum = r.values()
        if None in r.values() or None in r or _checksum(values) != checksum:
            raise ValueError(f"{path.name}: row {number} does not match its checksum; it was edited or cut")
    return rows


def _key(e: Experiment, row: dict) -> str:
    return json.dumps({k: str(row[k]) for k in e.grid[0]})


def run(name: str, jobs: int = 1, folder: Path = RESULTS) -> None:
    """Compute the rows of an experiment that its store does not hold yet, appending each as it finishes.

    Args:
        name: a key of `EXPERIMENTS`.
        jobs: rows computed at the same time, each in a process of its own with one thread.
        folder: where the store lies.

    Raises:
        ValueError: for an unknown name, or a store of another configuration or with a damaged row.
    """
    e = experiment(name)
    path = folder / f"{name}.csv"
    done = {_key(e, r) for r in _read(path, e)} if path.exists() else set()
    todo = [key for key in e.grid if _key(e, key) not in done]
    tasks = (joblib.delayed(_compute)(e.name, key) for key in todo)
    results = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(tasks)
    for row in tqdm(results, total=len(todo), desc=name, unit="row"):
        values = [str(v) for v in row.values()]
        if not path.exists():
            _append(path, f"# {json.dumps(_provenance(e))}\n" + _line([*row, "checksum"]))
        _append(path, _line([*values, _checksum(values)]))


def _compute(name: str, key: dict) -> dict:
    torch.set_num_threads(1)
    start = time.perf_counter()
    values = experiment(name).row(key)
    return {**key, **values, "device": "cpu", "seconds": round(time.perf_counter() - start, 1)}


def load(name: str, folder: Path = RESULTS) -> pd.DataFrame:
    """The stored rows of an experiment, in the order of its grid.

    Raises:
        ValueError: for an unknown name, a store that is missing, incomplete, of another
            configuration, or that holds an edited or cut row.
    """
    e = experiment(name)
    path = folder / f"{name}.csv"
    if not path.exists():
        raise ValueError(f"{path.name}: no stored rows; run `python -m moe_theory.experiments run {name}`")
    rows = {_key(e, r): r for r in _read(path, e)}
    missing = [key for key in e.grid if _key(e, key) not in rows]
    if missing:
        raise ValueError(f"{path.name}: {len(missing)} of {len(e.grid)} rows missing, the first {missing[0]}")
    ordered = [_line([*rows[_key(e, key)].values()][:-1]) for key in e.grid]
    columns = _line([c for c in rows[_key(e, e.grid[0])] if c != "checksum"])
    return pd.read_csv(io.StringIO(columns + "".join(ordered)))


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
    rows = load(name)
    (stored,) = rows[(rows[list(picked[0])] == pd.Series(picked[0])).all(axis=1)].to_dict("records")
    again = e.live(picked[0])
    return pd.DataFrame([{k: stored[k] for k in again}, again], index=["stored", "recomputed"])


def status(folder: Path = RESULTS) -> pd.DataFrame:
    """Rows stored and rows in the grid, for every experiment."""
    rows = []
    for e in EXPERIMENTS.values():
        path = folder / f"{e.name}.csv"
        stored = len(_read(path, e)) if path.exists() else 0
        rows.append({"experiment": e.name, "stored": stored, "rows": len(e.grid), "about": e.about})
    return pd.DataFrame(rows)
