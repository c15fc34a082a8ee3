"""What the build writes from the ledger and the executed chapters: counts, findings, ledger, map, errata, boxes.

Every number in them is the ledger's or a chapter's, but for the sentences of the findings, which lead to their boxes.
"""

import base64
import csv
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import nbformat
from bs4 import BeautifulSoup
from pybtex.database import parse_file

from moe_book import citing, front, manifest, notebooks
from moe_book import graph as claim_graph
from moe_book.claims import CRITERION_SET, MIME, NEWS, PAPERS, VERDICTS, registry, slug, table
from moe_book.claims import Box as VerdictBox
from moe_book.glue import put_in
from moe_book.speed import RESULTS
from moe_book.typeset import CAPTION, formulas, typeset

#: What the front page says first: a claim, and what the book found about it.
FINDINGS = {
    "smooth-prop-1": "<b>With one selected expert, do not renormalize its gate.</b> A softmax over a single expert is "
    "always 1, so the task sends the router a gradient of exactly zero, even where moving the router would lower the "
    "risk.",
    "chen-lem-5.1": "<b>A published bound on noisy routing is 128 times too large for sixteen experts.</b> If the "
    "noise has density at most $\\kappa$, no expert's probability changes by more than $2\\kappa$ times the largest "
    "change of a logit, for any number $M$ of experts. The paper proves $\\kappa M^2$.",
    "chen-tab-11": "<b>A training that fails may only be too short.</b> The paper reports that without a balancing "
    "loss plain gradient descent fails with thirty-two experts. The printed algorithm succeeds in every run once the "
    "step size lets training take off in time. The released code failed at both step sizes that we tried.",
    "nguyen-thm-5": "<b>The lengths of a cosine router's vectors cannot be learned from any amount of data.</b> The "
    "paper bounds a loss with this error from below by $n^{-1/2}$, but the error does not fall at all. What the "
    "function determines is learned at the usual rate.",
    "book-diagnose-faults": "<b>You can check your own model in one call.</b> <code>diagnose</code> reports which gate "
    "a model computes and whether its router gets a gradient. It named all {faults} faults that we planted in five "
    "model families, each under the expected names and no other.",
}
PICTURE = "04_exploration", 1  # chapter and figure that the front page shows

#: Verdicts by how much they change what a paper says, most first: the order of the errata.
WEIGHED = {
    "fails": "What does not hold",
    "differs": "What we could not reproduce",
    "corrected": "What holds after a repair",
    "sharpened": "What holds in a sharper form",
    "proof repaired": "What holds, by another proof",
    "misprint": "Slips of print",
}
KINDS = {  # of a claim, by what its `where` names
    "theorem": re.compile(r"Theorem|Proposition|Lemma|Corollary"),
    "table or figure": re.compile(r"Table|Figure"),
}
PARTS = {  # of the book, by the numbers of their chapters
    "Why experts diverge": range(1, 9),
    "What routers learn": range(9, 14),
    "Sparsity and stability": range(14, 20),
    "Cosine routers": range(20, 25),
    "In practice": range(25, 27),
}


def kind(row: dict) -> str:
    """Theorem, table or figure, or definition, formula or remark, by where the claim stands in its paper."""
    return next((name for name, words in KINDS.items() if words.search(row["where"])), "definition, formula or remark")


def part(row: dict) -> str:
    """The part of the book whose chapter settles the claim."""
    (name,) = (name for name, chapters in PARTS.items() if int(row["chapter"]) in chapters)
    return name


# --- where a claim stands: in its paper, and in the book ----------------------------------------

PLACE = re.compile(r"(?P<word>[A-Z]\w+\.?) (?P<outer>(?:\w+\.)?)(?P<first>\d+) to (?P=outer)(?P<last>\d+)")
BOX = re.compile(
    r"^:{3,}\{prf:(?P<kind>\w+)\}.*\n(?::label: (?P<label>\S+)|\*\{prf:ref\}`(?P<proved>[^`]+)`\.\*)?", re.MULTILINE
)


def members(where: str) -> list[str]:
    """What the ranges in a claim's `where` stand for: "Lemma E.10 to E.11" is "Lemma E.10" and "Lemma E.11"."""
    return [
        f"{r['word']} {r['outer']}{number}"
        for r in PLACE.finditer(where)
        for number in range(int(r["first"]), int(r["last"]) + 1)
    ]


