"""Claims and verdicts: the registry, the check a chapter makes, its box, and the ledger.

A chapter derives a claim, measures it, and calls `check("chen-tab-7", end=..., lead=...)`. What decides stands in the
registry (`claims.yml`): each line of evidence with its comparison, its tolerance and the number of cases, and, for a
verdict that the data choose, the rule. The box that is shown carries its content in a MIME bundle; the build collects
those bundles from the executed notebooks (`collect`) and writes the ledger and the errata from them.

While the book is built or tested, a box that does not stand stops the notebook. Anywhere else a reader plays: a box
never stops anything, may be run again, and shows in grey what is no longer the chapter's number.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files
from pathlib import Path
from string import Formatter

from moe_book import registries
from moe_book.evidence import UNFIT, Line, compare, names_in
from moe_book.evidence import validate as validate_line
from moe_book.notebooks import APPENDIX, chapter, page, settling
from moe_book.typeset import typeset

__all__ = ["check", "collect", "registry", "settle", "strict", "try_"]

MIME = "application/vnd.moe-theory.claim+json"

VERDICTS = {
    "holds": "true as stated",
    "proof repaired": "true as stated; the printed proof is not, and the book proves it",
    "sharpened": "true, and a better constant is proved",
    "corrected": "false as stated, true after a stated repair",
    "misprint": "a slip of print that nothing rests on",
    "fails": "a counterexample is shown",
    "reproduced": "a table or figure, at the sizes, rates and lengths that the paper names; the rest was set before",
    "reproduced after a search": "the same, but the criterion, or what the paper leaves open, was set after runs",
    "differs": "not reproduced: ours and theirs side by side, with the likely reason where one is known",
    "trend": "asymptotic: a fitted exponent with its interval over at least four sizes",
    "untested": "the setting cannot be had, or is not named and no choice met it; what would be needed is said",
}

#: Verdicts that say something the paper does not; each gets a place on the errata page.
NEWS = ("proof repaired", "sharpened", "corrected", "misprint", "fails", "differs")

PAPERS = {
    "chen2022": "Chen et al. (2022)",
    "dikkala2023": "Dikkala et al. (2023)",
    "smooth2025": "Smoothness bridges sparsity and stability (2025)",
    "nguyen2025": "Nguyen et al. (2025)",
    "book": "This book",
}

#: Fields of a claim that only pages and tests read: no box depends on them, nor anything that a chapter computes.
FOR_PAGES = ("kind", "chapter", "page", "box", "rests_on")

#: What a table or figure says of its criterion: when it was set.
CRITERION_SET = ("before the runs", "after the runs were seen")

#: Numbers of the registry that limits may name.
NUMBERS = ("target", "target_sd", "predicted")

MOST_LINES = 7  # of a box


@cache
def registry() -> dict[str, dict]:
    """All claims by id, in the order of `claims.yml`; `verdict` is absent from those still open.

    Raises:
        ValueError: for a slip in the file, in one line that names the file and the claim.
    """
    rows = registries.read(files("moe_book") / "claims.yml")
    claims = {}
    for row in rows:
        if row["id"] in claims:
            raise ValueError(f"claims.yml: id {row['id']!r} appears twice")
        try:
            validate(row)
        except ValueError as error:
            raise ValueError(f"claims.yml: {row['id']}: {error}") from None
        claims[row["id"]] = row
    _refuse_circles({claim: row.get("rests_on", []) for claim, row in claims.items()})
    return claims


REQUIRED = {"id", "paper", "where", "kind", "chapter", "says"}
OPTIONAL = {
    "verdict",
    "page",
    "box",
    "rests_on",
    "criterion",
    "criterion_set",
    "note",
    "record",
    "finding",
    "evidence",
    "rule",
    *NUMBERS,
}


def validate(row: dict) -> None:
    """Raise ValueError, with the reason, for a row of the registry that could not decide anything."""
    if missing := sorted(REQUIRED - row.keys()):
        raise ValueError(f"expected the fields {sorted(REQUIRED)}, missing {missing}")
    if unknown := sorted(map(str, row.keys() - REQUIRED - OPTIONAL)):
        raise ValueError(f"unknown fields {unknown}, expected some of {sorted(REQUIRED | OPTIONAL)}")
    if row.get("verdict", "holds") not in VERDICTS:
        raise ValueError(f"expected a verdict of {list(VERDICTS)}, got {row['verdict']!r}")
    if row["paper"] not in PAPERS:
        raise ValueError(f"expected a paper of {list(PAPERS)}, got {row['paper']!r}")
    if "page" in row and (not row["page"].startswith(f"{APPENDIX}/") or chapter(row["page"]) != int(row["chapter"])):
        raise ValueError(f"expected page to be an appendix page of chapter {row['chapter']}, got {row['page']!r}")
    if "criterion" in row and row.get("criterion_set") not in CRITERION_SET:
        raise ValueError(f"expected criterion_set to be one of {CRITERION_SET}")
    lines = row.get("evidence", {})
    for name, spec in lines.items():
        validate_line(name, spec)
        if typed := [limit for limit in names_in(spec) if _numeric(limit)]:
            raise ValueError(f"{name}: expected a number as YAML writes it, such as 1.0e-9, got the text {typed[0]!r}")
    if len(lines) > MOST_LINES:
        raise ValueError(f"expected at most {MOST_LINES} lines of evidence, got {len(lines)}")
    if lines and all("shown" in spec for spec in lines.values()):
        raise ValueError("expected at least one comparison in its evidence; nothing could refute the claim")
    _validate_rule(row, lines)
    _compare_transcriptions(row)


def _validate_rule(row: dict, lines: Mapping[str, dict]) -> None:
    rule = row.get("rule", {})
    names = [condition for conditions in rule.values() for condition in conditions]
    if unknown := [name for name in names if not isinstance(name, str) or _bare(name) not in lines]:
        raise ValueError(f"expected a rule that names lines of evidence, got {unknown}")
    if rule and (row.get("verdict") not in rule or not set(rule) <= VERDICTS.keys() or [*rule.values()][-1]):
        raise ValueError(f"expected a rule of verdicts, the registry's among them, the last for all else, got {rule}")


@cache
def _transcription() -> dict[str, dict]:
    """The papers' numbers as another reader typed them: claim -> field -> numbers."""
    return registries.read(files("moe_book") / "transcription.yml")


