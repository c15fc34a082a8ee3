"""The machinery on a small chapter of its own, what its operators offer, and what the book promises of its mutants."""

import ast
import contextlib
import multiprocessing
import re
import time

import nbformat
import numpy as np
import pandas as pd
import pytest

from moe_book import claims
from moe_book.sabotage import operators, outcomes, population, running, sources, stored
from moe_book.sabotage.__main__ import main
from moe_book.sabotage.slicing import needed, reached

CELLS = [
    "seed = 0\nfrom moe_book import claims, experiments",
    "from moe_theory.theory.smoothing import kappa\nlarge = kappa('gaussian')",
    "unread = 3 + 4",
    "rows = experiments.load('contact')\nhalf = 0.9975",
    "ratios = [2 * half * ((rows['distance'] < 1).all()) for _ in range(4)]",
    'claims.check("small", gaussian=large * 12.566370614359172**0.5, ratios=ratios)',
]
CLAIM = "small"
LINES = {
    "gaussian": {"says": "over its limit", "close_to": 1.41421356237, "within": 1e-9},
    "ratios": {"says": "ratios", "inside": [1.99, 2], "cases": 4},
}
ROW = {"id": CLAIM, "paper": "book", "where": "a test", "says": "It is small.", "kind": "theorem", "chapter": "03"}


