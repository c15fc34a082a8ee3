"""The registry decides: what `check` accepts, refuses and shows, strictly and where a reader plays."""

import copy

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from moe_book import claims
from moe_book.claims import MIME, collect
from moe_book.evidence import names_in

ID, OTHER = "chen-lem-5.1", "chen-rem-c.2"
LINES = {
    "ratio": {"says": "largest ratio", "at_most": 2},
    "tie": {"says": "$x<y$", "close_to": "formula", "within": 0.1, "cases": 2},
}
GOOD = {"ratio": 1.9, "tie": [1.0, 2.0], "formula": [1.0, 2.0]}
ROW = {"paper": "chen2022", "where": "Lemma 5.1", "kind": "inequality", "chapter": "03", "says": "For $a<K$ & b<c."}


@pytest.fixture
def registry(monkeypatch):
    """A registry of two claims, which a test may change."""
    rows = {
        ID: {"id": ID, **ROW, "verdict": "sharpened", "note": "A note.", "evidence": copy.deepcopy(LINES)},
        OTHER: {"id": OTHER, **ROW, "verdict": "holds", "evidence": {"x": {"says": "x", "equals": 1}}},
        "open": {"id": "open", **ROW},
    }
    monkeypatch.setattr(claims, "registry", lambda: rows)
    return rows


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(claims, "_checked", {})


@pytest.fixture
def playing(monkeypatch):
    monkeypatch.setattr(claims, "strict", lambda: False)


def test_measured_values_give_a_box(registry):
    box = claims.settle(ID, GOOD)
    bundle = box._repr_mimebundle_()
    assert bundle[MIME]["verdict"] == "sharpened" and bundle[MIME]["note"] == "A note."
    assert [line["says"] for line in bundle[MIME]["evidence"]] == ["largest ratio", "$x<y$"]
    assert [line["cases"] for line in bundle[MIME]["evidence"]] == [1, 2]
    assert ID in bundle["text/plain"] and "1.9 | refuted if > 2" in bundle["text/plain"]


def test_a_box_is_typeset_and_escaped_and_folds_criterion_and_record(registry):
    registry[ID] |= {"criterion": "None.", "criterion_set": "before the runs", "record": "In (E.1) read $b$."}
    shown = claims.settle(ID, GOOD).html()
    assert r"For \(a&lt;K\) &amp; b&lt;c." in shown and r'<th scope="row">\(x&lt;y\)</th>' in shown
    assert "<summary>The criterion, set before the runs</summary><p>None.</p></details>" in shown
    assert r"<summary>For the record</summary><p>In (E.1) read \(b\).</p></details>" in shown


@pytest.mark.parametrize("moved", [None, "l4", "l0"])
def test_a_long_box_shows_what_decides_and_the_first_other_line(registry, playing, moved):
    lines = {f"l{i}": {"says": f"line {i}", "equals": 1} for i in range(6)}
    registry[ID] |= {"evidence": lines, "verdict": "holds", "rule": {"holds": ["l5"], "differs": []}}
    shown = claims.settle(ID, {name: 2 if name == moved else 1 for name in lines}).html()
    first, rest = shown.split("<details", 1)
    assert [f"line {i}" in first for i in range(6)] == [True, False, False, False, False, True]
    assert [f"line {i}" in rest for i in range(6)] == [False, True, True, True, True, False]
    assert "<summary>4 more lines of evidence</summary>" in rest
    assert rest.split(">")[0].endswith(" open") is (moved == "l4"), "a greyed line is never folded"


