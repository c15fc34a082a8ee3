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
    "figures:band": ["label", "style"],
    "figures:panels": ["rows", "columns"],
    "measure/voronoi:voronoi_loss": ["kind", "r"],
    "models/experts:PatchCNN": ["seed"],
    "models/mixture:draw_measure": ["seed", "router_scale", "expert_scale"],
    "models/mixture:jacobian": ["expert"],
    "models/mixture:regression_function": ["expert"],
    "models/moe:PatchMoE": ["experts", "filters", "activation_name"],
    "models/routers:MLPRouter": ["seed"],
    "models/routers:MultiHeadRouter": ["seed"],
    "models/sparse:SparseMLP": ["seed"],
    "tasks/gaussians:GaussianClasses": ["classes", "d"],
    "tasks/regression:sample_regression": ["seed", "noise"],
    "theory/estimators:segment_means": ["nodes"],
    "theory/estimators:two_steps": ["seed"],
    "theory/fisher:standard_errors": ["expert"],
    "theory/router_gradient:logit_jacobian": ["noise"],
    "theory/tanh_blocks:two_blocks": ["seed"],
    "theory/uniform_stability:exact_stability": ["batch"],
    "training/least_squares:least_squares": ["expert"],
    "training/parts:take_apart": ["input_scale", "biases"],
    "training/sgd:stochastic_descent": ["expert"],
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_with_arguments_names_all_of_them(name):
    arguments, doc = FUNCTIONS[name]
    if section := re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", doc, re.MULTILINE):
        named = set(re.findall(r"(?<![\w.`])(\w+)(?=[,:])", section[1]))
        missing = [a for a in _positional(arguments) + [a.arg for a in arguments.kwonlyargs] if a not in named]
        assert not missing, f"{name}: Args does not say what {missing} are"


def test_no_statement_is_a_tuple():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Tuple)), f"{path}:{node.lineno}"
