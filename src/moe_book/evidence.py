"""What a card rests on: measured numbers, each with what was predicted and what would have refuted it.

Each kind is true or false, and has three texts with typeset numbers: `measured`, `predicted`, `refuted`.
Prefer the two-sided ones, `Close` and `Inside`: a limit that is only an upper one accepts too much.
`digits` are significant digits shown. Choose so few that they agree on every machine, or 0 where the
measured number is rounding, and the card then shows only that it is small enough.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from moe_book.typeset import number

_RELATIONS = {  # relation: test, prediction, what refutes
    "<": (operator.lt, "below", "≥"),
    "<=": (operator.le, "at most", ">"),
    ">": (operator.gt, "above", "≤"),
    ">=": (operator.ge, "at least", "<"),
    "==": (operator.eq, "exactly", "≠"),
}


@dataclass(frozen=True)
class Compared:
    """A number against one limit.

    Args:
        value: the number measured.
        relation: one of <, <=, >, >=, ==.
        limit: what it is compared with.
        digits: significant digits shown.

    Raises:
        ValueError: for another relation.
    """

    value: float
    relation: str
    limit: float
    digits: int = 4

    def __post_init__(self):
        if self.relation not in _RELATIONS:
            raise ValueError(f"relation: expected one of {list(_RELATIONS)}, got {self.relation!r}")

    def __bool__(self) -> bool:
        return bool(_RELATIONS[self.relation][0](self.value, self.limit))

    @property
    def measured(self) -> str:
        return number(self.value, self.digits) if self.digits else self.predicted

    @property
    def predicted(self) -> str:
        return f"{_RELATIONS[self.relation][1]} {number(self.limit, 6)}"

    @property
    def refuted(self) -> str:
        return f"{_RELATIONS[self.relation][2]} {number(self.limit, 6)}"


@dataclass(frozen=True)
class Close:
    """A number against a prediction, from both sides.

    Args:
        value: the number measured.
        predicted_value: what theory, or an independent route, says it is.
        within: largest distance allowed, in the unit of the value; or
        relative: the same as a share of the prediction's size. Exactly one of the two is given.
        digits: significant digits shown.

    Raises:
        ValueError: if both tolerances are given, or neither, or one that is not positive.
    """

    value: float
    predicted_value: float
    within: float | None = None
    relative: float | None = None
    digits: int = 4

    def __post_init__(self):
        given = [t for t in (self.within, self.relative) if t is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(f"within, relative: expected one positive tolerance, got {self.within}, {self.relative}")

    def __bool__(self) -> bool:
        allowed = self.within if self.relative is None else self.relative * abs(self.predicted_value)
        return bool(abs(self.value - self.predicted_value) <= allowed)

    @property
    def _tolerance(self) -> str:
        return number(self.within, 3) if self.relative is None else f"{number(100 * self.relative, 3)} %"

    @property
    def measured(self) -> str:
        return number(self.value, self.digits) if self.digits else f"within {self._tolerance}"

    @property
    def predicted(self) -> str:
        return number(self.predicted_value, max(self.digits, 4))

    @property
    def refuted(self) -> str:
        return f"off by more than {self._tolerance}"


@dataclass(frozen=True)
class Inside:
    """A number in a closed interval that was predicted for it.

    Raises:
        ValueError: unless low < high.
    """

    value: float
    low: float
    high: float
    digits: int = 4

    def __post_init__(self):
        if not self.low < self.high:
            raise ValueError(f"low, high: expected low < high, got {self.low!r}, {self.high!r}")

    def __bool__(self) -> bool:
        return bool(self.low <= self.value <= self.high)

    @property
    def measured(self) -> str:
        return number(self.value, self.digits) if self.digits else "inside"

    @property
    def predicted(self) -> str:
        return f"{number(self.low, 4)} to {number(self.high, 4)}"

    @property
    def refuted(self) -> str:
        return "outside"


@dataclass(frozen=True)
class Ordered:
    """Named numbers in a predicted order, largest first, each above the next by more than `margin`.

    Raises:
        ValueError: for fewer than two numbers.
    """

    values: Mapping[str, float]
    margin: float = 0.0
    digits: int = 3

    def __post_init__(self):
        if len(self.values) < 2:
            raise ValueError(f"values: expected at least two, got {dict(self.values)}")

    def __bool__(self) -> bool:
        return all(bool(above - below > self.margin) for above, below in pairwise(self.values.values()))

    @property
    def measured(self) -> str:
        return ", ".join(number(v, self.digits) for v in self.values.values())

    @property
    def predicted(self) -> str:
        return " > ".join(self.values)

    @property
    def refuted(self) -> str:
        return f"a lead of {number(self.margin, 3)} or less" if self.margin else "another order"


KINDS = (Compared, Close, Inside, Ordered)


def stands(evidence: Mapping[str, object]) -> bool:
    """Whether every comparison in a card's evidence is true; what is only shown does not count.

    Raises:
        ValueError: if nothing in it is a comparison, for then nothing could have refuted the claim.
    """
    comparisons = [v for v in evidence.values() if isinstance(v, KINDS)]
    if not comparisons:
        raise ValueError(f"evidence: expected at least one comparison, got only {list(evidence)}")
    return all(comparisons)
