"""What the search's index makes of formulas, places and pages; the rendered search page is tested beside the book."""

import re
from pathlib import Path

import nbformat
import pytest
from docutils.nodes import make_id
from myst_parser.mdit_to_docutils.base import default_slugify

from moe_book import build, search

PAGE = r"""<nav>Contents</nav><article class="bd-article"><section id="top"><h1><span>3. </span>Noise<a
class="headerlink" href="#top">#</a></h1>
<p>Bounds of \(\kappa M^2\).</p><div class="toctree-wrapper"><p>Contents</p></div>
<section id="sharp"><h2>Sharp</h2><p>Idea. <span class="math nohighlight">\(\tfrac1M\)</span></p>
<div class="math nohighlight">\[x\]</div>
<div class="proof theorem admonition" id="thm"><p class="admonition-title"><span>Theorem 3.1 </span>
(Chen et al., Lemmas 5.1 and C.1)</p><section class="theorem-content"><p>Let.</p></section></div>
<div class="cell"><div class="highlight"><pre>code</pre></div><div class="cell_output"><figure><img>
<figcaption>Shown.</figcaption></figure></div></div>
<div class="cell"><div class="cell_output"><div class="claim-card" id="claim-chen-lem-5.1"><p class="claim-head">
<strong class="claim-verdict">holds</strong> <code>chen-lem-5.1</code> Chen et al., Lemma 5.1</p><p>It says.</p>
<table><tr><td>1</td></tr></table><p class="claim-note">Note.</p><p class="claim-links">ledger</p></div></div></div>
</section></section></article>"""
QUESTIONS = """<article class="bd-article"><section id="top"><h1>Questions</h1><dl class="glossary"><dt id="a">one word
</dt><dt id="b">another</dt><dd><p>An answer: <a href="../notebooks/03.html#sharp">there</a>.</p></dd></dl></section>
</article>"""


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"\kappa M^2", "κM^2"),
        (r"\frac{1}{\sqrt n}", "1/√n"),
        (r"\tfrac12\,h_{m,i}", "1/2 h_m,i"),
        (r"\bar x\le\max_j|h_j|", "x≤max_j|h_j|"),
        (r"\mathrm{TV}(p,q) \in \mathbb R", "TV(p,q) ∈R"),
    ],
)
def test_formulas_are_plain(tex, text):
    assert search.plain_formula(tex) == text


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("Chen et al., Lemmas 5.1 and C.1, Remark C.2", "Lemma 5.1, Lemma C.1"),
        ("Chen et al., Lemmas E.6 to E.8", "Lemma E.6, Lemma E.7, Lemma E.8"),
        ("Nguyen et al., Eq. 5, 11 and 12", "Eq. 5, Eq. 11, Eq. 12"),
        ("Theorem 4.2 (Chen et al., Lemma 5.2)", ""),
    ],
)
def test_lists_and_ranges_of_places_are_named_one_by_one(text, members):
    assert search.places(text) == members


def written(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".html").write_text(text, encoding="utf-8")
    return folder


def test_a_page_becomes_sections_boxes_and_claims(tmp_path):
    index = search.index(written(tmp_path, notebooks__03=PAGE, book__questions=QUESTIONS))
    assert index["pages"] == [["book/questions.html", "Questions"], ["notebooks/03.html", "3. Noise"]]
    assert index["entries"] == [
        [0, "top", "section", "Questions", "", ""],
        [1, "sharp", "question", "one word", "another", "An answer."],
        [1, "top", "section", "3. Noise", "", "Bounds of κM^2."],
        [1, "sharp", "section", "Sharp", "", "Idea. 1/M … Shown."],
        [1, "thm", "theorem", "Theorem 3.1 (Chen et al., Lemmas 5.1 and C.1)", "Lemma 5.1, Lemma C.1", "Let."],
        [1, "claim-chen-lem-5.1", "claim", "Chen et al., Lemma 5.1: holds", "chen-lem-5.1", "It says. Note."],
    ]


def test_links_from_notebooks_lead_to_sections_whose_slug_is_their_id():
    """MyST looks for the slug of a heading, a copy for Colab links to the id that docutils gives it on the page."""
    sections = re.compile(r"^#{1,3} (.+)$", re.MULTILINE)
    links = []
    for path in build.chapters():
        text = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown")
        links += [(path.parent / to, slug) for to, slug in re.findall(r"\]\(([^()#\s]+\.ipynb)#([^()]+)\)", text)]
    assert len(links) > 30
    for target, slug in links:
        text = "\n".join(c.source for c in nbformat.read(target, 4).cells if c.cell_type == "markdown")
        assert any(default_slugify(title) == slug == make_id(title) for title in sections.findall(text)), (target, slug)