@dataclass(frozen=True)
class Box:
    """A theorem, definition or the like of the book.

    Attributes:
        name: what it is called, such as Theorem 22.2.
        page: the name of its page, such as `22_spare_experts`.
        proved: whether its proof follows it in a box.
    """

    name: str
    page: str
    proved: bool = False


def boxes(chapters: Iterable[Path]) -> dict[str, Box]:
    """The boxes of numbered chapters by their labels, with the numbers that sphinx-proof gives them: by kind.

    Raises:
        ValueError: for a proof with no box before it in its chapter: a proof is that of the last box, or of the one
            that it begins with in italics.
    """
    found = {}
    for path in chapters:
        if not (numbers := notebooks.label(page := notebooks.page(path))):
            continue
        cells = (cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")
        number, label = Counter(), None
        for box in BOX.finditer("\n".join(cells)):
            if box["kind"] == "proof":
                if not number:
                    raise ValueError(f"{path.name}: expected a box with what is proved, got a proof before any box")
                proved = box["proved"] or label
                found[proved] = replace(found[proved], proved=True)
                continue
            number[box["kind"]] += 1
            label = box["label"]
            found[label] = Box(f"{box['kind'].capitalize()} {numbers}.{number[box['kind']]}", page)
    return found


def derived(claim: str, known: Mapping[str, Box], here: str = "") -> list[str]:
    """Links to the boxes that state and prove what the book says of a claim, from the page `here` or one under book/.

    Raises:
        ValueError: if the claim's chapter has no box of a label that the registry names.
    """
    row, stated, proved, up = registry()[claim], [], [], _up(here)
    for label in row.get("box", []):
        box = known.get(label)
        if not box or notebooks.chapter(box.page) != int(row["chapter"]):
            raise ValueError(f"claims.yml: {claim}: chapter {row['chapter']} has no box {label!r}")
        page = "" if box.page == here else f"{up}notebooks/{box.page}.html"
        (proved if box.proved else stated).append(f'<a class="claim-box" href="{page}#{label}">{box.name}</a>')
    how = "Proved in part in" if row.get("verdict") == "trend" else "Proved in"
    return [f"{word}: {', '.join(links)}" for word, links in (("Stated in", stated), (how, proved)) if links]


def _up(page: str) -> str:
    """From a page of notebooks, or one under book/, to the root of the book."""
    return "../" * (1 + page.count("/"))


BIBLIOGRAPHY = Path(__file__).parents[2] / "book" / "references.bib"


@cache
def addresses() -> dict[str, str]:
    """The public pages of the papers that have one."""
    entries = parse_file(BIBLIOGRAPHY).entries
    return {key: entries[key].fields["url"] for key in PAPERS if key in entries and "url" in entries[key].fields}


def _paper(key: str) -> str:
    """A paper's name, linked to its public page."""
    name = escape(PAPERS[key], quote=False)
    return f'<a href="{addresses()[key]}">{name}</a>' if key in addresses() else name


def _chapter(row: dict) -> str:
    """Link from a page under book/ to the box in the chapter, or its appendix, that settled the claim."""
    page = row.get("notebook", "")
    name = f"appendix {notebooks.label(page)}" if "/" in page else f"chapter {int(row['chapter'])}"
    return f'<a href="{_address(row)}">{name}</a>' if "notebook" in row else name


def _address(row: dict) -> str:
    """That of a claim's box, or of its line in the ledger while it is open, from a page under book/."""
    return f"../notebooks/{row['notebook']}.html#claim-{row['id']}" if "notebook" in row else f"ledger.html#{row['id']}"


def _verdict(verdict: str, link: str = "") -> str:
    """A verdict in its colour and in words, linked to the claims in the ledger that have it if `link` is its path."""
    inner = f'<a href="{link}?verdict={quote(verdict)}">{verdict}</a>' if link else verdict
    return f'<span class="verdict claim-{slug(verdict)}">{inner}</span>'


# --- the front page -----------------------------------------------------------------------------


SUMMARY = (
    "**Of the papers' {all} claims {holds} hold as stated, {sharpened} with a better constant, {proof repaired} by a "
    "new proof, and {corrected} after a correction that we state. {fails} are refuted by a counterexample, and "
    "{differs} tables, figures and experiments gave other numbers.** Of the other tables, figures and experiments "
    "{reproduced} came out as described, and {reproduced after a search} after a search for what the paper leaves "
    "open, or by a criterion that was set afterwards. Where our numbers differ, both stand side by side. {trend} "
    "asymptotic claims appear as fitted trends, {misprint} are misprints, and {untested} could not be tested. The "
    "book adds {own} results of its own. If a number stops supporting its verdict, the book does not build."
)


def summary(papers: Mapping[str, int], own: Mapping[str, int]) -> str:
    """What the book found, in a sentence for each kind of verdict, from the counts of claims by verdict."""
    return SUMMARY.format_map({**papers, "all": sum(papers.values()), "own": sum(own.values())})


TALLIED = {  # what the front page's bar says of claims, and their verdicts, of which the first gives the colour
    "hold, or came out again": ("holds", "sharpened", "proof repaired", "reproduced", "reproduced after a search"),
    "need a correction": ("corrected", "misprint"),
    "gave other numbers in our runs": ("differs",),
    "fail, by a counterexample": ("fails",),
    "could only be seen as trends, or not be tested": ("untested", "trend"),
}


def tally(papers: Mapping[str, int]) -> str:
    """The papers' claims as one bar, with a legend; both lead to the ledger."""
    bar, legend = "", ""
    for said, verdicts in TALLIED.items():
        count = sum(papers[verdict] for verdict in verdicts)
        query = "" if len(verdicts) > 1 else f"?verdict={quote(verdicts[0])}"
        link = f'class="claim-{slug(verdicts[0])}" href="ledger.html{query}"'
        bar += f'<a {link} style="flex: {count}" title="{count} {said}" tabindex="-1">{count}</a>'
        legend += f"<li><a {link}>{count} {said}</a></li>"
    count = sum(papers.values())
    text = f"We derived their {count} claims again, or ran them where two processor cores allow it, and give verdicts."
    return f'<p>{text}</p>\n<div class="tally"><div aria-hidden="true">{bar}</div><ul>{legend}</ul></div>\n'


def counts(ledger: dict) -> str:
    """How many claims of the papers, and of the book, have each verdict, each leading to them in the ledger."""
    meaning, papers, own = {**VERDICTS, "open": "not settled yet"}, *ledger["counts"].values()
    rows = [
        f"<tr><td>{_verdict(v, 'ledger.html')}</td><td>{papers[v]}</td><td>{own[v]}</td><td>{meaning[v]}</td></tr>"
        for v in meaning
        if papers[v] + own[v]
    ]
    total = f"<tr><td>all</td><td>{sum(papers.values())}</td><td>{sum(own.values())}</td><td></td></tr>"
    head = "".join(f"<th>{name}</th>" for name in ("verdict", "papers", "book", "meaning"))
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}{total}</tbody>"
    return f'<table class="counts">{body}</table>\n'


