"""What a link to a theorem, a formula, a verdict box, a reference or a symbol shows where one points at it.

For each page a classic script, `previews/PAGE.js`, which book.js loads when it is asked for: a browser reads no other
page of a book that is opened from disk.
"""

import json
import re
from pathlib import Path

from bs4 import BeautifulSoup, Tag

#: What is shown, by what a link leads to.
SHOWN = "div.proof.admonition[id], div.math[id], .claim-card[id], .citation[id], tr[id^=symbol-]"
#: What a preview has no use for: the chapters of a symbol, in which its link stands, and parts of other targets.
CHAPTERS = r" \((?:from )?chapters?[^()]*\)"
LEFT = "a.headerlink, details, .claim-links, .claim-card > table, .backrefs, script"


def preview(target: Tag) -> str:
    """What a link shows of its target: without addresses of its own, and without links, which would lead elsewhere."""
    shown = BeautifulSoup(str(target), "html.parser")
    for tag in shown.select(LEFT):
        tag.decompose()
    if target.name == "tr":
        return _symbol([re.sub("</?p>", "", cell.decode_contents()).strip() for cell in shown.select("td")])
    for link in shown.select("a"):
        link.unwrap()
    for tag in shown.select("[id], [aria-labelledby], [role]"):
        for name in ("id", "aria-labelledby", "role", "aria-level"):
            tag.attrs.pop(name, None)
    return re.sub(r"\s+", " ", str(shown)).strip()


def _symbol(cells: list[str]) -> str:
    """A row of the notation as a sentence, without the chapters, in which a link to it stands."""
    symbol, meaning = cells[:2]
    return f"<p>{symbol}: {re.sub(CHAPTERS, '', meaning)}</p>"


def script(page: str, text: str) -> str:
    """The script of a page, empty for one that has nothing to show."""
    written = re.search(r"<article.*</article>", text, re.DOTALL)
    article = BeautifulSoup(written[0] if written else "", "html.parser")
    found = {str(target["id"]): preview(target) for target in article.select(SHOWN)}
    return f"previews[{json.dumps(page)}] = {json.dumps(found, ensure_ascii=False)};\n" if found else ""


def install(folder: Path) -> None:
    """Put the scripts into a folder of finished pages."""
    for path in [*folder.glob("book/*.html"), *folder.glob("notebooks/**/*.html")]:
        page = path.relative_to(folder).as_posix()
        if made := script(page, path.read_text(encoding="utf-8")):
            to = folder / "previews" / f"{page.removesuffix('.html')}.js"
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(made, encoding="utf-8")
