"""Measured numbers reach the sentences that name them, and no sentence names one that was not measured."""

import nbformat
import pytest
from nbclient import NotebookClient

from moe_book.glue import glue, glued, put_in


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    code = "from moe_book.glue import glue\nglue('gap', 0.03172, digits=2)\nglue('text', 'man')\nglue('n', 12_000)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3").execute()
    path = tmp_path_factory.mktemp("glue") / "03_a.ipynb"
    nbformat.write(notebook, path)
    return path


def test_a_sentence_takes_the_number_of_its_chapter(chapter):
    numbers = glued([chapter])
    assert numbers == {"03_a/gap": "0.032", "03_a/text": "man", "03_a/n": "12000"}
    assert put_in("The gap is {glue:text}`gap`.", numbers, "03_a") == "The gap is 0.032."
    assert put_in("{glue:text}`03_a/n` on {glue:text}`03_a/text`", numbers) == "12000 on man"


def test_a_number_that_nobody_measured_is_refused(chapter):
    with pytest.raises(ValueError, match="03_a: expected a number that a chapter has glued, got '03_a/lead'"):
        put_in("{glue:text}`lead`", glued([chapter]), "03_a")


def test_a_name_glued_twice_or_unusable_is_refused(chapter, tmp_path):
    notebook = nbformat.read(chapter, 4)
    notebook.cells[0].outputs *= 2
    nbformat.write(notebook, tmp_path / "03_a.ipynb")
    with pytest.raises(ValueError, match="03_a/gap is glued twice"):
        glued([tmp_path / "03_a.ipynb"])
    with pytest.raises(ValueError, match="name: expected a name that Python could have, got 'a gap'"):
        glue("a gap", 1)
