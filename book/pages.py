"""The pages generated from the ledger: counts, ledger, errata. Every word and number in them is the ledger's."""

from itertools import groupby

from moe_theory._html import typeset
from moe_theory.claims import NEWS, PAPERS, VERDICTS


def _link(row: dict) -> str:
    """Link from a page under book/ to the card in the chapter that settled the claim."""
    return f'<a href="../notebooks/{row["notebook"]}.html#claim-{row["id"]}">{row["notebook"][:2]}</a>'


def counts(ledger: dict) -> str:
    """How many claims stand in each verdict, as a table; included by the landing page."""
    names = [v for v in (*VERDICTS, "open") if ledger["counts"][v]]
    meaning = {**VERDICTS, "open": "not settled yet"}
    rows = [f"| {v} | {ledger['counts'][v]} | {meaning[v]} |" for v in names]
    return "\n".join(["| verdict | claims | meaning |", "|---|---:|---|", *rows]) + "\n"


def _mutant(m: dict) -> str:
    """One line of the list that a claim's number of refused mutants opens to."""
    outcome = f"open: {m['survives']}" if m["outcome"] == "survived" and m["survives"] else m["outcome"]
    by = f", {m['by']}" if m["by"] else ""
    return f"<li><b>{typeset(outcome)}</b>{by}: {typeset(m['what'])} ({m['kind']})</li>"


def _mutants(row: dict) -> str:
    """How many of a claim's mutants were refused; opens to say which, and by what."""
    if not row.get("mutants"):
        return "" if row["verdict"] == "open" else "none"
    refused = sum(m["outcome"].startswith("refused") for m in row["mutants"])
    state = "" if refused == len(row["mutants"]) else ' class="mutants-open"'
    lines = "".join(map(_mutant, row["mutants"]))
    return f"<details{state}><summary>{refused} of {len(row['mutants'])}</summary><ul>{lines}</ul></details>"


def ledger_page(ledger: dict) -> str:
    """Every claim of the four papers with its verdict, open ones included."""
    out = [
        "# The ledger\n",
        "Every claim the book must carry, with the verdict its chapter reached. The build collects these rows "
        "from the executed chapters; a claim without a card in one of them is open. A mutant is a small change of what "
        "a claim's card guards, a constant off by $5\\,\\%$ or a term dropped: the last column says under how many of "
        "them the chapter refuses to run, and opens to say which. A mutant that survives is a defect of the check. "
        '<a href="../ledger.json">The same as JSON.</a>\n',
        ":::{include} _verdicts.md\n:::\n",
    ]
    head = "".join(f"<th>{name}</th>" for name in ("claim", "where", "verdict", "chapter", "mutants refused"))
    for paper, rows in groupby(ledger["claims"], key=lambda r: r["paper"]):
        out += [
            f"\n## {PAPERS[paper]}\n",
            f'<table class="ledger mathjax_process"><thead><tr>{head}</tr></thead><tbody>',
        ]
        for r in rows:
            chapter = _link(r) if "notebook" in r else r["chapter"]
            cells = (
                f"<code>{r['id']}</code> {typeset(r['says'])}",
                typeset(r["where"]),
                r["verdict"],
                chapter,
                _mutants(r),
            )
            out.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        out.append("</tbody></table>\n")
    return "\n".join(out) + "\n"


def _evidence(rows: list) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("", "measured", "predicted", "refuted if"))
    body = "".join("<tr>" + "".join(f"<td>{typeset(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def errata_page(ledger: dict) -> str:
    """The claims whose verdict says something their paper does not."""
    # Sphinx loads MathJax where it sees a formula; those in HTML it does not see, so each page's first words hold one
    out = [
        "# Errata and sharper forms\n",
        "Claims whose verdict is sharpened, corrected, fails or differs, each with the note of the chapter that "
        "derives it. The page is generated from the ledger. A finding here is a remark between colleagues: "
        "the papers' main conclusions are judged in the chapters, and where one of our readings is wrong, its "
        "check should be shown to fail. Of a residual of rounding only its limit is shown, such as $10^{-12}$.\n",
    ]
    for r in ledger["claims"]:
        if r["verdict"] not in NEWS:
            continue
        out += [
            f"## {PAPERS[r['paper']]}, {r['where']}\n",
            f'<div class="erratum mathjax_process"><p><strong>{r["verdict"]}</strong> '
            f"(<code>{r['id']}</code>, derived in chapter {_link(r)})</p>"
            f"<p>The claim: {typeset(r['says'])}</p><p>{typeset(r['note'])}</p>{_evidence(r['evidence'])}</div>\n",
        ]
    return "\n".join(out) + "\n"


def generated(ledger: dict) -> dict[str, str]:
    """File names under book/ and their text."""
    return {"_verdicts.md": counts(ledger), "ledger.md": ledger_page(ledger), "errata.md": errata_page(ledger)}
