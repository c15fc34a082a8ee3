"""MyST Markdown as plain Markdown: what is rewritten, and what is not."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from moe_book import pages, publish
from moe_book.glue import glued
from moe_book.notebooks import label as label_of
from moe_book.notebooks import notebooks, page

REFS = publish.References(
    "../",
    titles={"01_one": "One", "running": "Running", "speed": "How fast"},
    labels={"eq-a": ("(1.1)", "01_one"), "thm-a": ("Theorem 2.1", "02_two"), "ex": ("Exercise 1.1", "01_one")},
    citations={"chen2022": "Chen et al., 2022", "nguyen2025": "Nguyen et al., 2025"},
)


OF_ALL, GLUED = publish.References.of(notebooks(), "../"), glued(notebooks())


def at(label):
    """The place that links to a label lead to."""
    return f'<a name="{label}" id="{label}"></a>'


def plain(source):
    return publish.plain(source, REFS, "01_one")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("By {eq}`eq-a` and {prf:ref}`thm-a`.", "By [(1.1)](#eq-a) and [Theorem 2.1](../notebooks/02_two.html#thm-a)."),
        ("{cite:p}`chen2022,nguyen2025`", "(Chen et al., 2022; Nguyen et al., 2025)"),
        ("{doc}`../book/running`", "[Running](../book/running.html)"),
        ("{doc}`speed`", "[How fast](../notebooks/speed.html)"),
        ("{doc}`how it runs <../book/running>`", "[how it runs](../book/running.html)"),
        ("{prf:ref}`as shown\nthere <thm-a>`", "[as shown there](../notebooks/02_two.html#thm-a)"),
        ("{ref}`above <eq-a>`", "[above](#eq-a)"),
        ("(a-target)=\n# Title", "# Title"),
        ("$$\nx\n$$ (eq-a)\n\nNext.", f"{at('eq-a')}\n\n$$\nx \\tag{{1.1}}$$\n\nNext."),
        (
            "[One](01_one.ipynb#a-b), [more](../book/ledger.md)",
            "[One](../notebooks/01_one.html#a-b), [more](../book/ledger.html)",
        ),
        (":::{prf:proof}\nBy {eq}`eq-a`.\n:::", "*Proof.*\n\nBy [(1.1)](#eq-a).\n\n∎"),
        (":::{exercise} Name\n:label: ex\n\nDo.\n:::", f"> {at('ex')}**Exercise 1.1 (Name).**\n>\n>\n> Do."),
        ("```{note}\nBy {eq}`eq-a`.\n```", "> **Note.**\n>\n> By [(1.1)](#eq-a)."),
    ],
)
def test_what_myst_adds_is_rewritten(source, expected):
    assert plain(source) == expected


def test_directives_inside_of_directives():
    source = (
        "::::{solution} ex\n:class: dropdown\nFirst.\n\n:::{prf:lemma} L\n:label: lem\n{eq}`eq-a`\n:::\n\nLast.\n::::"
    )
    inner = f"> {at('lem')}**Lemma (L).**\n>\n> [(1.1)](#eq-a)"
    assert (
        plain(source)
        == f"<details><summary>Solution of Exercise 1.1</summary>\n\nFirst.\n\n{inner}\n\nLast.\n\n</details>"
    )
    assert [part.name for part in publish.parsed(source)] == ["solution", "prf:lemma"]


@pytest.mark.parametrize(
    "source",
    [
        "```\n{eq}`eq-a`\n```",
        "```python\n# :::{note}\nx = '{doc}`nothing`'\n```",
        "    {eq}`indented`",
        "`` {eq}`eq-a` ``",
        r"\{eq}`eq-a`",
        "$\\{eq}`a$",
        "[A page elsewhere](https://example.org/a.md)",
        "A plain $x$ and `code`, $$y$$ and [a link](https://example.org).",
        "$$x$$",
    ],
)
def test_code_and_mathematics_stay(source):
    assert plain(source) == source
    assert plain(f"{source}\n\nBy {{eq}}`eq-a`.") == f"{source}\n\nBy [(1.1)](#eq-a)."


def test_code_in_a_directive_stays():
    source = ":::{prf:remark}\nBy {eq}`eq-a`:\n\n```\n{eq}`eq-a`\n```\n:::"
    assert plain(source) == "> **Remark.**\n>\n> By [(1.1)](#eq-a):\n>\n> ```\n> {eq}`eq-a`\n> ```"


def test_quotes_lists_and_tables():
    assert plain("> By {eq}`eq-a`\n> and {cite:p}`chen2022`.") == "> By [(1.1)](#eq-a)\n> and (Chen et al., 2022)."
    assert plain("- `{eq}` is {eq}`eq-a`") == "- `{eq}` is [(1.1)](#eq-a)"
    assert (
        plain("| a | {eq}`eq-a` |\n|---|---|\n| {eq}`eq-a` | `{eq}` |")
        == "| a | [(1.1)](#eq-a) |\n|---|---|\n| [(1.1)](#eq-a) | `{eq}` |"
    )
    assert (
        plain("- One:\n\n  :::{note}\n  {eq}`eq-a`\n  :::\n- Two")
        == "- One:\n\n  > **Note.**\n  >\n  > [(1.1)](#eq-a)\n- Two"
    )
    assert plain("{cite:p}`chen2022,\nnguyen2025`") == "(Chen et al., 2022; Nguyen et al., 2025)"


def test_labels_and_numbers_are_those_of_the_chapter(tmp_path):
    cells = [
        "# A title\n\n$$a$$ (eq-one)",
        "```\n$$b$$ (eq-code)\n```",
        "::::{prf:theorem} T\n:label: thm\n:::{note}\n$$c$$ (eq-two)\n:::\n::::",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(c, id=f"c{i}") for i, c in enumerate(cells)]
    )
    nbformat.write(notebook, tmp_path / "01_one.ipynb")
    refs = publish.References.of([tmp_path / "01_one.ipynb"], "../")
    assert refs.titles["01_one"] == "A title"
    assert {k: v[0] for k, v in refs.labels.items()} == {"eq-one": "(1.1)", "thm": "Theorem 1.1", "eq-two": "(1.2)"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (":::{prf:theorem} Name\nopen", "directive '{prf:theorem} Name': the fence is not closed"),
        ("::::{note}\n:::{tip}\nopen\n::::", "directive '{tip}': the fence is not closed"),
        (":::{note}\n:::{tip}\n:::\n:::", "directive '{tip}': the fence is not closed"),
        (":::\nx\n:::", "directive '': expected a name"),
        (":::{margin}\nx\n:::", "directive 'margin': no plain form"),
        ("{abbr}`x`", "role 'abbr': no plain form"),
        ("{doc}`nowhere`", "role 'doc': nothing in the book is called 'nowhere'"),
        ("{ref}`a text <thm-none>`", "role 'ref': nothing in the book is called 'thm-none'"),
        ("{cite:p}`chen2022,nobody`", "role 'cite:p': nothing in the book is called 'nobody'"),
    ],
)
def test_bad_syntax_is_refused(source, message):
    with pytest.raises(ValueError, match="^" + message.replace("{", r"\{").replace("}", r"\}")):
        plain(source)


# --- the copies for Colab -----------------------------------------------------------------------


def test_the_first_cell_is_a_form():
    code = 'seed = 0  # draws all\nn = 4_000\nrate = 1e-3  # small\nname = "a"  # of it\nlaws = (0.5, 2)  # both'
    form = publish._fields(code)
    assert form.splitlines() == [
        "#@title Numbers to change",
        *("#@markdown **seed**: draws all", 'seed = 0  #@param {type: "integer"}'),
        *("#@markdown **n**", 'n = 4000  #@param {type: "integer"}'),
        *("#@markdown **rate**: small", 'rate = 0.001  #@param {type: "number"}'),
        *("#@markdown **name**: of it", "name = 'a'  #@param {type: \"string\"}"),
        *("#@markdown **laws**: both", 'laws = (0.5, 2)  #@param {type: "raw"}'),
    ]
    assert values(form) == values(code)


def values(code):
    names = {}
    exec(code, names)
    return {name: value for name, value in names.items() if name != "__builtins__"}


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_what_the_book_folds_is_a_form_in_the_copy(path):
    before, after = nbformat.read(path, 4).cells, publish.published(path, OF_ALL, "git+x@y", GLUED).cells
    first, *rest = after
    assert first.id == "install" and "@ git+x@y" in first.source and first.metadata.cellView == "form"
    for needed in ("[chapters,transformers]", "in ('moe_theory', 'transformers'))"):
        assert (needed in first.source) == path.name.startswith("26")
    for one, other in zip(before, rest, strict=True):
        tags = {*one.metadata.get("tags", [])}
        folded = one.cell_type == "code" and bool(tags & {"hide-cell", "hide-input", "remove-cell", "remove-input"})
        assert (other.metadata.get("cellView") == "form") == folded
        assert other.source.startswith("#@title ") == folded
        assert ("jupyter" in other.metadata) == (folded and "parameters" not in tags)
        if "parameters" in tags:
            assert values(one.source) == values(other.source) and other.source.count("#@param") == len(
                values(one.source)
            )
        elif one.cell_type == "code":
            assert other.source.removeprefix(f"#@title {publish._title(one)}\n") == one.source


@pytest.mark.parametrize("path", [p for p in notebooks() if p.stem[0].isdigit()], ids=lambda p: p.stem)
def test_numbers_and_links_of_the_copy_are_those_of_the_book(path):
    """Each link within the copy leads to a place in it, and each box has the number that sphinx-proof gives it."""
    notebook = publish.published(path, OF_ALL, None, GLUED)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    places = re.findall(r'<a name="(.*?)" id="(.*?)">', text)
    assert all(a == b for a, b in places) and len(places) == len({*places})
    assert {*re.findall(r"\]\(#(.*?)\)", text)} <= {a for a, _ in places}
    numbers = {label: box.name for label, box in pages.boxes([path]).items() if label}
    assert {label: OF_ALL.labels[label][0] for label in numbers} == numbers
    assert all(f'<a name="{label}" id="{label}"></a>**{name}' in text for label, name in numbers.items())
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    found = [o["data"] for o in outputs if "text/markdown" in o.get("data", {})]
    before = [o for c in nbformat.read(path, 4).cells for o in c.get("outputs", [])]
    before = [o["data"]["text/markdown"] for o in before if "text/markdown" in o.get("data", {})]
    assert [re.sub(r"^[*]{2}.*?[*]{2} ", "", data["text/markdown"]) for data in found] == before
    html = "".join(o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {}))
    assert not [h for h in re.findall(r'href="(.*?)"', html) if not h.startswith(("https://", "../notebooks/"))]
    assert {*re.findall(r'href="#(.*?)"', text)} <= {a for a, _ in places}
    chapter = label_of(page(path))
    captions = [re.match(r"[*]{2}(Figure|Table) (.*?)[.][*]{2} ", data["text/markdown"]).groups() for data in found]
    assert all(data["text/plain"] == data["text/markdown"] for data in found)
    for kind in ("Figure", "Table"):
        of_kind = [number for what, number in captions if what == kind]
        assert of_kind == [f"{chapter}.{i}" for i in range(1, 1 + len(of_kind))]


def test_a_figure_that_moves_is_a_link_to_the_page_on_which_it_does():
    notebook = publish.published(next(p for p in notebooks() if p.stem == "04_exploration"), OF_ALL, None, GLUED)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    link = '<p>In the <a href="../notebooks/04_exploration.html">rendered book</a> this figure moves: '
    assert text.count('data-explorable="race"') == text.count(link) == 1


def test_the_install_cell_pins_what_python_imports(tmp_path, monkeypatch):
    """Of two distributions of a name the first on the path is imported, and keeps its version."""
    for folder, version in (("first", "3.0.3"), ("second", "2.0.1")):
        about = tmp_path / folder / f"MarkupSafe-{version}.dist-info"
        about.mkdir(parents=True)
        spelled = {"first": "MarkupSafe", "second": "markupsafe"}[folder]
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {spelled}\nVersion: {version}\n")
    odd = tmp_path / "second" / "odd-1.dist-info"
    odd.mkdir()
    (odd / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 0.1.43ubuntu1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    commands = []

    def run(command, check):
        commands.append((command, Path(command[command.index("-c") + 1]).read_text()))

    monkeypatch.setattr(subprocess, "run", run)
    exec(publish._install("x = 1", "git+https://host/owner/name@abc"), {})
    ((command, pins),) = commands
    assert command[-1] == "moe-theory[chapters] @ git+https://host/owner/name@abc"
    assert re.findall(r"^markupsafe==(.*)$", pins, re.MULTILINE) == ["3.0.3"]
    assert not re.search(r"[A-Z_.]", re.sub(r"==.*", "", pins)) and "odd==" not in pins
    assert len(pins.splitlines()) > 100  # what else is here


@pytest.mark.parametrize("line", ["# a comment", "n = 2**10  # of it", "n, m = 1, 2", 'name = "a # b" + "c"'])
def test_a_first_cell_of_another_form_is_refused(line):
    with pytest.raises(ValueError, match="^parameters: expected .*, got "):
        publish._fields(f"seed = 0\n{line}")


def test_a_published_book_says_where_its_pages_are_and_are_not(tmp_path):
    for name in ("index", "book/ledger", "notebooks/appendix/03_details", "_modules/index", "search"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.html").touch()
    found = ElementTree.fromstring(publish.sitemap("https://example.invalid/a/", tmp_path))
    pages = ["index", "book/ledger", "notebooks/appendix/03_details"]
    assert [loc.text for url in found for loc in url] == [f"https://example.invalid/a/{name}.html" for name in pages]
    links = re.findall(r'href="([^"]+)"', publish.not_found("https://example.invalid/a/"))
    places = ["", "book/questions.html", "search.html"]
    assert links == [f"https://example.invalid/a/{place}" for place in places]
