"""MyST Markdown as plain Markdown: what is rewritten, and what is not."""

import nbformat
import pytest

from moe_book import publish

REFS = publish.References(
    "../",
    titles={"01_one": "One", "running": "Running", "speed": "How fast"},
    labels={"eq-a": ("(1)", "01_one"), "thm-a": ("Theorem (A)", "02_two")},
    citations={"chen2022": "Chen et al., 2022", "nguyen2025": "Nguyen et al., 2025"},
)


def plain(source):
    return publish.plain(source, REFS, "01_one")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("By {eq}`eq-a` and {prf:ref}`thm-a`.", "By (1) and [Theorem (A)](../notebooks/02_two.html)."),
        ("{cite:p}`chen2022,nguyen2025`", "(Chen et al., 2022; Nguyen et al., 2025)"),
        ("{doc}`../book/running`", "[Running](../book/running.html)"),
        ("{doc}`speed`", "[How fast](../notebooks/speed.html)"),
        ("{doc}`how it runs <../book/running>`", "[how it runs](../book/running.html)"),
        ("{prf:ref}`as shown\nthere <thm-a>`", "[as shown there](../notebooks/02_two.html)"),
        ("{ref}`above <eq-a>`", "above"),
        ("(a-target)=\n# Title", "# Title"),
        ("$$\nx\n$$ (eq-a)\n\nNext.", "$$\nx \\tag{1}$$\n\nNext."),
        (
            "[One](01_one.ipynb), [more](../book/ledger.md)",
            "[One](../notebooks/01_one.html), [more](../book/ledger.html)",
        ),
        (":::{prf:proof}\nBy {eq}`eq-a`.\n:::", "*Proof.*\n\nBy (1).\n\n∎"),
        (":::{exercise} Name\n:label: ex\n\nDo.\n:::", "> **Exercise (Name).**\n>\n>\n> Do."),
        ("```{note}\nBy {eq}`eq-a`.\n```", "> **Note.**\n>\n> By (1)."),
    ],
)
def test_what_myst_adds_is_rewritten(source, expected):
    assert plain(source) == expected


def test_directives_inside_of_directives():
    source = (
        "::::{solution} ex\n:class: dropdown\nFirst.\n\n:::{prf:lemma} L\n:label: lem\n{eq}`eq-a`\n:::\n\nLast.\n::::"
    )
    inner = "> **Lemma (L).**\n>\n> (1)"
    assert plain(source) == f"<details><summary>Solution</summary>\n\nFirst.\n\n{inner}\n\nLast.\n\n</details>"
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
    assert plain(f"{source}\n\nBy {{eq}}`eq-a`.") == f"{source}\n\nBy (1)."


def test_code_in_a_directive_stays():
    source = ":::{prf:remark}\nBy {eq}`eq-a`:\n\n```\n{eq}`eq-a`\n```\n:::"
    assert plain(source) == "> **Remark.**\n>\n> By (1):\n>\n> ```\n> {eq}`eq-a`\n> ```"


def test_quotes_lists_and_tables():
    assert plain("> By {eq}`eq-a`\n> and {cite:p}`chen2022`.") == "> By (1)\n> and (Chen et al., 2022)."
    assert plain("- `{eq}` is {eq}`eq-a`") == "- `{eq}` is (1)"
    assert plain("| a | {eq}`eq-a` |\n|---|---|\n| {eq}`eq-a` | `{eq}` |") == "| a | (1) |\n|---|---|\n| (1) | `{eq}` |"
    assert plain("- One:\n\n  :::{note}\n  {eq}`eq-a`\n  :::\n- Two") == "- One:\n\n  > **Note.**\n  >\n  > (1)\n- Two"
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
    assert {k: v[0] for k, v in refs.labels.items()} == {"eq-one": "(1)", "thm": "Theorem (T)", "eq-two": "(2)"}


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