def sabotage(ledger: dict) -> str:
    """How many claims have a score and what their scores are, and what the boxes refused before any mending."""
    scores = [row["sabotage"]["score"] for row in ledger["claims"] if row.get("sabotage")]
    scores = [score for score in scores if score is not None]
    text = f"{len(scores)} of the {len(ledger['claims'])} claims have a score that holds for the code as it stands."
    if scores:
        high = sum(score >= 90 for score in scores)
        text += f" The median score is {statistics.median(scores):.0f} %, and {high} claims reach 90 %."
    start = list(csv.DictReader(START.read_text(encoding="utf-8").splitlines()))
    refused, judged = Counter(), Counter()
    for row in start:
        refused[row["kind"]] += int(row["refused"])
        judged[row["kind"]] += int(row["refused"]) + int(row["survived"])
    told = ", ".join(f"{100 * refused[kind] / judged[kind]:.0f} % of changed {name}" for kind, name in CHANGED.items())
    claims = len({row["claim"] for row in start})
    return (
        f"{text} Before any check was mended, {judged.total():,} changes of {claims} claims were judged. The boxes "
        f"refused {told}."
    )


START = Path(__file__).with_name("sabotage") / "start.csv"  # how the first mutants ended, by claim and operator
CHANGED = {"code": "code", "runs": "runs", "numbers": "numbers of the papers", "cases": "cases"}


def criteria() -> str:
    """How many tables, figures and experiments were judged by a criterion that is older than their numbers."""
    when = Counter(row["criterion_set"] for row in registry().values() if "criterion_set" in row)
    before, after = (when[name] for name in CRITERION_SET)
    return (
        f"<p>{before + after} tables, figures and experiments are judged by a criterion. That of {before} was set "
        f"before their numbers were known; that of {after} was set or changed when they were: such a verdict guards a "
        "finding, and tests no prediction. Each row of the registry says which.</p>"
    )


