"""Shapes in signatures are checked at run time while these tests run."""

import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))
import shapes

install_import_hook("moe_theory", "shapes.check")


@pytest.fixture(autouse=True)
def _no_shape_checks_on_bad_input(request, monkeypatch):
    if request.node.name.startswith("test_bad"):
        monkeypatch.setattr(shapes, "enabled", False)
