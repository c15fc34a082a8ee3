"""What public reports say was wrong is found under its name, and what is mended is not accused."""

import pytest

pytest.importorskip("transformers")

from known_reports import KNOWN
from public_reports import CASES, verdicts

REPORTS = CASES + KNOWN
ASKED = [
    pytest.param(case, id=case.name, marks=[pytest.mark.xfail(strict=True, reason=case.missed)] if case.missed else [])
    for case in REPORTS
    if case.broken is not None
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ASKED)
def test_reports_are_found_under_their_names(case):
    """No other name, and none in the fixed one; what is missed is marked, and fails once it is found."""
    fixed, broken = verdicts(case)
    if broken is None:
        pytest.skip(f"nothing to hand {case.kind} to")
    assert fixed == case.own
    assert broken == case.own | case.expected


def test_reports_are_public_and_differ():
    assert len({case.link for case in REPORTS}) == len(REPORTS) >= 70
    assert all(case.link.startswith("https://github.com/") and case.says for case in REPORTS)


def test_what_cannot_be_handed_over_says_why():
    assert all(case.missed for case in REPORTS if case.kind == "none")
