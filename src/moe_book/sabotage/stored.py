"""Small changes of stored runs and of the paper's numbers."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

MORE = 1.05  # a measured number that is off by 5 %
WIDER = 1.5  # a spread over seeds that is half as large again


def drawn(key: str, choices: Sequence) -> Any:
    """One of some choices, by a hash of a key."""
    return choices[int(hashlib.sha256(key.encode()).hexdigest(), 16) % len(choices)]


# --- runs -----------------------------------------------------------------------------------------

Values = pd.Series


def _of_numbers(change: Callable[[np.ndarray], np.ndarray], values: Values) -> Values:
    """A change of numbers, applied to a column of numbers as a whole, or to each curve of a column of curves."""
    if _curves(values):
        return values.map(lambda v: change(np.array(v, float)).tolist() if isinstance(v, list) and _flat(v) else v)
    return pd.Series(change(values.to_numpy(float)), values.index)


def _curves(values: Values) -> bool:
    return values.map(lambda v: isinstance(v, list)).any()


def _flat(value: list) -> bool:
    return bool(value) and all(isinstance(v, int | float) for v in value)


def scaled(values: Values, group: Values) -> Values:
    """5 % more, everywhere."""
    return _of_numbers(lambda x: MORE * x, values)


def scaled_in_one(values: Values, group: Values) -> Values:
    """5 % more, in one group."""
    mine = group == drawn(f"{values.name} in one", sorted(group.unique()))
    return values.where(~mine, _of_numbers(lambda x: MORE * x, values))


def exchanged(values: Values, group: Values) -> Values:
    """Two groups exchanged."""
    names = sorted(group.unique())
    if len(names) < 2:
        return values
    at = drawn(f"{values.name} exchanged", range(len(names) - 1))
    a, b = (values.index[group == name] for name in names[at : at + 2])
    n, new = min(len(a), len(b)), values.copy()
    for i, j in zip(a[:n], b[:n], strict=True):
        new.at[i], new.at[j] = values.at[j], values.at[i]
    return new


def unpaired(values: Values, group: Values) -> Values:
    """Pairs broken: in one group each run has the value of the next seed."""
    chosen = drawn(f"{values.name} unpaired", sorted(group.unique()))
    mine = [i for i, name in group.items() if name == chosen]
    new = values.copy()
    for i, j in zip(mine, [*mine[1:], *mine[:1]], strict=True):
        new.at[i] = values.at[j]
    return new


def copied(values: Values, group: Values) -> Values:
    """Every seed of a group is a copy of the first."""
    new = values.copy()
    for _, index in values.groupby(group.to_numpy()).groups.items():
        for i in index:
            new.at[i] = values.at[index[0]]
    return new


def widened(values: Values, group: Values) -> Values:
    """The spread over the seeds of each group half as large again."""
    if _curves(values):
        return values
    mean = values.astype(float).groupby(group.to_numpy()).transform("mean")
    return mean + WIDER * (values.astype(float) - mean)


def flattened(values: Values, group: Values) -> Values:
    """Each curve is its mean."""
    return _of_curves(lambda x: np.full(len(x), x.mean()), values)


def reversed_(values: Values, group: Values) -> Values:
    """Each curve runs backwards."""
    return _of_curves(lambda x: x[::-1], values)


def smoothed(values: Values, group: Values) -> Values:
    """Each curve is replaced by its running mean over four readings."""
    return _of_curves(lambda x: np.convolve(np.pad(x, (2, 1), "edge"), np.full(4, 0.25), "valid"), values)


def _of_curves(change: Callable[[np.ndarray], np.ndarray], values: Values) -> Values:
    return _of_numbers(change, values) if _curves(values) else values


def tilted(values: Values, group: Values) -> Values:
    """Nothing more in the first group of the grid, 10 % more in the last, and in proportion between."""
    if _curves(values):
        return values
    order = group.map({name: i for i, name in enumerate(group.unique())}) / max(group.nunique() - 1, 1)
    return values * (1 + 0.1 * order)


def flipped(values: Values, group: Values) -> Values:
    """Yes for no, in one group."""
    mine = group == drawn(f"{values.name} flipped", sorted(group.unique()))
    return values.where(~mine, ~values.astype(bool))


NUMBERS = (scaled, scaled_in_one, exchanged, unpaired, copied, widened, tilted, flattened, reversed_, smoothed)
RUNS = {operator.__name__.rstrip("_"): operator for operator in (*NUMBERS, flipped)}


def groups(rows: pd.DataFrame, keys: list[str]) -> Values:
    """The group of each run: its place in the grid without the seed."""
    named = [key for key in keys if key in rows and key not in ("seed", "rep", "run")]
    return rows[named].astype(str).agg(" ".join, axis=1) if named else pd.Series("", rows.index)


def changed_runs(rows: pd.DataFrame, operator: str, column: str, keys: list[str]) -> pd.DataFrame:
    """Stored runs with one column changed, or, for `only first`, cut to the first value of one key."""
    if operator == "only_first":
        words = rows[column].astype(str)
        return rows[words == words.iloc[0]].reset_index(drop=True)
    if operator == "another_column":
        return rows.assign(**{column: rows[_beside(rows, column, keys)]})
    return rows.assign(**{column: RUNS[operator](rows[column], groups(rows, keys))})


def offered_runs(rows: pd.DataFrame, keys: list[str], read: set[str]) -> Iterator[tuple[str, str]]:
    """The operators that change something, each with the column that it changes."""
    for column in rows.columns:
        if column not in read:
            continue
        if column in keys:
            if rows[column].astype(str).nunique() > 1:
                yield "only_first", column
            continue
        yield from (
            (name, column) for name in _fitting(rows[column]) if not changed_runs(rows, name, column, keys).equals(rows)
        )


def _fitting(values: Values) -> list[str]:
    """The operators that a column of this kind has."""
    if values.dtype == bool:
        return ["flipped"]
    if _measured(values):
        return [*(operator.__name__.rstrip("_") for operator in NUMBERS), "another_column"]
    return ["exchanged", "unpaired", "copied"]


def _beside(rows: pd.DataFrame, column: str, keys: list[str]) -> str:
    """The next measured column of the same kind, the first after the last; the column itself if there is none."""
    same = [c for c in rows if c not in keys and rows[c].dtype == rows[column].dtype and _measured(rows[c])]
    return same[(same.index(column) + 1) % len(same)]


def _measured(values: Values) -> bool:
    return pd.api.types.is_numeric_dtype(values) or values.map(lambda v: isinstance(v, list) and _flat(v)).all()


# --- the paper's numbers --------------------------------------------------------------------------

Path = tuple[str | int, ...]


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Every number of a row of the registry, by the way to it."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, (*path, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _at(value: object, path: Path) -> object:
    for key in path:
        value = value[key]
    return value


def offered_numbers(numbers: dict) -> Iterator[tuple[str, Path]]:
    """The operators that change the paper's numbers of a claim, each with the place of the change."""
    found = dict(leaves(numbers))
    for path in found:
        yield "off_by_5_percent", path
        if (other := _next(found, path)) and found[other] != found[path]:
            yield "two_exchanged", path
    rows = {path[:-1] for path in found if len(path) > 2}
    for path in sorted(rows, key=str):
        if (other := _next(dict.fromkeys(rows), path)) and _at(numbers, path) != _at(numbers, other):
            yield "row_for_another", path


def _next(paths: dict[Path, object], path: Path) -> Path | None:
    """The place after a place, among those beside it; the first after the last."""
    beside = [p for p in paths if p[:-1] == path[:-1]]
    other = beside[(beside.index(path) + 1) % len(beside)]
    return None if other == path else other


def changed_numbers(numbers: dict, operator: str, path: Path) -> dict:
    """The paper's numbers of a claim with one change."""
    new = copy.deepcopy(numbers)
    *before, last = path
    inside = _at(new, tuple(before))
    if operator == "off_by_5_percent":
        inside[last] = 1.05 * inside[last] if inside[last] else 1.0
        return new
    everywhere = {path: 0.0 for path, _ in leaves(numbers)}
    rows = dict.fromkeys({p[:-1] for p in everywhere if len(p) > 2})
    other = _next(everywhere if operator == "two_exchanged" else rows, path)
    assert other, "it is offered only where there is another"
    beside = _at(new, other[:-1])
    inside[last], beside[other[-1]] = beside[other[-1]], inside[last]
    return new