def _compare_transcriptions(row: dict) -> None:
    """Raise ValueError unless the two transcriptions of a paper's numbers agree."""
    for field, numbers in _transcription().get(row["id"], {}).items():
        if row.get(field) != numbers:
            raise ValueError(f"{field}: expected the numbers of transcription.yml, {numbers}, got {row.get(field)}")


def _numeric(text: str) -> bool:
    return text.replace("e", "").replace("-", "").replace("+", "").isdigit()


def _bare(condition: str) -> str:
    return condition.removeprefix("not ")


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


# --- the box --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A claim as a reader meets it: statement, verdict, evidence.

    Attributes:
        id, paper, where, says, criterion, criterion_set, note: from the registry; empty if it has none.
        verdict: one of `VERDICTS`, or what is said of numbers that are not the chapter's.
        evidence: the lines, as `Line.bundle` gives them.
        finding: what only this run can say, such as a number.
    """

    id: str
    paper: str
    where: str
    says: str
    verdict: str
    evidence: tuple[dict, ...]
    criterion: str = ""
    criterion_set: str = ""
    note: str = ""
    finding: str = ""

    @property
    def source(self) -> str:
        return ", ".join(filter(None, (PAPERS.get(self.paper, ""), self.where)))

    @property
    def remarks(self) -> dict[str, str]:
        """What stands below the lines, by its class."""
        return {label: text for label in ("finding", "note") if (text := getattr(self, label))}

    @property
    def folded(self) -> dict[str, str]:
        """What stands below those, folded, by its heading: what only somebody asks for who checks the claim.

        The record is the registry's of today: no line or verdict depends on it, so that boxes do not store it.
        """
        record = registry().get(self.id, {}).get("record", "")
        parts = {f"The criterion, set {self.criterion_set}": self.criterion, "For the record": record}
        return {heading: text for heading, text in parts.items() if text}

    def __str__(self) -> str:
        lines = [f"[{self.verdict}] {self.id} ({self.source})", f"  claim: {self.says}"]
        for line in self.evidence:
            mark = "" if line["holds"] else "  <-"
            refuted = f" | refuted if {line['refuted']}" * bool(line["refuted"])
            lines.append(f"  {line['says']}: {line['measured']}{refuted}{mark}")
        lines += [f"  {label}: {text}" for label, text in self.remarks.items()]
        lines += [f"  {heading.removeprefix('The ')}: {text}" for heading, text in self.folded.items()]
        return "\n".join(lines)

    def html(self, links: str = "") -> str:
        """The box as HTML, with what leads on from it; it takes its colours from the page, light or dark."""
        remarks = "".join(f'<p class="claim-{label}">{typeset(text)}</p>' for label, text in self.remarks.items())
        return (
            f'<div class="claim-card claim-{slug(self.verdict)} mathjax_process" id="claim-{self.id}">'
            f'<p class="claim-head"><strong class="claim-verdict">{self.verdict}</strong> '
            f"<code>{self.id}</code> {typeset(self.source)}</p>"
            f"<p>{typeset(self.says)}</p>{self._lines()}"
            f"{remarks}{self._folds()}{links}</div>"
        )

    def _lines(self) -> str:
        """Deciding lines and the first others, at least `FIRST`; the rest folded, but open where one is greyed."""
        lines = sorted(self.evidence, key=lambda line: not line["refuted"].endswith(DECIDES))
        shown = max(FIRST, sum(line["refuted"].endswith(DECIDES) for line in lines))
        if len(lines) <= shown + 1:
            return table(lines)
        rest = lines[shown:]
        state = "" if all(line["holds"] for line in rest) else " open"
        summary = f"<summary>{len(rest)} more lines of evidence</summary>"
        return f'{table(lines[:shown])}<details class="claim-more"{state}>{summary}{table(rest)}</details>'

    def _folds(self) -> str:
        return "".join(
            f'<details class="claim-fold"><summary>{heading}</summary><p>{typeset(text)}</p></details>'
            for heading, text in self.folded.items()
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self.html(), MIME: asdict(self)}


FIRST = 2  # lines that a box shows unfolded, but for those that decide
DECIDES = ", which would change the verdict", ", which sets this verdict"
MOVED = "not the chapter's numbers"
OWN = "your check"


def slug(verdict: str) -> str:
    """A verdict as the name of a class."""
    return {MOVED: "moved"}.get(verdict, verdict.split(":")[0].replace(" ", "-"))


def table(evidence: Iterable[dict]) -> str:
    """Lines of evidence, as `Line.bundle` gives them, as HTML."""
    head = "".join(f'<th scope="col">{column}</th>' for column in ("quantity", "measured", "refuted if"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, evidence))}</tbody></table>"


def _row(line: dict) -> str:
    cells = [f'<th scope="row">{typeset(line["says"])}</th>']
    cells += [f"<td>{typeset(line[key])}</td>" for key in ("measured", "refuted")]
    moved = "" if line["holds"] else ' class="claim-line-moved"'
    return f"<tr{moved}>{''.join(cells)}</tr>"


# --- checking -------------------------------------------------------------------------------------

#: Claims checked in this process: id -> source of the notebook cell that did, None outside a notebook.
_checked: dict[str, str | None] = {}


def strict() -> bool:
    """Whether a box that does not stand is an error: in tests, and where `MOE_BOOK_STRICT` is set, as by the build."""
    return bool(os.environ.keys() & {"MOE_BOOK_STRICT", "PYTEST_CURRENT_TEST"})


def _shell():
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def _show(box: Box) -> None:
    if _shell() is None:
        print(box)
    else:
        from IPython.display import display

        display(box)


def check(claim_id: str, **measured: object) -> None:
    """Settle a claim and show its box, in a notebook or as text.

    Args:
        claim_id: an id of the registry.
        measured: what was measured, under the names of the claim's lines of evidence, and what their limits name: a
            number, an array or a frame of numbers, a mapping from names of cases to numbers, or a word.

    Raises:
        ValueError: for an unknown id, a claim that is open in the registry, a name that is missing or not asked for,
            or, where `strict()`, an id checked before in this process (the same cell may run again).
        AssertionError: where `strict()`, if a line is refuted or its cases are not those of the registry, or if the
            data choose another verdict than the registry's.
    """
    _show(settle(claim_id, measured))


def settle(claim_id: str, measured: Mapping[str, object]) -> Box:
    """The box of a claim from what a chapter measured; see `check` for arguments and errors."""
    row = _row_of(claim_id)
    _match(claim_id, row["evidence"], measured)
    _once(claim_id)
    known = {**{field: row[field] for field in NUMBERS if field in row}, **measured}
    lines = {name: _line(claim_id, name, spec, measured[name], known) for name, spec in row["evidence"].items()}
    verdict = _verdict(row, lines)
    deciding = {_bare(condition) for conditions in row.get("rule", {}).values() for condition in conditions}
    false = [f"{name}: {line.measured} ({line.refuted})" for name, line in lines.items() if not line.holds]
    refuted = [text for text in false if text.split(":")[0] not in deciding]
    if strict() and refuted:
        raise AssertionError(f"{claim_id}: refuted by {'; '.join(refuted)}")
    if strict() and verdict != row["verdict"]:
        raise AssertionError(f"{claim_id}: the chapter finds {verdict!r}, the registry expects {row['verdict']!r}")
    evidence = tuple((_deciding(line) if name in deciding else line).bundle() for name, line in lines.items())
    fields = {key: row.get(key, "") for key in ("criterion", "criterion_set", "note")}
    return Box(
        claim_id,
        row["paper"],
        row["where"],
        row["says"],
        MOVED if refuted or verdict != row["verdict"] else verdict,
        evidence,
        **fields,
        finding=_finding(row, measured),
    )


def _row_of(claim_id: str) -> dict:
    claims = registry()
    if claim_id not in claims:
        raise ValueError(f"claim_id: expected an id of the registry, got {claim_id!r}")
    if not {"verdict", "evidence"} <= claims[claim_id].keys():
        raise ValueError(f"claim_id: {claim_id!r} is open in the registry; give it a verdict and evidence there first")
    return claims[claim_id]


def _match(claim_id: str, lines: Mapping[str, dict], measured: Mapping[str, object]) -> None:
    """Raise ValueError unless the chapter hands over what the lines and their limits name, and nothing else."""
    row = registry().get(claim_id, {})
    named = set(lines) | set().union(*map(names_in, lines.values())) - {field for field in NUMBERS if field in row}
    words = (limit for spec in lines.values() if isinstance(limit := spec.get("equals"), str))
    named -= {word for word in words if word not in measured}
    if missing := sorted(named - measured.keys()):
        raise ValueError(f"{claim_id}: expected measured values for {sorted(named)}, missing {missing}")
    if unknown := sorted(measured.keys() - named - _named_in_finding(row)):
        raise ValueError(f"{claim_id}: expected measured values for {sorted(named)}, got also {unknown}")


def _once(claim_id: str) -> None:
    shell = _shell()
    cell = shell.user_ns["In"][-1] if shell is not None else None
    if strict() and claim_id in _checked and (cell is None or _checked[claim_id] != cell):
        raise ValueError(f"claim_id: {claim_id!r} was checked before; a claim gets one verdict")
    _checked[claim_id] = cell


def _line(claim_id: str, name: str, spec: dict, value: object, known: Mapping[str, object]) -> Line:
    """The line; where a reader plays, cases that do not fit the registry's are shown as not the chapter's."""
    try:
        return compare(name, spec, value, known)
    except ValueError as error:
        if strict():
            raise AssertionError(f"{claim_id}: {error}") from None
        return Line(name, spec["says"], f"not compared: {error}", "", False)


def _verdict(row: dict, lines: Mapping[str, Line]) -> str:
    """The registry's only verdict, or the first of its rule whose conditions hold."""
    for verdict, conditions in row.get("rule", {}).items():
        if all(lines[_bare(c)].holds != c.startswith("not ") for c in conditions):
            return verdict
    return row["verdict"]


