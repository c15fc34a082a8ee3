"""Small changes of code, one at a time: what each operator makes of each place in a syntax tree.

An operator looks at one node, in the company of its parents, and offers replacements. Text, annotations, guards that
only raise, and what chooses a random stream are passed over: a change there changes no number, or only which.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

#: Keyword arguments that steer speed, the accuracy of a solver, or which random numbers are drawn.
SPEED = {"jobs", "chunk", "chunk_size", "block_size", "batch_size", "dtype", "device", "digits", "kind"}
ACCURACY = {"nodes", "limit", "order", "tol", "rtol", "atol", "xtol", "ftol", "epsabs", "epsrel", "maxiter", "eps"}
STEERING = SPEED | ACCURACY | {"seed", "generator"}
#: Constants of the package that bound memory, patience or rounding.
BUDGETS = {"BLOCK", "CHUNK", "PART", "ROWS", "PATIENCE", "ROUNDING", "AT_BOUND"}
#: Calls whose arguments choose a random stream, name an experiment, or are shown.
STREAMS = {"stream", "torch_stream", "default_rng", "manual_seed"}
PASSED_OVER = STREAMS | {"load", "recompute", "show", "table", "print", "set_default_dtype"}
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
SWAPS |= {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAPS |= {ast.And: ast.Or, ast.Or: ast.And}
EXTREMES = {"max": "min", "amax": "amin", "maximum": "minimum", "argmax": "argmin", "nanmax": "nanmin"}
EXTREMES |= {low: high for high, low in EXTREMES.items()}
TOTALS = {"sum": "mean", "mean": "sum", "nansum": "nanmean", "nanmean": "nansum"}
BOUNDS = {"clamp", "clip", "clamp_min", "relu"}
NORMAL = {"normal", "standard_normal", "randn", "randn_like"}
UNIFORM = {"rand", "random", "uniform", "rand_like"}
COUNTS = {"steps", "rounds", "tries", "restarts", "repeats", "trials", "draws", "n", "examples", "samples", "size"}


@dataclass(frozen=True)
class Site:
    """A node of a tree, by its place in `ast.walk`, and one replacement for it."""

    operator: str
    index: int
    variant: int
    old: str
    new: str

    @property
    def text(self) -> str:
        return f"`{self.old}` to `{self.new}`"


def _name(call: ast.AST) -> str:
    """What a call calls, without what it is an attribute of."""
    f = call.func if isinstance(call, ast.Call) else call
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def _renamed(call: ast.Call, name: str) -> ast.Call:
    new = copy.deepcopy(call)
    if isinstance(new.func, ast.Attribute):
        new.func.attr = name
    else:
        new.func = ast.Name(name, ast.Load())
    return new


def _number(node: ast.AST) -> float | int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value


def _first(iterable: ast.expr) -> ast.expr:
    return ast.parse(f"list({ast.unparse(iterable)})[:1]", mode="eval").body


# --- code -----------------------------------------------------------------------------------------


def constant(node, parent):
    """A literal times 1.05, plus one, negated."""
    value = _number(node)
    if value is None or isinstance(parent, ast.Subscript | ast.Slice):
        return
    counts = isinstance(value, int) and isinstance(parent, ast.Call | ast.keyword | ast.Tuple | ast.List)
    if value and abs(value) > 1e-8 and not counts:  # below: a guard against rounding
        yield ast.Constant(value * 1.05)
        yield ast.UnaryOp(ast.USub(), ast.Constant(value))
    if isinstance(value, int):
        yield ast.Constant(value + 1)


def scaled(node, parent):
    """An arithmetic expression, a root, or a constant of the chapter that is handed over, times 1.05."""
    arithmetic = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow
    whole = isinstance(node, ast.BinOp) and isinstance(node.op, arithmetic) and not isinstance(parent, ast.BinOp)
    root = isinstance(node, ast.Call) and _name(node) in {"sqrt", "exp", "log", "norm"}
    named = isinstance(node, ast.Name) and node.id.isupper() and len(node.id) > 2 and isinstance(parent, ast.Call)
    inside = isinstance(parent, ast.Subscript | ast.Slice) or _name(parent) == "range"
    if (whole or root or named) and not inside and _name(node) not in BUDGETS:
        yield ast.BinOp(ast.Constant(1.05), ast.Mult(), node)


def operator(node, parent):
    """An operator exchanged for its opposite."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPS[type(node.op)](), node.values)


