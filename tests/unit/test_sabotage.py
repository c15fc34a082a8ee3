"""The machinery on a small chapter of its own, and what the book promises of its mutants."""

import hashlib
import re

import nbformat
import pytest
import yaml

from moe_book import claims
from moe_book.sabotage import registry
from moe_book.sabotage.__main__ import main
from moe_book.sabotage.registry import SOURCES, lacking, mutants, outcomes, outcomes_by_claim
from moe_book.sabotage.slicing import needed, reached

CELLS = [
    "seed = 0\nfrom moe_book import claims, experiments",
    "from moe_theory.theory.smoothing import kappa\nlarge = kappa('gaussian')\nassert kappa('gaussian', 2.0) < large",
    "raise SystemExit('cells that the box does not need are not run')",
    "rows = experiments.load('contact')\nhalf = 0.9975",
    'claims.check("chen-lem-c.3", gaussian=large * 12.566370614359172**0.5,\n'
    '    ratios=[2 * half * (rows["gap"].nunique() > 1)] * 4)',
    "raise SystemExit('cells after the box are not run')",
]
ROOT_TWO_PI = dict(place="theory/smoothing.py", old="else 1 / (scale * math.sqrt(2 * math.pi))")
MUTANTS = {  # name: change, what becomes of it
    "larger": (ROOT_TWO_PI | dict(new="else 1.05 / (scale * math.sqrt(2 * math.pi))"), ("refused", "cell 5")),
    "nearly": (ROOT_TWO_PI | dict(new="else 1.0001 / (scale * math.sqrt(2 * math.pi))"), ("survived", "")),
    "inverted": (ROOT_TWO_PI | dict(new="else scale / math.sqrt(2 * math.pi)"), ("refused before", "cell 2")),
    "cell": (dict(place="notebook", old="half = 0.9975", new="half = 0.5"), ("refused", "cell 5")),
    "typo": (dict(place="notebook", old="half = 0.9975", new="half = hlf"), ("broken", "cell 4")),
    "flat": (dict(place="rows contact", do='rows["gap"] = 1.0'), ("refused", "cell 5")),
    "same": (dict(place="rows contact", do='rows["gap"] *= 1.0'), ("broken", "cell 4")),
}


def _row(name, change):
    place = {"in" if key == "place" else key: value for key, value in change.items()}
    return {"claim": "chen-lem-c.3", "name": name, "kind": "quantitative", "what": "a change"} | place


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A chapter of five cells, its mutants in a folder of their own."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "99_small.ipynb")
    for name, value in (("FOLDER", tmp_path), ("NOTEBOOKS", tmp_path), ("OUTCOMES", tmp_path / "outcomes.json")):
        monkeypatch.setattr(registry, name, value)
    registry.code.cache_clear()
    registry.cells_for.cache_clear()

    def write(*rows):
        (tmp_path / "99_small.yml").write_text(yaml.safe_dump(list(rows)))

    write(*(_row(name, change) for name, (change, _) in MUTANTS.items()))
    yield write
    registry.code.cache_clear()
    registry.cells_for.cache_clear()


def _tree():
    return {p: hashlib.sha256(p.read_bytes()).digest() for p in SOURCES.rglob("*") if p.suffix in {".py", ".csv"}}


@pytest.mark.slow
def test_mutants_are_refused_or_survive_and_the_tree_stays(small, capsys):
    before = _tree()
    assert main(["run", "--jobs", "2"]) == 1
    assert _tree() == before
    known = outcomes()
    found = {name: (known[f"chen-lem-c.3/{name}"]["outcome"], known[f"chen-lem-c.3/{name}"]["by"]) for name in MUTANTS}
    assert found == {name: outcome for name, (_, outcome) in MUTANTS.items()}
    assert {"commit", "torch", "digest", "seconds", "why"} <= set(known["chen-lem-c.3/larger"])
    assert "survived: chen-lem-c.3/nearly" in capsys.readouterr().out
    assert main(["spotcheck", "any text", "--jobs", "2"]) == 0
    known["chen-lem-c.3/cell"]["outcome"] = "survived"
    registry.store(known, mutants())
    assert main(["spotcheck", "any text", "--jobs", "2"]) == 1
    assert "cell: refused, stored as survived" in capsys.readouterr().out


@pytest.mark.slow
def test_a_chapter_that_does_not_pass_unchanged_is_named(small, tmp_path, capsys):
    path = tmp_path / "99_small.ipynb"
    path.write_text(path.read_text().replace("12.566370614359172", "10.5"))
    small(_row("cell", MUTANTS["cell"][0]))
    assert main(["run", "chen-lem-c.3", "--jobs", "1"]) == 1
    assert "chen-lem-c.3 does not pass unchanged, its mutants say nothing: cell 5" in capsys.readouterr().out


def test_an_outcome_of_an_earlier_text_does_not_count(small, tmp_path):
    change = MUTANTS["cell"][0]
    small(_row("cell", change))
    (mutant,) = mutants()
    registry.store({mutant.id: {"outcome": "refused", "digest": mutant.digest()}}, [mutant])
    assert outcomes_by_claim()["chen-lem-c.3"][0]["outcome"] == "refused"
    small(_row("cell", change | {"new": "half = 0.54"}))
    assert outcomes_by_claim()["chen-lem-c.3"][0]["outcome"] == "not run"


