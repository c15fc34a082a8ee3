"""What the repository promises of itself: pins, chapters, ledger, imports."""

import ast
import itertools
import json
import re
import tomllib
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import moe_theory as mt
from moe_book import claims
from moe_book.claims import MIME
from moe_book.notebooks import APPENDIX, notebooks
from moe_book.typeset import CAPTION

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "src" / "moe_theory", ROOT / "src" / "moe_book"]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
CHAPTERS = notebooks()  # and their appendix pages
NUMBERED = [p for p in CHAPTERS if p.name[0].isdigit()]  # the others settle no claim
LOCKED = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
LOCK = [line.split(" --hash")[0] for line in LOCKED]


def test_the_lock_pins_versions_and_files_and_names_no_address():
    for line in LOCKED:
        hashes = "" if line.startswith("torch==") else r"(?: --hash=sha256:[0-9a-f]{64})+"
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!+-]+" + hashes, line), line
    assert "torch==2.13.0" in LOCKED


def test_the_lock_agrees_with_pyproject_and_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {re.sub(r"[-_.]+", "-", n).lower(): Version(v) for n, v in (line.split("==") for line in LOCK)}
    optional = itertools.chain.from_iterable(project["optional-dependencies"].values())
    for requirement in map(Requirement, [*project["dependencies"], *optional]):
        if requirement.name == project["name"]:  # an extra that another one includes
            assert requirement.extras <= project["optional-dependencies"].keys()
            continue
        assert requirement.specifier.contains(pins[re.sub(r"[-_.]+", "-", requirement.name).lower()]), requirement
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert {f"python{project['requires-python']}", "pip", "make"} == {*environment["dependencies"]}


def test_this_environment_is_the_lock():
    for name, pin in (line.split("==") for line in LOCK):
        assert version(name).split("+")[0] == pin, name


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
BOOK_YML = WORKFLOWS["book"]
WORKFLOW = BOOK_YML["jobs"]


def test_the_workflow_tries_every_python_and_both_ends_of_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = WORKFLOW["locked"]["strategy"]["matrix"]["python-version"]
    assert project["requires-python"] == f">={tried[0]}" and tried == ["3.11", "3.12", "3.13"]
    ends = {row["versions"]: row for row in WORKFLOW["ranges"]["strategy"]["matrix"]["include"]}
    assert (ends["oldest"]["resolution"], ends["oldest"]["python-version"]) == ("lowest-direct", tried[0])
    assert (ends["newest"]["resolution"], ends["newest"]["python-version"]) == ("highest", tried[-1])
    for job in ("locked", "ranges"):
        assert WORKFLOW[job]["strategy"]["fail-fast"] is False, "one failure must not hide another"
        assert WORKFLOW[job]["container"] == "python:${{ matrix.python-version }}-bookworm"
    (install,) = [s["run"] for s in WORKFLOW["ranges"]["steps"] if s.get("name") == "Install"]
    extras = set(re.search(r"\[(.*?)\]", install)[1].split(","))
    assert extras == project["optional-dependencies"].keys()
    for installs in (str(WORKFLOW["ranges"]["steps"]), (ROOT / ".ci" / "run").read_text()):
        assert "bash .ci/packages" in installs, "both have the data that chapters read"
    said = (ROOT / "book" / "running.md").read_text()
    assert all(f"{name}={value} " in said for name, value in WORKFLOW["rounding"]["env"].items())


def test_what_passed_with_the_lock_is_published_and_once():
    """A new version of a library, which `ranges` tries, does not hold it back; nor does a later push end it."""
    publish = WORKFLOW["publish"]
    assert publish["needs"] == ["locked"] and "main" in publish["if"]
    assert "github.ref" in BOOK_YML["concurrency"]["group"]
    assert BOOK_YML["concurrency"]["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"
    assert [name for name, job in WORKFLOW.items() if "write" in str(job.get("permissions"))] == ["publish"]
    kept = [
        s for s in WORKFLOW["locked"]["steps"] if "make site" in s.get("run", "") or "artifact" in s.get("uses", "")
    ]
    assert len(kept) == 2
    for step in kept:
        assert step["if"].startswith("matrix.python-version == '3.11'"), "one entry of the matrix makes the site"
    (site,) = [s["with"] for s in publish["steps"] if "download-artifact" in s.get("uses", "")]
    assert site["name"] == kept[1]["with"]["name"] and publish["steps"][-1]["working-directory"] == site["path"]


def test_what_the_workflow_runs_is_there():
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    commands = "\n".join(s.get("run", "") for job in jobs for s in job["steps"])
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|&& )make (\w+)", commands, re.MULTILINE)) <= {*targets}
    paths = re.findall(r"[\w./]*(?:\.ci|tests)/[\w./]+(?:::\w+)?", commands)
    assert {".ci/run", "tests/unit"} <= {*paths} and "make sabotage" in commands
    for path, _, test in (name.partition("::") for name in paths):
        assert f"def {test}(" in (ROOT / path).read_text() if test else (ROOT / path).exists(), path
    commands += (ROOT / ".ci" / "run").read_text() + (ROOT / "Makefile").read_text()
    modules = {name for name in re.findall(r"-m (moe_\w+(?:\.\w+)*)", commands)}
    assert {"moe_book.build", "moe_book.sabotage"} <= modules and all(map(find_spec, modules))