def findings(ledger: dict) -> str:
    """The front page's findings, each with its verdict and the way to its derivation."""
    rows = {row["id"]: row for row in ledger["claims"]}
    planted = str(registry()["book-diagnose-faults"]["evidence"]["right"]["equals"]["first size, faults"])
    items = []
    for claim, text in FINDINGS.items():
        row = rows[claim]
        if row["verdict"] == "open":
            raise ValueError(f"FINDINGS: {claim} is open")
        whose = "Our claim" if row["paper"] == "book" else f"{PAPERS[row['paper']]}, {row['where'].split(', ')[0]}"
        text = formulas(text.replace("{faults}", planted))
        items.append(f"<li>{text} <small>{whose}: {_verdict(row['verdict'])} {_chapter(row)}</small></li>")
    return f'<ol class="findings mathjax_process">{"".join(items)}</ol>\n'


# --- ledger and errata --------------------------------------------------------------------------


def _survivor(m: dict) -> str:
    """One line of the list that a claim's score opens to."""
    reason = f" <b>Why:</b> {typeset(m['reason'])}" if m["reason"] else ""
    return f"<li>{escape(m['kind'])}, <code>{escape(m['place'])}</code>: {_coded(m['what'])}{reason}</li>"


def _coded(text: str) -> str:
    """Text with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _sabotage(row: dict) -> str:
    """A claim's score; opens to say how its mutants ended, and which survived."""
    found = row.get("sabotage")
    if not found:
        return "" if row["verdict"] == "open" else "not run"
    score = "none judged" if found["score"] is None else f"{found['score']:.0f} %"
    ends = f"{found['refused']} refused, {found['survived']} survived, {found['crashed']} crashed"
    ends += f", {found['equivalent']} change nothing that is said" * bool(found["equivalent"])
    lines = "".join(map(_survivor, [*found["survivors"], *found["equivalents"]]))
    return f"<details><summary>{score}</summary><p>{ends}</p><ul>{lines}</ul></details>"


COLUMNS = ("claim", "where", "verdict", "settled in", "sabotage score")  # of the ledger


def _row(row: dict, known: Mapping[str, Box]) -> str:
    """A claim's line in the ledger; what it can be filtered by, and what a phone calls its cells, is written on it."""
    facts = {"paper": row["paper"], "part": part(row), "verdict": row["verdict"], "kind": kind(row)}
    facts |= {"places": ", ".join(members(row["where"]))} if members(row["where"]) else {}
    marks = "".join(f' data-{name}="{value}"' for name, value in facts.items())
    erratum = f' <a href="errata.html#erratum-{row["id"]}">erratum</a>' if row["verdict"] in NEWS else ""
    cells = (
        f"<code>{row['id']}</code> {typeset(row['says'])}",
        f"{_paper(row['paper'])}, {typeset(row['where'])}",
        _verdict(row["verdict"]) + erratum,
        "<br>".join([_chapter(row), *derived(row["id"], known), *_rests(row["id"])]),
        _sabotage(row),
    )
    labelled = zip(COLUMNS, cells, strict=True)
    return (
        f'<tr id="{row["id"]}"{marks}>' + "".join(f'<td data-head="{h}">{cell}</td>' for h, cell in labelled) + "</tr>"
    )


def _rests(claim: str) -> list[str]:
    """On how many claims one rests, and how many rest on it, as a link to the map that names them."""
    graph = resting()
    on, by = len(graph[claim]), len(claim_graph.turned(graph)[claim])
    words = [f"rests on {on}"] * bool(on) + [f"used by {by}"] * bool(by)
    return [f'<a class="claim-rest" href="map.html#map-{claim}">{", ".join(words).capitalize()}</a>'] * bool(words)


def _choices(ledger: dict) -> str:
    """The form that filters the ledger; book.js shows it and does the work."""
    rows = ledger["claims"]
    values = {
        "paper": {key: name for key, name in PAPERS.items() if any(r["paper"] == key for r in rows)},
        "part": {name: name for name in PARTS if any(part(r) == name for r in rows)},
        "verdict": {v: v for v in (*VERDICTS, "open") if any(r["verdict"] == v for r in rows)},
        "kind": {name: name for name in (*KINDS, "definition, formula or remark")},
    }
    selects = "".join(
        f'<label>{name} <select name="{name}"><option value="">all</option>'
        + "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
        + "</select></label>"
        for name, options in values.items()
    )
    text = '<label>words <input type="search" name="text"></label>'
    return (
        f'<form class="filter pst-js-only" data-of="claims">{selects}{text}<output aria-live="polite"></output></form>'
    )


