"""A reader changes what a chapter suggests: every one of its edits runs to the end, without a word of error.

Run are the cells that give something else for an edit, and those that they need. The others do what they do in the
chapter as it stands, which is run elsewhere.
"""

import ast
import contextlib
import gc
import io
import re
from pathlib import Path

import nbformat
import pytest
import shapes
import torch

from moe_book import claims, figures
from moe_book.notebooks import APPENDIX, notebooks
from moe_book.sabotage.slicing import reached

CHAPTERS = [path for path in notebooks() if path.stem[0].isdigit()]
HEADING = "## Change one thing"
ITEM = re.compile(r"^\d\. Set ((?:`\w+ = [^`]+`(?: and )?)+)\.? ?(.*)", re.MULTILINE)


def edits(path: Path) -> list[tuple[str, str]]:
    """The edits that a chapter suggests, as Python statements, and what it says to expect."""
    cells = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown" and HEADING in c.source]
    if path.parent.name == APPENDIX and not cells:
        return []
    assert len(cells) == 1, f"{path.name}: expected one section {HEADING!r}, found {len(cells)}"
    return [("\n".join(re.findall(r"`([^`]+)`", code)), text) for code, text in ITEM.findall(cells[0])]


def parameters(path: Path) -> dict[str, object]:
    """What the first cell of a chapter sets."""
    (cell,) = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
    body = ast.parse(cell.source).body
    return {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in body}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_suggests_three_edits_of_its_first_cell(path):
    """An appendix page may suggest fewer."""
    suggested, known = edits(path), parameters(path)
    assert len(suggested) == 3 or (path.parent.name == APPENDIX and len(suggested) < 3)
    for code, text in suggested:
        for node in ast.parse(code).body:
            name, value = ast.unparse(node.targets[0]), ast.literal_eval(node.value)
            assert name in known and value != known[name], f"{path.name}: {code} changes nothing"
        assert len(text.split()) >= 5, f"{path.name}: {code} does not say what to expect"


def play(path: Path, code: str) -> None:
    """Run what an edit behind the first cell of a chapter reaches, drawing nothing."""
    names: dict[str, object] = {"__name__": "__main__", "display": lambda *shown: None}
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    (first,) = [i for i, c in enumerate(cells) if "parameters" in c.metadata.get("tags", [])]
    edited = {ast.unparse(node.targets[0]) for node in ast.parse(code).body}
    for i in reached([c.source for c in cells], first, edited):
        source = cells[i].source + f"\n{code}" * (i == first)
        exec(compile(source, f"{path.name}, {cells[i].id}", "exec"), names)


@pytest.fixture
def default_dtype():
    """A chapter may set torch's; it is to be for that chapter only."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        (["if K > 4:\n    print(nowhere)"], NameError),
        (["table = {4: 1}", "def of():\n    return table[K]", "found = of()"], KeyError),
        (["table = {4: 1}", "sizes = [K]", "for size in sizes:\n    last = size", "print(table[last])"], KeyError),
        (["table, sizes = {4: 1}, []", "sizes.append(K)", "print([table[size] for size in sizes])"], KeyError),
        (["if globals()['K'] != 4:\n    raise ValueError"], ValueError),
    ],
)
def test_an_error_that_only_an_edit_meets_is_found(sources, error, tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in ["K = 4", "other = 1", *sources]]
    cells[0].metadata["tags"] = ["parameters"]
    path = tmp_path / "chapter.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    play(path, "K = 4")
    with pytest.raises(error):
        play(path, "K = 5")


# backwards, since the last chapter takes longest: were it not the first to start, one core would wait for it
CASES = [(path, i) for path in CHAPTERS[::-1] for i in range(len(edits(path)))]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "i"), CASES, ids=lambda v: v.stem if isinstance(v, Path) else str(v + 1))
def test_what_a_chapter_suggests_runs(path, i, monkeypatch, default_dtype):
    monkeypatch.setattr(shapes, "enabled", False)  # a reader has no checks of shapes, and writes 2 for 2.0
    monkeypatch.setattr(claims, "strict", lambda: False)
    monkeypatch.setattr(claims, "_checked", {})
    monkeypatch.setattr(figures, "show", lambda figure, caption, alt: figures.plt.close(figure))
    monkeypatch.setattr(figures, "table", lambda frame, caption, digits=2: None)
    with contextlib.redirect_stdout(io.StringIO()):
        play(path, edits(path)[i][0])
    gc.collect()  # what a chapter holds is large
