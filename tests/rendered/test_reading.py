"""What readers of other books have: descriptions, reading times, few folds, citations, lists that fit a phone."""

import re
from contextlib import suppress
from itertools import pairwise

import pytest
from conftest import HTML, SILENT
from playwright.sync_api import TimeoutError
from pybtex.database import parse_string
from test_book import CHAPTERS, PAGES, barriers, load, opened, read, window

from moe_book import reading

SOURCE = sorted(p.relative_to(HTML).as_posix() for p in (HTML / "_modules").rglob("*.html"))[:3]


@pytest.mark.parametrize("page", [*PAGES, *SOURCE, "search.html"])
def test_a_page_describes_itself(page):
    """In plain words, and with no address, for a book that is not published has none."""
    said = {tag.get("name") or tag.get("property"): str(tag["content"]) for tag in read(page).select("meta[content]")}
    about = said["description"]
    assert 40 < len(about) <= 160 and not re.search(r"[\\$<>{}]", about)
    assert about == said["og:description"] and said["og:type"] == (
        "website" if page == "book/index.html" else "article"
    )
    assert said["og:title"] and not re.search(r"[\\$<>]", said["og:title"])
    assert "og:url" not in said and not read(page).select("link[rel=canonical]")


def test_the_descriptions_differ():
    about = [str(tag["content"]) for page in PAGES for tag in read(page).select("meta[name=description]")]
    assert len(set(about)) == len(PAGES)


# --- time and folds -----------------------------------------------------------------------------


def test_folds_code_and_outputs_take_no_time():
    words = "word " * 390
    page = f"<article><h1>3. Title</h1><p>{words} \\(x + y\\)</p>\\[x\\]<details>{words}</details>"
    page += f'<pre>{words}</pre><div class="cell"><p>{words}</p></div><div class="dropdown">{words}</div></article>'
    assert reading.minutes(page) == 3  # 2 words, 390, a formula in a line for one, another for ten
    assert reading.minutes("<article><p>word</p></article>") == 1


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_says_how_long_it_takes(page):
    (said,) = read(page).select("h1 + .reading-time")
    assert re.fullmatch(r"\d+ minutes to read, without the folds", said.text) and 1 < int(said.text.split()[0]) < 60


FOLDED = (
    '<div class="cell tag_hide-cell docutils container">\n<details class="admonition hide above-input">\n<summary>'
    '<span class="collapsed">{}</span><span class="expanded">Hide the code</span></summary>\n'
    '<div class="cell_input"><pre id="{}">a\nb\n</pre></div>\n</details>\n</div>\n'
)


def test_only_folds_side_by_side_become_one():
    one, two, three = (FOLDED.format(name, name[0]) for name in ("First", "Second", "Third"))
    assert reading.joined(f"{one}<p>text</p>{two}") == f"{one}<p>text</p>{two}"
    named = reading.joined(f"<p>x</p>{one}{two}<p>y</p>{three}")
    assert named.startswith("<p>x</p>") and named.endswith(three) and named.count("<details") == 2
    assert "First; Second</span>" in named and re.findall(r'id="(.)"', named) == ["F", "S", "T"]
    assert "Code: 2 cells, 4 lines</span>" in reading.joined(one + FOLDED.format("Code", "C"))


NEIGHBOURS = """() => [...document.querySelectorAll('div.cell:has(> details.hide:only-child)')]
    .filter(e => e.nextElementSibling?.matches('div.cell:has(> details.hide:only-child)'))
    .map(e => e.innerText)"""


@pytest.mark.parametrize("page", ["notebooks/05_router_centers.html", "notebooks/12_beyond_gaussians.html"])
def test_an_address_in_a_fold_opens_it(browser, page):
    tab, complaints = opened(browser, page)
    assert tab.evaluate(NEIGHBOURS) == []
    fold = tab.locator("details.hide:has(.fold-name)").first
    assert fold.get_attribute("open") is None
    fold.locator("pre").last.evaluate("e => { e.id = 'inside'; location.hash = 'inside'; }")
    tab.wait_for_selector("#inside", state="visible")
    assert complaints == []
    tab.context.close()


# --- citations ----------------------------------------------------------------------------------


