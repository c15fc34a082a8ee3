"""What `import moe_theory as mt` gives, and the page that shows it."""

import contextlib
import inspect
import io
import re
import subprocess
import sys

import pytest

import moe_theory as mt
from moe_book import api, experiments
from moe_theory import measure
from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models import routers, rules
from moe_theory.models.rules import Rule


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import moe_theory;"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules);"
        "assert {m for m in sys.modules if m.startswith('moe_theory')} == {'moe_theory'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_those_of_their_modules():
    for name, module in mt.EXPORTS.items():
        found = getattr(mt, name)
        assert (getattr(found, "__module__", None) or found.__name__) == f"moe_theory.{module}"
        assert name in dir(mt)
    assert measure.voronoi_loss is mt.voronoi_loss is voronoi_loss


def test_the_rules_can_be_imported_along_with_the_routers():
    for name in ("RULES", "gumbel", "sampled_topk", "softmax_topk", "top1_noisy", "topk_set", "topk_softmax"):
        assert getattr(routers, name) is getattr(rules, name)


def test_unknown_names_are_named():
    with pytest.raises(AttributeError, match="module 'moe_theory' has no attribute 'PatchTasks'; it has .*'PatchTask'"):
        _ = mt.PatchTasks
    with pytest.raises(AttributeError, match=r"'moe_theory.measure' has no attribute 'nothing'"):
        _ = measure.nothing


def test_the_page_shows_every_name_once():
    shown = [name for names in api.GROUPS.values() for name in names]
    assert len(set(shown)) == len(shown)
    assert {name.split(".")[0] for name in shown} == {*mt.EXPORTS, "moe_book"}
    page = api.page()
    for name in map(api.shown, shown):
        assert page.count(f"### `{name}`\n") == 1


@pytest.mark.slow
def test_the_example_of_the_page_runs():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(api.EXAMPLE, {})
    assert "linear" in printed.getvalue() and api.EXAMPLE in api.page()


def test_signatures_are_those_of_the_source():
    assert api.signature("mt.nullity", mt.nullity).startswith("mt.nullity(\n    router: Router | str,\n")
    assert "    d: int = 50,\n" in api.signature("PatchTask", mt.PatchTask)
    assert "v:" not in api.signature("PatchTask", mt.PatchTask), "not an argument"
    assert "self" not in api.signature("LinearRouter", mt.LinearRouter)
    assert "    *,\n    experts: int = 8,\n" in api.signature("train", mt.train_patch_moe)
    assert api.signature("s", experiments.recompute) == "s(name: str, **which) -> pd.DataFrame"


@pytest.mark.parametrize("name", [name for names in api.GROUPS.values() for name in names])
def test_the_page_says_what_every_argument_is(name):
    obj = api.lookup(name)
    called = obj.__call__ if isinstance(obj, Rule) else obj
    for function in (called, *(method for _, method in api._methods(obj))):
        section = dict(api.SECTION.findall(inspect.cleandoc(function.__doc__) + "\n")).get("Args", "")
        said = {n for names in re.findall(r"^ {4}([\w, ]+): ", section, re.MULTILINE) for n in names.split(", ")}
        assert said == set(inspect.signature(function).parameters) - {"self"}, function
        assert api.markdown(function.__doc__) in api.entry(name)


def test_docstrings_become_lists():
    doc = """One `line`.

    Args:
        x, y: the data,
            both of them.
        seed: draws them.

    Raises:
        ValueError: never.
    """
    assert api.markdown(doc) == (
        "One `line`.\n\n*Args*\n\n- **x, y**: the data, both of them.\n- **seed**: draws them.\n\n"
        "*Raises*\n\n- **ValueError**: never."
    )
