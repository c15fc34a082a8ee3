"""What became of the mutants: one file for each chapter, and the score of each claim."""

import json
from functools import cache
from pathlib import Path

import pandas as pd

from moe_book import registries
from moe_book.claims import registry as claims
from moe_book.sabotage.population import KINDS, SIZE, Mutant, chapters, reached
from moe_book.sabotage.sources import FOLDER, chapter_of, code, digest, reached_code, short_hash, syntax

OUTCOMES = FOLDER / "outcomes"
EQUIVALENT = FOLDER / "equivalent.yml"
SHARE = 0.2  # of a population that may be equivalent
ENDS = ("refused", "survived", "equivalent", "crashed")


def _path(chapter: str) -> Path:
    return OUTCOMES / f"{Path(chapter).name}.json"


def _read(chapter: str) -> dict:
    path = _path(chapter)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"trace": {}, "claims": {}}


def _write(chapter: str, found: dict) -> None:
    """One line for a function, and one for a mutant, so that a change is a small diff."""
    trace = {name: json.dumps(value) for name, value in found["trace"].items() if name != "functions"}
    lines = [f'  "{f}": {json.dumps(cells)}' for f, cells in found["trace"].get("functions", {}).items()]
    head = [f' "{name}": {value}' for name, value in trace.items()]
    head.append(' "functions": {\n' + ",\n".join(lines) + "\n }")
    blocks = []
    for claim, entry in found["claims"].items():
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in entry["mutants"])
        blocks.append(
            f' "{claim}": {{"digest": "{entry["digest"]}", "size": {entry["size"]}, "mutants": [\n{rows}\n ]}}'
        )
    text = '{"trace": {\n' + ",\n".join(head) + '\n}, "claims": {\n' + ",\n".join(blocks) + "\n}}\n"
    OUTCOMES.mkdir(exist_ok=True)
    new = _path(chapter).with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(_path(chapter))


# --- traces ---------------------------------------------------------------------------------------


def _trace_digest(chapter: str, functions: list[str]) -> str:
    return short_hash([syntax(cell) for cell in code(chapter)], reached_code(functions))


def stored_trace(chapter: str) -> list[dict] | None:
    """What each cell executes, as stored; None if a cell or a function that it reaches has changed since."""
    found = _read(chapter)["trace"]
    if not found or found["digest"] != _trace_digest(chapter, list(found["functions"])):
        return None
    cells = [{"functions": [], "seconds": seconds} for seconds in found["seconds"]]
    for function, places in found["functions"].items():
        for i in places:
            cells[i]["functions"].append(function)
    return cells


def store_trace(chapter: str, trace: list[dict]) -> None:
    """Keep what each cell executes, beside the outcomes."""
    functions: dict[str, list[int]] = {}
    for i, cell in enumerate(trace):
        for function in cell["functions"]:
            functions.setdefault(function, []).append(i)
    seconds = [cell["seconds"] for cell in trace]
    entry = {"digest": _trace_digest(chapter, list(functions)), "seconds": seconds, "functions": functions}
    _write(chapter, _read(chapter) | {"trace": entry})


# --- outcomes -------------------------------------------------------------------------------------


def current(claim: str) -> dict[str, dict]:
    """What became of a claim's mutants, by their key; nothing if what its box depends on has changed since."""
    chapter = chapter_of(claim)
    entry, trace = _read(chapter)["claims"].get(claim), stored_trace(chapter)
    if not entry or trace is None or entry["digest"] != digest(claim, list(reached(claim, trace))):
        return {}
    return {row["key"]: row for row in entry["mutants"]}


def complete(claim: str) -> bool:
    """Whether all mutants of a claim have an outcome that holds; some of them say little of its check."""
    return bool(known := current(claim)) and len(known) == _read(chapter_of(claim))["claims"][claim]["size"]


def store(chapter: str, drawn: dict[str, list[Mutant]], found: dict[str, dict], trace: list[dict]) -> None:
    """Keep the outcomes of the mutants that claims of a chapter have drawn, by key; what is of none of them goes."""
    file = _read(chapter)
    for claim, mutants in drawn.items():
        rows = [found[m.key] for m in mutants if m.key in found]
        entry = {"digest": digest(claim, list(reached(claim, trace))), "size": len(mutants), "mutants": rows}
        file["claims"][claim] = entry
    file["claims"] = {claim: file["claims"][claim] for claim in chapters()[chapter] if claim in file["claims"]}
    _write(chapter, file)