def test_a_claim_and_a_page_are_cited_by_keyboard(browser):
    page = "notebooks/03_smooth_routing.html"
    tab, complaints = opened(browser, page)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for button, key, line in (
        ("[id='claim-chen-lem-5.1']", "chen-lem-5.1", f"claim chen-lem-5.1, {page}#claim-chen-lem-5.1"),
        (".cite-page", "03_smooth_routing", f"“3. Noise makes routing smooth”, {page}"),
    ):
        tab.focus(f"{button} button.cite")
        tab.keyboard.press("Enter")
        tab.wait_for_function("() => document.activeElement.closest('p').nextElementSibling?.matches('.cited')")
        lines = "document.activeElement.closest('p').nextElementSibling"
        said, entry = tab.evaluate(f"() => [...{lines}.querySelectorAll('output')].map(e => e.value)")
        assert re.search(r"\(20\d\d\)\. Mixture of Experts, Checked, version \d", said) and said.endswith(line)
        [found] = parse_string(entry, "bibtex").entries.values()
        assert found.fields["title"] == "{Mixture of Experts, Checked}" and found.key == f"moe_theory:{key}"
        assert found.fields["note"] == line.replace("_", r"\_").replace("#", r"\#")
        tab.evaluate(f"() => {lines}.querySelector('button').focus()")
        tab.keyboard.press("Enter")
        tab.wait_for_function("() => document.activeElement.textContent === 'Copied BibTeX'")
        assert tab.evaluate("() => navigator.clipboard.readText()") == entry
    names = tab.eval_on_selector_all(".claim-card button.cite", "all => all.map(e => e.getAttribute('aria-label'))")
    assert names and len(set(names)) == len(names) and all(name.startswith("cite the claim ") for name in names)
    assert complaints == []
    tab.context.close()


def test_the_list_of_chapters_shows_where_one_is_and_the_search(browser):
    """Though the theme scrolls it to where it stood on the page before."""
    tab, _ = opened(browser, "book/ledger.html")
    for page in ("book/ledger.html", "notebooks/01_patch_task.html", "notebooks/22_spare_experts.html"):
        load(tab, [], page)
        for seen in (".bd-sidebar-primary li.current > a", ".bd-sidebar-primary .search-button-field"):
            box = tab.locator(seen).first.bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= tab.viewport_size["height"], (page, seen)
    tab.context.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_the_menu_buttons_open_and_close_what_they_say(browser, width):
    tab, complaints = opened(browser, "notebooks/04_exploration.html", width)
    for name, narrow in (("primary", (360, 1280)), ("secondary", (360,))):
        if width not in narrow:
            continue
        place = tab.locator(f".bd-sidebar-{name}").first
        shown = "e => { const b = e.getBoundingClientRect(); return b.width && b.right > 0 && b.left < innerWidth; }"
        before = bool(place.evaluate(shown))
        tab.locator(f".{name}-toggle:visible").click()
        now = f"Boolean(({shown})(document.querySelector('.bd-sidebar-{name}')))"
        tab.wait_for_function(f"before => {now} !== before", arg=before)
        assert before == (width == 1280)
        if width == 360:
            tab.keyboard.press("Escape")
            tab.wait_for_function("() => !document.querySelector('dialog[open]')")
    assert complaints == []
    tab.context.close()


# --- ledger, map and questions ------------------------------------------------------------------


def test_the_ledger_is_cards_with_labels_on_a_phone(browser):
    tab, _ = opened(browser, "book/ledger.html", 360)
    cells = tab.locator("table.ledger tbody tr").first.locator("td")
    labels = [cell.evaluate("e => getComputedStyle(e, '::before').content") for cell in cells.all()]
    assert labels[1:] == [f'"{name}: "' for name in ("where", "verdict", "settled in", "sabotage score")]
    boxes = [cell.bounding_box() for cell in cells.all()]
    assert all(b["y"] >= a["y"] + a["height"] for a, b in pairwise(boxes))
    height = tab.locator("form.filter").bounding_box()["height"]
    tab.fill("input[name=text]", "theorem 4.1")
    assert tab.locator("form.filter").bounding_box()["height"] == height < 330
    tab.context.close()


