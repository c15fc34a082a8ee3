r"""The book's search: an index of its sections, boxes, claims and questions, made from the rendered pages.

Sphinx's own search ranks whole pages and fetches them for its excerpts, which a browser refuses from disk. The index is
a classic script that sets `searchIndex`; `search.js` ranks its entries. `install` puts both into a folder of pages.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from urllib.parse import urljoin

from bs4 import BeautifulSoup, Tag

STOCK = ("searchindex.js", "_static/searchtools.js", "_static/language_data.js")
SCRIPTS = ("search/minisearch.js", "search/index.js", "search/search.js")
QUESTIONS = "book/questions.html"

#: What an entry's text leaves out: code, outputs, contents lists, and what has entries of its own or repeats them.
UNSAID = (
    "div[class*=highlight]:not(.math), div.toctree-wrapper, div.cell_output, details.hide, a.headerlink, table.ledger, "
    "script, form, .erratum, .claim-map, .claim-uses, table.touched, .tally, .prev-next-area, p.needs"
)
BOXES = ".proof.admonition[id], .exercise.admonition[id]"
HEADED = "section[id]:has(> :is(h1, h2, h3))"


@dataclass(frozen=True)
class Entry:
    """What one result leads to.

    Attributes:
        page: the path of the page, from the root of the book.
        anchor: the id there.
        kind: section, theorem and the other boxes, exercise, claim or question.
        title: what the result is called.
        names: what else it is called, such as the paper's name of a theorem, or the id of a claim.
        text: what it says.
    """

    page: str
    anchor: str
    kind: str
    title: str
    names: str
    text: str


# --- formulas and places as plain text ----------------------------------------------------------

SIGN = dict(
    re.findall(
        r"(\w+) (\S+)",
        """
        alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta θ kappa κ lambda λ mu μ nu ν
        xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω ell ℓ Gamma Γ Delta Δ Theta Θ
        Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω le ≤ ge ≥ ne ≠ neq ≠ cdot · times × to → infty ∞ in ∈ approx ≈
        sum Σ prod ∏ int ∫ partial ∂ nabla ∇ pm ± dots … sqrt √ sim ~ propto ∝ langle ⟨ rangle ⟩ top ᵀ mid | otimes ⊗
        circ ° log log exp exp max max min min sup sup inf inf tanh tanh cosh cosh sinh sinh cos cos sin sin tan tan
        """,
    )
)


def plain_formula(tex: str) -> str:
    r"""A formula as a reader would type it: `\frac{1}{\sqrt n}` is 1/√n; braces, fonts and accents are left out."""
    tex = re.sub(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\w))", r"\1\2/\3\4", tex.replace(r"\|", "|"))
    tex = re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\(?:[,;:! ]|q?quad)|[$&~]", " ", tex)
    tex = re.sub(r"\\([A-Za-z]+) ?", lambda m: SIGN.get(m[1], ""), tex)
    return re.sub(r"\s+", " ", re.sub(r"[{}\\]", "", tex)).strip()


NUMBER = r"(?:[A-Z]\.?)?\d+(?:\.\d+)*|[A-Z]\.\d+"
NAMED = re.compile(
    rf"\b(Theorem|Lemma|Proposition|Corollary|Definition|Table|Figure|Claim|Section|Appendix|Remark|Eq\.|Algorithm)s? "
    rf"((?:{NUMBER})(?:(?:, | and | to )(?:{NUMBER}))+)"
)
PLURALS = {"Lemmata": "Lemma", "Lemmas": "Lemma", "Corollaries": "Corollary", "Appendices": "Appendix"}


def places(text: str) -> str:
    """The members of lists and ranges: of "Lemmas 5.1 and C.1" they are "Lemma 5.1, Lemma C.1"."""
    for plural, word in PLURALS.items():
        text = text.replace(f"{plural} ", f"{word} ")
    found = []
    for word, listed in NAMED.findall(text):
        numbers = re.findall(rf"(to )?({NUMBER})", listed)
        for (_, before), (ranged, number) in zip([("", ""), *numbers], numbers, strict=False):
            outer, last = re.fullmatch(r"(.*?)(\d+)", number).groups()  # pyright: ignore[reportOptionalMemberAccess]
            first = int(re.search(r"\d+$", before)[0]) + 1 if ranged else int(last)  # pyright: ignore
            found += [f"{word} {outer}{n}" for n in range(first, int(last) + 1)]
    return ", ".join(found)


# --- the entries of a page ----------------------------------------------------------------------


def _one(tag: Tag, selector: str) -> Tag:
    """The first tag below another one that matches; ValueError if there is none."""
    if (found := tag.select_one(selector)) is None:
        raise ValueError(f"search: expected {selector!r} in {str(tag)[:80]!r}")
    return found


def _text(tag: Tag) -> str:
    """What a tag says, its formulas plain."""
    formula = re.compile(r"\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
    text = formula.sub(lambda m: plain_formula(m[1] or m[2]), tag.get_text().replace("¶", ""))
    return re.sub(r"\s+", " ", text).strip()


def _taken(page: Tag, selector: str) -> list[Tag]:
    """The tags of a page that match, last one first so that what is inside goes before its outside; taken out."""
    return [tag.extract() for tag in reversed(page.select(selector))]


def _claim(card: Tag, page: str) -> Entry:
    """A claim, by its verdict box: where it stands, its verdict, what it says and what was found."""
    verdict, name = (_one(card, f".claim-head {tag}").extract().text for tag in ("strong", "code"))
    where = _text(_one(card, ".claim-head"))
    said = " ".join(_text(p) for p in card.select(":scope > p:not(.claim-head, .claim-links)"))
    return Entry(page, str(card["id"]), "claim", f"{where}: {verdict}", f"{name} {places(where)}".strip(), said)


def _open_claims(article: Tag, page: str) -> Iterator[Entry]:
    """The rows of the ledger whose claims have no verdict box."""
    for row in article.select("table.ledger tr[id]:not(:has(a[href*='#claim-']))"):
        says, where, verdict = (_text(cell) for cell in row.select("td")[:3])
        yield Entry(page, str(row["id"]), "claim", f"{where}: {verdict}", f"{row['id']} {places(where)}".strip(), says)


def _box(box: Tag, page: str) -> Entry:
    """A theorem or the like; its title is its number and, in brackets, what it is called."""
    title = _text(_one(box, ".admonition-title").extract())
    (kind,) = set(box["class"]) - {"proof", "admonition"}
    return Entry(page, str(box["id"]), kind, title, places(title), _text(box))


def _question(answer: Tag, page: str) -> Entry:
    """A line of the page of questions, by its answer; it leads to the section that answers."""
    before = (tag for tag in answer.previous_siblings if isinstance(tag, Tag))
    asked = [*takewhile(lambda tag: tag.name == "dt", before)][::-1]
    link = _one(answer, "a[href]").extract()
    target, _, anchor = urljoin(page, str(link["href"])).partition("#")
    title, *others = map(_text, asked)
    return Entry(target, anchor, "question", title, "; ".join(others), _text(answer).rstrip(" :.") + ".")


def _section(section: Tag, page: str) -> Entry:
    """A section without those below it, which are taken out before."""
    title = _text(_one(section, "h1, h2, h3").extract())
    return Entry(page, str(section["id"]), "section", title, places(title), _text(section))


def entries(path: Path, page: str) -> list[Entry]:
    """The entries of a rendered page; the last one is the page itself, its first section."""
    written = re.search(r"<article.*</article>", path.read_text(encoding="utf-8"), re.DOTALL)
    code = re.compile(r"<pre>.*?</pre>", re.DOTALL)  # half of all tags: without them a page is read in half the time
    article = BeautifulSoup(code.sub("", written[0] if written else ""), "html.parser")
    found = [_claim(card, page) for card in _taken(article, ".claim-card[id]")]
    found += _open_claims(article, page)
    for cell in article.select("div.cell"):  # of its outputs only what figures and tables are said to show
        captions = cell.select("figcaption")
        cell.clear()
        cell.extend(captions)
    for formula in article.select("div.math"):
        formula.string = " … "
    _taken(article, UNSAID)
    if page == QUESTIONS:
        found += [_question(answer, page) for answer in article.select("dl.glossary > dd")]
        _taken(article, "dl.glossary")
    found += [_box(box, page) for box in _taken(article, BOXES)]
    return found + [_section(section, page) for section in _taken(article, HEADED)]


# --- the index of a book ------------------------------------------------------------------------


def pages(html: Path) -> list[str]:
    """The pages that are searched: chapters, appendix pages and those of the book."""
    found = (path for folder in ("book", "notebooks", "notebooks/appendix") for path in html.glob(f"{folder}/*.html"))
    return sorted(path.relative_to(html).as_posix() for path in found)


def index(html: Path) -> dict:
    """What `search.js` reads: paths and titles of the pages, and entries as lists, whose page is a place in those."""
    found = {page: entries(html / page, page) for page in pages(html)}
    place = {page: i for i, page in enumerate(found)}
    rows = [[place[e.page], e.anchor, e.kind, e.title, e.names, e.text] for each in found.values() for e in each[::-1]]
    return {"pages": [[page, each[-1].title] for page, each in found.items()], "entries": rows}


NO_SCRIPT = (
    "<noscript><p>The search needs JavaScript. Without JavaScript use the list of chapters; "
    f'<a href="{QUESTIONS}">Questions</a> is the index of the book.</p></noscript>'
)


def install(html: Path, scripts: Path) -> None:
    """Put the index into a folder of rendered pages, beside the scripts from another one, for the search page only.

    The theme loads the stock index on every page; it goes.
    """
    shutil.copytree(scripts, html / "search", dirs_exist_ok=True)
    made = json.dumps(index(html), ensure_ascii=False, separators=(",", ":"))
    (html / "search" / "index.js").write_text(f"const searchIndex = {made};\n", encoding="utf-8")
    for name in STOCK:
        (html / name).unlink(missing_ok=True)
    stock = re.compile(rf'\s*<script src="(?:\.\./)*(?:{"|".join(map(re.escape, STOCK))})[^>]*></script>')
    for page in html.rglob("*.html"):
        text = stock.sub("", page.read_text(encoding="utf-8"))
        page.write_text(_searching(text) if page == html / "search.html" else text, encoding="utf-8")


def _searching(text: str) -> str:
    """The search page with our scripts, and with what it says to a reader without any."""
    ours = "".join(f'<script defer src="{name}"></script>' for name in SCRIPTS)
    text = text.replace("</head>", f'<link rel="stylesheet" href="search/search.css" />{ours}</head>', 1)
    return re.sub(r"<noscript>\s*<div.*?</noscript>", NO_SCRIPT, text, count=1, flags=re.DOTALL)