def dropped(node, parent):
    """A term, a factor, a sign, a power, a square root, a bound, an absolute value left out."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield node.left
        if isinstance(node.op, ast.Add | ast.Mult):
            yield node.right
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        yield node.left
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _number(node.operand) is None:
        yield node.operand
    elif isinstance(node, ast.Call) and _name(node) in BOUNDS | {"sqrt", "abs", "exp", "log"}:
        yield from _argument(node)


def _argument(call: ast.Call) -> Iterator[ast.expr]:
    """What a function of one array is applied to: the first argument, or what it is a method of."""
    of_module = isinstance(call.func, ast.Attribute) and _name(call.func.value) in {"np", "torch", "math", "functional"}
    if isinstance(call.func, ast.Attribute) and not of_module:
        yield call.func.value
    elif call.args:
        yield call.args[0]


def extreme(node, parent):
    """A maximum for a minimum."""
    if isinstance(node, ast.Call) and _name(node) in EXTREMES:
        yield _renamed(node, EXTREMES[_name(node)])


def total(node, parent):
    """A mean for a sum."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name(node) in TOTALS:
        yield _renamed(node, TOTALS[_name(node)])


def axis(node, parent):
    """A reduction along another axis."""
    reduces = _name(node) in TOTALS.keys() | EXTREMES.keys() | {"cumsum", "softmax", "norm", "std", "var", "prod"}
    if not (isinstance(node, ast.Call) and reduces):
        return
    values = [k.value for k in node.keywords if k.arg in ("axis", "dim")]
    values += node.args[-1:] if isinstance(node.func, ast.Attribute) else []
    for value in values[:1]:
        if isinstance(number := _number(value), int):
            yield _with(node, value, ast.Constant({0: 1, 1: 0}.get(number, number - 1)))


def _with(node: ast.AST, old: ast.AST, new: ast.AST) -> ast.AST:
    """A node with one inside it replaced."""
    index = next(i for i, part in enumerate(ast.walk(node)) if part is old)
    return replaced(node, index, new)


def shifted(node, parent):
    """An index, or an end of a slice, shifted by one."""
    if isinstance(value := _number(node), int) and isinstance(parent, ast.Subscript | ast.Slice):
        yield ast.Constant(value + 1)


def column(node, parent):
    """One column or key for another that the same table is asked for."""
    if isinstance(node, ast.Subscript) and (other := getattr(node, "other", "")):
        yield ast.Subscript(node.value, ast.Constant(other), ast.Load())


def _note_keys(tree: ast.AST) -> None:
    """Write on each subscript by a text the next text by which the same name is subscripted in the tree, if any."""
    found: list[tuple[ast.Subscript, str, str]] = []
    for node in ast.walk(tree):
        key = getattr(node.slice, "value", None) if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Subscript) and isinstance(key, str) and isinstance(node.ctx, ast.Load):
            found.append((node, ast.unparse(node.value), key))
    for node, name, key in found:
        keys = sorted({k for _, n, k in found if n == name})
        if len(keys) > 1:
            node.other = keys[(keys.index(key) + 1) % len(keys)]  # pyright: ignore[reportAttributeAccessIssue]


# --- cases ----------------------------------------------------------------------------------------


def fewer(node, parent):
    """What is looped over, or listed, cut to the first."""
    loops = isinstance(parent, ast.For | ast.comprehension) and node is parent.iter
    idle = isinstance(node, ast.Call) and _name(node) == "range" and _idle(parent) and isinstance(parent, ast.For)
    paired = isinstance(parent, ast.Call) and _name(parent) in {"product", "zip"} and node in parent.args
    seeds = isinstance(parent, ast.keyword) and parent.arg == "seeds"
    if ((loops and not idle) or paired or seeds) and not isinstance(node, ast.Starred):
        yield _first(node)


