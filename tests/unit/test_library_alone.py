"""The library without the book: five packages are all that it needs."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from moe_theory import _validate as check

ROOT = Path(__file__).parents[2]
FIVE = {"torch", "numpy", "scipy", "pandas", "jaxtyping"}
TRANSFORMERS = {"transformers", "packaging"}  # of diagnose/families.py, which says what to install

ALONE = """
import sys
from importlib import import_module
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Five(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.split(".")[0]
        return PathFinder.find_spec(name, path, target) if top in ALLOWED or STANDARD(top) else None

ALLOWED = {"moe_theory", *sys.argv[1].split()}
STANDARD = lambda top: top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Five]
for name in sys.argv[2].split():
    import_module(name)
import torch
from moe_theory.diagnose import diagnose_router
report = diagnose_router(torch.randn(64, 8), k=2)
print(report, report.findings)
try:
    import_module("moe_theory.tasks.images").load_images("digits")
except ImportError as error:
    assert "digits: needs scikit-learn, which `pip install 'moe-theory[chapters]'` brings" in str(error), error
else:
    raise AssertionError("scikit-learn was there")
assert not {"moe_book", "sklearn", "matplotlib", "yaml", "tqdm", "joblib"} & set(sys.modules)
"""


def test_the_distribution_needs_these_five():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(line).name for line in project["dependencies"]} == FIVE


def test_nothing_else_is_imported_by_name():
    for path in (ROOT / "src" / "moe_theory").rglob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        allowed = FIVE | {"moe_theory"} | (TRANSFORMERS if path.name == "families.py" else set())
        foreign = {name.split(".")[0] for name in names} - allowed - sys.stdlib_module_names
        assert not foreign, f"{path.name} imports {foreign}"


def test_a_library_that_is_missing_is_named():
    with pytest.raises(
        ImportError, match=r"^training: needs no_such_thing, which `pip install 'moe-theory\[chapters\]'"
    ):
        check.library("no_such_thing.part", "training")


def needed(names: set[str]) -> set[str]:
    """Top-level modules of distributions and of all that they need, extras left out."""
    found, todo = set(), [*names]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        plain = [r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate({"extra": ""})]
        todo += [r.name for r in plain]
    tops = importlib.metadata.packages_distributions().items()
    return {top for top, owners in tops if {re.sub(r"[-_.]+", "-", o).lower() for o in owners} & found}


@pytest.mark.slow
def test_the_library_works_with_these_five(tmp_path):
    """Every module is imported, and a router diagnosed, where all else that is installed cannot be imported."""
    shutil.copytree(ROOT / "src" / "moe_theory", tmp_path / "moe_theory", ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted((tmp_path / "moe_theory").rglob("*.py"))
    names = [".".join(p.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__") for p in files]
    modules = " ".join(name for name in names if not name.endswith("__main__"))
    command = [sys.executable, "-c", ALONE, " ".join(needed(FIVE)), modules]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
