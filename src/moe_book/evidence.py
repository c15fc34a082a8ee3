"""A line of evidence: measured values, what the registry compares them with, and what a reader sees of it.

The registry writes a line as

    end: {says: "test accuracy, %", close_to: target, within: 2.5, digits: 3, cases: 4}

and a chapter hands over `end=...`: a number, an array or a frame of numbers, or a mapping from names of cases to
numbers. Every comparison is an interval of accepted values, so that a line over many cases is one line: it shows the
range of its cases, or the case that came nearest to refuting it.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from moe_book.typeset import number

#: The comparisons of a line: what it says of the measured values, and what would refute them.
COMPARISONS = {
    "close_to": "a prediction, `within` a distance or `relative` to its size",
    "inside": "[low, high], the ends included",
    "above": "a limit that each value exceeds",
    "at_least": "a limit that no value is below",
    "below": "a limit that each value is under",
    "at_most": "a limit that no value exceeds",
    "equals": "a number or a word that each value is",
    "descending": "a margin by which each value exceeds the next",
}
#: What values raise that are of another kind than the limits of their line.
UNFIT = (TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
FIELDS = {"says", "within", "relative", "digits", "cases", "shown", "needs", *COMPARISONS}


class Case(NamedTuple):
    """One measured value and the interval that accepts it; a word is accepted if it is the low and the high end."""

    label: str
    value: float | str
    low: float | str
    high: float | str
    strict: bool = False  # the ends themselves refute

    @property
    def holds(self) -> bool:
        if isinstance(self.value, str) or isinstance(self.low, str):
            return self.value == self.low
        return self.low < self.value < self.high if self.strict else self.low <= self.value <= self.high

    @property
    def room(self) -> float:
        """Distance to the nearer end, over half the width or the size of the only end; negative where it is refuted."""
        if isinstance(self.value, str) or isinstance(self.low, str):
            return 0.0 if self.holds else -math.inf
        room, width = min(self.value - self.low, self.high - self.value), (self.high - self.low) / 2
        if math.isinf(width):
            width = abs(self.low if math.isinf(self.high) else self.high)
        return -math.inf if math.isnan(room) else room / (width or 1.0)


@dataclass(frozen=True)
class Line:
    """A line of a verdict box.

    Attributes:
        name: what the chapter calls the measured value.
        says: the quantity, with its unit.
        measured: what was measured, typeset.
        refuted: what would refute it; empty for a value that is only shown or could not be computed.
        holds: whether every case does.
        cases: the values compared.
    """

    name: str
    says: str
    measured: str
    refuted: str
    holds: bool
    cases: tuple[Case, ...] = ()

    def bundle(self) -> dict:
        """The line as the notebook's output holds it."""
        texts = {key: getattr(self, key) for key in ("name", "says", "measured", "refuted")}
        return {**texts, "holds": self.holds, "cases": len(self.cases)}


def flatten(value: object) -> dict[str, float | str]:
    """The numbers of a value by a label each; the label of a single one is empty.

    Args:
        value: a number, a word, a mapping, a sequence, a tensor, a Series or a DataFrame, nested as one likes.

    Raises:
        ValueError: for anything else, or two cases of one label.
    """
    if isinstance(value, str):
        return {"": value}
    if isinstance(value, pd.DataFrame):
        value = value.stack().to_dict()
    elif isinstance(value, pd.Series | dict):
        value = dict(value)
    elif isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        value = list(value)
    if isinstance(value, list | tuple):
        value = {i + 1: part for i, part in enumerate(value)}
    if not isinstance(value, Mapping):
        try:
            return {"": int(value) if isinstance(value, int | np.integer) else float(value)}
        except (TypeError, ValueError):
            raise ValueError(f"expected numbers, or a mapping to numbers, got {type(value).__name__}") from None
    found = {}
    for key, part in value.items():
        for label, single in flatten(part).items():
            name = ", ".join(filter(None, (_label(key), label)))
            if name in found:
                raise ValueError(f"expected cases with names of their own, got {name!r} twice")
            found[name] = single
    return found


def _label(key: object) -> str:
    return ", ".join(map(_label, key)) if isinstance(key, tuple) else str(key)


def _limit(spec: object, known: Mapping[str, object]) -> dict[str, float | str]:
    """A number, a name of `known` with dots into its parts, or [factor, name], by case.

    Raises:
        ValueError: for a name that is not there.
    """
    if isinstance(spec, list):
        factor, name = spec
        return {label: factor * value for label, value in _limit(name, known).items()}
    if not isinstance(spec, str):
        return flatten(spec)
    first, *rest = spec.split(".")
    if first not in known:
        raise ValueError(f"expected a number or one of {sorted(known)}, got {spec!r}")
    value: Any = known[first]
    for part in rest:
        value = {str(key): inner for key, inner in value.items()}[part]
    return flatten(value)


