"""Text with $mathematics$ as HTML that MathJax typesets; shared by boxes, captions and generated pages."""

import html
import re

#: In the metadata of an output of a notebook: it is the caption of the one before.
CAPTION = "caption"


def formulas(text: str) -> str:
    """HTML in which `$...$` is marked for MathJax; formulas are escaped, for a browser takes `<K` for a tag."""
    return re.sub(r"[$]([^$]+)[$]", lambda formula: rf"\({html.escape(formula[1], quote=False)}\)", text)


def typeset(text: str) -> str:
    """The same for plain text: what stands outside formulas is escaped, too."""
    parts = re.split(r"([$][^$]+[$])", text)
    return "".join(formulas(p) if i % 2 else html.escape(p, quote=False) for i, p in enumerate(parts))


def number(value, digits: int) -> str:
    """A number to that many significant digits, a large or small power of ten typeset; other values as they print."""
    if not (isinstance(value, float) or hasattr(value, "item")):
        return str(value)
    factor, _, power = f"{float(value):.{digits}g}".partition("e")
    if not power:
        return factor
    if 0 < int(power) < 5:
        return f"{float(factor) * 10 ** int(power):.0f}"
    sign = {"1": "", "-1": "-"}.get(factor)
    return rf"${factor} \cdot 10^{{{int(power)}}}$" if sign is None else rf"${sign}10^{{{int(power)}}}$"