def ledger_page(ledger: dict, known: Mapping[str, Box]) -> str:
    """Every claim of the four papers with its verdict, open ones included."""
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return "\n".join(
        [
            "# The ledger\n",
            "All claims with the verdicts that the executed chapters reached. The last column is the share of forty "
            "planted errors that the check of the claim refuses, averaged over kinds of error; it opens to say which "
            'survived. <a href="verdicts.html">How verdicts are given.</a> '
            '<a href="map.html">A map shows which claim rests on which.</a> '
            '<a href="../ledger.json">The same as JSON.</a>\n',
            _choices(ledger),
            f'<div class="table-wrapper"><table class="ledger mathjax_process"><thead><tr>{head}</tr></thead><tbody>',
            *(_row(row, known) for row in ledger["claims"]),
            "</tbody></table></div>\n",
        ]
    )


def _erratum(row: dict, known: Mapping[str, Box]) -> str:
    places = f'{_chapter(row)}, <a href="ledger.html#{row["id"]}">ledger</a>'
    lines = derived(row["id"], known)
    boxed = f"<p>{' · '.join(lines)}</p>" if lines else ""
    remarks = " ".join(filter(None, (row["note"], registry()[row["id"]].get("record"))))
    return (
        f'<div class="erratum mathjax_process" id="erratum-{row["id"]}"><p>{_verdict(row["verdict"])} '
        f'<span title="{row["id"]}">{_paper(row["paper"])}, {typeset(row["where"])}</span> ({places})</p>'
        f"<p>The claim: {typeset(row['says'])}</p><p>{typeset(remarks)}</p>{boxed}"
        f"{table(row['evidence'])}</div>\n"
    )


def errata_page(ledger: dict, known: Mapping[str, Box]) -> str:
    """The claims whose verdict says something their paper does not, first what changes a conclusion."""
    out = [
        "# Errata and sharper forms\n",
        "Claims whose verdict says something their paper does not, what changes a conclusion first, each with the note "
        "of the chapter that derives it. The page is generated from the ledger. A finding here is a remark between "
        "colleagues: where one of our readings is wrong, its check should be shown to fail. A residual of rounding, "
        "such as $10^{-15}$, may be another one on another machine.\n",
    ]
    rows = [row for row in ledger["claims"] if row["verdict"] in WEIGHED]
    for verdict, heading in WEIGHED.items():
        theirs = [row for row in rows if row["verdict"] == verdict and row["paper"] != "book"]
        out += [f"## {heading}\n"] * bool(theirs) + [_erratum(row, known) for row in theirs]
    ours = [row for row in rows if row["paper"] == "book"]
    out += ["## Our own predictions that came out otherwise\n"] * bool(ours) + [_erratum(row, known) for row in ours]
    return "\n".join(out) + "\n"


# --- the map ------------------------------------------------------------------------------------

#: Verdicts that leave what rests on a claim as it is.
FIRM = ("holds", "proof repaired", "sharpened", "misprint", "reproduced", "reproduced after a search")
MOST = 6  # claims that the map names as the most used


def resting() -> dict[str, list[str]]:
    """Each claim of the registry with those that it rests on."""
    return {claim: row.get("rests_on", []) for claim, row in registry().items()}


SHORT = {"smooth2025": "Smoothness"}  # papers whose name in `PAPERS` is long


def _place(claim: str) -> str:
    """Where a claim stands, in few words: paper and place, of the book's own claims what they are about."""
    row = registry()[claim]
    paper = SHORT.get(row["paper"], re.sub(r" \(\d+\)$", "", PAPERS[row["paper"]]))
    return typeset(row["where"] if row["paper"] == "book" else f"{paper}, {row['where']}")


def _named(claims: Iterable[str]) -> str:
    """Links from the map to its entries for claims, by their places; the ids show where one points."""
    return "; ".join(
        f'<a class="claim-rest" href="#map-{claim}" title="{claim}">{_place(claim)}</a>' for claim in claims
    )


def _use(graph: claim_graph.Graph, users: claim_graph.Graph) -> str:
    """How much hangs together: what is used most, and the longest chain."""
    in_all = {claim: len(claim_graph.reached(users, claim)) for claim in graph}
    linked = [claim for claim in graph if graph[claim] or users[claim]]
    most = sorted(graph, key=lambda claim: -in_all[claim])[:MOST]
    named = ", ".join(f"{_named([c])} by {in_all[c]} claims ({len(users[c])} of them directly)" for c in most)
    chain = max(claim_graph.chains(graph).values(), key=len)
    return (
        f"<p>{len(linked)} of {len(graph)} claims rest on another one or carry one; the others stand by themselves. "
        f"Most used, directly or not: {named}. The longest chain has {len(chain)} claims, each of which "
        f"rests on the one before: {_named(chain)}.</p>\n"
    )


