"""Published notebooks: plain Markdown, and a first cell that installs without replacing anything."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

from moe_book import build, publish
from moe_book.glue import glued
from moe_book.notebooks import page

EXECUTED = [build.executed(n) for n in build.chapters()]
MYST = re.compile(r":::|\{[\w:]+\}`|^\([\w-]+\)=$|^:\w+:", re.MULTILINE)
OTHER_NUMPY, OTHER_TORCH = "2.3.5", "2.12.9"


@pytest.fixture(scope="module")
def refs():
    return publish.References.of(EXECUTED, "https://owner.github.io/name/")


@pytest.mark.parametrize("path", EXECUTED, ids=lambda p: p.stem)
def test_no_myst_is_left(path, refs):
    before, after = nbformat.read(path, 4), publish.published(path, refs, "git+x@y", glued(EXECUTED))
    nbformat.validate(after)
    assert any(MYST.search(c.source) for c in before.cells if c.cell_type == "markdown")
    for cell in after.cells:
        if cell.cell_type == "markdown":
            assert not MYST.search(cell.source), cell.source
    text = "\n".join(c.source for c in after.cells)
    if path.name[0].isdigit() and path.parent.name != "appendix":
        source = "\n".join(c.source for c in before.cells)
        assert re.search(r"\\tag\{\d+[.]1\}", text) or not re.search(r"\$\$ \(eq-", source)
        kinds = ("Theorem", "Definition", "Proposition", "Observation")
        assert any(f"</a>**{kind}" in text for kind in kinds) or ":::{prf:" not in source
        assert "<details><summary>Solution of Exercise" in text


def test_plain_forms(refs):
    source = ":::{prf:theorem} Name\n:label: t\nBy {eq}`eq-route`.\n\n$$x$$ (eq-route)\n:::"
    assert publish.plain(source, refs, "03_smooth_routing").endswith(
        "**Theorem (Name).**\n>\n> By [(3.1)](#eq-route).\n>\n> "
        '<a name="eq-route" id="eq-route"></a>\n>\n> $$x \\tag{3.1}$$'
    )
    assert publish.plain("See {cite:p}`chen2022`.", refs, "x") == "See (Chen et al., 2022)."
    link = publish.plain("{doc}`03_smooth_routing`", refs, "x")
    assert link == "[Noise makes routing smooth](https://owner.github.io/name/notebooks/03_smooth_routing.html)"
    assert publish.plain("{eq}`eq-route`", refs, "01_patch_task").startswith(
        "[(3.1)](https://owner.github.io/name/notebooks/03"
    )


@pytest.mark.parametrize("source", [":::{prf:theorem} Name\nopen", ":::{margin}\nx\n:::", "{abbr}`x`"])
def test_unknown_syntax_is_refused(source, refs):
    with pytest.raises(ValueError, match=r"directive|role"):
        publish.plain(source, refs, "x")


def test_buttons_lead_to_the_repository_and_open_the_published_notebooks_in_colab(tmp_path):
    """With a repository; that there are none without one is tested on the book itself."""
    build.render(tmp_path / "source", tmp_path / "site", publish.configuration("owner/name", "0123456789abcdef"))
    for chapter in EXECUTED:
        html = (tmp_path / "site" / "notebooks" / f"{page(chapter)}.html").read_text()
        address = f"https://colab.research.google.com/github/owner/name/blob/gh-pages/notebooks/{page(chapter)}.ipynb"
        assert f'href="{address}"' in html and 'href="https://github.com/owner/name"' in html
        home = f"https://owner.github.io/name/notebooks/{page(chapter)}.html"
        assert f'<link rel="canonical" href="{home}" />' in html
        assert f'<meta property="og:url" content="{home}" />' in html and ", commit 0123456789ab" in html


@pytest.mark.parametrize("repository", ["owner", "owner/name/more", "https://example.invalid/owner/name"])
def test_bad_repository_is_refused(repository):
    done = subprocess.run(
        [sys.executable, "-m", "moe_book.publish", "--repository", repository], capture_output=True, text=True
    )
    assert done.returncode == 1 and "expected owner/name" in done.stderr


def as_repository(folder: Path) -> tuple[str, str]:
    """The working tree as a git repository of one commit: its address and that commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "tree"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    return f"git+file://localhost{folder}", commit.stdout.strip()  # some pips want a host


def environment_with_other_versions(folder: Path) -> Path:
    """A virtual environment that holds another numpy, and torch under another version number.

    A second build of torch would be gigabytes; this one is the torch of the test's own environment,
    linked, with a version of its own in its metadata, which is all that pip goes by.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    packages = [
        f"numpy=={OTHER_NUMPY}",
        "setuptools>=77",
        "ipykernel",
        "nbclient",
        "nbformat",
    ]  # torch wants setuptools
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
    torch = distribution("torch")
    (site,) = folder.glob("lib/python*/site-packages")
    for top in ("torch", "torchgen", "functorch"):
        (site / top).symlink_to(Path(torch.locate_file(top)))
    metadata = site / f"torch-{OTHER_TORCH}.dist-info"
    metadata.mkdir()
    text = torch.read_text("METADATA")
    (metadata / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {OTHER_TORCH}", text, flags=re.MULTILINE))
    (metadata / "RECORD").write_text("")
    (metadata / "INSTALLER").write_text("pip\n")
    return python


def test_a_published_notebook_runs_in_an_environment_of_its_own(refs, tmp_path):
    address, commit = as_repository(tmp_path / "repository")
    python = environment_with_other_versions(tmp_path / "venv")
    chapter = next(p for p in EXECUTED if p.stem.startswith("03"))
    notebook = publish.published(chapter, refs, f"{address}@{commit}", glued(EXECUTED))
    found = (
        "import moe_theory, numpy; from importlib.metadata import version\n"
        "print(moe_theory.__file__, numpy.__version__, version('torch'))"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(found))
    empty = tmp_path / "empty"
    empty.mkdir()
    nbformat.write(notebook, tmp_path / "chapter.ipynb")
    run = (
        "import nbformat, sys; from nbclient import NotebookClient\n"
        "nb = nbformat.read(sys.argv[1], 4); NotebookClient(nb, timeout=300, kernel_name='python3').execute()\n"
        "print(nb.cells[-1].outputs[0].text)"
    )
    done = subprocess.run([python, "-c", run, tmp_path / "chapter.ipynb"], cwd=empty, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    where, numpy, torch = done.stdout.split()
    assert where.startswith(str(tmp_path / "venv")) and (numpy, torch) == (OTHER_NUMPY, OTHER_TORCH)
    assert list(empty.iterdir()) == []