def forget():
    for cached in (sources.code, sources.cells_of, sources.statements_of, outcomes.equivalents):
        cached.cache_clear()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A book of one chapter of six cells that settles one claim; its outcomes go to a folder of their own."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "03_small.ipynb")
    monkeypatch.setattr(sources, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(outcomes, "OUTCOMES", tmp_path / "outcomes")
    monkeypatch.setattr(outcomes, "EQUIVALENT", tmp_path / "equivalent.yml")
    outcomes.EQUIVALENT.write_text("{}")
    registry = {CLAIM: {**ROW, "verdict": "holds", "evidence": LINES}}
    for module in (sources, population, outcomes):
        monkeypatch.setattr(module, "claims", lambda: registry)
    monkeypatch.setattr(claims, "registry", lambda: registry)
    # processes that are forked from this one have this book, too
    monkeypatch.setattr(running, "get_context", lambda _: multiprocessing.get_context("fork"))
    forget()
    yield tmp_path
    forget()


TRACE = [{"functions": ["moe_theory.theory.smoothing:kappa"] if i == 1 else [], "seconds": 0.1} for i in range(6)]


def offered(text: str, kind: tuple) -> set[str]:
    """What operators make of a statement, as code."""
    tree = ast.parse(text).body[0]
    return {ast.unparse(operators.change(tree, site)) for site in operators.sites(tree, kind)}


SABOTAGES = [  # made by readers who had not seen the operators: the statement, what they changed it to, the kind
    ("x = torch.stack([s, beta[:, None] * c[k], t], 1)", "x = torch.stack([s, c[k], t], 1)", operators.CODE),
    ("x_0 = S * (1 + G)", "x_0 = 1 + G", operators.CODE),
    ("y = y + S * step", "y = y + step", operators.CODE),
    ("for M_ in (2, 4, 8, 32):\n    f(M_)", "for M_ in list((2, 4, 8, 32))[:1]:\n    f(M_)", operators.CASES),
    ("x = mean[of] + rng.normal(size=(200, d))", "x = mean[of] + 0.5 * rng.normal(size=(200, d))", operators.CASES),
    ("x = 2 * torch.rand(n) - 1", "x = 2 * (0.5 * torch.rand(n)) - 1", operators.CASES),
    ("task.mean[:8]", "task.mean[:9]", operators.CODE),
    ("ell = np.sqrt(v)", "ell = 1.05 * np.sqrt(v)", operators.CODE),
    ("b = np.minimum(rate * turn, 1)", "b = np.minimum(1.05 * (rate * turn), 1)", operators.CODE),
    ("r = p['moe'] / p['dense']", "r = p['dense'] / p['dense']", operators.CODE),
    ("s = loss + loss.detach()", "s = loss - loss.detach()", operators.CODE),
    ("w = pi.sqrt()", "w = pi", operators.CODE),
    ("fit(n, SIGMA)", "fit(n, 1.05 * SIGMA)", operators.CODE),
    ("for _ in range(steps):\n    f()", "for _ in range(0):\n    f()", operators.CASES),
    ("a = whole - part", "a = whole + part", operators.CODE),
    ("m = x.max(1)", "m = x.min(1)", operators.CODE),
    ("m = x.sum(1)", "m = x.mean(1)", operators.CODE),
    ("m = x.sum(1)", "m = x.sum(0)", operators.CODE),
    ("fit(seeds=(1, 2, 3))", "fit(seeds=list((1, 2, 3))[:1])", operators.CASES),
    ("x = u.clamp(0)", "x = u", operators.CODE),
]


@pytest.mark.parametrize(("before", "after", "kind"), SABOTAGES, ids=[after for _, after, _ in SABOTAGES])
def test_what_readers_tried_is_offered(before, after, kind):
    assert ast.unparse(ast.parse(after)) in offered(before, kind)


@pytest.mark.parametrize(
    "text",
    [
        "if x < 0:\n    raise ValueError(f'{x + 1}')",
        "draw = stream(seed, 'chapter', 3, 2)",
        "size = max(1, BLOCK // triples)",
        "solve(f, tol=1e-6, maxiter=20)",
        "from math import pi",
        "check.integer('steps', steps, 1)",
    ],
)
def test_what_changes_no_number_is_passed_over(text):
    assert {t for t in offered(text, operators.CODE) if "max(" not in t and "min(" not in t} == set()


RUNS = pd.DataFrame(
    {
        "arm": ["a", "a", "a", "b", "b", "b"],
        "seed": [0, 1, 2, 0, 1, 2],
        "loss": [1.0, 2.0, 4.0, 3.0, 5.0, 9.0],
        "time": [2.0, 3.0, 5.0, 4.0, 6.0, 1.0],
        "curve": [[3.0, 1.0, float(i)] for i in range(6)],
        "dead": [True, False, False, True, True, False],
    }
)
KEYS = ["arm", "seed"]


def test_every_operator_on_runs_changes_only_its_column_and_as_it_says():
    def of(operator, column="loss"):
        new = stored.changed_runs(RUNS, operator, column, KEYS)
        assert new.drop(columns=column).equals(RUNS.drop(columns=column))
        return new[column]

    assert np.allclose(of("scaled"), 1.05 * RUNS.loss)
    assert (of("scaled_in_one") != RUNS.loss).sum() == 3
    assert list(of("exchanged")) == [3, 5, 9, 1, 2, 4]
    broken = of("unpaired")
    assert sorted(broken) == sorted(RUNS.loss) and (broken != RUNS.loss).sum() == 3
    assert list(of("copied")) == [1, 1, 1, 3, 3, 3]
    wide = of("widened").groupby(RUNS.arm).agg(["mean", "std"]) / RUNS.groupby("arm").loss.agg(["mean", "std"])
    assert np.allclose(wide, [[1, 1.5], [1, 1.5]])
    assert np.allclose(of("tilted"), RUNS.loss * np.array([1, 1, 1, 1.1, 1.1, 1.1]))
    assert list(of("another_column")) == list(RUNS.time)
    assert of("flattened", "curve")[0] == [4 / 3] * 3
    assert of("reversed", "curve")[5] == [5.0, 1.0, 3.0]
    assert np.allclose(of("smoothed", "curve")[0], [2.5, 1.75, 1.0])
    assert (of("flipped", "dead") != RUNS.dead).sum() == 3
    assert len(stored.changed_runs(RUNS, "only_first", "arm", KEYS)) == 3


def test_runs_offer_what_changes_them_and_of_columns_that_are_read_only():
    found = set(stored.offered_runs(RUNS, KEYS, {"loss", "seed", "curve"}))
    assert {column for _, column in found} == {"loss", "seed", "curve"}
    assert ("only_first", "seed") in found and ("flattened", "loss") not in found and ("flattened", "curve") in found


PAPER = {
    "target": {"s1": {"moe": [99.5, 0.2], "single": [68.0, 1.0]}, "s2": {"moe": [98.0, 0.2], "single": [79.5, 2.0]}}
}


def test_every_operator_on_the_papers_numbers_changes_them():
    found = list(stored.offered_numbers(PAPER))
    assert {operator for operator, _ in found} == {"off_by_5_percent", "two_exchanged", "row_for_another"}
    before = dict(stored.leaves(PAPER))
    for operator, path in found:
        after = dict(stored.leaves(stored.changed_numbers(PAPER, operator, path)))
        off = {p for p in before if before[p] != after[p]}
        assert len(off) == 1 if operator == "off_by_5_percent" else off
        assert sorted(before.values()) == sorted(after.values()) or operator == "off_by_5_percent"


def test_a_population_is_spread_over_kinds_and_drawn_by_the_id(small):
    drawn = population.population(CLAIM, TRACE)
    assert [m.key for m in drawn] == [m.key for m in population.population(CLAIM, TRACE)]
    assert len({m.key for m in drawn}) == len(drawn) <= population.SIZE
    assert {m.kind for m in drawn[:4]} == {"code", "runs", "cases"}
    assert not any("unread" in m.what or m.place == "cell 3" for m in drawn)
    assert any(m.place == "moe_theory.theory.smoothing:kappa" and m.start == 1 for m in drawn)
    assert all(m.start == 4 - 1 for m in drawn if m.place == "runs contact")


@pytest.mark.slow
def test_mutants_are_run_and_told_by_what_the_box_says(small, capsys):
    assert main(["run", "--jobs", "2"]) == 0
    ends = outcomes.table().set_index("what").outcome
    assert ends["distance: 5 % more, everywhere"] == "survived"  # the box asks only that it is small
    assert ends["`range(4)` to `list(range(4))[:1]`"] == "refused"  # four cases are expected
    assert ends["`large * 12.566370614359172 ** 0.5` to `large`"] == "refused"
    assert set(ends) <= {"refused", "survived", "crashed"} and len(ends) == len(population.population(CLAIM, TRACE))
    scores = outcomes.score(outcomes.table())
    assert scores.loc[CLAIM, "refused"] == (ends == "refused").sum() and 0 < scores.loc[CLAIM, "score"] <= 100
    capsys.readouterr()
    assert main(["status"]) == 0 and f"{CLAIM}: {len(ends)} run" in capsys.readouterr().out
    assert main(["spotcheck", "any text", "--jobs", "2"]) == 0
    path = small / "03_small.ipynb"
    path.write_text(path.read_text().replace("0.9975", "0.9976"))
    forget()
    assert outcomes.current(CLAIM) == {}


@pytest.mark.slow
def test_a_claim_that_does_not_stand_unchanged_is_named(small, capsys):
    path = small / "03_small.ipynb"
    path.write_text(path.read_text().replace("12.566370614359172", "10.5"))
    assert main(["run", CLAIM, "--jobs", "1"]) == 2
    assert "03_small: expected a chapter that runs, got" in capsys.readouterr().err


def test_bad_input_is_one_line(capsys):
    assert main(["run", "chen-lem-99"]) == 2 and main(["run", "--jobs", "0"]) == 2
    assert "claim: expected an id of the registry, got 'chen-lem-99'" in capsys.readouterr().err


def test_the_text_that_is_hashed_is_the_same_in_every_python():
    for text in (
        "f\"{a['b']:.2f} of {c}\"",
        "f'{a} of {c}'",
        "(f\"{a['b']}\", 'it', f\"it's {a}\", f\"{'s' * (m > 1)}\")",
    ):
        assert sources.syntax(f"{text}  # as it is laid out") == text


JUDGED = {  # a change of how boxes are judged or only shown, and whether it is another judge
    "weaker": ("self.low <= self.value <= self.high", "self.low - 1 <= self.value <= self.high", True),
    "never false": ("all(c.holds for c in cases)", "True", True),
    "another text": ("farther than {off} from", "off by more than {off} from", False),
    "another docstring": ("One measured value and", "A measured value and", False),
}


def test_every_claim_has_a_digest_whatever_its_names_are():
    """YAML reads some names of cases as numbers."""
    assert len({sources.digest(claim, []) for claim in claims.registry()}) == len(claims.registry())


@pytest.mark.parametrize("name", JUDGED)
def test_outcomes_hold_for_the_code_that_judged_them(monkeypatch, name):
    old, new, another = JUDGED[name]
    whole, before = sources.module_tree, sources.judge()
    text = (sources.SOURCES / "moe_book" / "evidence.py").read_text()
    assert text.count(old) == 1
    changed = ast.parse(text.replace(old, new))
    monkeypatch.setattr(sources, "module_tree", lambda m: changed if m == "moe_book.evidence" else whole(m))
    sources.judge.cache_clear()
    assert (sources.judge() != before) is another
    sources.judge.cache_clear()


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


def test_every_settled_claim_has_cells_that_settle_it():
    for claim, row in claims.registry().items():
        if "verdict" in row:
            assert sources.statements_of(claim), claim


@pytest.mark.parametrize(
    ("cell", "ends"), [("while True: pass", False), ("import time; time.sleep(0.4)", True), ("time.sleep(9)", False)]
)
def test_the_time_of_a_cell_is_that_of_its_processor(cell, ends):
    """Or a busy machine would pass for a mutant that does not end."""
    with contextlib.nullcontext() if ends else pytest.raises(TimeoutError, match="does not end"):
        running._run_cell(cell, 0, {"time": time}, 0.1)


def test_reasons_are_of_survivors_that_there_are():
    rows = outcomes.table()
    for claim, reasons in outcomes.equivalents().items():
        assert not outcomes.complete(claim) or set(reasons) <= set(rows[rows.claim == claim].key), claim


def test_the_registry_is_typeset_in_sentences():
    greek = r"\b(alpha|beta|gamma|delta|kappa|sigma|theta|tau|eta|lambda|epsilon)\b"
    for claim, row in claims.registry().items():
        for field in ("says", "note", "record", "criterion"):
            text = row.get(field, "A sentence.").strip()
            outside = re.sub(r"[$][^$]+[$]", "", text)
            assert not re.search(rf"[\^_~\\<>=*]|{greek}", outside), f"{claim}: {field}: {outside}"
            assert text.endswith((".", ".)")), f"{claim}: {field} is a sentence"
        assert "suspect" not in row
        if row["kind"] in ("table", "figure") and "verdict" in row:
            assert "criterion" in row, f"{claim}: a table or figure says what decides"