def _deciding(line: Line) -> Line:
    """A line that chooses the verdict: it refutes nothing, and says what it does to the verdict."""
    return replace(line, refuted=f"{line.refuted}{DECIDES[not line.holds]}", holds=True)


def _named_in_finding(row: dict) -> set[str]:
    return {name.split("[")[0].split(".")[0] for _, name, _, _ in Formatter().parse(row.get("finding", "")) if name}


def _finding(row: dict, measured: Mapping[str, object]) -> str:
    """The registry's sentence about this run, with the measured numbers put in; none where a reader's do not fit."""
    try:
        return row["finding"].format(**measured) if "finding" in row else ""
    except (*UNFIT, ValueError):
        if strict():
            raise
        return ""


def try_(says: str, evidence: Mapping[str, dict], **measured: object) -> None:
    """A box of your own, which nothing rests on: it says whether your numbers are what you expected.

    Args:
        says: the claim, in a sentence; it may hold $mathematics$.
        evidence: lines as the registry has them, by name: `{"share": {"says": "share of the first expert", "close_to":
            0.125, "within": 0.01}}`.
        measured: a value for each line, and for each name in its limits, as in `check`.

    Raises:
        ValueError: for a line that is none, or a name that is missing or not asked for.
    """
    for name, spec in evidence.items():
        validate_line(name, spec)
    if all("shown" in spec for spec in evidence.values()):
        raise ValueError("try_: expected at least one line that compares; nothing could refute the claim")
    _match("try_", evidence, measured)
    lines = [compare(name, spec, measured[name], measured) for name, spec in evidence.items()]
    verdict = f"{OWN}: {'holds' if all(line.holds for line in lines) else 'refuted'}"
    _show(Box("try", "", "", says, verdict, tuple(line.bundle() for line in lines)))


