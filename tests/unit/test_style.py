"""The budget of a page: how long it, its parts and its sentences may be."""

import ast
import re
import statistics
from pathlib import Path

import nbformat
import pytest

from moe_book.claims import registry

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))

#: Chapters that are longer than the budget. The list may only get shorter.
TOO_LONG = set(
    [
        "09_spurious_directions",
        "10_mixture_of_gaussians",
        "12_beyond_gaussians",
        "13_frozen_router",
        "14_order_of_operations",
        "15_powers_of_k",
        "16_constants_to_stability",
        "17_measuring_stability",
        "18_soft_topk",
        "19_three_networks",
        "20_cosine_pde",
        "21_identifiability",
        "22_spare_experts",
        "23_rates",
        "24_cosine_at_work",
        "25_which_router",
    ]
)

LIMITS = {
    "words": 3000,
    "cells": 45,
    "visible code cells": 8,
    "lines of a visible code cell": 15,
    "outputs": 9,
    "figures": 5,
    "sections": 8,
    "verdict boxes": 4,
    "words of the note of a box": 80,
    "letters of the title": 30,
    "letters of a heading": 45,
    "letters of a caption": 350,
    "words of the median sentence": 18,
    "words of the longest sentence": 40,
    "colons per 1,000 words": 6,
    "semicolons per 1,000 words": 4,
    "pronouns of habit per 1,000 words": 35,
}
HIDDEN = re.compile(r"(hide|remove)-(input|cell)")
HABIT = re.compile(r"\b(it|they|its|that|those|these|this|one|both|neither|none)\b", re.IGNORECASE)


def prose(markdown: str) -> str:
    """What a reader reads as sentences: a word for a formula or a reference, no directives, tables or headings."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", " formula ", markdown, flags=re.DOTALL)
    text = re.sub(r"\$[^$]+\$|`[^`]*`", "formula", re.sub(r"\{\w+(:\w+)?\}`[^`]*`", "name", text))
    lines = [line for line in text.splitlines() if not re.match(r"\s*(:::|:\w+:|\||#|---)", line)]
    return re.sub(r"[*_>]|^\s*(\d+\.|-)\s", "", "\n".join(lines), flags=re.MULTILINE)


def sentences(text: str) -> list[int]:
    """Words of each sentence; a blank line ends one, too."""
    parts = re.split(r"(?<=[.!?])[\"')]*\s+(?=[A-Z0-9(])|\n\s*\n", text)
    return [n for part in parts if (n := len(part.split())) > 1]


def captions_of(source: str) -> list[str]:
    """The texts that a cell hands to `show` or `table` as captions, as far as they are typed."""
    tree = ast.parse(source)
    typed = {ast.unparse(n.targets[0]): n.value for n in ast.walk(tree) if isinstance(n, ast.Assign)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in ("show", "table")]
    values = [typed.get(ast.unparse(call.args[1]), call.args[1]) for call in calls if len(call.args) > 1]
    return [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]


def measures(path: Path) -> dict[str, float]:
    """Everything that `LIMITS` limits, of one page."""
    cells = nbformat.read(path, 4).cells
    markdown = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
    code = [c for c in cells if c.cell_type == "code"]
    tags = [set(c.metadata.get("tags", [])) for c in code]
    visible = [c for c, t in zip(code, tags, strict=True) if not any(map(HIDDEN.match, t))]
    shown = [
        c
        for c, t in zip(code, tags, strict=True)
        if not t & {"hide-cell", "hide-output", "remove-cell", "remove-output"}
    ]
    captions = [text for c in code for text in captions_of(c.source)]
    boxes = [name for c in code for name in re.findall(r'claims\.check\(\s*"([^"]+)"', c.source)]
    text = prose(markdown)
    words, lengths = len(text.split()), sentences(text)
    share = 1000 / max(words, 1)
    return {
        "words": words,
        "cells": len(cells),
        "visible code cells": len(visible),
        "lines of a visible code cell": max((len(c.source.splitlines()) for c in visible), default=0),
        "outputs": sum(bool(c.outputs) for c in shown),
        "figures": sum("show(" in c.source for c in shown),
        "sections": len(re.findall(r"^## ", markdown, re.MULTILINE)),
        "verdict boxes": len(boxes),
        "words of the note of a box": max((len(registry()[b].get("note", "").split()) for b in boxes), default=0),
        "letters of the title": len(re.findall(r"^# (.+)", markdown, re.MULTILINE)[0]),
        "letters of a heading": max(map(len, re.findall(r"^##+ (.+)", markdown, re.MULTILINE))),
        "letters of a caption": max(map(len, captions), default=0),
        "words of the median sentence": statistics.median(lengths),
        "words of the longest sentence": max(lengths),
        "colons per 1,000 words": share * len(re.findall(r":(?=\s)", text)),
        "semicolons per 1,000 words": share * text.count(";"),
        "pronouns of habit per 1,000 words": share * len(HABIT.findall(text)),
    }


def excess(path: Path) -> dict[str, float]:
    """What of a page is over its limit, and how much it is."""
    return {name: value for name, value in measures(path).items() if value > LIMITS[name]}


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.stem not in TOO_LONG], ids=lambda p: p.stem)
def test_a_chapter_keeps_its_budget(path):
    assert excess(path) == {}


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.stem in TOO_LONG], ids=lambda p: p.stem)
def test_a_chapter_that_keeps_its_budget_leaves_the_list(path):
    assert excess(path), f"{path.stem} keeps the budget: take it off the list"
