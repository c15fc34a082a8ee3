"""The search page, in the browser and from disk: what a reader types leads to the section that answers."""

import gzip
import json
import re
from functools import cache
from itertools import pairwise

import pytest
import yaml
from bs4 import BeautifulSoup
from conftest import HTML, ROOT
from test_book import PAGES, barriers, window

from moe_book.claims import registry

#: What readers typed, or the trade says, and where its answer is: the section, box or claim that has to come first.
ASKED = {
    # the paper's lemma as the book states it; its verdict box comes second
    "Lemma 5.1": "notebooks/03_smooth_routing.html#thm-smooth-paper",
    # "At even load the balancing loss on softmax probabilities has no slope", with the gradient at any load
    "load balancing loss gradient": "notebooks/07_load_normalization.html#at-even-load-the-loss-is-flat",
    # "A slope below the limit means that the router learns nothing from the task"
    "is my router learning anything": "notebooks/26_your_own_moe.html#three-tests-show-what-a-layer-computes",
    # Theorem 14.1: zero exactly where the selected experts agree, at K = 1 always
    "does top-k then softmax train": "notebooks/14_order_of_operations.html#when-it-is-zero",
    # the book's own; a paper's result has the paper's name before it
    "Theorem 4.2": "notebooks/04_exploration.html#thm-explore-52",
    "chen-lem-5.1": "notebooks/03_smooth_routing.html#claim-chen-lem-5.1",
    "auxiliary loss": "notebooks/07_load_normalization.html#at-even-load-the-loss-is-flat",
    "load-balancing loss": "notebooks/07_load_normalization.html#at-even-load-the-loss-is-flat",
    "expert collapse": "notebooks/appendix/06_details.html#balancing-the-load-helps-linear-experts",
    "global load balancing": "notebooks/26_your_own_moe.html#pooled-balance-can-hide-collapse",
    "top-k softmax order": "notebooks/14_order_of_operations.html#one-number-between-the-two-orders",
    "dead experts": "notebooks/05_router_centers.html#in-practice",
    "top-2": "notebooks/25_which_router.html#one-expert-before-or-after",
    "router z-loss": "notebooks/21_identifiability.html#trained-twice",
    "upcycling": "notebooks/14_order_of_operations.html#when-it-is-zero",
    "token dropping": "notebooks/25_which_router.html#what-this-means-for-someone-who-trains-a-mixture",
    "capacity": "notebooks/25_which_router.html#what-this-means-for-someone-who-trains-a-mixture",
    "noisy top-k": "notebooks/03_smooth_routing.html#each-probability-is-one-integral",
    "expert choice": "notebooks/14_order_of_operations.html#who-does-what",
    "loss-free balancing": "notebooks/26_your_own_moe.html#most-families-of-the-library-pass",
    "why do experts specialize": "notebooks/04_exploration.html#the-leader-runs-away",
    "how many experts": "notebooks/04_exploration.html#in-practice",
    "which router should I take": "notebooks/25_which_router.html#what-this-means-for-someone-who-trains-a-mixture",
}
LINKS = "links => links.map(a => a.getAttribute('href'))"


@pytest.fixture(scope="module")
def index() -> dict:
    return json.loads((HTML / "search" / "index.js").read_text(encoding="utf-8").partition("= ")[2].rstrip(";\n"))


@cache
def ids(page: str) -> set[str]:
    return {tag["id"] for tag in BeautifulSoup((HTML / page).read_text(encoding="utf-8"), "html.parser").select("[id]")}


@pytest.fixture(scope="module")
def searching(browser):
    """The search page in a window, and what it should not do."""
    tab, complaints = window(browser)
    tab.goto((HTML / "search.html").as_uri())
    tab.wait_for_function("() => document.querySelector('.search-count')")
    yield tab, complaints
    tab.context.close()


def found(tab, query: str) -> list[str]:
    """Where the results of a query lead, in order."""
    tab.goto("about:blank")
    tab.goto((HTML / "search.html").as_uri() + "?q=" + query.replace(" ", "+"))
    tab.wait_for_function("() => document.querySelector('.search-count')?.textContent")
    return tab.eval_on_selector_all(".search-list > li > a", LINKS)


@pytest.mark.parametrize("query", ASKED)
def test_what_is_asked_is_answered_first(searching, query):
    tab, complaints = searching
    first, *_ = found(tab, query)
    page, _, anchor = first.partition("#")
    assert first == ASKED[query] and anchor in ids(page) and complaints == []


def test_a_lemma_has_its_box_and_its_verdict_at_the_top(searching):
    assert "notebooks/03_smooth_routing.html#claim-chen-lem-5.1" in found(searching[0], "Lemma 5.1")[:3]
    assert "notebooks/appendix/05_outcome.html#thm-router-main" in found(searching[0], "Theorem 4.2")[:6]


def test_every_entry_leads_to_a_place_and_every_page_has_one(index):
    pages = [page for page, _ in index["pages"]]
    assert pages == PAGES
    assert all(anchor in ids(pages[page]) for page, anchor, *_ in index["entries"])
    assert {page for page, *_ in index["entries"]} == {*range(len(pages))}
    claims = {names.split(" ")[0] for *_, kind, _, names, _ in index["entries"] if kind == "claim"}
    assert claims == registry().keys()


