"""Which cells of a chapter a card depends on, and which depend on a parameter.

A cell is needed if it binds a name, or changes an object in place, that a needed cell reads later, itself
or in a function that it calls. What only draws or prints is left out, so that a mutant costs what its
card costs, and only the card and what it rests on can refuse it.
"""

import ast
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

SCOPES = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda


def needed(cells: list[str], card: int) -> list[int]:
    """Indices of the cells that the card in cell `card` depends on, itself included, in order."""
    facts, bodies = [_facts(source) for source in cells[: card + 1]], {}
    for cell in facts:
        for name, names in cell.bodies:
            bodies[name] = bodies.get(name, set()) | names
    modules = {name for cell in facts for name in cell.imported}
    found, wanted = [card], _closure(facts[card].flow.read, bodies)
    for index in range(card - 1, -1, -1):
        tree, flow = facts[index].tree, facts[index].flow
        if wanted & (flow.bound | facts[index].changed - modules) or _sets(tree, modules):
            found.append(index)
            wanted = (wanted - flow.replaced) | _closure(flow.read, bodies)
    return found[::-1]


def reached(cells: list[str], start: int, names: set[str]) -> list[int]:
    """Indices of the cells that give something else once `names` are changed in cell `start`, and of those they need.

    A cell is reached if it reads such a name, or one that a cell reached before it binds or changes in place; the
    arguments of a call that stands by itself count as changed, unless cell `start` sets them: it sets constants. One
    that asks for `globals()` reads every name. That cells share a stream of random numbers does not count: what one
    draws does not reach the next.
    """
    facts, bodies = [_facts(source) for source in cells], {}
    modules = {name for cell in facts for name in cell.imported}
    constants, other, found, everywhere = facts[start].flow.bound, {*names, "globals"}, [], False
    for index, cell in enumerate(facts):
        for name, read in cell.bodies:
            bodies[name] = bodies.get(name, set()) | read
        if index <= start:
            continue
        if everywhere or other & _closure(cell.flow.read, bodies):
            found.append(index)
            other |= cell.flow.bound - cell.imported | (cell.changed | _handed(cell.tree) - constants) - modules
            everywhere |= _sets(cell.tree, modules)
        else:
            other -= cell.flow.replaced
    return sorted({start, *found}.union(*(needed(cells, index) for index in found)))


class _Facts(NamedTuple):
    """What is known of a cell by itself."""

    tree: ast.Module
    flow: "_Flow"
    bodies: list[tuple[str, set[str]]]
    changed: set[str]
    imported: set[str]


@cache
def _facts(source: str) -> _Facts:
    tree = ast.parse(source)
    imported = {name for node in ast.walk(tree) for name in _imported(node)}
    return _Facts(tree, _Flow(tree), list(_bodies(tree)), _changed(tree), imported)


class _Flow(ast.NodeVisitor):
    """Names that a cell reads from cells before it, binds, and binds whatever happens, in the order of execution."""

    def __init__(self, tree: ast.Module):
        self.read, self.bound, self.replaced, self.sure = set(), set(), set(), True
        self.own = dict(_bodies(tree))  # functions of this cell: a call of one reads what it reads
        self.visit(tree)

    def _reads(self, names: set[str]) -> None:
        self.read |= _closure(names, self.own) - self.replaced

    def _binds(self, name: str) -> None:
        self.bound.add(name)
        if self.sure and name not in self.read:
            self.replaced.add(name)

    def visit_Name(self, node):
        if not isinstance(node.ctx, ast.Load):
            self._binds(node.id)
        else:
            self._reads({node.id})

    def visit_Assign(self, node):
        for part in (node.value, *node.targets):
            self.visit(part)

    def visit_AugAssign(self, node):
        if isinstance(node.target, ast.Name):
            self.visit_Name(ast.Name(node.target.id, ast.Load()))
        self.generic_visit(node)

    def visit_For(self, node):
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def visit_If(self, node):
        self.visit(node.test)
        sure, self.sure = self.sure, False
        for part in (*node.body, *node.orelse):
            self.visit(part)
        self.sure = sure

    def visit_FunctionDef(self, node):
        for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(part)
        self._binds(node.name)

    def visit_ClassDef(self, node):
        self._binds(node.name)

    def visit_Import(self, node):
        for name in _imported(node):
            self._binds(name)

    visit_ImportFrom = visit_Import

    def generic_visit(self, node):
        if isinstance(node, SCOPES):
            self._reads(_free(node))
        else:
            super().generic_visit(node)


def _free(tree: ast.AST) -> set[str]:
    """Names that code with a scope of its own reads and does not bind; a name bound anywhere in it counts as bound."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {n.id for n in names if not isinstance(n.ctx, ast.Load)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load)} - own


def _bodies(tree: ast.Module) -> Iterable[tuple[str, set[str]]]:
    """Functions, classes and named lambdas of a cell, with the names that they read when they are called."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, _free(node)
        elif isinstance(node, ast.Assign):
            lambdas = [n for n in ast.walk(node.value) if isinstance(n, ast.Lambda)]
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            yield from ((name, set().union(*map(_free, lambdas))) for name in names if lambdas)


def _closure(names: set[str], bodies: dict[str, set[str]]) -> set[str]:
    """The names, and all that the functions among them read."""
    found, todo = set(names), list(names)
    while todo:
        fresh = bodies.get(todo.pop(), set()) - found
        found |= fresh
        todo += fresh
    return found


def _changed(tree: ast.Module) -> set[str]:
    """Names whose objects a cell may change in place: by assigning to a part, or by a method called for its effect."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found |= _base(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found |= _base(node.value.func) if isinstance(node.value.func, ast.Attribute) else set()
    return found


def _handed(tree: ast.Module) -> set[str]:
    """Names whose objects a cell hands to a call that stands by itself, which has nothing to give but its effect."""
    calls = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    return {name for call in calls for part in (*call.args, *(k.value for k in call.keywords)) for name in _base(part)}


def _sets(tree: ast.Module, modules: set[str]) -> bool:
    """Whether a cell sets something of a module for all cells after it, as `torch.set_default_dtype` does."""
    calls = [node.value.func for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(f, ast.Attribute) and f.attr.startswith("set_") and _base(f) & modules for f in calls)


def _base(node: ast.expr) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _imported(node: ast.AST) -> set[str]:
    aliases = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    return {(alias.asname or alias.name).split(".")[0] for alias in aliases}
