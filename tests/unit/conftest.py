"""Shapes in signatures are checked at run time while these tests run."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))
import shapes

# What a module under the hook is the first to import is compiled anew, whatever bytecode there is of it: seconds.
LIBRARIES = [
    *("IPython", "joblib", "matplotlib.pyplot", "pandas", "scipy.integrate", "scipy.optimize", "scipy.stats"),
    *("seaborn", "torch", "yaml"),
]
for library in LIBRARIES:
    import_module(library)
install_import_hook("moe_theory", "shapes.check")


@pytest.fixture(scope="session")
def garments():
    """Skips what computes on Fashion-MNIST where it is not at hand."""
    if not import_module("moe_book.experiments.router_tasks").at_hand("fashion"):
        pytest.skip("Fashion-MNIST is not at hand")


@pytest.fixture(autouse=True)
def _no_shape_checks_on_bad_input(request, monkeypatch):
    if request.node.name.startswith("test_bad"):
        monkeypatch.setattr(shapes, "enabled", False)


@pytest.fixture
def what_an_older_library_does_not_serve_is_skipped(monkeypatch):
    """Tests of models of transformers are skipped where the library is older than what they build."""
    tiny = import_module("moe_theory.diagnose.tiny")

    def library(least="5.6", asked=tiny.library):
        try:
            return asked(least)
        except ImportError as error:
            pytest.skip(str(error))

    monkeypatch.setattr(tiny, "library", library)