JUDGED = {  # a change of how cards are judged or only shown, and whether outcomes become outdated
    "weaker": ("evidence.py", "self.low <= self.value <= self.high", "self.low - 1 <= self.value <= self.high", True),
    "never false": ("evidence.py", "all(c.holds for c in cases)", "True", True),
    "any verdict": ("claims.py", 'if strict() and verdict != row["verdict"]:', "if False:", True),
    "another text": ("evidence.py", "farther than {off} from", "off by more than {off} from", False),
    "more refusals": (
        "sabotage/running.py",
        "(AssertionError, ValueError)",
        "(AssertionError, ValueError, KeyError)",
        True,
    ),
    "never broken": (
        "sabotage/running.py",
        'return refused if isinstance(error, REFUSALS) else "broken"',
        "return refused",
        True,
    ),
    "more patience": ("sabotage/running.py", "PATIENCE = 600", "PATIENCE = 900", False),
    "another docstring": ("evidence.py", "One measured value and", "A measured value and", False),
}


@pytest.mark.parametrize("name", JUDGED)
def test_outcomes_hold_for_the_code_that_judged_them(small, monkeypatch, name):
    place, old, new, outdated = JUDGED[name]
    small(_row("cell", MUTANTS["cell"][0]))
    (mutant,) = mutants()
    registry.store({mutant.id: {"outcome": "refused", "digest": mutant.digest()}}, [mutant])
    text, read = registry._file(place), registry._file
    assert text.count(old) == 1
    monkeypatch.setattr(registry, "_file", lambda p: text.replace(old, new) if p == place else read(p))
    assert registry.outdated() is outdated
    assert outcomes_by_claim()["chen-lem-c.3"][0]["outcome"] == ("not run" if outdated else "refused")


def test_outcomes_from_before_the_second_hash_hold_while_the_first_does(small):
    small(_row("cell", MUTANTS["cell"][0]))
    (mutant,) = mutants()
    registry.store({mutant.id: {"outcome": "refused", "digest": mutant.digest()}}, [mutant])
    file = registry.OUTCOMES.with_name(registry.JUDGE)
    first, second = file.read_text().split()
    for text, outdated in ((first, False), (second, True), ("", True), (f"{first} {first}", True)):
        file.write_text(text)
        assert registry.outdated() is outdated


def test_the_stored_outcomes_were_judged_by_this_code():
    assert not registry.outdated()
    assert registry.OUTCOMES.with_name(registry.JUDGE).read_text().split() == [registry.judge(), registry.recogniser()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in": "theory/nothing.py"}, "in: expected a module of the packages, `notebook` or `rows NAME`, got 'theory"),
        ({"old": "half"}, "old: expected a text that stands once in notebook and is changed, found 2"),
        ({"old": "no such text"}, "99_small.yml: chen-lem-c.3/cell: old: .* found 0"),
        ({"new": "half = 0.9975"}, "old: expected a text that stands once"),
        ({"in": "rows contact"}, "expected statements under `do`"),
        ({"kind": "large"}, "kind: expected one of"),
        ({"claim": "nguyen-tab-9"}, "claim: expected a claim with a verdict, got 'nguyen-tab-9'"),
        ({"claim": "chen-rem-c.2"}, "expected one cell that settles 'chen-rem-c.2', found 0"),
        ({"size": 5}, r"unknown fields \['size'\]"),
        ({"what": None, "in": None}, None),
    ],
)
def test_a_stale_or_malformed_mutant_is_refused(small, change, message, capsys):
    row = {k: v for k, v in (_row("cell", MUTANTS["cell"][0]) | change).items() if v is not None}
    small(row)
    with pytest.raises(ValueError, match=message or "expected the fields"):
        mutants()
    assert main(["status"]) == 2 and "error: " in capsys.readouterr().err


def test_two_of_one_name_and_unknown_claims_are_refused(small):
    with pytest.raises(ValueError, match=r"claim: expected claims with mutants, got \['chen-lem-99'\]"):
        mutants(["chen-lem-99"])
    row = _row("cell", MUTANTS["cell"][0])
    small(row, row)
    with pytest.raises(ValueError, match=r"got two of \['chen-lem-c.3/cell'\]"):
        mutants()


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        (["a = 1", "b = 2", "check(a)"], [0, 2]),
        (["a = 1", "a = 2", "check(a)"], [1, 2]),
        (["a = 1", "a = a + 1", "check(a)"], [0, 1, 2]),
        (["a = 1", "a += 1", "check(a)"], [0, 1, 2]),
        (["a = 1", "if a:\n    a = 2", "check(a)"], [0, 1, 2]),
        (["c = 3", "def f(x):\n    return x + c", "x = 1", "check(f(4))"], [0, 1, 3]),
        (["c = 3", "f = lambda x: x + c", "c = 4", "check(f(4))"], [0, 1, 2, 3]),
        (["c = 3", "def g():\n    return c", "def f():\n    return g()\n\n\ns = [f()]", "check(s)"], [0, 1, 2, 3]),
        (["a = []", "a.append(1)", "print(a)", "check(a)"], [0, 1, 3]),
        (["a = {}", "a['k'] = 1", "check(a)"], [0, 1, 2]),
        (["import math as m", "m.sqrt(4)", "check(m.pi)"], [0, 2]),
        (["import torch", "torch.set_default_dtype(torch.float64)", "check(f())"], [0, 1, 2]),
        (["k = 1", "s = [k for k in range(3)]", "check(s)"], [1, 2]),
        (["k = 1", "for k in range(3):\n    s = k", "check(s)"], [1, 2]),
        (["a = 1", "assert a == 1", "check(a)"], [0, 2]),
    ],
)
def test_the_cells_that_a_card_depends_on(cells, kept):
    assert needed(cells, len(cells) - 1) == kept


