"""What a claim is computed from: its cells, the statements that it needs, and the functions that they reach."""

import ast
import hashlib
import io
import itertools
import json
import re
import tokenize
from functools import cache
from pathlib import Path

from moe_book import manifest
from moe_book.claims import registry as claims
from moe_book.experiments import EXPERIMENTS
from moe_book.notebooks import NOTEBOOKS, settling
from moe_book.sabotage.slicing import needed

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1]  # of the two packages
JUDGING = ("settle", "_match", "_once", "_line", "_verdict")  # what of claims.py refuses
DECIDES = ("evidence", "rule", "verdict", "target", "target_sd", "predicted")  # fields of a claim that its box reads

# --- cells ----------------------------------------------------------------------------------------


@cache
def code(chapter: str) -> list[str]:
    """Sources of the code cells of a chapter or an appendix page, in order; ValueError if there is no such notebook."""
    path = NOTEBOOKS / f"{chapter}.ipynb"
    if not path.exists():
        raise ValueError(f"chapter: expected a notebook of {NOTEBOOKS}, got {chapter!r}")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def chapter_of(claim: str) -> str:
    """The page that settles a claim, by its name; ValueError for an id that is not in the registry."""
    if claim not in claims():
        raise ValueError(f"claim: expected an id of the registry, got {claim!r}")
    return settling(claims()[claim], NOTEBOOKS)


def _settles(source: str, claim: str) -> bool:
    return "claims.check(" in source and f'"{claim}"' in source


@cache
def cells_of(claim: str) -> tuple[str, ...]:
    """The chapter's code cells up to the claim's box; those that the box does not depend on are empty.

    Raises:
        ValueError: unless exactly one cell settles the claim.
    """
    cells = code(chapter_of(claim))
    found = [i for i, source in enumerate(cells) if _settles(source, claim)]
    if len(found) != 1:
        raise ValueError(f"{chapter_of(claim)}: expected one cell that settles {claim!r}, found {len(found)}")
    kept = set(needed(cells, found[0]))
    return tuple(cell if i in kept else "" for i, cell in enumerate(cells[: found[0] + 1]))


@cache
def statements_of(claim: str) -> tuple[tuple[int, int], ...]:
    """The statements that a claim's box depends on, each by its cell and its place there."""
    places = [(i, j) for i, cell in enumerate(cells_of(claim)) for j in range(len(ast.parse(cell).body))]
    texts = [ast.unparse(ast.parse(cells_of(claim)[i]).body[j]) for i, j in places]
    last = max(k for k, (i, j) in enumerate(places) if _box(cells_of(claim)[i], j, claim))
    return tuple(places[k] for k in needed(texts, last))


def _box(cell: str, statement: int, claim: str) -> bool:
    return _settles(ast.get_source_segment(cell, ast.parse(cell).body[statement]) or "", claim)


def loaded(claim: str) -> dict[str, int]:
    """The experiments that a claim's cells name, each with the first cell that does."""
    found: dict[str, int] = {}
    for i, cell in enumerate(cells_of(claim)):
        for name in re.findall(r"""["'](\w+)["']""", cell):
            if name in EXPERIMENTS:
                found.setdefault(name, i)
    return found


# --- functions ------------------------------------------------------------------------------------


@cache
def module_tree(module: str) -> ast.Module:
    """The syntax tree of a module of the packages."""
    path = SOURCES.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def function_node(function: str) -> ast.FunctionDef | None:
    """The definition of `module:qualified.name`; None if there is none, as for a function that a decorator made."""
    module, name = function.split(":")
    try:
        node: ast.AST | None = module_tree(module)
    except FileNotFoundError:
        return None
    for part in name.split("."):
        inside = [n for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        node = next((n for n in inside if n.name == part), None)
    return node if isinstance(node, ast.FunctionDef) else None


# --- digests --------------------------------------------------------------------------------------


@cache
def syntax(source: str) -> str:
    """Code without its layout, as Python 3.11 writes it."""
    text = ast.unparse(ast.parse(source))
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


def short_hash(*parts: object) -> str:
    """A short hash of what JSON can write, whatever the order of its mappings."""
    return hashlib.sha256(json.dumps(_named(parts), sort_keys=True).encode()).hexdigest()[:16]


def _named(value: object) -> object:
    """The same with text for every key: YAML reads some as numbers, which do not sort among names."""
    if isinstance(value, dict):
        return {str(key): _named(inner) for key, inner in value.items()}
    return [_named(inner) for inner in value] if isinstance(value, list | tuple) else value


class _Bare(ast.NodeTransformer):
    """What a definition does, without docstrings and f-strings (the texts of a box and of errors)."""

    def _body(self, node):
        self.generic_visit(node)
        node.body = node.body[ast.get_docstring(node) is not None :] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = _body

    def visit_JoinedStr(self, node):
        return ast.Constant("")


def _bare(node: ast.AST) -> str:
    return ast.unparse(_Bare().visit(ast.parse(ast.unparse(node))))


@cache
def bare_source(function: str) -> str:
    """What a function does, less its texts; empty if it has no definition."""
    node = function_node(function)
    return _bare(node) if node else ""


@cache
def constants(module: str) -> str:
    """What a module says outside its functions, classes and imports, less its docstring."""
    apart = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return "\n".join(_bare(node) for node in module_tree(module).body if not isinstance(node, apart))


@cache
def judge() -> str:
    """Hash of the code by which a box is judged: evidence.py, and `JUDGING` of claims.py, less texts."""
    judging = [bare_source(f"moe_book.claims:{name}") for name in JUDGING]
    return short_hash(_bare(module_tree("moe_book.evidence")), judging)


def reached_code(functions: list[str]) -> list[str]:
    """The source of functions, and of the constants beside them."""
    return [*sorted(map(bare_source, functions)), *map(constants, sorted({f.split(":")[0] for f in functions}))]


def digest(claim: str, functions: list[str]) -> str:
    """Hash of all that a claim's box depends on: its cells, the code and the runs that they reach, what decides."""
    cells = [syntax(cell) for cell in cells_of(claim) if cell]
    files = manifest.entries()
    runs = [files[f"{name}.csv"]["sha256"] for name in sorted(loaded(claim))]
    decides = [claims()[claim].get(field) for field in DECIDES]
    return short_hash(claim, cells, reached_code(functions), runs, decides, judge())