def test_torch_is_the_build_for_processors_wherever_it_is_installed_for_a_check():
    for name, workflow in WORKFLOWS.items():
        for job in workflow["jobs"].values():
            text = "\n".join(str(step.get("run", "")) for step in job["steps"])
            if re.search(r"make (?!site)|\.ci/run|uv pip", text):
                assert {**workflow.get("env", {}), **job.get("env", {})}["TORCH"] == "cpu", name
            assert text.count("uv pip install") == text.count('--torch-backend "$TORCH"'), name
    devcontainer = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert devcontainer["containerEnv"] == {"TORCH": "cpu"} and "make book" in devcontainer["postCreateCommand"]
    assert "TORCH:-cpu" in (ROOT / ".binder" / "postBuild").read_text()
    for path in ("README.md", "book/running.md", "environment.yml", "requirements.lock", "Makefile"):
        assert "TORCH=cpu" in (ROOT / path).read_text(), path


def test_a_job_has_no_data_and_one_the_versions_of_colab():
    bare = WORKFLOW["bare"]
    assert "slim" in bare["container"] and not any(".ci/packages" in str(step) for step in bare["steps"])
    assert [step["run"] for step in bare["steps"][-2:]] == ["make book", "make test"]
    weekly = WORKFLOWS["weekly"]
    assert "schedule" in weekly[True] and weekly["jobs"]["colab"]["steps"][-1]["run"] == "make colab"  # True: `on`
    pins = [line for line in (ROOT / ".ci" / "colab.txt").read_text().splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", line) for line in pins) and {"torch", "transformers", "ipython"} <= {
        line.split("==")[0] for line in pins
    }


READS = {  # what is read: calls in a chapter that read it
    "images": r"load_images\(|\bat_hand\(|images\.data\(",
    "pages": r"load_characters\(|languages\.at_hand\(|(?:language|cl)\.text\(\)",
}


def reading(calls: str) -> set[int]:
    """The chapters whose code has such calls."""
    code = {p: "\n".join(c.source for c in nbformat.read(p, 4).cells if c.cell_type == "code") for p in NUMBERED}
    return {int(path.name[:2]) for path in NUMBERED if re.search(calls, code[path])}


DATA_OF = {what: reading(calls) for what, calls in READS.items()}


def test_the_chapters_that_read_data_are_named():
    said = re.search(r"Chapters ([\d, and]+) read real data: .*?\(([\d, ]+)\).*?\(([\d, ]+)\)", _flat("README.md"))
    every, *parts = ({*map(int, re.findall(r"\d+", part))} for part in said.groups())
    assert parts == [*DATA_OF.values()] and every == set.union(*parts)
    assert f"Chapters {said[1]} and the experiments" in _flat("book/running.md")