# --- the ledger -----------------------------------------------------------------------------------


def link(claim_id: str) -> str:
    """A link from a chapter to a claim's box on its page, and the verdict; ValueError for an unknown id."""
    if claim_id not in registry():
        raise ValueError(f"claim_id: expected an id of the registry, got {claim_id!r}")
    row = registry()[claim_id]
    name, verdict = f"<code>{claim_id}</code>", row.get("verdict", "open")
    place = settling(row)
    return (f'<a href="{place}.html#claim-{claim_id}">{name}</a>' if place else name) + f" ({verdict})"


def boxes(notebooks: Iterable[Path]) -> dict[str, dict]:
    """The boxes that executed notebooks hold, by claim, each with the `notebook` it stands in.

    Raises:
        ValueError: if two outputs settle one claim, or a box disagrees with the registry or stands on another page.
    """
    claims, found = registry(), {}
    for path in sorted(notebooks):
        for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                box = output.get("data", {}).get(MIME)
                if box is None:
                    continue
                if box["id"] in found:
                    raise ValueError(f"{path.name}: {box['id']} has a box in {found[box['id']]['notebook']} already")
                if claims.get(box["id"], {}).get("verdict") != box["verdict"]:
                    raise ValueError(
                        f"{path.name}: the box of {box['id']} ({box['verdict']}) is not what the registry says"
                    )
                if page(path) != (said := claims[box["id"]].get("page", path.stem)):
                    raise ValueError(f"{path.name}: the registry says that the box of {box['id']} stands on {said}")
                found[box["id"]] = {**box, "notebook": page(path)}
    return found