def test_no_entry_has_code_or_contents(index):
    """Titles of two sections in a row are a list of contents, be they with their numbers or without."""
    titles = [title for _, _, kind, title, *_ in index["entries"] if kind == "section"]
    bare = [re.sub(r"^[A-Z]?[\d.]+ ", "", title) for title in titles]
    listed = {f"{a} {b}" for names in (titles, bare) for a, b in pairwise(names) if a != b and len(a + b) > 20}
    for *_, title, _, text in index["entries"]:
        assert not any(pair in text for pair in listed), title
        assert "torch_stream(" not in text and "\\(" not in text and "{glue" not in text, title


def test_the_index_is_light_and_on_the_search_page_only():
    size = {p.name: len(gzip.compress(p.read_bytes(), 9)) for p in (HTML / "search").glob("*.js")}
    assert size["index.js"] < 400e3 and size["minisearch.js"] < 20e3
    for path in HTML.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert ("search/index.js" in text) == (path.name == "search.html"), path
        assert not re.search(r'(src|href)="[^"]*(searchindex|searchtools|language_data|genindex)', text), path
        assert 'rel="index"' not in text, path


def test_each_line_of_the_questions_leads_to_a_section():
    """Never to the top of a page; each has an answer of one sentence before its link."""
    soup = BeautifulSoup((HTML / "book" / "questions.html").read_text(encoding="utf-8"), "html.parser")
    answers = soup.select("dl.glossary > dd")
    assert 40 <= len(answers) <= 70
    for answer in answers:
        (link,) = answer.select("a.reference")
        page = (HTML / "book" / link["href"].partition("#")[0]).resolve()
        section = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").find(id=link["href"].partition("#")[2])
        assert section and section.name == "section" and section.find(["h2", "h3"], recursive=False), link["href"]
        sentence = answer.text[: answer.text.rindex(link.text)].strip()
        assert sentence.endswith(":") and ". " not in sentence


def test_questions_are_the_first_page_to_look_up():
    parts = {part["caption"]: part["chapters"] for part in yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]}
    assert parts["To look up"][0] == {"file": "book/questions"}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_page_is_accessible_and_fits(browser, width, scheme):
    tab, complaints = window(browser, width, scheme)
    assert len(found(tab, "softmax gradient")) == 20
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= width
    assert complaints == []
    assert barriers(tab, scheme) == []
    tab.context.close()


def test_the_keyboard_reaches_every_result(searching):
    """From the field, which has the focus, by the tab key to the first result; what is typed is counted and marked."""
    tab, _ = searching
    found(tab, "frozen router")
    tab.keyboard.press("Control+A")
    tab.keyboard.type("upcycling")
    tab.wait_for_function("() => location.search === '?q=upcycling'")
    status = tab.locator(".search-count")
    assert status.get_attribute("aria-live") == "polite" and re.fullmatch(r"\d+ results?", status.inner_text())
    assert tab.locator(".search-list mark").first.inner_text().lower() == "upcycling"
    tab.keyboard.press("Tab")
    assert tab.evaluate("() => document.activeElement.closest('.search-list li') !== null")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/14_order_of_operations.html#when-it-is-zero")


def test_the_rest_of_many_results_is_shown_when_it_is_asked_for(searching):
    tab, _ = searching
    assert len(found(tab, "router")) == 20
    tab.click(".bd-search-container button:has-text('Show all')")
    assert tab.locator(".search-list > li").count() > 20
    assert tab.evaluate(
        "() => document.activeElement.closest('li') === document.querySelectorAll('.search-list li')[20]"
    )


def test_a_slip_of_the_pen_is_forgiven_and_nothing_is_said_to_be_nothing(searching):
    tab, _ = searching
    assert found(tab, "softmx")
    assert found(tab, "zzzzqqqq") == [] and "Nothing found" in tab.inner_text(".search-count")


def test_what_no_section_has_is_said_to_be_only_near(searching):
    """All words have to be in one section, those of a word with hyphens in a row; the last may be begun only."""
    tab, _ = searching
    for query in ("router z-loss schedule", "softmx", "hash-routed experts"):
        assert found(tab, query) and tab.inner_text(".search-count") == "Nothing has all these words. The nearest:", (
            query
        )
    for query in ("router z-loss", "router z-los", "load balancing losses", "Lemma 5.1", "chen-lem-5.1"):
        assert found(tab, query) and re.fullmatch(r"\d+ results?", tab.inner_text(".search-count")), query


def test_the_field_has_one_ring(searching):
    tab, _ = searching
    found(tab, "router")
    assert tab.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "none"
    assert tab.evaluate("() => document.activeElement.matches('form.bd-search input')")


def test_the_field_of_every_page_leads_to_the_search(browser):
    tab, complaints = window(browser)
    tab.goto((HTML / "notebooks" / "03_smooth_routing.html").as_uri())
    tab.click("button.search-button__button >> visible=true")
    tab.keyboard.type("upcycling")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".search-list li")
    assert "search.html?q=upcycling" in tab.url and complaints == []
    tab.context.close()


def test_without_scripts_the_page_says_where_the_questions_are(browser):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto((HTML / "search.html").as_uri())
    assert "Questions is the index" in tab.inner_text(".bd-search-container")
    context.close()
