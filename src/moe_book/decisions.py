"""The table of decisions of the chapter on routers, from decisions.yml."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moe_book import registries

FILE = Path(__file__).with_suffix(".yml")
WHEN = ("before the first run", "while it trains", "when it is read", "not covered")
FIELDS = {"decision": str, "advice": str, "condition": str, "size": str, "rests_on": list, "shown": str}


def decisions() -> dict[str, list[dict]]:
    """The rows of each part of the table, with all fields; ValueError for a slip."""
    parts = registries.checked(FILE.name, registries.read(FILE), dict.fromkeys(WHEN, list))
    return {when: [_row(when, entry) for entry in part] for when, part in parts.items()}


def _row(when: str, entry) -> dict:
    name = entry.get("decision") if isinstance(entry, dict) else entry
    row = registries.checked(f"{FILE.name}: {when}: {name}", entry, FIELDS, optional=("size", "rests_on", "shown"))
    return {"size": "", "rests_on": [], "shown": "", **row}


def tables(numbers: Mapping[str, object], link: Callable[[str], str]) -> Iterator[list[dict[str, str]]]:
    """The rows of each part of the table, with the chapter's numbers put in and links to the claims.

    Args:
        numbers: what stands for the names in braces.
        link: what makes a link of an id.
    """
    for when, part in decisions().items():
        yield [
            {
                when: d["decision"],
                "advice": d["advice"],
                "condition": d["condition"].format_map(numbers),
                "how large": d["size"].format_map(numbers) or "–",
                "rests on": ", ".join([*map(link, d["rests_on"]), *filter(None, [d["shown"]])]),
            }
            for d in part
        ]