def collect(notebooks: Iterable[Path], sabotage: Mapping[str, dict]) -> dict:
    """The ledger: every claim of the registry, with the box that executed notebooks hold for it.

    Args:
        notebooks: executed .ipynb files.
        sabotage: for each claim what became of its mutants (`moe_book.sabotage.outcomes.by_claim`).

    Returns:
        `{"counts": {"papers": {verdict or "open": number}, "book": the same}, "claims": [row, ...]}`; a row carries the
        registry's id, paper, where, says and chapter, and either what its box holds, notebook and sabotage, or the
        verdict "open". Nothing in it is typed by hand.

    Raises:
        ValueError: see `boxes`.
    """
    settled, rows = boxes(notebooks), []
    for claim_id, claim in registry().items():
        row = {key: claim[key] for key in ("id", "paper", "where", "says", "chapter")}
        if box := settled.get(claim_id):
            rows.append({**row, **box, "sabotage": sabotage.get(claim_id, {})})
        else:
            rows.append({**row, "verdict": "open"})
    own = {"papers": lambda row: row["paper"] != "book", "book": lambda row: row["paper"] == "book"}
    counts = {
        whose: {v: sum(row["verdict"] == v for row in filter(mine, rows)) for v in [*VERDICTS, "open"]}
        for whose, mine in own.items()
    }
    return {"counts": counts, "claims": rows}