def smaller(node, parent):
    """A number of draws, examples or repetitions cut to a tenth."""
    if isinstance(parent, ast.keyword) and parent.arg in COUNTS and isinstance(_number(node), int) and node.value > 10:
        yield ast.Constant(node.value // 10)


def tame(node, parent):
    """Random draws made tame: their absolute value, or half their range."""
    if isinstance(node, ast.Call) and _name(node) in NORMAL:
        yield ast.Call(ast.Name("abs", ast.Load()), [node], [])
    if isinstance(node, ast.Call) and _name(node) in NORMAL | UNIFORM:
        yield ast.BinOp(ast.Constant(0.5), ast.Mult(), node)
    if isinstance(node, ast.Call) and _name(node) in {"linspace", "logspace", "geomspace"} and _two_ends(node):
        yield _with(node, node.args[1], ast.parse(f"({_half(node.args[0], node.args[1])})", mode="eval").body)


def _two_ends(call: ast.Call) -> bool:
    return len(call.args) > 1 and not any(isinstance(end, ast.Starred) for end in call.args[:2])


def _half(a: ast.expr, b: ast.expr) -> str:
    return f"0.5 * ({ast.unparse(a)} + {ast.unparse(b)})"


def _idle(loop: ast.AST) -> bool:
    return isinstance(loop, ast.For | ast.comprehension) and isinstance(loop.target, ast.Name) and loop.target.id == "_"


def stepless(node, parent):
    """A search, or a descent, without steps."""
    if isinstance(node, ast.Call) and _name(node) == "range" and isinstance(parent, ast.For) and _idle(parent):
        yield ast.parse("range(0)", mode="eval").body


Operator = Callable[[ast.AST, ast.AST], Iterator[ast.AST]]
CODE: tuple[Operator, ...] = (constant, scaled, operator, dropped, extreme, total, axis, shifted, column)
CASES: tuple[Operator, ...] = (fewer, smaller, tame, stepless)


# --- sites ----------------------------------------------------------------------------------------


def _only_raises(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and not node.orelse


def _passed_over(node: ast.AST) -> bool:
    """Whether nothing inside a node can change a number that is measured."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr) or _only_raises(node):
        return True
    if isinstance(node, ast.BinOp) and any(_name(part) in BUDGETS for part in ast.walk(node)):
        return True
    if not isinstance(node, ast.Call):
        return False
    return _name(node) in PASSED_OVER or (isinstance(node.func, ast.Attribute) and _name(node.func.value) == "check")


Tree = TypeVar("Tree", bound=ast.AST)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that a change could reach."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.keyword) and part.arg in STEERING:
                continue
            if isinstance(part, ast.AST):
                yield part


def _reached(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    todo: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while todo:
        node, parent = todo.pop()
        if not _passed_over(node):
            yield node, parent
            todo += [(part, node) for part in _parts(node)]


def sites(tree: ast.AST, operators: tuple[Operator, ...]) -> Iterator[Site]:
    """Every change that some operators offer in a tree, each another tree than before."""
    place = {id(node): i for i, node in enumerate(ast.walk(tree))}
    _note_keys(tree)
    for node, parent in _reached(tree):
        for offer in operators:
            for variant, new in enumerate(offer(node, parent)):
                old, text = ast.unparse(node), ast.unparse(ast.fix_missing_locations(new))
                if old != text:
                    yield Site(offer.__name__, place[id(node)], variant, old, text)


def replaced(tree: Tree, index: int, new: ast.AST) -> Tree:
    """A copy of a tree with the node of that place in `ast.walk` replaced."""
    tree = copy.deepcopy(tree)
    old = next(islice(ast.walk(tree), index, None))

    class Replace(ast.NodeTransformer):
        def visit(self, node):
            return new if node is old else self.generic_visit(node)

    return ast.fix_missing_locations(Replace().visit(tree))


def change(tree: Tree, site: Site) -> Tree:
    """A copy of a tree with a site's replacement in it."""
    return replaced(tree, site.index, ast.parse(site.new, mode="eval").body)