def row(m: Mutant, outcome: str, why: str, seconds: float) -> dict:
    """A mutant and what became of it, as its file has it."""
    fields = {name: getattr(m, name) for name in ("key", "kind", "operator", "place", "what")}
    return {**fields, "outcome": outcome, "why": why, "seconds": seconds}


@cache
def equivalents() -> dict[str, dict[str, str]]:
    """Why a survivor changes nothing that a sentence speaks of: claim -> key of the mutant -> reason.

    Raises:
        ValueError: for an unknown claim, or more reasons than a fifth of a population.
    """
    found = registries.read(EQUIVALENT) or {}
    for claim, reasons in found.items():
        if claim not in claims():
            raise ValueError(f"{EQUIVALENT.name}: expected ids of the registry, got {claim!r}")
        if len(reasons) > SHARE * SIZE:
            raise ValueError(
                f"{EQUIVALENT.name}: {claim}: expected at most {SHARE * SIZE:.0f} reasons, got {len(reasons)}"
            )
    return {claim: dict(reasons) for claim, reasons in found.items()}


# --- scores ---------------------------------------------------------------------------------------


def ended() -> list[dict]:
    """Every mutant with an outcome that holds, with its claim, its chapter, and the reason if it is equivalent."""
    rows = []
    for chapter, ids in chapters().items():
        for claim in ids:
            for key, mutant in current(claim).items():
                reason = equivalents().get(claim, {}).get(key, "")
                ends = "equivalent" if reason and mutant["outcome"] == "survived" else mutant["outcome"]
                rows.append({"claim": claim, "chapter": chapter, **mutant, "outcome": ends, "reason": reason})
    return rows


def table() -> pd.DataFrame:
    """The same as a frame."""
    columns = ["claim", "chapter", "key", "kind", "operator", "place", "what", "outcome", "why", "seconds", "reason"]
    return pd.DataFrame(ended(), columns=columns)


def score(mutants: pd.DataFrame) -> pd.DataFrame:
    """The score of each claim, in percent: refused over refused and survived for each kind, and their mean.

    Args:
        mutants: as `table` gives them.

    Returns:
        A frame by claim: a column for each of `KINDS`, nan where it has none, `score`, and the counts of `ENDS`.
    """
    judged = mutants[mutants.outcome.isin(["refused", "survived"])]
    share = (judged.outcome == "refused").groupby([judged.claim, judged.kind]).mean().unstack().reindex(columns=KINDS)
    ends = pd.crosstab(mutants.claim, mutants.outcome).reindex(columns=ENDS, fill_value=0)
    by_kind = 100 * share.astype(float)
    return by_kind.assign(score=by_kind.mean(axis=1)).join(ends, how="outer")


def by_claim() -> dict[str, dict]:
    """For the ledger: the score of each claim whose mutants have all run, how they ended, and those that survived.

    Returns:
        By claim `score` in percent (None where nothing was judged), the counts of `ENDS`, and `survivors` and
        `equivalents`, lists of mutants as `ended` gives them.
    """
    all_rows, found = ended(), {}
    whole = {claim for claim in {row["claim"] for row in all_rows} if complete(claim)}
    rows = [row for row in all_rows if row["claim"] in whole]
    scores = score(pd.DataFrame(rows)) if rows else pd.DataFrame()
    for claim, numbers in scores.iterrows():
        counts = {end: int(numbers[end]) for end in ENDS}
        mine = [m for m in rows if m["claim"] == claim]
        survivors, reasons = ([m for m in mine if m["outcome"] == end] for end in ("survived", "equivalent"))
        value = None if pd.isna(numbers.score) else round(float(numbers.score), 1)
        found[claim] = {"score": value, **counts, "survivors": survivors, "equivalents": reasons}
    return found


def by_operator(mutants: pd.DataFrame) -> pd.DataFrame:
    """What became of the mutants of each operator, and the share that was refused, in percent."""
    ends = pd.crosstab([mutants.kind, mutants.operator], mutants.outcome).reindex(columns=ENDS, fill_value=0)
    return ends.assign(score=100 * ends.refused / (ends.refused + ends.survived))
