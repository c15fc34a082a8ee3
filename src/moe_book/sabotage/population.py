"""The mutants of a claim: what operators offer for it, and the forty that a hash of its id draws."""

import ast
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache

from moe_book import experiments
from moe_book.claims import NUMBERS
from moe_book.claims import registry as claims
from moe_book.sabotage import operators, stored
from moe_book.sabotage.operators import Operator, Site
from moe_book.sabotage.sources import cells_of, chapter_of, function_node, loaded, statements_of

SIZE = 40  # of a claim's population
KINDS = {
    "code": "the functions that its cells execute, and the cells themselves",
    "runs": "a column of stored runs that is read",
    "numbers": "the paper's numbers",
    "cases": "sizes, seeds, kinds cut; draws made tame; a search without steps",
}


@dataclass(frozen=True)
class Mutant:
    """One small change of what a claim is computed from.

    Attributes:
        claim: its id.
        kind: one of `KINDS`.
        operator: what kind of change it is.
        place: a function as `module:name`, `cell 12`, `runs NAME`, or `paper`.
        what: the change, in words or code.
        start: the code cell from which the change matters, counted from 0.
        where: the column, the way to a number, or the statement of a cell.
        site: the node that is changed; None for runs and numbers.
    """

    claim: str
    kind: str
    operator: str
    place: str
    what: str
    start: int
    where: tuple = ()
    site: Site | None = None

    @property
    def key(self) -> str:
        """What it is stored under: the same as long as the change is."""
        site = asdict(self.site) if self.site else ""
        text = f"{self.kind} {self.operator} {self.place} {self.where} {self.what} {site}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def rank(self) -> str:
        """Its place in the order that the claim's hash gives."""
        return hashlib.sha256(f"{self.claim} {self.key}".encode()).hexdigest()


def population(claim: str, trace: list[dict]) -> list[Mutant]:
    """The forty mutants of a claim, or all if there are fewer; any beginning of them is spread over the kinds, too."""
    offered = {m.key: m for m in _offered(claim, trace)}.values()
    kinds = [_by_turns(_spread(m for m in offered if m.kind == kind)) for kind in KINDS]
    return list(itertools.islice(_by_turns(kinds), SIZE))


def control(claim: str) -> Mutant:
    """No change: whether the box stands when only the cells that it needs are run."""
    return Mutant(claim, "control", "", "", "nothing is changed", len(cells_of(claim)) - 1)


def _spread(offered: Iterable[Mutant]) -> list[list[Mutant]]:
    """Mutants of a kind by operator, in the package and in cells apart, each in the order of the claim's hash."""
    found: dict[tuple, list[Mutant]] = {}
    for m in sorted(offered, key=lambda m: m.rank):
        found.setdefault((m.operator, m.place.startswith("cell")), []).append(m)
    return sorted(found.values(), key=lambda of_operator: of_operator[0].rank)


def _by_turns(groups: Iterable[Iterable[Mutant]]) -> Iterator[Mutant]:
    """One of each group, then the next of each."""
    for turn in itertools.zip_longest(*groups):
        yield from (m for m in turn if m is not None)


def _offered(claim: str, trace: list[dict]) -> Iterator[Mutant]:
    cells = cells_of(claim)
    yield from _in_cells(claim, "code", operators.CODE)
    yield from _in_cells(claim, "cases", operators.CASES)
    for function, start in reached(claim, trace).items():
        if node := function_node(function):
            yield from _in_function(claim, "code", operators.CODE, function, node, start)
            yield from _in_function(claim, "cases", (operators.stepless,), function, node, start)
    for name, start in loaded(claim).items():
        keys = list(experiments.experiment(name).grid[0])
        for operator, column in stored.offered_runs(_rows(name), keys, read(claim, trace)):
            kind = "cases" if operator == "only_first" else "runs"
            yield Mutant(claim, kind, operator, f"runs {name}", f"{column}: {_words(operator)}", start, (column,))
    start = next((i for i, cell in enumerate(cells) if "registry()" in cell), len(cells) - 1)
    for operator, path in stored.offered_numbers(paper_numbers(claim)):
        what = f"{'.'.join(map(str, path))}: {operator.replace('_', ' ')}"
        yield Mutant(claim, "numbers", operator, "paper", what, start, path)


def _words(operator: str) -> str:
    other = {"only_first": "cut to the first value.", "another_column": "the next column in its place."}
    text = other.get(operator) or stored.RUNS[operator].__doc__ or ""
    return text.rstrip(".")[0].lower() + text.rstrip(".")[1:]


def _in_cells(claim: str, kind: str, offer: tuple[Operator, ...]) -> Iterator[Mutant]:
    for i, j in statements_of(claim):
        statement = ast.parse(cells_of(claim)[i]).body[j]
        for site in operators.sites(statement, offer):
            yield Mutant(claim, kind, site.operator, f"cell {i + 1}", site.text, i, (j,), site)


def _in_function(claim, kind, offer, function, node, start) -> Iterator[Mutant]:
    for site in operators.sites(node, offer):
        yield Mutant(claim, kind, site.operator, function, site.text, start, (), site)


def reached(claim: str, trace: list[dict]) -> dict[str, int]:
    """The functions that a claim's cells execute, each with the first cell that does."""
    found: dict[str, int] = {}
    for i, cell in enumerate(cells_of(claim)):
        for function in trace[i]["functions"] if cell else []:
            found.setdefault(function, i)
    return found


@cache
def _rows(name: str):
    return experiments.load(name)


def read(claim: str, trace: list[dict]) -> set[str]:
    """Words in the claim's statements, and in the functions of experiments they reach, that a column may be called."""
    texts = [ast.parse(cells_of(claim)[i]).body[j] for i, j in statements_of(claim)]
    texts += [node for f in reached(claim, trace) if f.startswith("moe_book") and (node := function_node(f))]
    return {word for tree in texts for node in ast.walk(tree) for word in _named(node)}


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall(r"\w+", node.value)
        yield node.value
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.keyword) and node.arg:
        yield node.arg


def paper_numbers(claim: str) -> dict:
    """What the registry has of the paper's numbers."""
    return {field: claims()[claim][field] for field in NUMBERS if field in claims()[claim]}


def chapters() -> dict[str, list[str]]:
    """The settled claims of each chapter, in the order of the book."""
    found: dict[str, list[str]] = {}
    for claim, row in claims().items():
        if "verdict" in row:
            found.setdefault(chapter_of(claim), []).append(claim)
    return dict(sorted(found.items()))
