"""The table of decisions: what it rests on is there, and every number it names is one that the chapter computes."""

import re
from pathlib import Path
from string import Formatter

import nbformat
import pytest

from moe_book import claims
from moe_book import decisions as module
from moe_book.decisions import WHEN, decisions, tables

PARTS = decisions()
ROWS = [row for part in PARTS.values() for row in part]
CHAPTER = Path(__file__).parents[2] / "notebooks" / "25_which_router.ipynb"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["decision"])
def test_a_row_rests_on_settled_claims_or_says_where_it_is_shown(row):
    assert row["rests_on"] or row["shown"].startswith("no ")
    for claim in row["rests_on"]:
        assert "verdict" in claims.registry()[claim]


def test_the_parts_are_in_the_order_of_a_training():
    assert [*PARTS] == [*WHEN]
    assert len({row["decision"] for row in ROWS}) == len(ROWS)


def test_the_chapter_computes_every_number_that_a_row_names():
    named = {
        f for row in ROWS for part in (row["condition"], row["size"]) for _, f, _, _ in Formatter().parse(part) if f
    }
    roots = {re.split(r"[\[.]", name)[0] for name in named}
    code = "\n".join(c.source for c in nbformat.read(CHAPTER, 4).cells if c.id.startswith("ch25-040"))
    given = {*re.findall(r"^    (\w+)=", code, re.MULTILINE), *re.findall(r'^    "(\w+)":', code, re.MULTILINE)}
    given |= {"start_gaussians", "start_fashion"} if 'f"start_{t}"' in code else set()
    assert roots == given


class Anything(dict):
    def __missing__(self, key):
        return 1.5 if key == "times" else Anything()


def test_a_table_for_each_part_with_the_claims_linked():
    parts = list(tables(Anything(), lambda claim: f"<{claim}>"))
    assert [next(iter(part[0])) for part in parts] == [*PARTS] and sum(map(len, parts)) == len(ROWS)
    heads = parts[0][5]
    assert heads["before the first run"] == "More heads" and heads["how large"].startswith(
        "heads: 1.5 times the products"
    )
    assert heads["rests on"] == "<smooth-fig-6>"
    assert parts[0][0]["rests on"] == "no box: the wall"


def test_what_has_no_size_says_so():
    assert [row["how large"] for row in list(tables(Anything(), str))[-1]] == ["–"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("early:\n  - decision: A\n    advice: b", r"decisions.yml: early: A: expected the fields \['condition'\]"),
        ("early:\n  - {decision: A, advice: b, condition: c, sice: d}", r"early: A: unknown fields \['sice'\]"),
        ("early:\n  - {decision: A, advice: no, condition: c}", "early: A: advice: expected a str, got False"),
        ("early:\n  - A", "decisions.yml: early: A: expected the fields"),
        ("early:\n  - decision: a: b", "decisions.yml: line 2: mapping values are not allowed in this context"),
        (r'early: ["\kappa"]', "line 1: found unknown escape character; between double quotes .* take single ones"),
        (r'early: ["\nu"]', "line 1: found an escape of a control letter; between double quotes"),
        ("early:", r"^decisions.yml: early: expected a list, got None"),
        ("late: []", r"^decisions.yml: expected the fields \['early'\]"),
        ("early: []\nearly: []", "decisions.yml: line 1: two entries 'early'"),
    ],
)
def test_a_slip_is_named_in_one_line(text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE", tmp_path / "decisions.yml")
    monkeypatch.setattr(module, "WHEN", ("early",))
    module.FILE.write_text(text)
    with pytest.raises(ValueError, match=message) as found:
        decisions()
    assert "\n" not in str(found.value)