def _touched(rows: Mapping[str, dict], users: claim_graph.Graph) -> str:
    """Which claims a verdict other than those of `FIRM` touches: a table, first what carries most."""
    in_all = {c: len(claim_graph.reached(users, c)) for c, row in rows.items() if row["verdict"] not in FIRM}
    lines = "".join(
        f"<tr><td>{_named([claim])}</td><td>{_verdict(rows[claim]['verdict'])}</td><td>{_named(users[claim])}</td>"
        f"<td>{in_all[claim]}</td></tr>"
        for claim in sorted(in_all, key=lambda claim: -in_all[claim])
        if in_all[claim]
    )
    bare = [*in_all.values()].count(0)
    head = "".join(f"<th>{name}</th>" for name in ("claim", "verdict", "rests on it directly", "in all"))
    return (
        f'<table class="touched"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>\n'
        f"<p>On {bare} more claims with such a verdict nothing rests.</p>\n"
    )


def _entry(row: dict, graph: claim_graph.Graph, users: claim_graph.Graph) -> str:
    """A claim in the list: the way to its box, what it rests on and what rests on it."""
    claim = row["id"]
    links = {"rests on": graph[claim], "used by": users[claim]}
    uses = [f"{how} {_named(others)}" for how, others in links.items() if others]
    return (
        f'<li id="map-{claim}"><a href="{_address(row)}" title="{claim}">{_place(claim)}</a> {_verdict(row["verdict"])}'
        f"{'<br>' * bool(uses)}{'<br>'.join(uses)}</li>"
    )


def _map(name: str, rows: Mapping[str, dict], graph: claim_graph.Graph, users: claim_graph.Graph) -> list[str]:
    """One part of the book: its drawing, with claims of other parts that it uses, and the same as a list."""
    inside = [claim for claim in graph if part(rows[claim]) == name]
    drawn = {c: graph[c] for c in inside if graph[c] or users[c]}
    drawn = {other: [] for others in drawn.values() for other in others if other not in drawn} | drawn
    nodes = {
        claim: claim_graph.Node(
            _address(row), row["verdict"], f"{claim} {row['verdict']}: {PAPERS[row['paper']]}, {row['where']}"
        )
        for claim, row in rows.items()
        if claim in drawn
    }
    picture = claim_graph.drawing(drawn, nodes, f"{name}: which claim rests on which")
    entries = "\n".join(_entry(rows[claim], graph, users) for claim in inside)
    return [f"## {name}\n", f"{picture}\n", f'<ul class="claim-uses">\n{entries}\n</ul>\n']


def map_page(ledger: dict) -> str:
    """Which claim rests on which: drawn for each part of the book, as a list, and what follows from it."""
    graph, rows = resting(), {row["id"]: row for row in ledger["claims"]}
    users = claim_graph.turned(graph)
    names = [name for name in PARTS if any(part(row) == name for row in rows.values())]
    return "\n".join(
        [
            "# What rests on what\n",
            "Claim A rests on claim B if the derivation, the criterion or the setting of A uses B. If the book "
            "corrected B, A uses the corrected form.\n",
            '<p class="of-drawings">In the drawings each claim stands below all that it rests on; where one points at '
            "a box, or reaches it with the keyboard, what it rests on and what rests on it stand out. A box leads to "
            "the verdict box of its claim, and its edge has the colour of the verdict. Below each drawing the same "
            "stands as a list, with the claims that stand by themselves, too.</p>\n",
            _use(graph, users),
            *(line for name in names for line in _map(name, rows, graph, users)),
            "## What a verdict touches\n",
            f"Claims whose verdict is none of {', '.join(FIRM[:-1])} and {FIRM[-1]}, and what rests on them. That does "
            "not put it in doubt: it uses what the book left of them. It says where to look again if one of them is "
            "read in its paper's form.\n",
            _touched(rows, users),
        ]
    )


