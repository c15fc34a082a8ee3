"""What was found and what was measured, in one class for models, layers, logits and choices."""

from dataclasses import dataclass, field
from itertools import chain

import pandas as pd

from moe_theory.diagnose.arrays import RouterReport
from moe_theory.diagnose.balance import BalanceReport
from moe_theory.diagnose.findings import FINDINGS, Finding
from moe_theory.diagnose.probes import GateReport


@dataclass(frozen=True, repr=False)
class Report:
    """What was found in a model, a layer, logits or choices of experts; true if anything was.

    Attributes:
        routers: by the router's name, what it does with the tokens.
        gates: by the router's name, what its layer computes.
        balance: what each balancing loss reads; empty if the model returns none.
        of_model: what is wrong with the model as a whole.
        left_out: blocks with experts that were not looked at, since they have another router.
        unasked: questions that were not put, each with what it takes to put it.
    """

    routers: dict[str, RouterReport]
    gates: dict[str, GateReport] = field(default_factory=dict)
    balance: list[BalanceReport] = field(default_factory=list)
    of_model: list[Finding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, layer by layer."""
        parts = chain(self.routers.values(), self.gates.values(), self.balance)
        return [*chain.from_iterable(part.findings for part in parts), *self.of_model]

    @property
    def named(self) -> set[str]:
        return {finding.name for finding in self.findings}

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __repr__(self) -> str:
        rest = f" ({len(self.left_out)} left out)" if self.left_out else ""
        found = ", ".join(sorted(self.named)) or "nothing"
        return f"{type(self).__name__}({len(self.routers)} layers{rest}, found: {found})"

    def layers(self) -> pd.DataFrame:
        """What was measured, a row for each layer; in use: effective experts, shares are those of the tokens.

        Behind: whether the block makes of its experts' output that times a constant, with something added, or
        something else, as a norm does; learns: the router.
        """
        rows = {}
        for name, router in self.routers.items():
            gate = self.gates[name]
            rows[name] = {
                "tokens": router.tokens,
                "selects by": str(gate.rule),
                "gate": gate.gate,
                "times": gate.factor,
                "behind": "a constant" if gate.bent <= 1e-6 else "no constant",
                "learns": gate.learns,
                "selected": router.k,
                "in use": router.effective,
                "idle": len(router.dead),
                "undecided": router.undecided / router.tokens,
                f"changed by noise {router.noise:g}": router.changed,
                "slope": gate.gradient,
                "jump": gate.jump,
                "common shift": router.gauge,
            }
        return pd.DataFrame.from_dict(rows, "index")

    def table(self) -> pd.DataFrame:
        """The findings with what they mean and what can be done."""
        rows = [
            {**finding._asdict(), "claim": finding.claim, **FINDINGS[finding.name]._asdict()}
            for finding in self.findings
        ]
        return pd.DataFrame(rows, columns=["where", "name", "value", "limit", "detail", "claim", "says", "act"])
