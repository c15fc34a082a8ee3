"""Letters that lead to their row of the notation, where a chapter first uses them in a section.

The functions take and return the text of a page, before its formulas are set.
"""

import html
import re
from typing import NamedTuple

from bs4 import BeautifulSoup

from moe_book.mathml import mathml

LAST = 26  # chapter
COLUMNS = 4  # at least, of the table that says what symbols mean in book and papers; others have fewer

SPAN = r'<span class="math notranslate nohighlight">\\\((?P<formula>[^<]+?)\\\)</span>'
#: Lone formulas, sections, and what holds words that are no running text.
TOKEN = re.compile(
    rf"{SPAN}|(?P<section><h2\b)|<(?P<end>/?)(?P<tag>a|h[1-6]|table|summary|figcaption|button|pre|script)\b[^>]*>"
)
INDEXED = re.compile(r"_|\\mathcal")
ROW = re.compile(r'<tr class="row-[^"]*">(?=\s*<td>)')


class Row(NamedTuple):
    """A row of the notation: its anchor, its symbols as LaTeX, and the chapters that it speaks of, if it says so."""

    anchor: str
    symbols: tuple[str, ...]
    chapters: frozenset[int] | None


def chapters_in(text: str) -> frozenset[int]:
    """The numbers in a text such as `14 to 19, 25 and 26` or `14 on`; a number of an algorithm is none."""
    found = set()
    for first, last, on in re.findall(r"(?<!Algorithm )\b(\d+)(?: to (\d+)| (on)\b)?", text):
        found |= set(range(int(first), (LAST if on else int(last or first)) + 1))
    return frozenset(found)


def _chapters(meaning: str) -> frozenset[int] | None:
    """The chapters of a row of the first table; None where one of its meanings stands for all of the others."""
    parts = [re.findall(r"chapters? ([\d, toand]+)", part) for part in meaning.split(";")]
    return chapters_in(" ".join(map(" ".join, parts))) if all(parts) else None


def with_anchors(page: str) -> str:
    """The page of notation, each row of its table of symbols with an address of its own."""
    taken: dict[str, int] = {}

    def anchored(found: re.Match) -> str:
        cells = page[found.end() : page.index("</tr>", found.end())].split("</td>")
        if len(cells) <= COLUMNS or not (symbol := re.search(SPAN, cells[0])):
            return found[0]
        name = "symbol-" + "-".join(re.findall(r"[A-Za-z0-9]+", symbol["formula"]))
        taken[name] = taken.get(name, 0) + 1
        name += f"-{taken[name]}" if taken[name] > 1 else ""
        return f'{found[0][:-1]} id="{name}">'

    return ROW.sub(anchored, page)


def notation(page: str) -> list[Row]:
    """The rows of an anchored page."""
    rows = BeautifulSoup(page, "html.parser").select("tr[id]")
    cells = {str(row["id"]): [cell.get_text() for cell in row.find_all("td")] for row in rows}
    return [
        Row(anchor, tuple(re.findall(r"\\\((.+?)\\\)", symbols)), _chapters(meaning))
        for anchor, (symbols, meaning, *_) in cells.items()
    ]


def rows_of(chapter: int, rows: list[Row]) -> dict[str, str]:
    """The anchor of every symbol that is linked in a chapter.

    A row that names its chapters counts in these, any other for symbols with an index only, since single letters change
    their meaning.
    """
    found = {s: row.anchor for row in rows if row.chapters is None for s in row.symbols if INDEXED.search(s)}
    here = [row for row in rows if chapter in (row.chapters or ())]
    return found | {symbol: row.anchor for row in reversed(here) for symbol in row.symbols}


def with_symbols(page: str, anchors: dict[str, str], address: str) -> str:
    """A chapter in which the first lone symbol of each kind in a section is a link to its row at an address."""
    inside, linked = 0, set()

    def link(found: re.Match) -> str:
        nonlocal inside
        if found["tag"] or found["section"]:
            if found["section"]:
                linked.clear()
            inside += -1 if found["end"] else 1
            return found[0]
        symbol = html.unescape(found["formula"])
        if inside or symbol in linked or symbol not in anchors:
            return found[0]
        linked.add(symbol)
        said = re.sub(r"<[^>]+>", "", mathml(symbol))  # what is read out: no reader takes a name from MathML
        return f'<a class="symbol" aria-label="{said}" href="{address}#{anchors[symbol]}">\\({found["formula"]}\\)</a>'

    start, end = page.find("<article"), page.find("</article>")
    return page[:start] + TOKEN.sub(link, page[start:end]) + page[end:] if start >= 0 else page