def test_outside_a_notebook_the_box_is_printed(registry, capsys):
    claims.check(ID, **GOOD)
    assert capsys.readouterr().out.startswith("[sharpened] chen-lem-5.1 (Chen et al. (2022), Lemma 5.1)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": 2.1}, r"refuted by ratio: 2.1 \(> 2\)"),
        ({"ratio": float("nan")}, "refuted by ratio"),
        ({"tie": [1.0, 2.2]}, "refuted by tie: 2.2, predicted 2 .closest call of 2: 2. .farther than 0.1"),
        ({"tie": [1.0], "formula": [1.0]}, "^chen-lem-5.1: tie: expected 2 cases, got 1"),
    ],
)
def test_what_is_refuted_stops_the_build(registry, change, message):
    with pytest.raises(AssertionError, match=message):
        claims.check(ID, **GOOD | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("ratio"), r"chen-lem-5.1: expected measured values for .* missing \['ratio'\]"),
        (lambda m: m.pop("formula"), r"missing \['formula'\]"),
        (lambda m: m.update(more=1), r"got also \['more'\]"),
    ],
)
def test_names_are_those_of_the_registry(registry, change, message):
    measured = dict(GOOD)
    change(measured)
    with pytest.raises(ValueError, match=message):
        claims.check(ID, **measured)


def test_unknown_and_open_claims_are_refused(registry):
    with pytest.raises(ValueError, match="claim_id: expected an id of the registry, got 'chen-lem-99'"):
        claims.check("chen-lem-99")
    with pytest.raises(ValueError, match="'open' is open in the registry"):
        claims.check("open", ratio=1)


def test_a_claim_checked_twice_is_refused(registry):
    claims.check(ID, **GOOD)
    with pytest.raises(ValueError, match="was checked before"):
        claims.check(ID, **GOOD)


# --- a verdict that the data choose ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gap", "expected"),
    [("enwik8", 1.0, "reproduced"), ("enwik8", -1.0, "differs"), ("man", 1.0, "untested"), ("man", -1.0, "untested")],
)
def test_a_rule_takes_the_first_verdict_whose_conditions_hold(registry, text, gap, expected):
    registry[ID] |= {
        "evidence": {"text": {"says": "text", "equals": "enwik8"}, "gap": {"says": "gap", "above": 0}},
        "rule": {"untested": ["not text"], "reproduced": ["gap"], "differs": []},
        "verdict": expected,
    }
    assert claims.settle(ID, {"text": text, "gap": gap}).verdict == expected
    registry[ID]["verdict"] = "holds"
    claims._checked.clear()
    with pytest.raises(AssertionError, match=f"the chapter finds '{expected}', the registry expects 'holds'"):
        claims.check(ID, text=text, gap=gap)


def test_a_finding_holds_the_numbers_of_the_run(registry):
    registry[ID] |= {"finding": "Over {seeds} seeds the ratio is {ratio:.1f}."}
    assert claims.settle(ID, {**GOOD, "seeds": 3}).finding == "Over 3 seeds the ratio is 1.9."


# --- playing --------------------------------------------------------------------------------------


def test_where_a_reader_plays_a_box_never_stops_anything(registry, playing, capsys):
    for change in (
        {"ratio": 2.1},
        {"ratio": float("nan")},
        {"tie": [1.0], "formula": [1.0]},
        {"tie": {"a": 1, "b": 2}},
    ):
        claims.check(ID, **GOOD | change)
        shown = capsys.readouterr().out
        assert shown.startswith("[not the chapter's numbers] chen-lem-5.1") and "<-" in shown
    claims.check(ID, **GOOD)
    assert capsys.readouterr().out.startswith("[sharpened]"), "and may be run again"


VALUES = [
    *(
        0,
        -1.5,
        float("nan"),
        float("inf"),
        10**400,
        "word",
        True,
        [],
        {},
        [1, 2, 3],
        (1, "a"),
        {"a": 1},
        {"a": {"b": "c"}},
    ),
    *(object(), [[1], [2, 3]], {"a": None}, np.zeros((2, 2)), torch.ones(3), pd.Series([1, 2], index=["a", "a"])),
]


@pytest.mark.parametrize("claim", claims.registry())
def test_no_value_of_a_reader_stops_a_box(claim, playing):
    row = claims.registry()[claim]
    words = {spec["equals"] for spec in row["evidence"].values() if isinstance(spec.get("equals"), str)}
    limits = set().union(*map(names_in, row["evidence"].values())) - words - {f for f in claims.NUMBERS if f in row}
    for value in VALUES:
        measured = dict.fromkeys(set(row["evidence"]) | limits | claims._named_in_finding(row), value)
        assert claims.settle(claim, measured).html()