def _flat(name: str) -> str:
    """The text of a page, its lines joined."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_chapters_are_executed_sources(path):
    nb = nbformat.read(path, 4)
    nbformat.validate(nb)
    assert nb.nbformat_minor >= 5 and len({c.id for c in nb.cells}) == len(nb.cells)
    tags = [tag for c in nb.cells for tag in c.metadata.get("tags", [])]
    assert tags.count("parameters") == 1
    for cell in nb.cells:
        assert set(cell.metadata) <= {"tags", "mystnb"}, "no timing or papermill metadata"
        if cell.cell_type == "code":
            assert cell.execution_count is not None
            for output in cell.outputs:
                assert output.output_type != "error" and output.get("name") != "stderr", cell.id


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_compared_outputs_show_no_rounding_errors(path):
    """What nbval compares is the same on every processor: below 1e-6 powers of ten, and no measured numbers."""
    for cell in nbformat.read(path, 4).cells:
        if "nbval-check-output" in cell.metadata.get("tags", []):
            printed = " ".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)
            numbers = re.findall(r"\b\d[\d.]*e-(?:0[6-9]|[1-9]\d)", printed)
            assert all(re.match("1(?:[.]0+)?e", n) for n in numbers), f"{cell.id}: {numbers}"


def _checks(cell) -> list[ast.Call]:
    """The calls of `claims.check` in a cell."""
    calls = [n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Call)]
    return [c for c in calls if ast.unparse(c.func) == "claims.check"]


@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.stem)
def test_a_chapter_hands_over_measured_values_and_nothing_else(path):
    """The registry decides: no limit, tolerance or verdict stands in a notebook, nor a value typed by hand."""
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code" and _checks(cell)]
    assert cells
    for cell in cells:
        (call,) = _checks(cell)
        assert len(call.args) == 1 and isinstance(call.args[0], ast.Constant), cell.id
        typed = [k.arg for k in call.keywords if isinstance(k.value, ast.Constant) and k.value.value is not None]
        assert not typed, f"{cell.id}: {typed} typed by hand"


@pytest.mark.parametrize("path", NUMBERED, ids=lambda p: p.stem)
def test_stored_boxes_are_of_the_registry_as_it_stands(path):
    for claim, box in claims.boxes([path]).items():
        row = claims.registry()[claim]
        assert box["says"] == row["says"] and box["criterion"] == row.get("criterion", ""), f"{claim}: make outputs"
        lines = {line["name"]: line["says"] for line in box["evidence"]}
        assert lines == {name: spec["says"] for name, spec in row["evidence"].items()}, f"{claim}: make outputs"
        assert any(line["refuted"] for line in box["evidence"]), claim


def _warnings(source: str, name: str) -> list[str]:
    """What the compiler says of a source, such as that a backslash escapes nothing, which a later Python may refuse."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compile(source, name, "exec", dont_inherit=True)
    return [f"{name}: {w.message}" for w in said]


@pytest.mark.parametrize("path", [*CHAPTERS, *MODULES], ids=lambda p: p.stem)
def test_code_compiles_without_a_warning(path):
    if path.suffix == ".py":
        assert not _warnings(path.read_text(), path.name)
    else:
        code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert not [said for cell in code for said in _warnings(cell.source, cell.id)]


def test_a_warning_of_the_compiler_is_seen():
    assert not _warnings(r"x = r'\s' + '\\s'", "good")
    for bad in (r"x = '\s'", r"x = f'\l{1}'", "x = 1 is 1"):
        assert len(_warnings(bad, "bad")) == 1


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_the_stored_boxes_had_their_data(path):
    """A guard that holds two data sets apart where there is one would show here."""
    outputs = [o for c in nbformat.read(path, 4).cells for o in c.get("outputs", [])]
    lines = [line for o in outputs for line in o.get("data", {}).get(MIME, {}).get("evidence", [])]
    assert not [line["says"] for line in lines if line["measured"].startswith("not computed")]


MARKED = re.compile(r"(?<!\w)_|[*`]|~~|\]\(|^(?:[#>-]|\d+[.)]) ")  # what Markdown would take for more than text


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_figures_have_captions_and_alternative_texts(path):
    """For viewers that show no HTML, too: a figure is an image, and its caption is Markdown."""
    figures = 0
    for cell in (c for c in nbformat.read(path, 4).cells if c.cell_type == "code"):
        displayed = [o for o in cell.outputs if o.output_type == "display_data"]
        plain = [o.data["text/plain"] for o in displayed if "scrapbook" not in o.metadata]  # that is glued
        assert not any(text.startswith("<IPython") for text in plain), cell.id
        if "decisions" in cell.source:  # tables between whose rows the text speaks
            continue
        rich = [o for o in displayed if MIME not in o.data and "scrapbook" not in o.metadata]
        for shown, caption in zip(rich[::2], rich[1::2], strict=True):
            assert shown.data.keys() in ({"image/png", "text/plain"}, {"text/html", "text/plain"}), cell.id
            assert "<img" not in shown.data.get("text/html", "")
            assert caption.metadata == {CAPTION: True}
            words = re.sub(r"[$][^$]+[$]", "", caption.data["text/markdown"])
            assert len(words) > 20 and not MARKED.search(words), words
            if "image/png" in shown.data:
                assert len(shown.metadata["image/png"]["alt"]) > 19
                figures += 1
    assert figures or path.parent.name == APPENDIX


