"""The pages generated from the ledger: counts, ledger, errata. Every word and number in them is the ledger's."""

import re
from itertools import groupby

from moe_theory.claims import NEWS, PAPERS, VERDICTS


def _link(row: dict) -> str:
    """Link from a page under book/ to the card in the chapter that settled the claim."""
    return f'<a href="../notebooks/{row["notebook"]}.html#claim-{row["id"]}">{row["notebook"][:2]}</a>'


def _plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_\[\]<>$|~#])", r"\\\1", str(text)).replace("\n", " ")


def counts(ledger: dict) -> str:
    """How many claims stand in each verdict, as a table; included by the landing page."""
    names = [v for v in (*VERDICTS, "open") if ledger["counts"][v]]
    meaning = {**VERDICTS, "open": "not settled yet"}
    rows = [f"| {v} | {ledger['counts'][v]} | {meaning[v]} |" for v in names]
    return "\n".join(["| verdict | claims | meaning |", "|---|---:|---|", *rows]) + "\n"


def ledger_page(ledger: dict) -> str:
    """Every claim of the four papers with its verdict, open ones included."""
    out = [
        "# The ledger\n",
        "Every claim the book must carry, with the verdict its chapter reached. The build collects these rows "
        "from the executed chapters; a claim without a card in one of them is open. "
        '<a href="../ledger.json">The same as JSON.</a>\n',
        ":::{include} _verdicts.md\n:::\n",
    ]
    for paper, rows in groupby(ledger["claims"], key=lambda r: r["paper"]):
        out += [f"\n## {PAPERS[paper]}\n", "| claim | where | verdict | chapter |", "|---|---|---|---|"]
        for r in rows:
            chapter = _link(r) if "notebook" in r else str(r["chapter"])
            out.append(f"| `{r['id']}`: {_plain(r['says'])} | {_plain(r['where'])} | {r['verdict']} | {chapter} |")
    return "\n".join(out) + "\n"


def errata_page(ledger: dict) -> str:
    """The claims whose verdict says something their paper does not."""
    out = [
        "# Errata and sharper forms\n",
        "Claims whose verdict is sharpened, corrected, fails or differs, each with the note of the chapter that "
        "derives it. The page is generated from the ledger. A finding here is a remark between colleagues: "
        "the papers' main conclusions are judged in the chapters, and where one of our readings is wrong, its "
        "check should be shown to fail.\n",
    ]
    for r in ledger["claims"]:
        if r["verdict"] not in NEWS:
            continue
        evidence = [f"- {_plain(name)}: {_plain(shown)}" for name, shown in r["evidence"]]
        out += [
            f"## {PAPERS[r['paper']]}, {_plain(r['where'])}\n",
            f"**{r['verdict']}** (`{r['id']}`, derived in chapter {_link(r)})\n",
            f"The claim: {_plain(r['says'])}.\n",
            f"{_plain(r['note'])}\n",
            *evidence,
            "",
        ]
    return "\n".join(out) + "\n"


def generated(ledger: dict) -> dict[str, str]:
    """File names under book/ and their text."""
    return {"_verdicts.md": counts(ledger), "ledger.md": ledger_page(ledger), "errata.md": errata_page(ledger)}
