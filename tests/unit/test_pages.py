"""What pages say of where a claim stands: in its paper, and in the book."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml
from bs4 import BeautifulSoup
from pybtex.database import parse_file, parse_string

from moe_book import build, claims, notebooks, pages

REGISTRY = claims.registry()
BOXES = pages.boxes(build.chapters())
DISPLAYS = {  # about displayed formulas of a lemma or its proof, or a remark below it, which a chapter's text takes up
    "chen-lem-e1",
    "chen-lem-e3-sign",
    "chen-lem-e5-display",
    "chen-lem-e16-remark",
}


def chapter(path, *cells):
    """A notebook with these Markdown cells."""
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(c) for c in cells]), path)
    return path


def test_boxes_are_numbered_by_kind_and_know_their_proofs(tmp_path):
    one = chapter(
        tmp_path / "07_a.ipynb",
        ":::{prf:theorem} Name\n:label: thm-a\nText.\n:::\n\n::::{prf:lemma}\n:label: lem-a\nText.\n::::",
        ":::{prf:theorem}\n:label: thm-b\nText.\n:::\n\nThis is why:\n\n:::{prf:proof}\nText.\n:::",
        ":::{prf:theorem}\n:label: thm-e\nText.\n:::\n\n:::{prf:proof}\n*{prf:ref}`lem-a`.* Text.\n:::",
    )
    other = chapter(tmp_path / "12_b.ipynb", ":::{prf:theorem}\n:label: thm-c\nText.\n:::")
    (tmp_path / "appendix").mkdir()
    more = chapter(tmp_path / "appendix" / "07_more.ipynb", ":::{prf:theorem}\n:label: thm-f\nText.\n:::")
    unnumbered = chapter(tmp_path / "speed.ipynb", ":::{prf:theorem}\n:label: thm-d\nText.\n:::")
    assert pages.boxes([one, other, unnumbered, more]) == {
        "thm-a": pages.Box("Theorem 7.1", "07_a"),
        "lem-a": pages.Box("Lemma 7.1", "07_a", proved=True),
        "thm-b": pages.Box("Theorem 7.2", "07_a", proved=True),
        "thm-e": pages.Box("Theorem 7.3", "07_a"),
        "thm-c": pages.Box("Theorem 12.1", "12_b"),
        "thm-f": pages.Box("Theorem A7.1", "appendix/07_more"),
    }


def test_a_proof_before_its_box_is_refused(tmp_path):
    """Also where a box without a label stands in the chapter before."""
    other = chapter(tmp_path / "06_b.ipynb", ":::{prf:theorem}\nText.\n:::\n\n:::{prf:proof}\nText.\n:::")
    path = chapter(tmp_path / "07_a.ipynb", ":::{prf:proof}\nText.\n:::\n\n:::{prf:theorem}\n:label: a\nText.\n:::")
    for chapters in ([path], [other, path]):
        with pytest.raises(ValueError, match=r"^07_a.ipynb: expected a box .* got a proof before any box"):
            pages.boxes(chapters)


@pytest.mark.parametrize("claim", REGISTRY)
def test_a_settled_theorem_names_a_box_of_its_chapter(claim):
    row = REGISTRY[claim]
    boxed = pages.derived(claim, BOXES)
    if "verdict" in row and pages.kind(row) == "theorem":
        assert bool(boxed) != (claim in DISPLAYS)


def test_links_lead_to_the_box_from_every_page():
    box = BOXES["thm-tv"]
    name = f'<a class="claim-box" href="{{}}#thm-tv">{box.name}</a>'
    away, near = name.format("../notebooks/03_smooth_routing.html"), name.format("")
    assert pages.derived("book-smooth-tv", BOXES) == [f"Proved in: {away}"]
    assert pages.derived("book-smooth-tv", BOXES, "03_smooth_routing") == [f"Proved in: {near}"]
    deeper = name.format("../../notebooks/03_smooth_routing.html")
    assert pages.derived("book-smooth-tv", BOXES, "appendix/03_details") == [f"Proved in: {deeper}"]


def test_what_is_only_stated_or_proved_in_part_is_not_called_proved():
    stated, part = pages.derived("chen-prop-e9", BOXES)
    assert stated.startswith("Stated in: ") and part.startswith("Proved in part in: ")
    assert all(line.startswith("Stated in: ") for line in pages.derived("chen-thm-4.2", BOXES))


@pytest.mark.parametrize("label", ["thm-none", "thm-tight"])
def test_a_label_that_the_chapter_does_not_have_is_refused(label, monkeypatch):
    changed = REGISTRY | {"chen-lem-c.3": REGISTRY["chen-lem-c.3"] | {"box": [label]}}
    monkeypatch.setattr(pages, "registry", lambda: changed)
    with pytest.raises(ValueError, match=rf"chen-lem-c.3: chapter 03 has no box '{label}'"):
        pages.derived("chen-lem-c.3", BOXES)


def test_ranges_are_found_by_their_members():
    assert pages.members("Proposition E.9, Lemma E.10 to E.12") == ["Lemma E.10", "Lemma E.11", "Lemma E.12"]
    assert pages.members("Eq. 3.1 to 3.3, Algorithm 1") == ["Eq. 3.1", "Eq. 3.2", "Eq. 3.3"]
    assert pages.members("Theorem 5, Eq. 9 to 11, Lemma 2") == ["Eq. 9", "Eq. 10", "Eq. 11"]
    assert pages.members("Theorem 4, Theorem 6") == []


def ledger():
    """A ledger of the registry as if every claim were settled in a chapter of its number."""
    keys = ("id", "paper", "where", "says", "chapter")
    rows = [
        {**{key: row[key] for key in keys}, "verdict": row.get("verdict", "open"), "notebook": f"{row['chapter']}_x"}
        for row in REGISTRY.values()
    ]
    return {"claims": rows}


def test_the_map_lists_every_claim_once_with_its_uses_both_ways():
    graph, page = pages.resting(), BeautifulSoup(pages.map_page(ledger()), "html.parser")
    entries = {item["id"].removeprefix("map-"): item for item in page.select("ul.claim-uses li")}
    assert len(page.select("ul.claim-uses li")) == len(graph) and set(entries) == set(graph)
    for claim, item in entries.items():
        on, _, by = item.text.partition("used by ")
        named = [link["href"].removeprefix("#map-") for link in item.select("a.claim-rest")]
        users = [user for user, others in graph.items() if claim in others]
        assert named == [*graph[claim], *users] and bool(by) == bool(users), claim
        assert ("rests on" in on) == bool(graph[claim]), claim


def test_the_map_draws_every_claim_that_has_a_use():
    graph, page = pages.resting(), BeautifulSoup(pages.map_page(ledger()), "html.parser")
    nodes = page.select(".claim-map a.node")
    near = {(node["data-claim"], other) for node in nodes for other in node["data-near"].split()}
    used = {(claim, other) for claim, others in graph.items() for other in others}
    assert near == used | {(other, claim) for claim, other in used}
    assert {node["data-claim"] for node in nodes} == {claim for pair in used for claim in pair}
    assert all(node["href"].endswith(f"#claim-{node['data-claim']}") for node in nodes)


def test_the_map_names_the_longest_chain_and_what_a_verdict_touches():
    graph, page = pages.resting(), BeautifulSoup(pages.map_page(ledger()), "html.parser")
    (said,) = (p for p in page.select("p") if "longest chain" in p.text)
    length = int(re.search(r"longest chain has (\d+) claims", said.text)[1])
    chain = [link["title"] for link in said.select("a")][-length:]
    assert all(before in graph[after] for before, after in pairwise(chain))
    assert length == max(map(len, pages.claim_graph.chains(graph).values()))
    touched = {row.td.a["title"]: row for row in page.select("table.touched tbody tr")}
    weak = {c for c, row in REGISTRY.items() if row.get("verdict", "open") not in pages.FIRM}
    assert set(touched) == {c for c in weak if any(c in others for others in graph.values())}
    for claim, row in touched.items():
        direct = {user for user, others in graph.items() if claim in others}
        above = direct.copy()
        while more := {user for user, others in graph.items() if above & set(others)} - above:
            above |= more
        assert {link["title"] for link in row.select("td:nth-child(3) a")} == direct
        assert int(row.select("td")[3].text) == len(above)


def test_the_ledger_says_on_how_many_claims_one_rests_and_how_many_rest_on_it(monkeypatch):
    graph = {"a": [], "b": ["a"], "c": ["a", "b"], "d": []}
    monkeypatch.setattr(pages, "resting", lambda: graph)
    link = '<a class="claim-rest" href="map.html#map-{}">{}</a>'.format
    assert pages._rests("a") == [link("a", "Used by 2")]
    assert pages._rests("b") == [link("b", "Rests on 1, used by 1")]
    assert pages._rests("c") == [link("c", "Rests on 2")]
    assert pages._rests("d") == []


def test_cells_of_words_are_marked_and_numbers_keep_to_one_line():
    frame = pd.DataFrame({"act": ["lower one logit, see", "differentiate the balancing loss"], "n": ["0.1 ± 0.2", "3"]})
    html = pages.TABLE.sub(pages._dressed, frame.to_html(classes="book-table", index=False))
    first, second = BeautifulSoup(html, "html.parser").select("tbody tr")
    assert [cell.get("class") for cell in (*first, *second) if cell.name] == [["text"], None, ["text", "long"], None]
    assert [cell["data-head"] for cell in second.find_all("td")] == ["act", "n"]
    assert pages._dressed(pages.TABLE.search("<table class='book-table'><td>1.0 [-2, 3]</td></table>")).endswith(
        "<td><span>1.0</span> <span>[-2, 3]</span></td></table>"
    )
    assert "stacks" in html and "stacks" not in pages.TABLE.sub(
        pages._dressed, frame[["n"]].to_html(classes="book-table")
    )


@pytest.mark.parametrize("about", [{}, {"wide": True}])
def test_a_figure_that_a_phone_scrolls_is_marked(about):
    drawn = pages._drawn({"data": {"image/png": "cGljdHVyZQ=="}, "metadata": {"image/png": {"alt": 'a "b"', **about}}})
    assert ('class="wide"' in drawn) == bool(about) and drawn.startswith("<img")
    assert 'alt="a &quot;b&quot;"' in drawn and "cGljdHVyZQ==" in drawn


def test_a_phone_gets_the_narrow_drawing():
    about = {"alt": "Two panels.", "stacked": True, "phone": "bmFycm93"}
    drawn = pages._drawn({"data": {"image/png": "cGljdHVyZQ=="}, "metadata": {"image/png": about}})
    phone = '<picture><source media="(max-width: 600px)" srcset="data:image/png;base64,bmFycm93">'
    assert drawn.startswith(phone) and drawn.endswith("</picture>") and "cGljdHVyZQ==" in drawn and "wide" not in drawn


PARTS = yaml.safe_load((build.ROOT / "_toc.yml").read_text())["parts"]
PAGES = [entry["file"] for part in PARTS for entry in part["chapters"]]
NUMBERED = [page for page in PAGES if re.match(r"notebooks/\d\d_", page)]


@pytest.mark.parametrize("page", NUMBERED)
def test_a_chapter_ends_with_a_link_to_the_next_page(page):
    """Its last section is called so, and leads on to the page below it in the table of contents."""
    cells = nbformat.read(build.ROOT / f"{page}.ipynb", 4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    heading, _, last = text.rpartition("\n## ")[2].partition("\n")
    assert heading == "What comes next"
    following = PAGES[PAGES.index(page) + 1]
    links = re.findall(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`", last)
    assert following in {(Path("notebooks") / link).as_posix() for link in links}, f"no link to {following}"


@pytest.mark.parametrize("page", [page for page in PAGES if f"/{notebooks.APPENDIX}/" in page])
def test_an_appendix_page_and_its_chapter_lead_to_each_other(page):
    (chapter,) = (p for p in NUMBERED if p.startswith(f"notebooks/{page.split('/')[-1][:2]}_"))
    for here, there in ((page, chapter), (chapter, page)):
        text = "\n".join(c.source for c in nbformat.read(build.ROOT / f"{here}.ipynb", 4).cells)
        links = re.findall(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`", text) + re.findall(r"\]\(([^()#]+)\.ipynb#", text)
        paths = {(build.ROOT / here).parent.joinpath(link).resolve() for link in links}
        assert build.ROOT / there in paths, f"{here} does not lead to {there}"


def test_every_notebook_is_a_page_of_the_book():
    assert {f"notebooks/{notebooks.page(path)}" for path in notebooks.notebooks()} <= {*PAGES}


PLACE = r"(Proof of )?(Definition|Theorem|Lemma|Proposition|Remark|Claim|Algorithm|Table|Figure|Eq\.|Section|Appendix) "


@pytest.mark.parametrize("claim", [c for c, row in REGISTRY.items() if row["paper"] != "book"])
def test_each_place_in_a_paper_has_its_full_name(claim):
    where = REGISTRY[claim]["where"]
    for place in where.split(", "):
        assert re.match(PLACE, place) or place in ("third item", "first display"), where
    assert not re.search(r"\w\d-\w*\d|s \d|\d and \d", where), where
    assert len(pages.members(where)) >= 2 * (" to " in where)


def test_bibtex_of_the_book_and_of_the_papers_can_be_read():
    citation = yaml.safe_load((build.ROOT / "CITATION.cff").read_text())
    shown = pages.citations().removeprefix("```bibtex\n").removesuffix("```\n")
    entries = parse_string(shown, "bibtex").entries
    assert list(entries) == ["moe_theory", *(key for key in claims.PAPERS if key != "book")]
    book = entries.pop("moe_theory")
    assert (book.fields["title"], book.fields["version"]) == (f"{{{citation['title']}}}", citation["version"])
    assert str(book.persons["author"][0]) == f"{{{citation['authors'][0]['name']}}}"
    known = parse_file(pages.BIBLIOGRAPHY).entries
    assert all(entry == known[key] for key, entry in entries.items())


@pytest.mark.parametrize(("name", "own_too"), [("README.md", True), ("paper.md", False)])
def test_the_readme_and_the_paper_count_as_the_front_page_does(name, own_too):
    counts = [
        Counter(row["verdict"] for row in REGISTRY.values() if (row["paper"] == "book") == own) for own in (False, True)
    ]
    papers, own = ({verdict: found[verdict] for verdict in claims.VERDICTS} for found in counts)
    text = " ".join((build.ROOT / name).read_text(encoding="utf-8").replace("**", "").split())
    said = " ".join(pages.summary(papers, own).replace("**", "").split())
    said = said if own_too else said.partition(" The book adds")[0]
    assert said in text, f"expected in {name}: {said}"


def test_the_front_page_s_bar_counts_every_claim_of_the_papers():
    papers = Counter(row["verdict"] for row in REGISTRY.values() if row["paper"] != "book")
    assert sorted(v for verdicts in pages.TALLIED.values() for v in verdicts) == sorted(claims.VERDICTS)
    shown = pages.tally(papers)
    pieces, legend = (re.findall(p, shown) for p in (r'style="flex: (\d+)"', r"<li><a [^>]*>(\d+) "))
    assert pieces == legend and sum(map(int, pieces)) == papers.total() == int(
        re.findall(r"their (\d+) claims", shown)[0]
    )


def test_findings_are_short():
    for text in pages.FINDINGS.values():
        assert len(re.sub(r"<[^>]+>", "", text)) <= 350


def test_the_paper_cites_what_is_in_the_references():
    cited = re.findall(r"@(\w+)", (build.ROOT / "paper.md").read_text(encoding="utf-8"))
    assert {*claims.PAPERS} - {"book"} < {*cited} <= {*parse_file(pages.BIBLIOGRAPHY).entries}