LIBRARY = {  # a layer of the library may import from itself and from those it names
    "_validate": set(),
    "streams": {"_validate"},
    "__init__": set(),  # what it gives is imported by name when it is asked for
    "tasks": {"_validate", "streams"},
    "models": {"_validate", "streams"},
    "measure": {"tasks", "models", "_validate", "streams"},
    "training": {"tasks", "models", "measure", "_validate", "streams"},
    "theory": {"tasks", "models", "measure", "_validate", "streams"},
    "diagnose": {"models", "measure", "theory", "_validate", "streams"},
}
BOOK = {  # one of the apparatus, too; `the library` is all of it
    "__init__": set(),
    "typeset": set(),
    "manifest": set(),
    "graph": set(),
    "glue": {"typeset"},
    "search": set(),
    "notebooks": set(),
    "registries": set(),
    "decisions": {"registries"},
    "provenance": {"the library"},
    "evidence": {"typeset"},
    "claims": {"typeset", "evidence", "notebooks", "registries"},
    "figures": {"typeset"},
    "experiments": {"devices", "manifest", "provenance", "registries", "the library"},
    "speed": {"manifest", "the library"},
    "sabotage": {"claims", "figures", "experiments", "manifest", "notebooks", "provenance", "registries"},
    "front": {"experiments", "the library"},
    "citing": {"__init__"},
    "pages": {"citing", "claims", "front", "glue", "manifest", "notebooks", "speed", "typeset", "graph"},
    "devices": {"the library"},
    "api": {"experiments", "claims", "the library"},
    "build": {
        "api",
        "claims",
        "decisions",
        "glue",
        "notebooks",
        "pages",
        "experiments",
        "sabotage",
        "search",
        "finish",
        "previews",
    },
    "mathml": set(),
    "previews": set(),
    "reading": set(),
    "symbols": {"mathml"},
    "finish": {"mathml", "reading", "symbols"},
    "extension": {"__init__", "citing", "notebooks", "search", "the library"},
    "publish": {"build", "claims", "extension", "glue", "notebooks", "pages"},
    "pdf": {"build", "notebooks"},
    "seeds": {"build"},
    "gpu": {"devices", "manifest", "notebooks", "pages", "seeds", "speed"},
}
LAYERS = {f"moe_theory.{name}": {f"moe_theory.{n}" for n in uses} for name, uses in LIBRARY.items()}
LAYERS |= {f"moe_book.{name}": {f"moe_book.{n}" for n in uses} for name, uses in BOOK.items()}


def _layer(path: Path) -> str:
    """The package of a module, and the folder there that it is in, or its own name for one at the top."""
    package, name = path.relative_to(ROOT / "src").parts[:2]
    return f"{package}.{name.removesuffix('.py')}"


def _imported_layers(source: str) -> set[str]:
    """The layers of the packages that a source imports from, in whatever form."""
    exported = {f"moe_theory.{name}": f"moe_theory.{module.split('.')[0]}" for name, module in mt.EXPORTS.items()}
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "the package is imported by its name"
            names = [f"{node.module}.{name}" for name in names]
        for package, *inner in (name.split(".") for name in names):
            if package in ("moe_theory", "moe_book"):
                name = ".".join([package, *inner[:1]])
                name = exported.get(name, name)
                found.add(name if name in LAYERS else f"{package}.__init__")
    return found


def test_every_module_stands_in_a_layer():
    assert {_layer(path) for path in MODULES} == LAYERS.keys()


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    """The library never imports the apparatus."""
    allowed = LAYERS[layer] | {layer}
    if "moe_book.the library" in allowed:
        allowed |= {name for name in LAYERS if name.startswith("moe_theory.")}
    for path in MODULES:
        if _layer(path) == layer:
            foreign = _imported_layers(path.read_text()) - allowed
            assert not foreign, f"{path.name} imports from {foreign}"


def test_every_form_of_import_is_seen():
    for text, layers in (
        ("from moe_book import claims, figures as f", {"moe_book.claims", "moe_book.figures"}),
        ("import moe_book.experiments.store as s", {"moe_book.experiments"}),
        ("from moe_theory.training.fit import fit", {"moe_theory.training"}),
        ("def f():\n    from moe_theory import nullity, __version__", {"moe_theory.theory", "moe_theory.__init__"}),
        ("import moe_theory as mt", {"moe_theory.__init__"}),
        ("import moe_book", {"moe_book.__init__"}),
        ("from torch import nn\nimport numpy", set()),
    ):
        assert _imported_layers(text) == layers


def test_public_functions_are_documented():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), path
        for node in ast.walk(tree):
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and node in tree.body:
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_what_contributing_quotes_stands_where_it_says():
    """Each block that begins with the name of a file, as a whole: a worked example that is out of date is none."""
    quoted = re.findall(r"```\w+\n# (\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(quoted) == 3
    for name, block in quoted:
        texts = [(ROOT / name).read_text()]
        if name.endswith(".ipynb"):
            texts = [cell.source for cell in nbformat.read(ROOT / name, 4).cells]
        assert any(block.strip() in text for text in texts), f"{name}: {block}"