def _spread(limit: dict[str, float | str], labels: list[str]) -> list[float | str]:
    """A limit for each case: its own by its label, or the only one.

    Raises:
        ValueError: if the limit has other cases than the measured value.
    """
    if list(limit) == [""]:
        return [limit[""]] * len(labels)
    if set(limit) != set(labels):
        raise ValueError(f"expected the cases {sorted(limit)}, got {sorted(labels)}")
    return [limit[label] for label in labels]


def _kind(spec: Mapping[str, object]) -> str:
    return next(kind for kind in COMPARISONS if kind in spec)


def _cases(spec: Mapping[str, object], value: object, known: Mapping[str, object]) -> list[Case]:
    """The cases of a line; ValueError if value and limits do not fit each other."""
    kind, values = _kind(spec), flatten(value)
    labels = list(values)

    def limits(which: object) -> list:
        return _spread(_limit(which, known), labels)

    if kind == "descending":
        margin = _limit(spec[kind], known)[""]
        pairs = itertools.pairwise(labels)
        return [Case(f"{a} over {b}", values[a] - values[b], margin, math.inf, True) for a, b in pairs]
    if kind == "close_to":
        centers, share = limits(spec[kind]), "relative" in spec
        widths = limits(spec["relative"] if share else spec["within"])
        ends = [(c, w * abs(c) if share else w) for c, w in zip(centers, widths, strict=True)]
        return [Case(m, values[m], c - w, c + w) for m, (c, w) in zip(labels, ends, strict=True)]
    if kind == "inside":
        low, high = map(limits, spec[kind])
    elif kind == "equals":
        low = high = [spec[kind]] * len(labels) if _word(spec[kind], known) else limits(spec[kind])
    else:
        ends, open_end = limits(spec[kind]), [math.inf] * len(labels)
        low, high = (ends, open_end) if kind in ("above", "at_least") else ([-math.inf] * len(labels), ends)
    strict = kind in ("above", "below")
    return [Case(m, values[m], a, b, strict) for m, a, b in zip(labels, low, high, strict=True)]


def _word(limit: object, known: Mapping[str, object]) -> bool:
    return isinstance(limit, str) and limit.split(".")[0] not in known


def compare(name: str, spec: Mapping[str, object], value: object, known: Mapping[str, object]) -> Line:
    """A line of evidence from its entry in the registry and the measured value.

    Args:
        name, spec: the line's name and its fields; see `FIELDS` and `COMPARISONS`.
        value: what was measured; None only where the entry says what it `needs` and that is not there.
        known: values that limits may name: all that the chapter handed over, and the numbers of the registry.

    Raises:
        ValueError: if value, limits and number of cases do not fit each other; it names the line.
    """
    if value is None and "needs" in spec:
        return Line(name, spec["says"], f"not computed: needs {spec['needs']}", "", True)
    try:
        return _line(name, spec, value, known)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except UNFIT:
        raise ValueError(f"{name}: expected values that fit the limits of the line, got {value!r:.60}") from None


def _line(name: str, spec: Mapping[str, object], value: object, known: Mapping[str, object]) -> Line:
    digits = spec.get("digits", 3)
    if "shown" in spec:
        values = flatten(value)
        return Line(name, spec["says"], ", ".join(_number(v, digits) for v in values.values()), "", True)
    cases = _cases(spec, value, known)
    if len(cases) != (expected := _expected(spec, known)) or not cases:
        hint = "" if "cases" in spec else "; a line without `cases` has 1"
        raise ValueError(f"expected {expected} cases, got {len(cases)}{hint}")
    shown = _measured(spec, cases, flatten(value), digits)
    return Line(name, spec["says"], shown, _refuted(spec, cases), all(c.holds for c in cases), tuple(cases))


def _expected(spec: Mapping[str, object], known: Mapping[str, object]) -> int:
    cases = spec.get("cases", 1)
    return int(_limit(cases, known)[""])


# --- what a reader sees ---------------------------------------------------------------------------


ROUNDING = 1e-9  # numbers below are residuals of rounding or of a solver: one digit, which another machine may change


def _number(value: float | str, digits: int) -> str:
    return number(value, 1 if not isinstance(value, str) and abs(value) < ROUNDING else digits)