def generated(ledger: dict, known: Mapping[str, Box]) -> dict[str, str]:
    """File names under book/ and their text, from the ledger and the boxes of the chapters."""
    papers, own = ledger["counts"].values()
    return {
        "_tally.md": tally(papers),
        "_summary.md": summary(papers, own),
        "_verdicts.md": counts(ledger),
        "_criteria.md": criteria(),
        "_sabotage.md": sabotage(ledger),
        "_findings.md": findings(ledger),
        "_gpu.md": gpu_table(),
        "_training.md": front.training(),
        "ledger.md": ledger_page(ledger, known),
        "map.md": map_page(ledger),
        "errata.md": errata_page(ledger, known),
    }


# --- the record of a GPU ------------------------------------------------------------------------

GPU_RECORD = "gpu.json"


def gpu_table(folder: Path = RESULTS) -> str:
    """What the chapters that use a GPU gained from one, as `make gpu` recorded it; or that nobody has."""
    if GPU_RECORD not in manifest.entries(folder):
        return "No times on a GPU are stored yet.\n"
    record = manifest.read_json(GPU_RECORD, folder)
    lines = [f"On {record['date']}, {record['card']}, torch {record['torch']}:\n"]
    lines += ["| chapter | seconds on the GPU | on the CPU | boxes that fell |", "|---|---|---|---|"]
    for row in record["chapters"]:
        fell = sum(len(found) for found in row["fallen"].values())
        if row["gpu"] or fell:
            lines.append(f"| {row['chapter']} | {row['seconds'].get('cuda', '–')} | {row['seconds']['cpu']} | {fell} |")
    return "\n".join(lines) + f"\n\nAll {len(record['chapters'])} chapters ran there.\n"


# --- how to cite --------------------------------------------------------------------------------


def citations() -> str:
    """BibTeX entries of the book and of the papers, those as in references.bib."""
    written = BIBLIOGRAPHY.read_text(encoding="utf-8")
    found = (re.search(rf"^@\w+{{{key},.*?^}}", written, re.MULTILINE | re.DOTALL) for key in PAPERS if key != "book")
    entries = "\n\n".join([citing.bibtex(), *(entry[0] for entry in found if entry)])
    return f"```bibtex\n{entries}\n```\n"


# --- chapters -----------------------------------------------------------------------------------


def _drawn(output: Mapping) -> str:
    """A figure as HTML; a phone gets its narrow drawing, or a mark that it scrolls where it has none."""
    about = output["metadata"]["image/png"]
    data, phone, alt = output["data"]["image/png"], about.get("phone"), escape(about["alt"])
    style = ' class="wide"' * about.get("wide", False) + ' style="max-width:100%;height:auto"'
    image = f'<img alt="{alt}"{style} src="data:image/png;base64,{data}">'
    source = f'<source media="(max-width: 600px)" srcset="data:image/png;base64,{phone}">'
    return f"<picture>{source}{image}</picture>" if phone else image


TABLE = re.compile(r"<table[^>]*\bbook-table\b.*?</table>", re.DOTALL)
WORD = re.compile(r"[A-Za-z]{2,}|[A-Za-z]:")
INTERVAL = re.compile(r"(<td>)([^<>\s]+) ([\[(][^<>]*[\])])(?=</td>)")  # after what it belongs to
LONG = 26  # letters of a cell that may have several lines


def _words(cell) -> str:
    """What a cell shows, nearly: without the signs of TeX."""
    return re.sub(r"\\[A-Za-z]+|[{}$^_\\]", "", cell.text).strip()


def _dressed(table: re.Match) -> str:
    """A table whose cells of words are marked, `text` in columns of words and `long` where they may have several lines.

    A number and its interval may stand in two lines, but neither is broken.
    The cells of a table with long ones are also marked with the names of their columns, which a phone shows above them.
    """
    soup = BeautifulSoup(INTERVAL.sub(r"\1<span>\2</span> <span>\3</span>", table[0]), "html.parser")
    rows = [row.find_all("td") for row in soup.select("tbody tr")]
    heads = [row.find_all("th") for row in soup.select("thead tr")]
    for k in range(1, 1 + min(map(len, rows), default=0)):  # columns from the right: names of rows stand left of them
        column = [row[-k] for row in rows]
        said = [words for cell in column if (words := _words(cell)) not in ("", "–")]
        if 3 * sum(map(bool, map(WORD.match, said))) > 2 * len(said):  # of a letter or two in some rows
            for cell in column + [row[-k] for row in heads if len(row) >= k]:
                cell["class"] = ["text"]
    for cell in soup.select("tbody th, tbody td"):
        if len(words := _words(cell)) > LONG and len(WORD.findall(words)) > 2:
            cell["class"] = [*cell.get("class", []), "long"]  # pyright: ignore[reportOptionalIterable]
    if (
        soup.select_one("td.long")
        and len(heads) == 1
        and not soup.select_one("[colspan]")
        and "\\(" not in str(soup.thead)
    ):
        soup.table["class"] = [*soup.table["class"], "stacks"]  # pyright: ignore[reportOptionalSubscript]
        for row in rows:
            for k, cell in enumerate(reversed(row), 1):
                cell["data-head"] = heads[0][-k].text
    return str(soup)


