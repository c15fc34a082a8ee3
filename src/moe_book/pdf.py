"""The rendered book as one PDF, `_build/moe-theory.pdf`: `python -m moe_book.pdf` is what `make pdf` runs.

Chromium prints every page by itself; then the pages are joined, and what led from one to another by its address leads
to the place in the joined file. Links to what is not in it, such as the highlighted sources, become text.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import yaml
from bs4 import BeautifulSoup
from playwright.sync_api import Browser, sync_playwright
from pypdf import PageObject, PdfReader, PdfWriter
from pypdf.constants import PageLabelStyle
from pypdf.generic import ArrayObject, DictionaryObject, FloatObject, NameObject, NullObject

from moe_book import build
from moe_book.notebooks import label

PDF = build.BUILD / "moe-theory.pdf"

#: Readies a page for paper: light, nothing folded but code that the page folds too, no links to what is not printed,
#: and nothing that a screen would scroll: what is wider than its column is drawn smaller.
#: Chromium keeps the places of those anchors alone that a page itself leads to, so each leads to all that others name.
READY = """async ([anchors, root, pages]) => {
  document.documentElement.dataset.theme = "light";
  document.querySelectorAll("details.hide").forEach(d => d.remove());
  document.querySelectorAll(".toggle-hidden").forEach(d => d.classList.remove("toggle-hidden"));
  document.querySelectorAll("details").forEach(d => d.open = true);
  document.querySelectorAll("img").forEach(i => i.loading = "eager");
  document.querySelectorAll(".scrolls").forEach(e => e.classList.remove("scrolls"));
  for (const box of document.querySelectorAll(WIDE))
    if (box.clientWidth && box.scrollWidth > box.clientWidth + 1)
      (box.querySelector(":scope > table") ?? box).style.zoom = 0.99 * box.clientWidth / box.scrollWidth;
  for (const a of [...document.links])
    if (a.href.startsWith(root) && !pages.includes(a.href.split(/[?#]/)[0])) a.removeAttribute("href");
  const links = document.createElement("div");
  links.style.display = "none";
  for (const anchor of anchors) links.append(Object.assign(document.createElement("a"), {href: "#" + anchor}));
  document.body.append(links);
}""".replace(
    "WIDE",
    '"article figure, article div.math > math, article .claim-card, article .erratum, '
    'article .table-wrapper, article .pst-scrollable-table-container"',
)
#: The theme prints no title, for its own stands in what is left out here; and no table of its breaks.
STYLE = """
@page { size: A4; margin: 18mm 16mm 20mm }
#jb-print-docs-body, #jb-print-toc, .headerlink, .toggle-button, .copybtn, form.filter { display: none !important }
.bd-main .bd-content .bd-article h1:first-of-type { display: block !important }
h1, h2, h3, h4, .rubric, .claim-head, .erratum > p:first-child, p:has(+ ul, + ol, + dl, + table) { break-after: avoid }
h1, h2, h3, h4, figure:has(img), img, tr, div.math, math { break-inside: avoid }
table, pre, .cell_input, .cell_output { break-inside: auto !important }
p, li, pre { orphans: 3; widows: 3 }
pre { white-space: pre-wrap !important }
.scrolls { box-shadow: none !important }
figcaption, figcaption * { color: #222 !important }
table.ledger thead { display: none }
table.ledger, table.ledger tbody, table.ledger tr { display: block }
table.ledger tr { padding: 0.5rem 0; border-top: 1px solid #ccc; break-inside: avoid }
table.ledger td { display: inline; border: 0; padding: 0 }
table.ledger td:not(:first-child, :empty, :has(> details))::before { content: " · " }
"""
#: Pixels of a line of A4 between those margins, as large as it is printed.
SCALE, LINE = 0.8, round((210 - 2 * 16) / 25.4 * 96 / 0.8)
FOOT = """<div style="font: 8px sans-serif; width: 100%; text-align: center; color: #666">
{title} · <span class="pageNumber"></span></div>"""


def contents() -> list[str]:
    """Pages of the book in the order of `_toc.yml`, as paths without their ending."""
    toc = yaml.safe_load((build.ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]


def read(name: str) -> tuple[str, set[tuple[str, str]]]:
    """Of a rendered page its title, with the number of its chapter, and page and anchor of all that it links to.

    Queries are left out: they filter the ledger, which paper cannot.
    """
    soup = BeautifulSoup((build.HTML / f"{name}.html").read_text(encoding="utf-8"), "html.parser")
    title, number = next(soup.h1.stripped_strings), label(name.removeprefix("notebooks/"))  # pyright: ignore[reportOptionalMemberAccess]
    links = {urldefrag(urljoin(address_of(name), a["href"])) for a in soup.find_all("a", href=True)}
    places = {(url.partition("?")[0], unquote(anchor)) for url, anchor in links}
    return (f"{number}. " if number else "") + title, places


def printed(browser: Browser, names: list[str], folder: Path) -> list[str]:
    """Print pages of the book into `folder`, each as `N.pdf`; returns their titles."""
    titles, links = zip(*map(read, names), strict=True)
    page = browser.new_page(color_scheme="light", viewport={"width": LINE, "height": 1200})
    page.emulate_media(media="print")
    page.set_default_timeout(300_000)
    for i, (name, title) in enumerate(zip(names, titles, strict=True)):
        page.goto(address_of(name))
        anchors = sorted(anchor for url, anchor in set().union(*links) if anchor and url == address_of(name))
        page.add_style_tag(content=STYLE)
        page.evaluate(READY, [anchors, build.HTML.as_uri(), [address_of(n) for n in names]])
        how = dict(prefer_css_page_size=True, scale=SCALE, print_background=True, display_header_footer=True)
        how |= dict(header_template="<p></p>", footer_template=FOOT.format(title=title))
        page.pdf(path=folder / f"{i}.pdf", **how)
    page.close()
    return list(titles)


def address_of(name: str) -> str:
    """The address of a rendered page."""
    return (build.HTML / f"{name}.html").as_uri()


def joined(names: list[str], titles: list[str], parts: list[PdfReader]) -> PdfWriter:
    """The printed pages as one document: links within it, an outline, and labels such as 3-12 for its pages.

    Raises:
        ValueError: for a link to a page or an anchor of the book that was not printed.
    """
    writer, places, home = PdfWriter(), {}, {}
    for name, title, part in zip(names, titles, parts, strict=True):
        start, here = len(writer.pages), address_of(name)
        for page in part.pages:
            home[len(writer.pages)] = here
            writer.add_page(page)
        places[here, ""] = _place(writer.pages[start], None)
        for anchor, place in part.named_destinations.items():
            page = writer.pages[start + part.get_destination_page_number(place)]
            places[here, unquote(anchor[1:])] = _place(page, float(place.top))
        writer.add_outline_item(title=title, page_number=start)
        prefix = label(name.removeprefix("notebooks/")) or title
        writer.set_page_label(start, len(writer.pages) - 1, PageLabelStyle.DECIMAL, f"{prefix}-")
    for number, here in home.items():
        for link in writer.pages[number].get("/Annots", ()):
            _lead(link.get_object(), here, places)
    return writer


def _place(page: PageObject, top: float | None) -> ArrayObject:
    """What opens a page at a height (of the whole page for None), with the zoom as it is."""
    height = NullObject() if top is None else FloatObject(top)
    return ArrayObject([page.indirect_reference, NameObject("/XYZ"), NullObject(), height, NullObject()])


def _lead(link: DictionaryObject, here: str, places: dict[tuple[str, str], ArrayObject]) -> None:
    """Let a link lead to its place in the document; one out of the book stays as it is."""
    if "/Dest" in link:
        where = (here, unquote(link["/Dest"][1:]))
    else:
        url, anchor = urldefrag(link["/A"]["/URI"])
        where = url.partition("?")[0], unquote(anchor)
        if not url.startswith(build.HTML.as_uri()):
            return
    if where not in places:
        raise ValueError(f"{here}: expected a link to a page or anchor of the book, got {'#'.join(where)}")
    link.pop("/A", None)
    link[NameObject("/Dest")] = places[where]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; FileNotFoundError where it is not installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if not path:
        raise FileNotFoundError("chromium: expected it on the path, where it prints the pages; found none")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def main() -> None:
    """Entry point: print the pages and join them."""
    names = contents()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        titles = printed(browser, names, Path(folder))
        writer = joined(names, titles, [PdfReader(Path(folder) / f"{i}.pdf") for i in range(len(names))])
    title = yaml.safe_load((build.ROOT / "_config.yml").read_text(encoding="utf-8"))["title"]
    writer.add_metadata({"/Title": title})
    writer.compress_identical_objects()
    writer.write(PDF)
    print(f"== open {PDF}: {len(writer.pages)} pages")


if __name__ == "__main__":
    main()
