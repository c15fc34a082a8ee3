"""The mutants there are, what they change, and what became of each."""

import ast
import hashlib
import io
import itertools
import json
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_book import registries
from moe_book.claims import registry as claims
from moe_book.sabotage.slicing import needed

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1]  # of the two packages
NOTEBOOKS = FOLDER.parents[2] / "notebooks"
OUTCOMES = FOLDER / "outcomes.json"
PACKAGES = ("moe_theory", "moe_book")
JUDGE = "judge.txt"  # beside the outcomes: the hashes of the code that judged them
JUDGING = ("settle", "_match", "_once", "_line", "_verdict")  # what of claims.py refuses
RECOGNISED = ("REFUSALS", "_cell", "_go_on")  # what of running.py makes an outcome of an error

KINDS = {
    "quantitative": "a constant or a measured number off by 5 %, or by one standard error where it is estimated",
    "structural": "a sign, a dropped term, an exponent, exchanged columns, the wrong rows",
}
FIELDS = {"name", "kind", "what", "in", "old", "new", "do", "survives"}


@dataclass(frozen=True)
class Mutant:
    """One small change of what a claim's card guards.

    Attributes:
        claim: id of the claim.
        name: what it is called among the claim's mutants.
        kind: one of `KINDS`.
        what: the change as a phrase, with $mathematics$.
        place: a file of the package (`theory/smoothing.py`), `notebook` for a cell of the chapter, or `rows NAME`
            for the stored rows of an experiment.
        old, new: for a file or a cell: the text that is replaced, which occurs there exactly once, and
            what replaces it.
        do: for rows: Python statements that change the frame `rows`.
        survives: why it cannot be refused; empty if it must be.
        chapter: stem of the notebook.
    """

    claim: str
    name: str
    kind: str
    what: str
    place: str
    old: str
    new: str
    do: str
    survives: str
    chapter: str

    @property
    def id(self) -> str:
        return f"{self.claim}/{self.name}"

    @property
    def of_module(self) -> bool:
        """Whether it changes a file of the package, rather than a cell or rows."""
        return self.place != "notebook" and not self.place.startswith("rows ")

    def digest(self) -> str:
        """Hash of what is changed, of the cells that are run and of what decides: an outcome holds for one such hash.

        Of the cells their syntax counts, not their layout.
        """
        change = (self.claim, self.place, self.old, self.new, self.do)
        cells = [_syntax(cell) for cell in cells_for(self.claim, self.chapter) if cell]
        row = claims()[self.claim]
        decides = [row.get(field) for field in ("evidence", "rule", "verdict", "target", "target_sd", "predicted")]
        return hashlib.sha256(json.dumps([change, cells, decides]).encode()).hexdigest()[:16]


@cache
def _syntax(cell: str) -> str:
    """A cell without its layout, as Python 3.11 writes it."""
    text = ast.unparse(ast.parse(cell))
    return _requoted(text) if hasattr(tokenize, "FSTRING_START") else text