@pytest.mark.parametrize("width", [1280, 1920])
def test_a_score_that_opens_moves_no_column(browser, width):
    tab, _ = opened(browser, "book/ledger.html", width)
    columns = "() => [...document.querySelectorAll('table.ledger th')].map(e => e.getBoundingClientRect().left)"
    before = tab.evaluate(columns)
    tab.eval_on_selector_all("table.ledger details", "all => all.forEach(e => { e.open = true; })")
    assert tab.evaluate(columns) == before and len(before) == 5
    tab.context.close()


def test_a_phone_shows_the_map_as_lists(browser):
    tab, _ = opened(browser, "book/map.html", 360)
    lists, maps = tab.locator(".claim-uses"), tab.locator(".claim-map")
    assert lists.count() == maps.count() > 3
    assert all(one.is_visible() for one in lists.all()) and not any(one.is_visible() for one in maps.all())
    size = "all => Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))"
    assert tab.eval_on_selector_all(".claim-uses *:not(math *)", size) >= 11
    assert "$" not in tab.inner_text("article")
    tab.context.close()


def test_the_questions_are_filtered_and_have_letters(browser):
    tab, complaints = opened(browser, "book/questions.html", 360)
    for letter in read("book/questions.html").select(".letters a"):
        assert tab.locator(letter["href"]).inner_text()[0].lower() == letter.text.lower()
    tab.fill("input[name=text]", "z-loss")
    assert tab.locator("dl.glossary dt:visible").first.inner_text().startswith("router z-loss")
    assert tab.locator("dl.glossary dd:visible").count() == 1 and tab.locator("h2:visible").count() == 1
    assert tab.inner_text("form.filter output").startswith("1 of ") and "text=z-loss" in tab.url
    assert tab.evaluate("() => document.querySelector('article').offsetHeight") < 1500 and complaints == []
    tab.context.close()


# --- what one points at, and every width --------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_preview_leaves_the_sentence_to_be_read_and_is_one_box(browser, scheme):
    tab, _ = opened(browser, "notebooks/11_two_gaussians.html", scheme=scheme)
    for link in tab.locator("article p a[href='#thm-2g-signs']:visible").all()[:3]:
        link.scroll_into_view_if_needed()
        link.hover()
        tab.wait_for_selector("#preview", state="visible")
        place, box = link.bounding_box(), tab.locator("#preview").bounding_box()
        assert box["y"] >= place["y"] + place["height"] or box["y"] + box["height"] <= place["y"]
        inner = tab.locator("#preview > *").evaluate(
            "e => [getComputedStyle(e).borderTopWidth, getComputedStyle(e).boxShadow]"
        )
        assert inner == ["0px", "none"]
        tab.keyboard.press("Escape")
        tab.mouse.move(5, 5)
    tab.context.close()


WIDTHS = (360, 768, 1280, 1920)
OPEN = """() => { document.querySelectorAll('article details').forEach(e => { e.open = true; });
    document.querySelectorAll('.toggle-hidden').forEach(e => e.classList.remove('toggle-hidden'));
    dispatchEvent(new Event('resize')); }"""
SETTLED = "() => document.getAnimations().every(e => e.playState !== 'running')"  # sidebars and folds move into place


@pytest.fixture(scope="module")
def resized(browser):
    return window(browser)


@pytest.mark.parametrize("page", PAGES)
def test_nothing_scrolls_without_a_sign_at_any_width_be_the_folds_open(resized, page):
    tab, complaints = resized
    load(tab, complaints, page)
    for state in ("closed", "open"):
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            with suppress(TimeoutError):
                tab.wait_for_function(
                    f"() => innerWidth === {width} && ({SETTLED})() && !({SILENT})().length", timeout=3000
                )
                continue
            raise AssertionError((state, width, tab.evaluate(SILENT)))
        tab.evaluate(OPEN)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "page", ["notebooks/03_smooth_routing.html", "notebooks/appendix/04_details.html", "book/ledger.html"]
)
def test_folds_are_accessible(browser, page, scheme):
    tab, _ = opened(browser, page, scheme=scheme)
    tab.evaluate(OPEN)
    tab.wait_for_function(SETTLED)
    assert barriers(tab, scheme) == []
    tab.context.close()
