"""Claims and verdicts: the registry, the check a chapter makes, its card, and the ledger.

A chapter derives a claim, measures it, and calls `check`. The verdict must be the one the registry
(`claims.yml`) expects, and every comparison in the evidence must come out true; otherwise the
notebook fails. The card that is shown carries its content in a MIME bundle. The build collects those
bundles from the executed notebooks (`collect`) and writes the ledger and the errata from them.
"""

import html
import json
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import yaml

MIME = "application/vnd.moe-theory.claim+json"

VERDICTS = {
    "holds": "true as stated",
    "sharpened": "true, and a better constant is proved",
    "corrected": "true after a stated repair",
    "fails": "a counterexample is shown",
    "reproduced": "table or figure within a stated tolerance",
    "differs": "not reproduced: ours, theirs and the likely reason side by side",
    "trend": "asymptotic: a fitted exponent with its confidence interval",
}

#: Verdicts that say something the paper does not; each gets a place on the errata page.
NEWS = ("sharpened", "corrected", "fails", "differs")

PAPERS = {
    "chen2022": "Chen et al. (2022)",
    "dikkala2023": "Dikkala et al. (2023)",
    "smooth2025": "Smoothness bridges sparsity and stability (2025)",
    "nguyen2025": "Perturbing the cosine router (2025)",
    "book": "This book",
}

_RELATIONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_SYMBOLS = {"<=": "≤", ">=": "≥", "==": "="}


@dataclass(frozen=True)
class Compared:
    """A measured number and what it is compared with; the claim is refuted if the relation is false.

    Args:
        value: the number measured.
        relation: one of <, <=, >, >=, ==.
        limit: what it is compared with.
        digits: significant digits shown; choose so few that they agree on every machine, or 0 to
            show only the relation, as for residuals of rounding.
    """

    value: float
    relation: str
    limit: float
    digits: int = 4

    def __post_init__(self):
        if self.relation not in _RELATIONS:
            raise ValueError(f"relation: expected one of {list(_RELATIONS)}, got {self.relation!r}")

    def __bool__(self) -> bool:
        return bool(_RELATIONS[self.relation](self.value, self.limit))

    def __str__(self) -> str:
        tail = f"{_SYMBOLS.get(self.relation, self.relation)} {_number(self.limit, 6)}"
        return f"{_number(self.value, self.digits)} {tail}" if self.digits else tail


def _number(value, digits: int = 4) -> str:
    if isinstance(value, float) or hasattr(value, "item"):
        return f"{float(value):.{digits}g}"
    return str(value)


@cache
def registry() -> dict[str, dict]:
    """All claims by id, in the order of `claims.yml`; `verdict` is absent from those still open.

    Raises:
        ValueError: for a repeated id or an unknown verdict or paper in the file.
    """
    rows = yaml.safe_load(files("moe_theory").joinpath("claims.yml").read_text(encoding="utf-8"))
    claims = {}
    for row in rows:
        if row["id"] in claims:
            raise ValueError(f"claims.yml: id {row['id']!r} appears twice")
        if row.get("verdict", "holds") not in VERDICTS:
            raise ValueError(f"claims.yml: {row['id']}: expected a verdict of {list(VERDICTS)}, got {row['verdict']!r}")
        if row["paper"] not in PAPERS:
            raise ValueError(f"claims.yml: {row['id']}: expected a paper of {list(PAPERS)}, got {row['paper']!r}")
        claims[row["id"]] = row
    return claims