@pytest.mark.parametrize(
    ("cells", "run"),
    [
        (["k = 1", "a = 2", "b = 3", "print(a)", "print(k + b)"], [0, 2, 4]),
        (["k = 1", "a = k", "c = 3", "b = a", "print(b)", "print(c)"], [0, 1, 3, 4]),
        (["k = 1", "a = k", "a = 2", "print(a)"], [0, 1]),
        (["k = 1", "a = k", "a = a + 1", "print(a)"], [0, 1, 2, 3]),
        (["k = 1", "a = k", "if c:\n    a = 2", "print(a)"], [0, 1, 2, 3]),
        (["k = 1", "k = 2", "print(k)"], [0]),
        (["k = 1", "s = [k for k in range(3)]", "print(s)"], [0]),
        (
            ["k = 1", "def f():\n    return k", "def g():\n    return f()", "c = 3", "a = g()", "print(a)"],
            [0, 1, 2, 4, 5],
        ),
        (["k = 1", "a = []", "a.append(k)", "print(a)"], [0, 1, 2, 3]),
        (["k = 1", "a = {}", "a['k'] = k", "print(a)"], [0, 1, 2, 3]),
        (["k = 1", "a = []", "fill(a, k)", "print(a)"], [0, 1, 2, 3]),
        (["k = 1", "import numpy as np", "np.fill(a[0], value=k)", "print(a, np)", "print(np)"], [0, 1, 2, 3]),
        (["k = 1", "import torch", "torch.set_default_dtype(k)", "print(2)"], [0, 1, 2, 3]),
        (["k = 1\nn = 2", "import math\ncheck(n, k)", "print(math.pi)", "print(n)"], [0, 1]),
        (["k = 1", "import math\na = math.sqrt(k)", "print(math.pi)", "print(a)"], [0, 1, 3]),
        (["k = 1", "print(globals()['k'])", "print(2)"], [0, 1]),
        (["a = 1", "k = 1", "print(k)", "print(a)"], [1, 2]),
    ],
)
def test_the_cells_that_an_edit_reaches(cells, run):
    assert reached(cells, run[0], {"k"}) == run


# What the book promises of its mutants.


def test_every_settled_claim_has_a_quantitative_and_a_structural_mutant():
    assert lacking() == {}


def test_the_text_that_is_hashed_is_the_same_in_every_python():
    for text in (
        "f\"{a['b']:.2f} of {c}\"",
        "f'{a} of {c}'",
        "(f\"{a['b']}\", 'it', f\"it's {a}\", f\"{'s' * (m > 1)}\")",
    ):
        assert registry._syntax(f"{text}  # as it is laid out") == text


def test_no_mutant_that_was_run_as_it_stands_survives_without_a_reason():
    """One that was not run since its text changed is shown as such; the ledger counts it among none."""
    known, by_id = outcomes(), {m.id: m for m in mutants()}
    assert set(known) <= set(by_id)
    for id, m in by_id.items():
        if known.get(id, {}).get("digest") == m.digest():
            assert known[id]["outcome"].startswith("refused") or m.survives, id


def test_what_a_mutant_changes_is_typeset():
    for m in mutants():
        outside = re.sub(r"[$][^$]+[$]", "", m.what + m.survives)
        assert not re.search(r"[\^_~\\<>]", outside), f"{m.id}: {m.what}"


def test_the_registry_is_typeset_in_sentences():
    greek = r"\b(alpha|beta|gamma|delta|kappa|sigma|theta|tau|eta|lambda|epsilon)\b"
    for claim, row in claims.registry().items():
        for field in ("says", "note", "criterion"):
            text = row.get(field, "A sentence.").strip()
            outside = re.sub(r"[$][^$]+[$]", "", text)
            assert not re.search(rf"[\^_~\\<>=]|{greek}", outside), f"{claim}: {field}: {outside}"
            assert text.endswith((".", ".)")), f"{claim}: {field} is a sentence"
        assert "suspect" not in row
        if row["kind"] in ("table", "figure") and "verdict" in row:
            assert "criterion" in row, f"{claim}: a table or figure says what decides"