def test_lines_that_moved_are_marked(registry, playing):
    html = claims.settle(ID, GOOD | {"ratio": 3}).html()
    assert html.count("claim-line-moved") == 1 and "claim-moved" in html


def test_a_box_of_ones_own_needs_no_registry(playing, capsys):
    lines = {"share": {"says": "share of expert 1", "close_to": 0.125, "within": 0.01}}
    claims.try_("Experts share alike.", lines, share=0.12)
    claims.try_("Experts share alike.", lines, share=0.5)
    shown = capsys.readouterr().out
    assert "[your check: holds] try" in shown and "[your check: refuted] try" in shown
    with pytest.raises(ValueError, match=r"try_: expected .* missing \['share'\]"):
        claims.try_("Experts share alike.", lines)
    with pytest.raises(ValueError, match="try_: expected at least one line that compares"):
        claims.try_("Nothing.", {})


def test_strict_is_set_by_build_and_tests_only(monkeypatch):
    assert claims.strict(), "in a test"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.delenv("MOE_BOOK_STRICT", raising=False)
    assert not claims.strict()
    monkeypatch.setenv("MOE_BOOK_STRICT", "1")
    assert claims.strict()


# --- the ledger -----------------------------------------------------------------------------------

PEAKS = claims.registry()["chen-rem-c.2"]["evidence"]["peak"]["close_to"]
CALL = f"claims.check('chen-rem-c.2', kappa={PEAKS}, peak={PEAKS})"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """An executed notebook of one box."""
    cells = [nbformat.v4.new_code_cell(s) for s in ("from moe_book import claims", CALL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3").execute()
    path = tmp_path_factory.mktemp("notebooks") / "appendix" / "03_details.ipynb"
    path.parent.mkdir()
    nbformat.write(notebook, path)
    return path


def test_the_ledger_holds_every_claim_and_what_the_boxes_say(executed):
    sabotage = {OTHER: {"score": 90.0, "refused": 36}}
    ledger = collect([executed], sabotage)
    rows = {r["id"]: r for r in ledger["claims"]}
    assert list(rows) == list(claims.registry())
    assert rows[OTHER]["verdict"] == "holds" and rows[OTHER]["notebook"] == "appendix/03_details"
    assert rows[OTHER]["evidence"][0]["cases"] == 6 and rows[OTHER]["sabotage"] == sabotage[OTHER]
    # a registry verdict without a box in a notebook is not done
    assert rows[ID]["verdict"] == "open" and "evidence" not in rows[ID]
    papers, own = ledger["counts"]["papers"], ledger["counts"]["book"]
    assert sum(papers.values()) + sum(own.values()) == len(rows)
    assert own["open"] == sum(row["paper"] == "book" for row in claims.registry().values())


def test_two_boxes_for_one_claim_are_refused(executed, tmp_path):
    again = tmp_path / "05_c.ipynb"
    again.write_text(executed.read_text())
    with pytest.raises(ValueError, match="has a box in appendix/03_details already"):
        collect([executed, again], {})


def test_a_box_on_another_page_than_the_registry_says_is_refused(executed, tmp_path):
    moved = tmp_path / "03_a.ipynb"
    moved.write_text(executed.read_text())
    with pytest.raises(ValueError, match="the registry says that the box of .* stands on appendix/03_details"):
        collect([moved], {})


def test_a_box_that_contradicts_the_registry_is_refused(executed, tmp_path):
    forged = tmp_path / "03_a.ipynb"
    forged.write_text(executed.read_text().replace('"verdict": "holds"', '"verdict": "fails"'))
    with pytest.raises(ValueError, match="not what the registry says"):
        collect([forged], {})


def test_running_a_cell_again_is_allowed_but_a_second_cell_is_not():
    cells = [nbformat.v4.new_code_cell(s) for s in ("from moe_book import claims", CALL, f"x = 1; {CALL}")]
    nb = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(nb, kernel_name="python3")
    with client.setup_kernel():
        for index in (0, 1, 1):
            client.execute_cell(nb.cells[index], index)
        with pytest.raises(CellExecutionError, match="was checked before"):
            client.execute_cell(nb.cells[2], 2)


# --- the file -------------------------------------------------------------------------------------


def test_registry_keeps_every_id_once_with_known_fields():
    rows = yaml.safe_load((claims.files("moe_book") / "claims.yml").read_text())
    assert len({r["id"] for r in rows}) == len(rows) == len(claims.registry())
    for r in rows:
        assert {"id", "paper", "where", "kind", "chapter", "says"} <= set(r)
        assert ("verdict" in r) == ("evidence" in r), f"{r['id']}: a verdict and what decides it come together"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("id: chen-lem-c.4", "id: chen-lem-c.3"), "id 'chen-lem-c.3' appears twice"),
        (("verdict: holds", "verdict: true-ish"), "chen-def-3.1: expected a verdict of"),
        (("paper: chen2022", "paper: chen"), "chen-def-3.1: expected a paper of"),
        (("inside: [1.99, 2]", "inside: [2, 2]"), "chen-lem-c.3: ratios: expected low < high"),
        (("- id: chen-lem-c.4", "- id: chen-lem-c.4\n  rule: {holds: [none], fails: []}"), "names lines of evidence"),
        (("paper: chen2022", "paper: chen: 2022"), "line 25: mapping values are not allowed"),
    ],
)
def test_a_slip_in_the_registry_is_one_line(change, message, tmp_path, monkeypatch):
    text = (claims.files("moe_book") / "claims.yml").read_text()
    assert change[0] in text
    (tmp_path / "claims.yml").write_text(text.replace(*change, 1))
    monkeypatch.setattr(claims, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match=rf"claims.yml: .*{message}") as refused:
        claims.registry.__wrapped__()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rests_on", "message"),
    [
        ({"a": ["b"], "c": []}, "a: expected rests_on to hold ids of the registry, got 'b'"),
        ({"a": "abc", "b": []}, "a: expected rests_on to hold ids of the registry, got 'c'"),
        ({"a": ["a"]}, "a: expected rests_on without a circle, got a, which is used by a"),
        (
            {"a": ["b"], "b": ["c"], "c": ["a"]},
            "expected rests_on without a circle, got a, which is used by c, which is used by b, which is used by a",
        ),
    ],
)
def test_a_claim_that_rests_on_an_unknown_one_or_on_itself_is_refused(rests_on, message, tmp_path, monkeypatch):
    rows = [{"id": claim, **ROW, "rests_on": others} for claim, others in rests_on.items()]
    (tmp_path / "claims.yml").write_text(yaml.safe_dump(rows))
    monkeypatch.setattr(claims, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match=f"claims.yml: .*{message}"):
        claims.registry.__wrapped__()


@pytest.mark.parametrize(("claim", "row"), claims.registry().items())
def test_what_a_claim_rests_on_is_named_once_in_the_order_of_the_registry(claim, row):
    named = row.get("rests_on", [])
    assert named == [other for other in claims.registry() if other in named]
    assert named or "rests_on" not in row, claim


def test_a_number_of_a_paper_on_which_two_readers_disagree_is_refused():
    row = copy.deepcopy(claims.registry()["chen-tab-7"])
    row["target"]["cubic"] += 0.01
    with pytest.raises(ValueError, match="target: expected the numbers of transcription.yml"):
        claims.validate(row)


def test_every_number_of_a_paper_is_transcribed_twice():
    """The numbers that chen-tab-8-released is held against are those that the released code printed."""
    held = {claim for claim, row in claims.registry().items() if "target" in row} - {"chen-tab-8-released"}
    assert set(claims._transcription()) == held