@dataclass(frozen=True)
class Card:
    """A settled claim as a reader meets it: statement, evidence, verdict.

    Attributes:
        id, paper, where, says: from the registry.
        verdict: one of `VERDICTS`.
        evidence: what was measured, as pairs of name and what is shown, in order.
        refutable: whether the evidence holds at least one comparison that could have failed.
        note: what the verdict rests on, or what had to change.
    """

    id: str
    paper: str
    where: str
    says: str
    verdict: str
    evidence: tuple[tuple[str, str], ...]
    refutable: bool
    note: str

    def __str__(self) -> str:
        lines = [f"[{self.verdict}] {self.id} ({PAPERS[self.paper]}, {self.where})", f"  claim: {self.says}"]
        lines += [f"  {name}: {shown}" for name, shown in self.evidence]
        return "\n".join([*lines, *([f"  note: {self.note}"] if self.note else [])])

    def html(self) -> str:
        """The card as HTML; it takes its colours from the page, so it reads in light and dark mode."""
        e = html.escape
        rows = "".join(f"<tr><td>{e(name)}</td><td>{e(shown)}</td></tr>" for name, shown in self.evidence)
        note = f'<p class="claim-note">{e(self.note)}</p>' if self.note else ""
        return (
            f'<div class="claim-card claim-{self.verdict}" id="claim-{e(self.id)}">'
            f'<p class="claim-head"><strong class="claim-verdict">{self.verdict}</strong> '
            f"<code>{e(self.id)}</code> {e(PAPERS[self.paper])}, {e(self.where)}</p>"
            f"<p>{e(self.says)}</p><table>{rows}</table>{note}</div>"
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self.html(), MIME: asdict(self)}


#: Claims checked in this process: id -> source of the notebook cell that did, None outside a notebook.
_checked: dict[str, str | None] = {}


def _shell():
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def check(claim_id: str, verdict: str, evidence: Mapping[str, object], note: str = "") -> None:
    """Settle a claim (see `settle`) and show its card, in a notebook or as text."""
    card = settle(claim_id, verdict, evidence, note)
    if _shell() is None:
        print(card)
    else:
        from IPython.display import display

        display(card)


def settle(claim_id: str, verdict: str, evidence: Mapping[str, object], note: str = "") -> Card:
    """Record the verdict a chapter reached.

    Args:
        claim_id: an id of the registry.
        verdict: the verdict reached; compute it from the evidence rather than writing it down.
        evidence: what was measured, by name: `Compared` for a number that could have refuted the claim, or a
            number or string that is only shown.
        note: one or two sentences.

    Returns:
        The card.

    Raises:
        ValueError: for an unknown id or verdict, an id whose verdict is still open in the registry, or
            an id checked before in this process (running the same notebook cell again is allowed).
        AssertionError: if the verdict is not the registry's, or a comparison in the evidence is false.
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
    false = {
        k: f"{v.value!r} is not {v.relation} {v.limit!r}"
        for k, v in evidence.items()
        if isinstance(v, Compared) and not v
    }
    if false:
        raise AssertionError(f"{claim_id}: refuted by {false}")
    if verdict != row["verdict"]:
        raise AssertionError(f"{claim_id}: the chapter finds {verdict!r}, the registry expects {row['verdict']!r}")
    refutable = any(isinstance(v, Compared) for v in evidence.values())
    shown = tuple((name, str(v) if isinstance(v, Compared) else _number(v)) for name, v in evidence.items())
    _checked[claim_id] = cell
    return Card(claim_id, row["paper"], row["where"], row["says"], verdict, shown, refutable, note)


def collect(notebooks: Iterable[Path]) -> dict:
    """The ledger: every claim of the registry, with the card that executed notebooks hold for it.

    Args:
        notebooks: executed .ipynb files.

    Returns:
        `{"counts": {verdict or "open": number}, "claims": [row, ...]}`; a row carries the registry's
        id, paper, where, says and chapter, and either verdict, evidence, note and notebook, or the
        verdict "open". Nothing in it is typed by hand.

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
        settled = (
            {key: card[key] for key in ("verdict", "evidence", "note", "notebook")} if card else {"verdict": "open"}
        )
        rows.append({**row, **settled})
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in [*VERDICTS, "open"]}
    return {"counts": counts, "claims": rows}


def write_ledger(notebooks: Iterable[Path], path: Path) -> dict:
    """Write `collect(notebooks)` to a JSON file and return it."""
    ledger = collect(notebooks)
    path.write_text(json.dumps(ledger, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return ledger


def verify_ledger(notebooks: Iterable[Path], path: Path) -> None:
    """Raise ValueError if the ledger at `path` is not what the notebooks' cards say."""
    if json.loads(Path(path).read_text(encoding="utf-8")) != collect(notebooks):
        raise ValueError(f"{path}: stale; it differs from the cards in the notebooks, run `make ledger`")
