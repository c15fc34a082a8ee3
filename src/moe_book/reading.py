"""What a reader is told and spared: how long a chapter takes, folds side by side, a way through a long list.

The functions take and return the text of a page, as those of `finish` do.
"""

import math
import re
from collections.abc import Iterator

from bs4 import BeautifulSoup

PACE = 200  # words a minute
DISPLAYED = 10  # words that a formula on lines of its own takes as long as; one in a line counts as a word

#: Code and formulas as Sphinx writes them: `inline` and `display` are told apart, code goes.
FORMULA = re.compile(r"<pre\b.*?</pre>|(?P<inline>\\\(.+?\\\))|(?P<display>\\\[.+?\\\])", re.DOTALL)
#: What a chapter's time leaves out: folds, code and its outputs, and what is no prose.
UNREAD = "details, .dropdown, .toggle, div.cell, .headerlink, .section-number, .cite-page, script, style"


def minutes(page: str) -> int:
    """How long the prose takes that a page shows unfolded, at least one minute."""

    def counted(found: re.Match) -> str:
        return " x" * (1 if found["inline"] else DISPLAYED if found["display"] else 0)

    written = re.search(r"<article.*?</article>", page, re.DOTALL)
    article = BeautifulSoup(FORMULA.sub(counted, written[0] if written else ""), "html.parser")
    for tag in article.select(UNREAD):
        tag.decompose()
    return max(1, math.ceil(len(re.findall(r"\S*\w\S*", article.get_text(" "))) / PACE))


def with_reading_time(page: str) -> str:
    """The time below the title of a chapter, before its formulas are set."""
    took = minutes(page)
    said = f'<p class="reading-time">{took} minute{"s" * (took > 1)} to read, without the folds</p>'
    return re.sub(r"(<article.*?</h1>)", lambda title: f"{title[1]}\n{said}", page, count=1, flags=re.DOTALL)


# --- folds side by side -------------------------------------------------------------------------

CELL = re.compile(r'<div class="cell [^"]*">\s*(?=<details class="admonition hide )')
DIV = re.compile(r"<(/?)div\b[^>]*>")
FOLD = re.compile(
    r'<details class="admonition hide [^"]*">\s*<summary><span class="collapsed">(?P<name>.*?)</span>.*?</summary>'
    r"(?P<inside>(?:(?!<details class=\"admonition hide ).)*)</details>\s*",
    re.DOTALL,
)
NAMES = 90  # letters of the names of folds that stand in one line


def _end(page: str, start: int) -> int:
    """Where the div ends that starts at a place."""
    depth = 0
    for tag in DIV.finditer(page, start):
        depth += -1 if tag[1] else 1
        if not depth:
            return tag.end()
    raise ValueError(f"page: a div is not closed: {page[start : start + 80]!r}")


def _folded(page: str) -> Iterator[tuple[int, int, re.Match]]:
    """Cells that show nothing but a fold: where they start and end, and the fold."""
    for cell in CELL.finditer(page):
        end = _end(page, cell.start())
        if fold := FOLD.fullmatch(page, cell.end(), end - len("</div>")):
            yield cell.start(), end, fold


def _together(folds: list[re.Match]) -> str:
    """Folds as one, whose summary names them or, where that takes too long, counts them."""
    names = [fold["name"] for fold in folds]
    lines = sum(
        code.count("\n") for fold in folds for code in re.findall(r"<pre\b.*?</pre>", fold["inside"], re.DOTALL)
    )
    named = "; ".join(names)
    said = named if "Code" not in names and len(named) <= NAMES else f"Code: {len(folds)} cells, {lines} lines"
    parts = "".join(f'<p class="fold-name">{fold["name"]}</p>{fold["inside"]}' for fold in folds)
    return (
        '<div class="cell tag_hide-cell docutils container">\n<details class="admonition hide above-input">\n'
        f'<summary><span class="collapsed">{said}</span><span class="expanded">Hide the code</span></summary>\n'
        f"{parts}</details>\n</div>"
    )


def joined(page: str) -> str:
    """Folds of code that follow each other with nothing to see between them, as one."""
    runs: list[list[tuple[int, int, re.Match]]] = []
    for cell in _folded(page):
        if runs and not page[runs[-1][-1][1] : cell[0]].strip():
            runs[-1].append(cell)
        else:
            runs.append([cell])
    for run in reversed([run for run in runs if len(run) > 1]):
        page = page[: run[0][0]] + _together([fold for _, _, fold in run]) + page[run[-1][1] :]
    return page


# --- the page of questions ----------------------------------------------------------------------


def with_letters(page: str) -> str:
    """Letters that lead to the words of the page of questions, above them."""
    words = re.search(r'<dl class="[^"]*glossary">.*?</dl>', page, re.DOTALL)
    if not words:
        return page
    first: dict[str, str] = {}
    for groups in re.split(r"</dd>", words[0]):
        if found := re.search(r'<dt id="(term-[^"]+)">', groups):
            first.setdefault(found[1].removeprefix("term-")[0].upper(), found[1])
    links = " ".join(f'<a href="#{anchor}">{letter}</a>' for letter, anchor in first.items())
    nav = f'<nav class="letters" aria-label="Words by their first letter">{links}</nav>\n'
    return page[: words.start()] + nav + page[words.start() :]
