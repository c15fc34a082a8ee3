"""Pages of a book, printed and joined: what leads where."""

import pytest
from pypdf import PdfReader

from moe_book import build, pdf

PAGE = """<!doctype html><title>x</title><style>@media print {{ .bd-main .bd-content .bd-article h1:first-of-type
{{ display: none }} }}</style><!-- so does the theme --><div class="bd-main"><div class="bd-content">
<article class="bd-article"><h1>{title}</h1></article></div></div><p id="here">{links}</p>
<div style="break-before: page" id="there"><h2>There</h2></div>"""
LINKS = {
    "book/index": ["../notebooks/01_one.html#there", "../notebooks/01_one.html", "#there", "https://example.org/"],
    "notebooks/01_one": ["../book/index.html?verdict=holds#here", "../_modules/x.html#f", "../ledger.json"],
}


@pytest.fixture
def printed(tmp_path, monkeypatch, browser):
    """A function of the links of two pages, each of two sheets, that prints and joins them."""

    def of(links: dict[str, list[str]]) -> tuple[PdfReader, list[str]]:
        monkeypatch.setattr(build, "HTML", tmp_path / "html")
        for name, addresses in links.items():
            path = tmp_path / "html" / f"{name}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            anchors = " ".join(f'<a href="{a}">link</a>' for a in addresses)
            path.write_text(PAGE.format(title=name[-5:], links=anchors))
        names = list(links)
        titles = pdf.printed(browser, names, tmp_path)
        pdf.joined(names, titles, [PdfReader(tmp_path / f"{i}.pdf") for i in range(2)]).write(tmp_path / "book.pdf")
        return PdfReader(tmp_path / "book.pdf"), titles

    return of


def leads(document: PdfReader, sheet: int) -> list:
    """Where the links of a sheet lead: the number of a sheet, or an address."""
    sheets = {page.indirect_reference.idnum: number for number, page in enumerate(document.pages)}
    found = (link.get_object() for link in document.pages[sheet].get("/Annots", ()))
    return [sheets[a["/Dest"][0].idnum] if "/Dest" in a else a["/A"]["/URI"] for a in found]


def test_links_lead_to_their_places_in_the_joined_file(printed):
    document, titles = printed(LINKS)
    assert titles == ["index", "1. 1_one"]
    assert leads(document, 0) == [3, 2, 1, "https://example.org/"]
    assert leads(document, 2) == [0]  # what is not printed is text
    assert document.page_labels == ["index-1", "index-2", "1-1", "1-2"]
    assert [(o.title, document.get_destination_page_number(o)) for o in document.outline] == [
        ("index", 0),
        ("1. 1_one", 2),
    ]


def test_the_first_sheet_of_a_page_has_its_title(printed):
    document, _ = printed(LINKS)
    assert [document.pages[i].extract_text().split()[0] for i in (0, 2)] == ["index", "1_one"]


def test_what_is_wider_than_a_sheet_is_drawn_smaller(browser):
    """On paper nothing scrolls: after that every box is as wide as its column, and nothing is marked as scrolling."""
    wide, style = '<p style="width: 3000px">x</p>', 'style="overflow-x: auto"'
    table = f'<figure class="scrolls" {style}><table><tr><td>{wide}</table></figure>'
    tab = browser.new_page(viewport={"width": pdf.LINE, "height": 900})
    tab.set_content(f'<article>{table}<div class="claim-card" {style}>{wide}</div></article>')
    cut = "() => [...document.querySelectorAll('figure, .claim-card')].filter(e => e.scrollWidth > e.clientWidth + 1)"
    assert tab.evaluate(f"{cut}.length") == 2
    tab.evaluate(pdf.READY, [[], "", []])
    assert tab.evaluate(f"{cut}.length") == 0 and tab.locator(".scrolls").count() == 0
    tab.close()


def test_a_link_to_nowhere_in_the_book_is_an_error(printed):
    with pytest.raises(ValueError, match="expected a link to a page or anchor of the book, got .*01_one.html#gone"):
        printed({**LINKS, "book/index": ["../notebooks/01_one.html#gone"]})


def test_the_order_is_that_of_the_contents():
    assert pdf.contents()[:2] == ["book/index", "notebooks/25_which_router"]