def _links(row: dict, known: Mapping[str, Box], here: str, scores: Mapping[str, float | None]) -> str:
    """What leads on from a verdict box: theorems, line in the ledger, score, erratum, paper; how to cite it."""
    links, book = derived(row["id"], known, here), f"{_up(here)}book"
    links.append(f'<a href="{book}/ledger.html#{row["id"]}">ledger</a>')
    if (score := scores.get(row["id"])) is not None:
        page = f"{book}/verdicts.html#what-a-check-is-worth"
        links.append(f'<a class="claim-score" href="{page}">sabotage score</a> {score:.0f} %')
    if row["verdict"] in NEWS:
        links.append(f'<a href="{book}/errata.html#erratum-{row["id"]}">erratum</a>')
    if row["paper"] in addresses():
        links.append(f'<a href="{addresses()[row["paper"]]}">the paper</a>')
    links.append(f'<a href="#claim-{row["id"]}">address of this box</a>')
    name = f"cite the claim {row['id']}"
    cite = f'<span class="pst-js-only"> · <button type="button" class="cite" aria-label="{name}">cite</button></span>'
    return f'<p class="claim-links">{" · ".join(links)}{cite}</p>'


def captioned(notebook: nbformat.NotebookNode, page: str) -> Iterator[tuple[dict, dict, str]]:
    """The figures and tables of a page: each one's output, that of its caption, and its name, such as Figure 9.2."""
    chapter, number = notebooks.label(page), Counter()
    for cell in notebook.cells:
        for shown, caption in pairwise(cell.get("outputs", [])):
            if caption.get("metadata", {}).get(CAPTION):
                what = "Figure" if "image/png" in shown["data"] else "Table"
                number[what] += 1
                yield shown, caption, f"{what} {chapter}{'.' * bool(chapter)}{number[what]}"


def presented(
    path: Path, known: Mapping[str, Box], numbers: Mapping[str, str], scores: Mapping[str, float | None]
) -> str:
    """An executed chapter as Sphinx reads it: boxes with their links, figures and tables with number and address.

    Args:
        path: the executed notebook.
        known: the boxes of all chapters.
        numbers: what the chapters have glued, by `chapter/name`.
        scores: of claims whose sabotage was run, in percent.
    """
    notebook, page = nbformat.read(path, 4), notebooks.page(path)
    for shown, caption, name in captioned(notebook, page):
        anchor = re.sub(r"\W", "-", name[0].lower() + name[1:])
        body = _drawn(shown) if "image/png" in shown["data"] else shown["data"]["text/html"]
        said = f'<a class="figure-number" href="#{anchor}">{name}.</a> {formulas(caption["data"]["text/markdown"])}'
        if shown.get("metadata", {}).get("image/png", {}).get("stacked"):
            said += '<span class="on-phone"> On this narrow screen the panels stand below each other.</span>'
        below = f'<figcaption class="mathjax_process">{said}</figcaption>'
        shown["data"] = {"text/html": f'<figure class="book-figure" id="{anchor}">{body}{below}</figure>'}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = put_in(cell.source, numbers, path.stem)
            continue
        cell.outputs = [o for o in cell.outputs if not o.get("metadata", {}).get(CAPTION)]
        for data in (o["data"] for o in cell.outputs if "text/html" in o.get("data", {})):
            if MIME in data:
                data["text/html"] = VerdictBox(**data[MIME]).html(_links(data[MIME], known, page, scores))
            else:
                data["text/html"] = TABLE.sub(_dressed, data["text/html"])
    return nbformat.writes(notebook) + "\n"


def picture(folder: Path) -> bytes:
    """The figure of the front page, from the chapters in a folder: a PNG."""
    stem, number = PICTURE
    outputs = [o for cell in nbformat.read(folder / f"{stem}.ipynb", 4).cells for o in cell.get("outputs", [])]
    images = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return base64.b64decode(images[number - 1])
