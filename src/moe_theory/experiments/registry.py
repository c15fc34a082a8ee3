"""Which experiments there are."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from moe_theory import _validate as check
from moe_theory.experiments import algorithm1, single_expert


@dataclass(frozen=True)
class Experiment:
    """A grid and a function of one row.

    Attributes:
        name: also the stem of its result file.
        about: one line.
        grid: the rows to compute, each a dict of JSON values; together they are the configuration.
        row: computes one row: its values as a dict, from the row's dict alone.
        live: recomputes the part of a row that is cheap enough for a chapter.
    """

    name: str
    about: str
    grid: list[dict]
    row: Callable[[dict], dict]
    live: Callable[[dict], dict]

    @property
    def configuration(self) -> str:
        """Hash of the grid; a store made for another grid is refused."""
        return hashlib.sha256(json.dumps(self.grid, sort_keys=True).encode()).hexdigest()[:16]


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment(
            "single_expert",
            "Tables 7 and 8 of Chen et al. (2022): one patch CNN, every activation, full size",
            single_expert.grid(),
            single_expert.row,
            single_expert.live,
        ),
        Experiment(
            "algorithm1_variants",
            "Algorithm 1 of Chen et al. (2022) as written against the released notebooks' variant, full size",
            algorithm1.grid(),
            algorithm1.row,
            algorithm1.live,
        ),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of that name; ValueError names the ones there are."""
    return EXPERIMENTS[check.choice("experiment", name, EXPERIMENTS)]
