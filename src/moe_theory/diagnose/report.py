"""What was found and what was measured, in one class for models, layers, logits and choices."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from moe_theory.diagnose.arrays import RouterReport
from moe_theory.diagnose.balance import BalanceReport
from moe_theory.diagnose.findings import FINDINGS, Finding
from moe_theory.diagnose.html import page
from moe_theory.diagnose.probes import GateReport

#: Packages on whose versions a report depends.
PACKAGES = ("moe_theory", "torch", "transformers")

#: Layers that `print` names for one kind of finding.
NAMED = 4


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

    @property
    def router(self) -> RouterReport:
        """The only router's report.

        Raises:
            ValueError: if there are several.
        """
        if len(self.routers) != 1:
            raise ValueError(f"router: expected the report of one router, got one of {len(self.routers)}; see routers")
        return next(iter(self.routers.values()))

    @property
    def tokens(self) -> int:
        """Tokens that each router was shown; of several numbers the least."""
        return min((router.tokens for router in self.routers.values()), default=0)

    def __repr__(self) -> str:
        number = len(self.routers)
        rest = f" ({len(self.left_out)} left out)" if self.left_out else ""
        said = [f"{number} layer{'s' * (number != 1)}{rest}", f"{self.tokens:,} tokens"]
        said.append(f"found: {', '.join(sorted(self.named)) or 'nothing'}")
        if self.unasked:
            said.append(f"not asked: {'; '.join(question.partition(':')[0] for question in self.unasked)}")
        return f"{type(self).__name__}({', '.join(said)})"

    def __str__(self) -> str:
        """The same, and for each kind of finding what it says, the first layers it was found in, and what to do."""
        lines = [repr(self)]
        for name, found in groupby(sorted(self.findings, key=lambda finding: finding.name), lambda f: f.name):
            found = [*found]
            lines.append(f"{name}: {FINDINGS[name].says}")
            lines += [f"    {f.where}: {f.value:.4g}, limit {f.limit:.4g}, {f.detail}" for f in found[:NAMED]]
            if len(found) > NAMED:
                lines.append(f"    and {len(found) - NAMED} more, see table()")
            lines.append(f"    to do: {FINDINGS[name].act}")
        return "\n".join(lines)

    def layers(self) -> pd.DataFrame:
        """What was measured, a row for each layer; in use: effective experts, shares are those of the tokens.

        Behind: whether the block makes of its experts' output that times a constant, with something added, or
        something else, as a norm does; learns: the router. There is no column for what was not asked.
        """
        rows = {}
        for name, router in self.routers.items():
            gate = self.gates.get(name)
            rows[name] = {
                "tokens": router.tokens,
                **({} if gate is None else _of_gate(gate)),
                "selected": router.k,
                "in use": router.effective,
                "idle": len(router.dead),
                "undecided": router.undecided / router.tokens,
                "flips": router.flips,
                f"changed by noise {router.noise:g}": router.changed,
                **({} if gate is None else {"slope": gate.gradient, "jump": gate.jump}),
                "common shift": router.gauge,
            }
        return pd.DataFrame.from_dict(rows, "index").dropna(axis=1, how="all")

    def to_dict(self, of: str = "") -> dict[str, Any]:
        """All that the report says, of types that JSON has; a number that is none, or infinite, is None.

        Args:
            of: what was looked into, in the caller's words.
        """
        bins = _bins([*self.routers.values()])
        return {
            "of": of,
            "versions": {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES},
            "tokens": self.tokens,
            "found": sorted(self.named),
            "findings": [_plain(row) for row in self.table().to_dict("records")],
            "layers": [_layer(router, self.gates.get(name), bins) for name, router in self.routers.items()],
            "balance": [_plain(balance) for balance in self.balance],
            "left_out": [*self.left_out],
            "unasked": [*self.unasked],
        }

    def to_html(self, of: str = "") -> str:
        """The report as one page that needs nothing from elsewhere.

        Args:
            of: what was looked into, in the caller's words.
        """
        return page(self.to_dict(of))

    def table(self) -> pd.DataFrame:
        """The findings with what they mean and what can be done; without a row where nothing was found."""
        rows = [
            {**finding._asdict(), "claim": finding.claim, **FINDINGS[finding.name]._asdict()}
            for finding in self.findings
        ]
        return pd.DataFrame(rows, columns=["where", "name", "value", "limit", "detail", "claim", "says", "act"])


def _of_gate(gate: GateReport) -> dict[str, Any]:
    """The columns that say what a layer computes."""
    return {
        "selects by": str(gate.rule),
        "gate": gate.gate,
        "times": gate.factor,
        "behind": "a constant" if gate.bent <= 1e-6 else "no constant",
        "learns": gate.learns,
    }


def _bins(routers: list[RouterReport]) -> slice:
    """The bins from the first to the last one in which any router has a gap."""
    used = [i for router in routers for i, count in enumerate(router.gaps.counts) if count]
    return slice(min(used), max(used) + 1) if used else slice(0)


def _layer(router: RouterReport, gate: GateReport | None, bins: slice) -> dict[str, Any]:
    """What was measured and found in a layer; of its histogram some bins alone."""
    gaps = {"edges": router.gaps.edges[bins] + router.gaps.edges[bins.stop :][:1], "counts": router.gaps.counts[bins]}
    told = _plain(router) | {"effective": _plain(router.effective), "dead": router.dead, "gaps": _plain(gaps)}
    found = {finding.name for part in (router, gate) if part is not None for finding in part.findings}
    of_gate = None if gate is None else _plain(gate) | {"name": gate.gate, "selects_by": str(gate.rule)}
    return told | {"gate": of_gate, "found": sorted(found)}


def _plain(value: Any) -> Any:
    """A value in the types that JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _plain(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, torch.dtype) else value
