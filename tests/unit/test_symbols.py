"""Letters that lead to the notation."""

from moe_book.symbols import chapters_in, notation, rows_of, with_anchors, with_symbols

SPAN = '<span class="math notranslate nohighlight">\\({}\\)</span>'


def row(symbols: list[str], *cells: str) -> str:
    first = ", ".join(map(SPAN.format, symbols))
    return '<tr class="row-odd">\n' + "".join(f"<td><p>{cell}</p></td>" for cell in (first, *cells)) + "</tr>"


PAGE = (
    "<article><table>"
    + row(["K"], "clusters (chapters 1 to 3)", "–", "–")
    + row(["K"], "selected (from chapter 4 on)", "–", "–")
    + row(["h_m"], "logit of an expert", "–", "–")
    + row(["m", "j"], "an expert", "–", "–")
    + row([r"\tau"], "perturbation (chapters 20 to 24); temperature (chapter 18)", "–", "–")
    + "</table><table>"
    + row([r"\tau"], "perturbation", "signs (6)")
    + "</table></article>"
)


def test_numbers_of_chapters_are_read_as_ranges_and_those_of_algorithms_are_not():
    assert chapters_in("14 to 16, 25 and 26") == {14, 15, 16, 25, 26}
    assert chapters_in("Algorithm 1, 16") == {16} and chapters_in("24 on") == {24, 25, 26}


def test_every_row_has_an_address_of_its_own():
    rows = notation(with_anchors(PAGE))
    assert [row.anchor for row in rows] == ["symbol-K", "symbol-K-2", "symbol-h-m", "symbol-m", "symbol-tau"]
    assert [row.chapters for row in rows[2:4]] == [None, None]
    assert rows[4].chapters == {18, 20, 21, 22, 23, 24} and "symbol-tau-2" not in with_anchors(PAGE)


def test_a_letter_leads_to_what_it_means_in_its_chapter():
    """A single letter of no stated chapter is not linked."""
    rows = notation(with_anchors(PAGE))
    assert rows_of(3, rows) == {"K": "symbol-K", "h_m": "symbol-h-m"}
    assert rows_of(6, rows) == {"K": "symbol-K-2", "h_m": "symbol-h-m"}  # the signs of chapter 6 are said there
    assert rows_of(20, rows)[r"\tau"] == "symbol-tau"


def test_the_first_use_in_a_section_is_linked_and_none_in_headings_links_and_tables():
    K = SPAN.format("K")
    page = (
        f"<p>{K}</p><article><h1>On {K}</h1><p><a href='#'>{K}</a> {K}, {K}</p><table><td>{K}</td></table>"
        f"<h2>{K}</h2><figcaption>{K}</figcaption><p>{K} {SPAN.format('K=2')}</p></article>"
    )
    found = with_symbols(page, {"K": "symbol-K"}, "notation.html")
    link = '<a class="symbol" aria-label="K" href="notation.html#symbol-K">\\(K\\)</a>'
    assert found.replace(link, "!") == (
        f"<p>{K}</p><article><h1>On {K}</h1><p><a href='#'>{K}</a> !, {K}</p><table><td>{K}</td></table>"
        f"<h2>{K}</h2><figcaption>{K}</figcaption><p>! {SPAN.format('K=2')}</p></article>"
    )