def _measured(spec: Mapping[str, object], cases: list[Case], values: Mapping[str, object], digits: int) -> str:
    """A single value as it is, few in their order, many by their range or by the case nearest to refutation."""
    if _kind(spec) == "descending" or (len(cases) <= 3 and all(isinstance(c.value, str) for c in cases)):
        return " > ".join(_number(v, digits) for v in values.values())
    if any(isinstance(c.value, str) for c in cases):
        return f"{sum(c.holds for c in cases)} of {len(cases)}"
    nearest = min(cases, key=lambda case: case.room)
    if len(cases) == 1:
        return _against(spec, nearest, digits)
    if len({(c.low, c.high) for c in cases}) == 1 and not any(math.isnan(c.value) for c in cases):
        low, high = (_number(end(c.value for c in cases), digits) for end in (min, max))
        return (low if low == high else f"{low} to {high}") + f" ({len(cases)} cases)"
    return f"{_against(spec, nearest, digits)} (closest call of {len(cases)}: {nearest.label})"


def _against(spec: Mapping[str, object], case: Case, digits: int) -> str:
    """A value, and beside it the prediction if the registry does not hold that as a number."""
    value = _number(case.value, digits)
    if _kind(spec) == "close_to" and isinstance(spec["close_to"], str | list):
        return f"{value}, predicted {_number((case.low + case.high) / 2, max(digits, 3))}"
    return value


SIGNS = {"above": "≤", "at_least": "<", "below": "≥", "at_most": ">", "equals": "≠"}


def _refuted(spec: Mapping[str, object], cases: list[Case]) -> str:
    """What would refute the line, with the numbers where all cases share them."""
    kind, nearest = _kind(spec), min(cases, key=lambda case: case.room)
    if kind == "descending":
        return f"a lead of {number(nearest.low, 3)} or less" if nearest.low else "another order"
    if kind == "inside":
        return f"outside {number(nearest.low, 4)} to {number(nearest.high, 4)}"
    if kind == "close_to":
        width = (nearest.high - nearest.low) / 2
        off = f"{number(100.0 * spec['relative'], 3)} %" if _plain(spec.get("relative")) else number(width, 3)
        center = number(spec["close_to"], 6) if _plain(spec["close_to"]) else "the prediction"
        return f"farther than {off} from {center}"
    limit = nearest.high if kind in ("below", "at_most") else nearest.low
    return f"{SIGNS[kind]} {number(limit, 6)}"


def _plain(limit: object) -> bool:
    return isinstance(limit, int | float)


# --- what the registry may say --------------------------------------------------------------------


def validate(name: str, spec: object) -> None:
    """Raise ValueError, with the reason, for an entry of the registry that is no line of evidence."""
    if not isinstance(spec, dict) or "says" not in spec:
        raise ValueError(f"{name}: expected a line with `says`, got {spec!r}")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name}: expected a name that Python can hand over")
    if unknown := set(spec) - FIELDS:
        hint = "; quote a text that holds ', '" if None in map(spec.get, unknown) else ""
        raise ValueError(f"{name}: unknown fields {sorted(map(str, unknown))}, expected some of {sorted(FIELDS)}{hint}")
    kinds = [kind for kind in (*COMPARISONS, "shown") if kind in spec]
    if len(kinds) != 1:
        raise ValueError(f"{name}: expected one comparison of {list(COMPARISONS)}, or `shown`, got {kinds}")
    tolerances = [field for field in ("within", "relative") if field in spec]
    if len(tolerances) != (kinds == ["close_to"]):
        raise ValueError(f"{name}: expected one of `within` and `relative` with `close_to`, got {tolerances}")
    if tolerances and _plain(spec[tolerances[0]]) and not spec[tolerances[0]] > 0:
        raise ValueError(f"{name}: expected a positive tolerance, got {spec[tolerances[0]]}")
    if kinds == ["inside"] and not (isinstance(spec["inside"], list | tuple) and len(spec["inside"]) == 2):
        raise ValueError(f"{name}: expected `inside: [low, high]`, got {spec['inside']!r}")
    if all(map(_plain, ends := spec.get("inside", []))) and ends and not ends[0] < ends[1]:
        raise ValueError(f"{name}: expected low < high, got {ends}")


def names_in(spec: Mapping[str, object]) -> set[str]:
    """The names, up to their first dot, that the limits of a line refer to."""
    found = set()
    for field in (*COMPARISONS, "within", "relative", "cases"):
        limits = spec.get(field, [])
        for limit in limits if isinstance(limits, list) else [limits]:
            for part in limit if isinstance(limit, list) else [limit]:
                found |= {part.split(".")[0]} if isinstance(part, str) else set()
    return found
