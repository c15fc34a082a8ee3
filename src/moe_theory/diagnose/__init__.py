"""The book's theorems as instruments for a mixture of experts that somebody runs.

`diagnose` looks into a model of the library transformers, `diagnose_router` at the logits of any router, `compare` at
two models that should be one, and `compare_routers` at two sets of router vectors. What they find wrong they name, with
a number and the limit that theory sets it; a finding has the claim of the book behind it, too (`FINDINGS`). What they
measure beside that is in the report.
"""

from moe_theory.diagnose.arrays import RouterReport, RouterStream, diagnose_router
from moe_theory.diagnose.compare import ModelComparison, compare
from moe_theory.diagnose.findings import FINDINGS, Finding
from moe_theory.diagnose.gauge import compare_routers
from moe_theory.diagnose.layer import diagnose_layer
from moe_theory.diagnose.model import diagnose
from moe_theory.diagnose.report import Report

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
    "diagnose_layer",
    "diagnose_router",
]
