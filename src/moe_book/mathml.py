"""Formulas as MathML, set by Temml when the book is built: no script runs for them in a reader's browser."""

import atexit
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

from py_mini_racer import JSEvalException, MiniRacer

TEMML = Path(__file__).with_name("temml") / "temml.min.js"

#: Signs before which a formula on a line of its own may break; after a wide space, too.
RELATIONS = frozenset("=≠<>≤≥≪≫≈≃≍∼∝∈⊂⊆→←⟶⟺↦")
WIDE = ("1em", "2em")
LARGE = re.compile(r"<mo (?=[^>]*minsize)")  # from \big and its like, beside which a browser would leave space
OPENING, CLOSING = "([{⟨⌊⌈", ")]}⟩⌋⌉"


@cache
def _temml() -> MiniRacer:
    """Temml, loaded; closed at the end, or its threads would keep the process."""
    engine = MiniRacer()
    atexit.register(engine.close)
    engine.eval(TEMML.read_text(encoding="utf-8"))
    return engine


@cache
def mathml(formula: str, display: bool = False) -> str:
    """A formula of LaTeX as a `<math>` element, which may break at its relations where its line is too short.

    Args:
        formula: without the signs that mark it as one; display: whether it stands on a line of its own.

    Raises:
        ValueError: for what Temml does not know.
    """
    how = {"displayMode": display, "wrap": "tex", "throwOnError": True}
    try:
        found = str(_temml().call("temml.renderToString", formula, how)).replace("‾", "¯")  # which the font has
        found = LARGE.sub(r'\g<0>lspace="0em" rspace="0em" ', found)
        return _broken(found) if display else _joined(found)
    except JSEvalException as error:
        reason = next(filter(None, map(str.strip, str(error).splitlines())), "")
        raise ValueError(f"formula: expected LaTeX that Temml knows, got {formula!r}: {reason}") from None


def _joined(found: str) -> str:
    """A formula in a line of text, without breaks at the inner side of a bracket or before a lone operator.

    Temml puts what it does not break into a row; an operator alone in a row would lose the space about it.
    """
    math = ET.fromstring(found)
    if any(row.tag != "mrow" or not len(row) for row in math):
        return found
    rows = [math[0]]
    for row in math[1:]:
        lone = any([one.tag for one in each] == ["mo"] for each in (rows[-1], row))
        if lone or rows[-1][-1].text in (*OPENING,) or row[0].text in (*CLOSING,):
            rows[-1].extend(row)
        else:
            rows.append(row)
    math[:] = rows
    return ET.tostring(math, encoding="unicode", short_empty_elements=False)


def _broken(found: str) -> str:
    """A displayed formula in rows that may stand below each other; Temml makes such rows in lines of text only.

    It breaks after wide spaces first: between them are parts, `<mrow class="part">`, which break before relations.
    """
    math = ET.fromstring(found)
    if [row.tag for row in math] != ["mrow"]:
        return found
    parts: list[list[list[ET.Element]]] = [[[]]]
    for one in math[0]:
        parts[-1][-1] += [one]
        if one.tag == "mspace" and one.get("width") in WIDE:
            parts.append([[]])
        elif one.tag == "mo" and one.text in RELATIONS and len(parts[-1][-1]) > 1:
            parts[-1].append([parts[-1][-1].pop()])
    math.remove(math[0])
    for part in parts:
        group = ET.SubElement(math, "mrow", {"class": "part"})
        for row in part:
            ET.SubElement(group, "mrow").extend(row)
    return ET.tostring(math, encoding="unicode", short_empty_elements=False)
