"""What makes a chapter run again: its own claims, experiments, rows and the modules it reaches, and nothing else."""

import functools
import subprocess
import sys

import nbformat
import pytest

from moe_book import build
from moe_book.experiments import catalogue as registry
from moe_book.experiments.catalogue import EXPERIMENTS, entries

MODULES = {
    "moe_theory/__init__.py": "",
    "moe_theory/tasks/__init__.py": "",
    "moe_theory/tasks/patches.py": "",
    "moe_theory/tasks/images.py": "",
    "moe_book/__init__.py": "",
    "moe_book/claims.py": "from moe_book import evidence",
    "moe_book/claims.yml": "",
    "moe_book/evidence.py": "",
    "moe_book/evidence.yml": "",
    "moe_book/experiments/__init__.py": "from moe_book.experiments.store import load",
    "moe_book/experiments/store.py": "",
    "moe_book/experiments/stages.py": "import moe_theory.tasks.patches as patches",
    "moe_book/experiments/rates.py": "def row(key):\n    from moe_theory.tasks import images",
    "moe_book/results/outcome.csv": "1",
    "moe_book/results/contact.csv": "2",
}
ENTRY = {"outcome": {"module": "stages", "grid": "outcome"}, "contact": {"module": "rates", "grid": "contact"}}


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of one chapter that names a claim and an experiment; gives its path and what rewrites a file."""
    chapter = tmp_path / "chapter.ipynb"
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "RESULTS", tmp_path / "src" / "moe_book" / "results")
    known = {name: dict(entry) for name, entry in ENTRY.items()}
    monkeypatch.setattr(build, "entries", lambda: known)
    registry = {"a-thm-1": {"says": "yes", "box": ["thm-a"]}, "b-thm-1": {"says": "no"}}
    monkeypatch.setattr(build.claims, "registry", lambda: registry)

    def write(name, text):
        path = tmp_path / name if name == "requirements.lock" else tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name, text in {**MODULES, "requirements.lock": "torch==1"}.items():
        write(name, text)
    code = 'from moe_book import claims, experiments\nrows = experiments.load("outcome")\nclaims.check("a-thm-1")'
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code, id="one")]), chapter)
    return chapter, write


def _sources(chapter):
    """The files of the packages that a chapter depends on."""
    files = build.dependencies(chapter)
    return {str(f.relative_to(build.SOURCES)) for f in files if build.SOURCES in f.parents}


def test_a_chapter_depends_on_what_it_reaches(book):
    chapter, _ = book
    other = {"moe_theory/tasks/images.py", "moe_book/experiments/rates.py", "moe_book/results/contact.csv"}
    other |= {"moe_book/claims.yml"}  # of which a chapter sees its own rows only
    assert _sources(chapter) == set(MODULES) - other
    assert {chapter, build.ROOT / "requirements.lock"} <= build.dependencies(chapter)


def test_modules_imported_in_functions_and_by_name_are_followed(book):
    chapter, write = book
    write("moe_book/experiments/stages.py", MODULES["moe_book/experiments/rates.py"])
    assert "moe_theory/tasks/images.py" in _sources(chapter)


@pytest.mark.parametrize(
    ("statement", "reached"),
    [
        ("from moe_theory import PatchTask", {"moe_theory/tasks/patches.py"}),
        ("import moe_theory as mt", {"moe_theory/tasks/patches.py", "moe_theory/tasks/images.py"}),
        ("import moe_book.evidence", {"moe_book/evidence.py", "moe_book/evidence.yml"}),
        ("from moe_theory.tasks import Images", {"moe_theory/tasks/images.py"}),
    ],
)
def test_names_that_a_package_gives_are_followed_to_their_modules(book, statement, reached):
    chapter, write = book
    write("moe_theory/__init__.py", 'EXPORTS = {"PatchTask": "tasks.patches", "Images": "tasks.images"}')
    write("moe_theory/tasks/__init__.py", 'EXPORTS = {"Images": "images"}')
    _edit_cell(chapter, source=statement)
    assert {f for f in _sources(chapter) if not f.endswith("__init__.py")} == reached


def test_own_claims_and_experiments_only(book):
    chapter, _ = book
    assert build.claimed(chapter) == [{"says": "yes"}], "without what only pages show"
    assert build.experimented(chapter) == {"outcome": ENTRY["outcome"]}


def _edit_claim(name, field="says"):
    build.claims.registry()[name][field] = "perhaps"


def _edit_entry(name):
    build.entries()[name]["grid"] = "another"


def _edit_cell(chapter, **changes):
    notebook = nbformat.read(chapter, 4)
    notebook.cells[0].update(changes)
    nbformat.write(notebook, chapter)


@pytest.mark.parametrize(
    ("edit", "again"),
    [
        (lambda chapter, write: _edit_claim("a-thm-1"), True),
        (lambda chapter, write: _edit_claim("b-thm-1"), False),
        (lambda chapter, write: _edit_claim("a-thm-1", "box"), False),
        (lambda chapter, write: _edit_entry("outcome"), True),
        (lambda chapter, write: _edit_entry("contact"), False),
        (lambda chapter, write: write("moe_book/experiments/stages.py", "x = 1"), True),
        (lambda chapter, write: write("moe_theory/tasks/patches.py", "x = 1"), True),
        (lambda chapter, write: write("moe_theory/tasks/__init__.py", "x = 1"), True),
        (lambda chapter, write: write("moe_book/evidence.py", "x = 1"), True),
        (lambda chapter, write: write("moe_book/experiments/rates.py", "x = 1"), False),
        (lambda chapter, write: write("moe_theory/tasks/images.py", "x = 1"), False),
        (lambda chapter, write: write("moe_book/results/outcome.csv", "3"), True),
        (lambda chapter, write: write("moe_book/results/contact.csv", "3"), False),
        (lambda chapter, write: write("requirements.lock", "torch==2"), True),
        (lambda chapter, write: _edit_cell(chapter, outputs=[nbformat.v4.new_output("stream", text="1")]), False),
        (lambda chapter, write: _edit_cell(chapter, source="1 + 1"), True),
        (lambda chapter, write: _edit_cell(chapter, metadata={"tags": ["hide-input"]}), True),
    ],
)
def test_a_chapter_runs_again_if_and_only_if_an_input_changes(book, edit, again):
    before = build.fingerprint(book[0])
    edit(*book)
    assert (build.fingerprint(book[0]) != before) == again


def test_every_entry_makes_an_experiment_and_every_chapter_reaches_its_own(monkeypatch):
    for name in ("_code", "_exports", "_files_of", "_imported"):  # no file is read twice
        monkeypatch.setattr(build, name, functools.cache(getattr(build, name)))
    assert list(EXPERIMENTS) == list(entries()) and {e.name for e in EXPERIMENTS.values()} == set(entries())
    for chapter in build.chapters():
        reached = {path.stem for path in build.dependencies(chapter) if path.parent.name == "experiments"}
        assert reached >= {entry["module"] for entry in build.experimented(chapter).values()}


@pytest.mark.slow
def test_nothing_is_imported_until_an_experiment_is_asked_for():
    code = (
        "import sys; from moe_book import experiments; list(experiments.EXPERIMENTS);"
        "assert not any(m.startswith(('moe_theory.t', 'moe_theory.m')) for m in sys.modules);"
        "experiments.experiment('exploration'); assert 'moe_book.experiments.stages' in sys.modules;"
        "assert 'moe_book.experiments.rates' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prose_is_not_executed_and_meets_the_outputs_of_the_code(book, monkeypatch, tmp_path):
    """Editing text runs nothing again, and the assembled chapter has the new text beside the outputs."""
    chapter, _ = book
    before = build.fingerprint(chapter)
    monkeypatch.setattr(build, "EXECUTED", tmp_path / "executed")
    build.EXECUTED.mkdir()
    ran = nbformat.read(chapter, 4)
    ran.cells[0].outputs = [nbformat.v4.new_output("stream", text="settled")]
    nbformat.write(ran, build.EXECUTED / chapter.name)
    written = nbformat.read(chapter, 4)
    written.cells.insert(0, nbformat.v4.new_markdown_cell("New prose", id="prose"))
    nbformat.write(written, chapter)
    assert build.fingerprint(chapter) == before
    build.assemble(chapter)
    prose, code = nbformat.read(build.EXECUTED / chapter.name, 4).cells
    assert prose.source == "New prose" and code.outputs[0].text == "settled"
    written.cells[1].source += "\nrows"
    nbformat.write(written, chapter)
    assert build.fingerprint(chapter) != before


# Registries, and what is stored.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("module: nothing", r"experiments.yml: contact: module: expected one of .*, got 'nothing'"),
        ("row: no_such_row", r"experiments.yml: contact: rates.py has no function \['no_such_row'\]"),
        ("lives: live", r"experiments.yml: contact: unknown fields \['lives'\]"),
        ("about: 7", "experiments.yml: contact: about: expected a str, got 7"),
        ("about: a: b", "experiments.yml: line 2: mapping values are not allowed in this context"),
    ],
)
def test_a_slip_in_the_registry_of_experiments_is_named(change, message, tmp_path, monkeypatch):
    (tmp_path / "rates.py").write_text("def grid(): ...\ndef row(): ...")
    entry = {"about": "about: x", "module": "module: rates", "grid": "grid: grid", "row": "row: row"}
    entry[change.partition(":")[0]] = change
    monkeypatch.setattr(registry, "FILE", tmp_path / "experiments.yml")
    registry.FILE.write_text("contact:\n  " + "\n  ".join(entry.values()))
    with pytest.raises(ValueError, match=message) as found:
        registry.entries.__wrapped__()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["entries", "decisions", "equivalents", "registry"])
def test_a_slip_in_any_registry_ends_the_build_before_a_chapter_runs(name, monkeypatch):
    def slip():
        raise ValueError("some.yml: row: expected this, got that")

    monkeypatch.setattr(build.claims if name == "registry" else build, name, slip)
    for other in {"entries", "decisions", "equivalents"} - {name}:
        monkeypatch.setattr(build, other, lambda: None)
    monkeypatch.setattr(build, "execute_changed", None)
    monkeypatch.setattr(sys, "argv", ["build", "--store"])
    with pytest.raises(SystemExit, match="^some.yml: row: expected this, got that$"):
        build.main()


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A book of two chapters whose outputs, once executed, are their names; gives what runs `--store`."""
    (tmp_path / "notebooks").mkdir()
    for name in ("03_a", "07_b"):
        cells = [nbformat.v4.new_code_cell("1", id="one")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / f"{name}.ipynb")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "EXECUTED", tmp_path / "executed")
    monkeypatch.setattr(build, "check_registries", lambda: None)
    monkeypatch.setattr(build, "fingerprint", lambda n: "".join(c.source for c in nbformat.read(n, 4).cells))
    monkeypatch.setattr(build.pages, "picture", lambda folder: b"")
    ran = []

    def run(chosen):
        build.EXECUTED.mkdir(exist_ok=True)
        for path in chosen:
            ran.append(path.stem)
            notebook = nbformat.read(path, 4)
            notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text=path.stem)]
            nbformat.write(notebook, build.EXECUTED / path.name)
            build.assemble(path)

    monkeypatch.setattr(build, "execute_changed", run)

    def store(*chapters):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["build", "--store", *(x for c in chapters for x in ("--chapter", c))])
        build.main()
        return ran[:]

    return store


def test_only_chapters_whose_inputs_changed_since_they_were_stored_run_and_are_stored(two):
    assert two("03") == ["03_a"] and two() == ["07_b"] and two() == [] == two("07")
    for path in build.chapters():
        assert nbformat.read(path, 4).cells[0].outputs[0].text == path.stem and build.stored_inputs(path) == "1"
    _edit_cell(build.chapters()[0], source="2")
    assert two("07") == [] and two("03", "07") == ["03_a"]
    with pytest.raises(SystemExit, match=r"--chapter: expected how the file of a chapter begins, .* got \['9'\]"):
        two("9")


def test_the_picture_of_the_front_page_is_stored_with_its_chapter_only(two, monkeypatch):
    monkeypatch.setattr(build.pages, "PICTURE", ("07_b", 1))
    picture = build.ROOT / "book" / "_static" / "front.png"
    assert two("03") == ["03_a"] and not picture.exists()
    assert two() == ["07_b"] and picture.exists()
