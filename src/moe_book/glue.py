"""Measured numbers in prose: a cell glues one under a name, a sentence takes it from there.

A cell calls `glue("gap", 0.0317, digits=2)`; a sentence of the same chapter says ``{glue:text}`gap` ``, one of another
page ``{glue:text}`03_smooth_routing/gap` ``. The role is that of myst-nb, and so is what a notebook stores. The build
puts the numbers in before the pages are rendered, so that the published copies have them, too.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat

from moe_book.typeset import number

PREFIX = "application/papermill.record/"
ROLE = re.compile(r"\{glue:text\}`([\w/]+)`")


def glue(name: str, value: object, digits: int = 3) -> None:
    """Keep a number, or a word, for the sentences of a chapter; nothing is shown.

    Args:
        name: what sentences call it, a name that Python could have.
        value: a number, shown with so many significant digits, or a string, shown as it is.
        digits: significant digits; choose so few that every machine agrees on them.

    Raises:
        ValueError: for a name that sentences cannot use.
    """
    from IPython.display import display

    if not name.isidentifier():
        raise ValueError(f"name: expected a name that Python could have, got {name!r}")
    bundle = {f"{PREFIX}text/plain": number(value, digits)}
    display(bundle, raw=True, metadata={"scrapbook": {"name": name, "mime_prefix": PREFIX}})


def glued(notebooks: Iterable[Path]) -> dict[str, str]:
    """What executed notebooks have glued, by `chapter/name`.

    Raises:
        ValueError: for a name that a chapter glues twice.
    """
    found = {}
    for path in notebooks:
        for cell in nbformat.read(path, 4).cells:
            for output in cell.get("outputs", []):
                if "scrapbook" not in output.get("metadata", {}):
                    continue
                name = f"{path.stem}/{output['metadata']['scrapbook']['name']}"
                if name in found:
                    raise ValueError(f"{path.name}: {name} is glued twice")
                found[name] = output["data"][f"{PREFIX}text/plain"]
    return found


def put_in(text: str, numbers: Mapping[str, str], here: str = "") -> str:
    """Markdown with its glued numbers.

    Args:
        text: Markdown.
        numbers: by `chapter/name`, from `glued`.
        here: the chapter that names without one belong to.

    Raises:
        ValueError: for a number that no chapter has glued.
    """

    def put(role: re.Match) -> str:
        name = role[1] if "/" in role[1] else f"{here}/{role[1]}"
        if name not in numbers:
            raise ValueError(f"{here or 'a page'}: expected a number that a chapter has glued, got {name!r}")
        return numbers[name]

    return ROLE.sub(put, text)
