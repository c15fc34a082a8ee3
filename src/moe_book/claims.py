"""Claims and verdicts: the registry, the check a chapter makes, its card, and the ledger.

A chapter derives a claim, measures it, and calls `check`. The verdict must be the one the registry
(`claims.yml`) expects, and every comparison in the evidence must come out true; otherwise the
notebook fails. The card that is shown carries its content in a MIME bundle. The build collects those
bundles from the executed notebooks (`collect`) and writes the ledger and the errata from them.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files
from pathlib import Path

import yaml

from moe_book.evidence import KINDS, Close, Compared, Inside, Ordered, stands
from moe_book.typeset import number, typeset

__all__ = ["Close", "Compared", "Inside", "Ordered", "check", "collect", "registry", "settle", "stands"]

MIME = "application/vnd.moe-theory.claim+json"

VERDICTS = {
    "holds": "true as stated",
    "sharpened": "true, and a better constant is proved",
    "corrected": "true after a stated repair",
    "fails": "a counterexample is shown",
    "reproduced": "table or figure within a stated tolerance",
    "differs": "not reproduced: ours and theirs side by side, with the likely reason where one is known",
    "trend": "asymptotic: a fitted exponent with its interval; the note says whether the claimed one was seen",
    "untested": "the setting cannot be had here, or is not named and no choice met it; what was done is shown as that",
}

#: Verdicts that say something the paper does not; each gets a place on the errata page.
NEWS = ("sharpened", "corrected", "fails", "differs")

PAPERS = {
    "chen2022": "Chen et al. (2022)",
    "dikkala2023": "Dikkala et al. (2023)",
    "smooth2025": "Smoothness bridges sparsity and stability (2025)",
    "nguyen2025": "Nguyen et al. (2025)",
    "book": "This book",
}

#: Fields of a claim that only pages and tests read: no card depends on them, nor anything that a chapter computes.
FOR_PAGES = ("kind", "chapter", "box", "rests_on")

#: What a table or figure says of its criterion: when it was set.
CRITERION_SET = ("before the rows", "after the rows were seen")


@cache
def registry() -> dict[str, dict]:
    """All claims by id, in the order of `claims.yml`; `verdict` is absent from those still open.

    Raises:
        ValueError: for a repeated id, an unknown verdict or paper in the file, a criterion that does not
            say when it was set, or a claim that rests on an unknown one or on itself.
    """
    rows = yaml.safe_load(files("moe_book").joinpath("claims.yml").read_text(encoding="utf-8"))
    claims = {}
    for row in rows:
        if row["id"] in claims:
            raise ValueError(f"claims.yml: id {row['id']!r} appears twice")
        if row.get("verdict", "holds") not in VERDICTS:
            raise ValueError(f"claims.yml: {row['id']}: expected a verdict of {list(VERDICTS)}, got {row['verdict']!r}")
        if row["paper"] not in PAPERS:
            raise ValueError(f"claims.yml: {row['id']}: expected a paper of {list(PAPERS)}, got {row['paper']!r}")
        if "criterion" in row and row.get("criterion_set") not in CRITERION_SET:
            raise ValueError(f"claims.yml: {row['id']}: expected criterion_set to be one of {CRITERION_SET}")
        claims[row["id"]] = row
    _refuse_circles({claim: row.get("rests_on", []) for claim, row in claims.items()})
    return claims


def _refuse_circles(rests_on: Mapping[str, list[str]]) -> None:
    """Raise ValueError if a claim rests on an id that is not there, or on itself, by way of others or at once."""
    for claim, others in rests_on.items():
        for other in others:
            if other not in rests_on:
                raise ValueError(f"claims.yml: {claim}: expected rests_on to hold ids of the registry, got {other!r}")
    try:
        TopologicalSorter(rests_on).prepare()
    except CycleError as error:
        circle = error.args[1]  # each of them rests on the one before
        way = ", which is used by ".join(circle)
        raise ValueError(f"claims.yml: {circle[0]}: expected rests_on without a circle, got {way}") from None


@dataclass(frozen=True)
class Card:
    """A settled claim as a reader meets it: statement, evidence, verdict.

    Attributes:
        id, paper, where, says: from the registry.
        verdict: one of `VERDICTS`.
        evidence: rows of name, measured value, what was predicted, what would have refuted; the last two are
            empty for what is only shown.
        criterion: for a table or figure, what decides, and when that was set.
        note: what the verdict rests on, or what had to change.
    """

    id: str
    paper: str
    where: str
    says: str
    verdict: str
    evidence: tuple[tuple[str, str, str, str], ...]
    criterion: str
    note: str

    def __str__(self) -> str:
        lines = [f"[{self.verdict}] {self.id} ({PAPERS[self.paper]}, {self.where})", f"  claim: {self.says}"]
        for name, measured, predicted, refuted in self.evidence:
            lines.append(f"  {name}: {measured}" + (f" | predicted {predicted} | refuted if {refuted}" * bool(refuted)))
        lines += [f"  {label}: {text}" for label, text in self._remarks if text]
        return "\n".join(lines)

    @property
    def _remarks(self) -> tuple[tuple[str, str], ...]:
        return ("criterion", self.criterion), ("note", self.note)

    def html(self, links: str = "") -> str:
        """The card as HTML, with what leads on from it; it takes its colours from the page, light or dark."""
        head = "".join(f"<th>{column}</th>" for column in ("", "measured", "predicted", "refuted if"))
        rows = "".join("<tr>" + "".join(f"<td>{typeset(cell)}</td>" for cell in row) + "</tr>" for row in self.evidence)
        remarks = "".join(f'<p class="claim-{label}">{typeset(text)}</p>' for label, text in self._remarks if text)
        return (
            f'<div class="claim-card claim-{self.verdict} mathjax_process" id="claim-{self.id}">'
            f'<p class="claim-head"><strong class="claim-verdict">{self.verdict}</strong> '
            f"<code>{self.id}</code> {typeset(PAPERS[self.paper])}, {typeset(self.where)}</p>"
            f"<p>{typeset(self.says)}</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"{remarks}{links}</div>"
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self.html(), MIME: asdict(self)}


def _shown(name: str, value: object) -> tuple[str, str, str, str]:
    if isinstance(value, KINDS):
        return name, value.measured, value.predicted, value.refuted
    return name, number(value, 4), "", ""


#: Claims checked in this process: id -> source of the notebook cell that did, None outside a notebook.
_checked: dict[str, str | None] = {}


def _shell():
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def check(claim_id: str, verdict: str, evidence: Mapping[str, object], note: str = "") -> None:
    """Settle a claim and show its card, in a notebook or as text.

    Args:
        claim_id: an id of the registry.
        verdict: the verdict reached; compute it from the evidence, with `stands`, rather than writing it down.
        evidence: what was measured, by name: `Close`, `Inside`, `Ordered` or `Compared` for what could have
            refuted the claim, or a number or string that is only shown. Names may hold $mathematics$.
        note: what only this run can say, such as a number; the registry's own note stands before it.

    Raises:
        ValueError: for an unknown id or verdict, an id whose verdict is still open in the registry,
            evidence without a comparison, or an id checked before in this process (running the same
            notebook cell again is allowed).
        AssertionError: if the verdict is not the registry's, or a comparison in the evidence is false.
    """
    card = settle(claim_id, verdict, evidence, note)
    if _shell() is None:
        print(card)
    else:
        from IPython.display import display

        display(card)


def settle(claim_id: str, verdict: str, evidence: Mapping[str, object], note: str = "") -> Card:
    """Record the verdict a chapter reached.

    Args:
        claim_id, verdict, evidence, note: see `check`.

    Returns:
        The card.

    Raises:
        ValueError, AssertionError: see `check`.
    """
    claims = registry()
    if claim_id not in claims:
        raise ValueError(f"claim_id: expected an id of the registry, got {claim_id!r}")
    if verdict not in VERDICTS:
        raise ValueError(f"verdict: expected one of {list(VERDICTS)}, got {verdict!r}")
    shell = _shell()
    cell = shell.user_ns["In"][-1] if shell is not None else None
    if claim_id in _checked and (cell is None or _checked[claim_id] != cell):
        raise ValueError(f"claim_id: {claim_id!r} was checked before; a claim gets one verdict")
    row = claims[claim_id]
    if "verdict" not in row:
        raise ValueError(f"claim_id: {claim_id!r} is open in the registry; give it a verdict there first")
    if not stands(evidence):
        false = "; ".join(f"{name}: {v!r}" for name, v in evidence.items() if isinstance(v, KINDS) and not v)
        raise AssertionError(f"{claim_id}: refuted by {false}")
    if verdict != row["verdict"]:
        raise AssertionError(f"{claim_id}: the chapter finds {verdict!r}, the registry expects {row['verdict']!r}")
    _checked[claim_id] = cell
    criterion = f"{row['criterion']} (Set {row['criterion_set']}.)" if "criterion" in row else ""
    shown = tuple(_shown(name, value) for name, value in evidence.items())
    notes = " ".join(filter(None, (row.get("note"), note)))
    return Card(claim_id, row["paper"], row["where"], row["says"], verdict, shown, criterion, notes)


def link(claim_id: str) -> str:
    """A link from one chapter to a claim's card in its own, and the verdict; ValueError for an unknown id.

    The chapters' names are those of the files of mutants.
    """
    if claim_id not in registry():
        raise ValueError(f"claim_id: expected an id of the registry, got {claim_id!r}")
    row = registry()[claim_id]
    stems = {p.name[:2]: p.name.removesuffix(".yml") for p in files("moe_book").joinpath("sabotage").iterdir()}
    name, verdict = f"<code>{claim_id}</code>", row.get("verdict", "open")
    page = stems.get(row["chapter"])
    return (f'<a href="{page}.html#claim-{claim_id}">{name}</a>' if page else name) + f" ({verdict})"


def collect(notebooks: Iterable[Path], mutants: Mapping[str, list[dict]]) -> dict:
    """The ledger: every claim of the registry, with the card that executed notebooks hold for it.

    Args:
        notebooks: executed .ipynb files.
        mutants: for each claim what became of its mutants (`moe_book.sabotage.outcomes_by_claim`).

    Returns:
        `{"counts": {verdict or "open": number}, "claims": [row, ...]}`; a row carries the registry's
        id, paper, where, says and chapter, and either verdict, evidence, criterion, note, notebook and
        mutants, or the verdict "open". Nothing in it is typed by hand.

    Raises:
        ValueError: if two outputs settle one claim, or a card disagrees with the registry.
    """
    claims, cards = registry(), {}
    for path in sorted(notebooks):
        for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                card = output.get("data", {}).get(MIME)
                if card is None:
                    continue
                if card["id"] in cards:
                    raise ValueError(f"{path.name}: {card['id']} has a card in {cards[card['id']]['notebook']} already")
                if card["id"] not in claims or claims[card["id"]].get("verdict") != card["verdict"]:
                    raise ValueError(
                        f"{path.name}: the card of {card['id']} ({card['verdict']}) is not what the registry says"
                    )
                cards[card["id"]] = {**card, "notebook": path.stem}
    rows = []
    for claim_id, claim in claims.items():
        row = {key: claim[key] for key in ("id", "paper", "where", "says", "chapter")}
        card = cards.get(claim_id)
        settled = {"verdict": "open"}
        if card:
            settled = {key: card[key] for key in ("verdict", "evidence", "criterion", "note", "notebook")}
            settled["mutants"] = mutants.get(claim_id, [])
        rows.append({**row, **settled})
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in [*VERDICTS, "open"]}
    return {"counts": counts, "claims": rows}


def write_ledger(notebooks: Iterable[Path], mutants: Mapping[str, list[dict]], path: Path) -> dict:
    """Write `collect(notebooks, mutants)` to a JSON file and return it."""
    ledger = collect(notebooks, mutants)
    path.write_text(json.dumps(ledger, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return ledger
