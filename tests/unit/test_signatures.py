"""How the package's functions are called, and what their docstrings say of their arguments."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "moe_theory"

#: What may be passed by position although it has a default, or draws: chapters do, and it reads well.
BY_POSITION = {
    "claims:check": ["note"],
    "claims:settle": ["note"],
    "experiments/exponents:draw_block": ["seed"],
    "experiments/exponents:train": ["seed"],
    "experiments/rates:near": ["seed"],
    "experiments/router_steps:turned": ["seed"],
    "figures:band": ["label", "style"],
    "figures:panels": ["rows", "columns"],
    "figures:power_law": ["style"],
    "figures:spread": ["label", "style"],
    "measure/voronoi:voronoi_loss": ["kind", "r"],
    "measure/scaling:fit_exponent": ["seed"],
    "diagnose/arrays:linear_logits": ["b", "dtype"],
    "models/experts:PatchCNN": ["seed"],
    "models/mixture:draw_measure": ["seed", "router_scale", "expert_scale"],
    "models/mixture:jacobian": ["expert"],
    "models/mixture:regression_function": ["expert"],
    "models/moe:PatchMoE": ["experts", "filters", "activation_name"],
    "models/routers:MLPRouter": ["seed"],
    "models/routers:MultiHeadRouter": ["seed"],
    "models/routers:random_router": ["seed"],
    "models/sparse:SparseMLP": ["seed"],
    "tasks/gaussians:GaussianClasses": ["classes", "d"],
    "tasks/regression:sample_regression": ["seed", "noise"],
    "theory/estimators:segment_means": ["nodes"],
    "theory/estimators:two_steps": ["seed"],
    "theory/fisher:descent_law": ["expert"],
    "theory/fisher:standard_errors": ["expert"],
    "theory/router_gradient:logit_jacobian": ["noise"],
    "theory/single_expert:best_additive_accuracy": ["K"],
    "theory/single_expert:least_errors": ["K"],
    "theory/tanh_blocks:behind_two_blocks": ["seed"],
    "theory/uniform_stability:exact_stability": ["batch"],
    "training/least_squares:least_squares": ["expert"],
    "training/parts:take_apart": ["input_scale", "biases"],
    "training/sgd:stochastic_descent": ["expert"],
    "training/sgd:stochastic_descents": ["expert"],
}


def _functions():
    """Every public function and constructor of the package: its file and name, its node and its docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            name, doc = f"{path.relative_to(PACKAGE).with_suffix('')}:{node.name}", ast.get_docstring(node) or ""
            for part in [node] if isinstance(node, ast.FunctionDef) else node.body:
                if isinstance(part, ast.FunctionDef) and (part is node or part.name == "__init__"):
                    yield name, part.args, doc


FUNCTIONS = {name: (arguments, doc) for name, arguments, doc in _functions()}


def _positional(arguments: ast.arguments) -> list[str]:
    return [a.arg for a in arguments.args if a.arg != "self"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_optional_or_draws_is_passed_by_name(name):
    arguments, _ = FUNCTIONS[name]
    positional = _positional(arguments)
    optional = positional[len(positional) - len(arguments.defaults) :]
    found = [a for a in positional if a in optional or a in ("seed", "dtype", "device")]
    if len(positional) + len(arguments.kwonlyargs) >= 4:
        assert found == BY_POSITION.get(name, []), f"put a * before the first of {found} of {name}"


def _described():
    """Every callable whose docstring has a list of arguments: its name, the arguments it takes and those listed."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            section = re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
            if section:
                yield f"{path.relative_to(PACKAGE).with_suffix('')}:{node.name}", _taken(node), _listed(section[1])


def _taken(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Arguments of a function, of a constructor, or of the one that the fields of a class make."""
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not made:
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            return [part.target.id for part in fields if "init=False" not in ast.unparse(part)]
        node = made[0]
    of = node.args
    starred = [a.arg for a in (of.vararg, of.kwarg) if a]
    return [a.arg for a in of.posonlyargs + of.args + of.kwonlyargs if a.arg != "self"] + starred


def _listed(section: str) -> list[str]:
    """Names before the colon of an entry, which begins a line or follows a semicolon."""
    lines = re.sub(r"\n {8,}", " ", section).splitlines()
    entries = [re.match(r"\s*(\w+(?:, \w+)*): \S", part) for line in lines for part in line.split("; ")]
    return [name for entry in entries if entry for name in entry[1].split(", ")]


@pytest.mark.parametrize(("name", "taken", "listed"), [*_described()])
def test_a_list_of_arguments_has_each_of_them_once_and_no_other(name, taken, listed):
    assert sorted(listed) == sorted(taken), name


def test_no_statement_is_a_tuple():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple)), f"{path}:{node.lineno}"


LAYERS = ("tasks", "models", "measure", "training", "theory")


def _type(annotation: str) -> str:
    """`tensor` for anything that has a shape, or the last name of the first type of a union."""
    if "Tensor" in annotation or "ndarray" in annotation:
        return "tensor"
    return annotation.split(" | ")[0].split(".")[-1]


def _glossary() -> set[tuple[str, str]]:
    """Names of arguments and their types, as the page on notation has them."""
    page = (PACKAGE.parents[1] / "book" / "notation.md").read_text().split("## Names in the code")[1]
    rows = re.findall(r"^\| (`.*?) \| (\w+) \|", page, re.MULTILINE)
    return {(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names.split(" of ")[0])}


def test_a_name_of_the_glossary_has_the_types_that_the_glossary_says():
    glossary, found = _glossary(), {}
    names = {name for name, _ in glossary}
    for path in (path for layer in LAYERS for path in (PACKAGE / layer).glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            made = isinstance(node, ast.ClassDef) and "Args:" in (ast.get_docstring(node) or "")
            arguments = [(n.target.id, n.annotation) for n in parts if made and isinstance(n, ast.AnnAssign)]
            for f in (n for n in parts if isinstance(n, ast.FunctionDef)):
                if not f.name.startswith("_") or f.name == "__init__":
                    arguments += [(a.arg, a.annotation) for a in f.args.args + f.args.kwonlyargs]
            for name, annotation in arguments:
                if name in names:
                    assert annotation, f"{path.name}: {getattr(node, 'name', '')}: {name} has no type"
                    found[name, _type(ast.unparse(annotation))] = f"{path.name}: {getattr(node, 'name', '')}"
    assert found.keys() == glossary, {pair: found.get(pair, "nowhere") for pair in found.keys() ^ glossary}
