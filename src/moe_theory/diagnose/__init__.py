"""The book's theorems as instruments for a mixture of experts that somebody runs.

`diagnose` looks into a model of the library transformers, `diagnose_layer` into a layer of one's own, `diagnose_router`
at the logits of any router, `diagnose_choices` at the experts chosen alone, `compare` at two models that should be one,
and `compare_routers` at two sets of router vectors. What they find wrong they name, with a number and the limit that
theory sets it; a finding has the claim of the book behind it, too (`FINDINGS`). What they measure beside that is in the
report.
"""

from moe_theory.diagnose.arrays import RouterReport, RouterStream
from moe_theory.diagnose.compare import ModelComparison, compare
from moe_theory.diagnose.findings import FINDINGS, Finding
from moe_theory.diagnose.gauge import compare_routers
from moe_theory.diagnose.layer import diagnose_layer
from moe_theory.diagnose.model import diagnose
from moe_theory.diagnose.report import Report
from moe_theory.diagnose.routers import diagnose_choices, diagnose_router
from moe_theory.diagnose.training import watch, watch_trainer

__all__ = [
    "FINDINGS",
    "Finding",
    "ModelComparison",
    "Report",
    "RouterReport",
    "RouterStream",
    "compare",
    "compare_routers",
    "diagnose",
    "diagnose_choices",
    "diagnose_layer",
    "diagnose_router",
    "watch",
    "watch_trainer",
]
