import json

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from moe_book import claims
from moe_book.claims import MIME, Compared, collect, write_ledger


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(claims, "_checked", {})


GOOD = {"largest ratio": Compared(1.9, "<=", 2)}


def test_a_right_verdict_gives_a_card():
    card = claims.settle("chen-lem-5.1", "sharpened", {**GOOD, "M": 8}, "A note.")
    bundle = card._repr_mimebundle_()
    assert bundle[MIME]["verdict"] == "sharpened"
    assert bundle[MIME]["evidence"] == (
        ("largest ratio", "1.9", "at most 2", "> 2"),
        ("M", "8", "", ""),
    )
    note = claims.registry()["chen-lem-5.1"]["note"]
    assert bundle[MIME]["note"] == f"{note} A note." and "chen-lem-5.1" in bundle["text/plain"]


def test_a_card_is_typeset_and_escaped(monkeypatch):
    row = claims.registry()["chen-lem-5.1"] | {"says": "For $a<K$ & b<c.", "criterion": "None.", "criterion_set": "x"}
    monkeypatch.setattr(claims, "registry", lambda: {"chen-lem-5.1": row})
    shown = claims.settle("chen-lem-5.1", "sharpened", {"$x<y$": Compared(1.9, "<=", 2)}).html()
    assert r"For \(a&lt;K\) &amp; b&lt;c." in shown and r"<td>\(x&lt;y\)</td><td>1.9</td>" in shown
    assert "<th>measured</th><th>predicted</th><th>refuted if</th>" in shown and "None. (Set x.)" in shown


def test_outside_a_notebook_the_card_is_printed(capsys):
    claims.check("chen-lem-5.1", "sharpened", GOOD, "A note.")
    assert capsys.readouterr().out.startswith("[sharpened] chen-lem-5.1 (Chen et al. (2022)")


def test_false_verdict_is_refused():
    with pytest.raises(AssertionError, match=r"finds 'holds'.*expects 'sharpened'"):
        claims.check("chen-lem-5.1", "holds", GOOD)


def test_false_evidence_is_refused_whatever_the_verdict():
    with pytest.raises(AssertionError, match=r"refuted by largest ratio: Compared\(value=2.1"):
        claims.check("chen-lem-5.1", "sharpened", {"largest ratio": Compared(2.1, "<=", 2)})


def test_nan_refutes():
    with pytest.raises(AssertionError, match="refuted"):
        claims.check("chen-lem-5.1", "sharpened", {"largest ratio": Compared(float("nan"), "<=", 2)})


def test_unknown_id_and_verdict_are_refused():
    with pytest.raises(ValueError, match="claim_id: expected an id of the registry, got 'chen-lem-99'"):
        claims.check("chen-lem-99", "holds", {})
    with pytest.raises(ValueError, match="verdict: expected one of"):
        claims.check("chen-lem-5.1", "true", {})


def test_a_claim_without_an_expected_verdict_stays_open(monkeypatch):
    rows = claims.registry()
    still_open = {field: value for field, value in rows["chen-lem-5.1"].items() if field != "verdict"}
    monkeypatch.setattr(claims, "registry", lambda: rows | {"chen-lem-5.1": still_open})
    with pytest.raises(ValueError, match="is open in the registry"):
        claims.check("chen-lem-5.1", "sharpened", GOOD)


def test_a_claim_checked_twice_is_refused():
    claims.check("chen-lem-5.1", "sharpened", GOOD)
    with pytest.raises(ValueError, match="was checked before"):
        claims.check("chen-lem-5.1", "sharpened", GOOD)


def test_a_refused_check_leaves_no_trace():
    with pytest.raises(AssertionError):
        claims.check("chen-lem-5.1", "holds", GOOD)
    claims.check("chen-lem-5.1", "sharpened", GOOD)


def test_evidence_that_cannot_fail_is_refused():
    with pytest.raises(ValueError, match="evidence: expected at least one comparison"):
        claims.check("chen-lem-5.1", "sharpened", {"M": 8})