def _requoted(text: str) -> str:
    """Double quotes around each f-string with single ones inside; since 3.12 `ast.unparse` leaves them single, too."""
    ends = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    opened, letters = [], list(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        at = ends[token.start[0] - 1] + token.start[1]
        if token.type == tokenize.FSTRING_START:  # pyright: ignore[reportAttributeAccessIssue]
            opened.append(at + 1)
        elif token.type == tokenize.FSTRING_END:  # pyright: ignore[reportAttributeAccessIssue]
            start = opened.pop()
            if not opened and token.string == "'" and "'" in text[start + 1 : at]:
                letters[start] = letters[at] = '"'
    return "".join(letters)


@cache
def code(chapter: str) -> list[str]:
    """Sources of a chapter's code cells, in order; ValueError if there is no such notebook."""
    path = NOTEBOOKS / f"{chapter}.ipynb"
    if not path.exists():
        raise ValueError(f"chapter: expected a notebook of {NOTEBOOKS}, got {chapter!r}")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def card_cell(claim: str, chapter: str) -> int:
    """Number of the code cell that settles a claim; ValueError unless there is exactly one."""
    found = [i for i, source in enumerate(code(chapter)) if "claims.check(" in source and f'"{claim}"' in source]
    if len(found) != 1:
        raise ValueError(f"{chapter}: expected one cell that settles {claim!r}, found {len(found)}")
    return found[0]


@cache
def cells_for(claim: str, chapter: str) -> tuple[str, ...]:
    """The chapter's code cells up to a claim's card; those that the card does not depend on are empty."""
    cells, card = code(chapter), card_cell(claim, chapter)
    kept = set(needed(cells, card))
    return tuple(cell if i in kept else "" for i, cell in enumerate(cells[: card + 1]))


def _mutant(row: dict, chapter: str) -> Mutant:
    """A mutant from a row of its file; ValueError for one that could not be run or would change nothing."""
    where = f"sabotage/{chapter}.yml: {row.get('claim')}/{row.get('name')}"
    if missing := {"claim", "name", "kind", "what", "in"} - row.keys():
        raise ValueError(f"{where}: expected the fields {sorted(missing)}")
    if unknown := row.keys() - FIELDS - {"claim"}:
        raise ValueError(f"{where}: unknown fields {sorted(unknown)}")
    if row["kind"] not in KINDS:
        raise ValueError(f"{where}: kind: expected one of {list(KINDS)}, got {row['kind']!r}")
    if "verdict" not in claims().get(row["claim"], {}):
        raise ValueError(f"{where}: claim: expected a claim with a verdict, got {row['claim']!r}")
    texts = {name: row.get(name, "") for name in ("old", "new", "do", "survives")}
    mutant = Mutant(row["claim"], str(row["name"]), row["kind"], row["what"], row["in"], **texts, chapter=chapter)
    try:
        changed(mutant)
        card_cell(mutant.claim, chapter)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return mutant


def changed(mutant: Mutant) -> str | list[str]:
    """The changed text: of the file, of the cells, or for rows the statements.

    Raises:
        ValueError: if the old text does not occur exactly once, or nothing is changed.
    """
    if mutant.place.startswith("rows "):
        if not mutant.do.strip() or mutant.old or mutant.new:
            raise ValueError("expected statements under `do`, and neither `old` nor `new`")
        return mutant.do
    cells = code(mutant.chapter) if mutant.place == "notebook" else [_file(mutant.place)]
    found = sum(text.count(mutant.old) for text in cells) if mutant.old else 0
    if found != 1 or mutant.old == mutant.new:
        raise ValueError(f"old: expected a text that stands once in {mutant.place} and is changed, found {found}")
    texts = [text.replace(mutant.old, mutant.new) for text in cells]
    return texts if mutant.place == "notebook" else texts[0]


def _path(place: str) -> Path:
    found = [path for package in PACKAGES if (path := SOURCES / package / place).is_file() and path.suffix == ".py"]
    if len(found) != 1:
        raise ValueError(f"in: expected a module of the packages, `notebook` or `rows NAME`, got {place!r}")
    return found[0]


def _file(place: str) -> str:
    return _path(place).read_text(encoding="utf-8")


def module(place: str) -> str:
    """The dotted name of a module that a mutant changes, from its place; ValueError if there is none."""
    return ".".join(_path(place).relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


def _rows(path: Path) -> list[dict]:
    rows = registries.read(path) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"sabotage/{path.name}: expected a list of rows with fields")
    return rows


def mutants(chosen: Iterable[str] = ()) -> list[Mutant]:
    """The mutants of the claims in `chosen`, or all of them, in the order of the chapters.

    Raises:
        ValueError: for a claim without mutants, two mutants of one name, a text that is not found, and any
            other mutant that could not be run; the message names it.
    """
    everyone = []
    for path in sorted(FOLDER.glob("*.yml")):
        everyone += [_mutant(row, path.stem) for row in _rows(path)]
    ids = [m.id for m in everyone]
    if twice := {i for i in ids if ids.count(i) > 1}:
        raise ValueError(f"mutants: expected one of each name, got two of {sorted(twice)}")
    chosen = list(chosen)
    if unknown := set(chosen) - {m.claim for m in everyone}:
        raise ValueError(f"claim: expected claims with mutants, got {sorted(unknown)}")
    return [m for m in everyone if not chosen or m.claim in chosen]


def lacking() -> dict[str, list[str]]:
    """Settled claims and the kinds of mutant that they lack; empty when every claim has one of each."""
    kinds = {(m.claim, m.kind) for m in mutants()}
    settled = [claim for claim, row in claims().items() if "verdict" in row]
    lack = {claim: [kind for kind in KINDS if (claim, kind) not in kinds] for claim in settled}
    return {claim: missing for claim, missing in lack.items() if missing}


class _Judging(ast.NodeTransformer):
    """What a definition does, without docstrings and f-strings (the texts of a box and of errors)."""

    def _bare(self, node):
        self.generic_visit(node)
        node.body = node.body[ast.get_docstring(node) is not None :] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = _bare

    def visit_JoinedStr(self, node):
        return ast.Constant("")


def judge() -> str:
    """Hash of the syntax by which a box is judged: evidence.py, and `JUDGING` of claims.py, less texts.

    Every outcome rests on it, so one hash is stored beside them all.
    """
    evidence, cards = (ast.parse(_file(f"{name}.py")) for name in ("evidence", "claims"))
    judging = [n for n in cards.body if isinstance(n, ast.FunctionDef) and n.name in JUDGING]
    return _hash([evidence, *judging])


def recogniser() -> str:
    """Hash of the syntax by which an error in a cell becomes an outcome: `RECOGNISED` of running.py, less texts."""
    named = {}
    for node in ast.parse(_file("sabotage/running.py")).body:
        if isinstance(node, ast.FunctionDef):
            named[node.name] = node
        elif isinstance(node, ast.Assign):
            named[ast.unparse(node.targets[0])] = node
    return _hash([named[name] for name in RECOGNISED])


def _hash(trees: list[ast.AST]) -> str:
    bare = [ast.unparse(_Judging().visit(tree)) for tree in trees]
    return hashlib.sha256(json.dumps(bare).encode()).hexdigest()[:16]


def outdated() -> bool:
    """Whether outcomes are stored that other code than today's has judged; `recogniser` counts where it is stored."""
    if not OUTCOMES.exists():
        return False
    file, today = OUTCOMES.with_name(JUDGE), [judge(), recogniser()]
    stored = file.read_text(encoding="utf-8").split() if file.exists() else []
    return not stored or stored != today[: len(stored)]


def outcomes() -> dict[str, dict]:
    """What became of each mutant when it was last run, by its id; nothing, if the outcomes are `outdated`."""
    return json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() and not outdated() else {}


def store(known: dict[str, dict], everyone: list[Mutant]) -> None:
    """Write the outcomes of `everyone` there is, in that order; those of mutants that are gone are dropped."""
    kept = {m.id: known[m.id] for m in everyone if m.id in known}
    text = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
    new = OUTCOMES.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(OUTCOMES)
    OUTCOMES.with_name(JUDGE).write_text(f"{judge()}\n{recogniser()}\n", encoding="utf-8")


def outcomes_by_claim() -> dict[str, list[dict]]:
    """For the ledger: each claim's mutants, with what became of them, `not run` where that is not known."""
    known, found = outcomes(), {}
    for m in mutants():
        last = known.get(m.id, {})
        outcome = last.get("outcome", "not run") if last.get("digest") == m.digest() else "not run"
        row = {"name": m.name, "kind": m.kind, "what": m.what, "outcome": outcome, "survives": m.survives}
        found.setdefault(m.claim, []).append({**row, "by": last.get("by", ""), "commit": last.get("commit", "")})
    return found
