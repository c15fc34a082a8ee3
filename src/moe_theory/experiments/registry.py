"""Which experiments there are."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from moe_theory import _validate as check
from moe_theory.experiments import algorithm1, exponents, overfit, rates, single_expert, sparse, stages

PROFILES = ("paper", "smoke")


def text(value) -> str:
    """A value as a result file has it: lists and numbers as JSON."""
    return json.dumps(value) if isinstance(value, list | float) else str(value)


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


def _of(module, name: str, about: str, grid: list[dict]) -> Experiment:
    return Experiment(name, about, grid, module.smoke(grid), module.row, module.live)


EXPERIMENTS = {
    e.name: e
    for e in (
        _of(
            single_expert,
            "single_expert",
            "Tables 7 and 8 of Chen et al. (2022): one patch CNN, every activation",
            single_expert.grid(),
        ),
        _of(
            single_expert,
            "single_expert_wide",
            "Table 3 of Chen et al. (2022): single models of 512 filters, and of 128 in setting 4",
            single_expert.wide(),
        ),
        _of(
            algorithm1,
            "moe_tables",
            "Tables 1 and 3 to 6, Figure 3 of Chen et al. (2022): four settings, linear and cubic, both variants",
            algorithm1.main_tables(),
        ),
        _of(
            algorithm1,
            "moe_longer",
            "Algorithm 1 as written, longer: linear experts in setting 1, cubic ones in setting 3",
            algorithm1.longer(),
        ),
        _of(
            algorithm1,
            "moe_balanced",
            "Table 9 of Chen et al. (2022): linear experts with the load-balancing loss",
            algorithm1.balanced_linear(),
        ),
        _of(
            algorithm1,
            "moe_same_start",
            "Table 10 of Chen et al. (2022): experts that start from the same weights",
            algorithm1.same_start(),
        ),
        _of(
            algorithm1,
            "moe_control",
            "Beside Table 10: random and equal starts over the coefficient of the balancing loss, released variant",
            algorithm1.control(),
        ),
        _of(
            algorithm1,
            "moe_descent",
            "Table 11 of Chen et al. (2022): normalized or plain descent, with and without load balancing",
            algorithm1.load_or_speed(),
        ),
        Experiment(
            "exploration",
            "Lemmas E.3 to E.8 and 5.2 of Chen et al. (2022) at T1, over sigma_0 and over d",
            stages.exploration(),
            stages.smoke(stages.exploration()),
            stages.exploration_row,
            stages.exploration_row,
        ),
        Experiment(
            "outcome",
            "Theorem 4.2 of Chen et al. (2022) as a trend in d and n",
            stages.outcome(),
            stages.smoke(stages.outcome()),
            stages.outcome_row,
            stages.outcome_row,
        ),
        Experiment(
            "beyond_stopping",
            "Algorithm 1 of Chen et al. (2022) run on for 20,000 steps, with and without load balancing",
            stages.beyond(),
            stages.smoke(stages.beyond()),
            stages.beyond_row,
            stages.beyond_live,
        ),
        Experiment(
            "voronoi_lse",
            "Figure 1 of Nguyen et al. (2025) by its least squares estimator, with its errors taken apart",
            rates.lse(),
            rates.smoke(rates.lse()),
            rates.lse_row,
            rates.lse_row,
        ),
        Experiment(
            "voronoi_starts",
            "The least squares estimator of Figure 1 of Nguyen et al. (2025) from near and from far starts",
            rates.starts(),
            rates.smoke(rates.starts()),
            rates.starts_row,
            rates.starts_row,
        ),
        Experiment(
            "voronoi_sgd",
            "Figures 1 and 2 of Nguyen et al. (2025) by stochastic gradient descent from near the truth",
            rates.sgd(),
            rates.smoke(rates.sgd()),
            rates.sgd_row,
            rates.sgd_row,
        ),
        Experiment(
            "one_too_many",
            "Table 1 of Nguyen et al. (2025) on a small problem: exact- and over-specified least squares",
            overfit.small(),
            overfit.smoke(overfit.small()),
            overfit.small_row,
            overfit.small_row,
        ),
        Experiment(
            "contact",
            "Table 1 of Nguyen et al. (2025) without noise: how the function notices a split expert",
            overfit.contact(),
            overfit.smoke(overfit.contact()),
            overfit.contact_row,
            overfit.contact_row,
        ),
        _of(
            sparse,
            "sparse_training",
            "Figures 3 to 7 of smooth2025: sparse MLP, CNN and transformer, their gradients and stability",
            sparse.grid(),
        ),
        Experiment(
            "exponents",
            "smooth2025, Eq. 2 to 15 and Lemma 1: Jacobians, L and beta over K = 1 to 64 of 64 experts",
            exponents.grid(),
            exponents.smoke(exponents.grid()),
            exponents.row,
            exponents.row,
        ),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of that name; ValueError names the ones there are."""
    return EXPERIMENTS[check.choice("experiment", name, EXPERIMENTS)]