SHARPENED = "'chen-lem-5.1', 'sharpened', {'ratio': Compared(1.9, '<=', 2)}, 'note'"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Two executed notebooks of one card each; one kernel ran the cells of both."""
    calls = {"03_a": SHARPENED, "04_b": "'chen-rem-c.2', 'holds', {'x': Compared(1, '==', 1)}"}
    setup = nbformat.v4.new_code_cell("from moe_book import claims\nfrom moe_book.claims import Compared")
    cards = [nbformat.v4.new_code_cell(f"claims.check({call})") for call in calls.values()]
    NotebookClient(nbformat.v4.new_notebook(cells=[setup, *cards]), kernel_name="python3").execute()
    folder = tmp_path_factory.mktemp("notebooks")
    paths = [folder / f"{name}.ipynb" for name in calls]
    for path, card in zip(paths, cards, strict=True):
        nbformat.write(nbformat.v4.new_notebook(cells=[setup, card]), path)
    return paths


def test_the_ledger_holds_every_claim_and_what_the_cards_say(executed, tmp_path):
    mutants = {"chen-lem-5.1": [{"name": "a", "outcome": "refused"}]}
    ledger = write_ledger(executed, mutants, tmp_path / "ledger.json")
    rows = {r["id"]: r for r in ledger["claims"]}
    assert list(rows) == list(claims.registry())
    assert rows["chen-lem-5.1"]["verdict"] == "sharpened" and rows["chen-lem-5.1"]["notebook"] == "03_a"
    assert rows["chen-lem-5.1"]["evidence"] == [["ratio", "1.9", "at most 2", "> 2"]]
    assert rows["chen-lem-5.1"]["mutants"] == mutants["chen-lem-5.1"] and rows["chen-rem-c.2"]["mutants"] == []
    # a registry verdict without a card in a notebook is not done
    assert rows["chen-thm-4.1"]["verdict"] == "open" and "evidence" not in rows["chen-thm-4.1"]
    assert sum(ledger["counts"].values()) == len(rows) and ledger["counts"]["open"] == len(rows) - 2
    assert json.loads((tmp_path / "ledger.json").read_text()) == collect(executed, mutants) == ledger


def test_two_cards_for_one_claim_are_refused(executed, tmp_path):
    again = tmp_path / "05_c.ipynb"
    again.write_text(executed[0].read_text())
    with pytest.raises(ValueError, match="has a card in 03_a already"):
        collect([*executed, again], {})


def test_a_card_that_contradicts_the_registry_is_refused(executed, tmp_path):
    forged = tmp_path / "03_a.ipynb"
    forged.write_text(executed[0].read_text().replace('"verdict": "sharpened"', '"verdict": "holds"'))
    with pytest.raises(ValueError, match="not what the registry says"):
        collect([forged], {})


def test_running_a_cell_again_is_allowed_but_a_second_cell_is_not():
    setup = "from moe_book import claims\nfrom moe_book.claims import Compared"
    sources = setup, f"claims.check({SHARPENED})", f"x = 1; claims.check({SHARPENED})"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    client = NotebookClient(nb, kernel_name="python3")
    with client.setup_kernel():
        for index in (0, 1, 1):
            client.execute_cell(nb.cells[index], index)
        with pytest.raises(CellExecutionError, match="was checked before"):
            client.execute_cell(nb.cells[2], 2)


def test_registry_keeps_every_id_once_with_known_fields():
    rows = yaml.safe_load((claims.files("moe_book") / "claims.yml").read_text())
    assert len({r["id"] for r in rows}) == len(rows) == len(claims.registry())
    for r in rows:
        assert {"id", "paper", "where", "kind", "chapter", "says"} <= set(r)


@pytest.mark.parametrize(
    "change",
    [
        ("id: chen-lem-c.4", "id: chen-lem-c.3"),
        ("verdict: holds", "verdict: true-ish"),
        ("paper: chen2022", "paper: chen"),
    ],
)
def test_a_damaged_registry_is_refused(change, tmp_path, monkeypatch):
    text = (claims.files("moe_book") / "claims.yml").read_text().replace(*change, 1)
    (tmp_path / "claims.yml").write_text(text)
    monkeypatch.setattr(claims, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match=r"claims.yml"):
        claims.registry.__wrapped__()


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
    rows = [{"id": claim, "paper": "book", "rests_on": others} for claim, others in rests_on.items()]
    (tmp_path / "claims.yml").write_text(yaml.safe_dump(rows))
    monkeypatch.setattr(claims, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match=f"claims.yml: .*{message}"):
        claims.registry.__wrapped__()


@pytest.mark.parametrize(("claim", "row"), claims.registry().items())
def test_what_a_claim_rests_on_is_named_once_in_the_order_of_the_registry(claim, row):
    named = row.get("rests_on", [])
    assert named == [other for other in claims.registry() if other in named]
    assert named or "rests_on" not in row, claim
