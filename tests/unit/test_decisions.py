"""The table of decisions: what it rests on is there, and every number it names is one that the chapter computes."""

import re
from pathlib import Path
from string import Formatter

import nbformat
import pytest

from moe_book import claims
from moe_book.decisions import DECISIONS, WHEN, tables

CHAPTER = Path(__file__).parents[2] / "notebooks" / "25_which_router.ipynb"


@pytest.mark.parametrize("row", DECISIONS, ids=lambda d: d.decision)
def test_a_row_rests_on_settled_claims_or_says_where_it_is_shown(row):
    assert row.rests_on or row.shown.startswith("no ")
    for claim in row.rests_on:
        assert "verdict" in claims.registry()[claim]


def test_the_parts_are_in_the_order_of_a_training():
    assert list(dict.fromkeys(d.when for d in DECISIONS)) == [*WHEN]
    assert [d.when for d in DECISIONS] == sorted((d.when for d in DECISIONS), key=WHEN.index), "each part once"
    assert len({d.decision for d in DECISIONS}) == len(DECISIONS)


def test_the_chapter_computes_every_number_that_a_row_names():
    named = {f for d in DECISIONS for part in (d.condition, d.size) for _, f, _, _ in Formatter().parse(part) if f}
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
    assert [next(iter(part[0])) for part in parts] == [*WHEN] and sum(map(len, parts)) == len(DECISIONS)
    heads = parts[0][5]
    assert heads["before the first run"] == "More heads" and heads["how large"].startswith(
        "heads: 1.5 times the products"
    )
    assert heads["rests on"] == "<smooth-fig-6>"
    assert parts[0][0]["rests on"] == "no card: the wall"


def test_what_has_no_size_says_so():
    assert [row["how large"] for row in list(tables(Anything(), str))[-1]] == ["–"]
