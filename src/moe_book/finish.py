"""What is done to each page once Sphinx has written it: formulas and icons are set, and some of its HTML is mended.

The functions take and return the text of a page, so that nothing of a page waits for a script.
"""

import base64
import hashlib
import html
import re
from functools import cache
from pathlib import Path

from moe_book.mathml import mathml
from moe_book.reading import joined, with_letters, with_reading_time
from moe_book.symbols import notation, rows_of, with_anchors, with_symbols

#: Formulas as Sphinx and `typeset.formulas` mark them, and what holds text that is no formula.
FORMULA = re.compile(
    r"<(?P<code>pre|code|script|style|textarea)\b.*?</(?P=code)>"
    r"|(?P<span><span class=\"math notranslate nohighlight\"[^>]*>)?\\\((?P<inline>.+?)\\\)(?(span)</span>)"
    r"|(?P<open><div class=\"math notranslate nohighlight\"[^>]*>)\s*(?P<number><span class=\"eqno\">.*?</span>)?"
    r"\s*\\\[(?P<display>.+?)\\\]</div>",
    re.DOTALL,
)

#: A formula in a line, and the signs that belong to it: a line may break on either side of a formula.
HELD = re.compile(
    r"(?P<before>[(\[“‘]*)"
    r"(?P<formula>(?P<link><a class=\"symbol\"[^>]*>)?<span class=\"math\">.*?</math></span>(?(link)</a>))"
    r"(?P<after>(?:-(?:th|st|nd|rd)\b)?(?:&[rl]squo;|&#8217;|[)\]}.,:!?…”’'%]|;(?=[\s<]))*)",
    re.DOTALL,
)

ICON = re.compile(r'<(?P<tag>i|span) class="(?P<names>[^"]*\bfa-[^"]*)"(?P<rest>[^>]*)></(?P=tag)>')
DRAWN = re.compile(r'[,{]"?([a-z-]+)"?:\[(\d+),(\d+),\[[^\]]*\],"[0-9a-f]+","([^"]+)"')
#: A picture without a size: its file, or as many letters as say its size.
PICTURE = re.compile(
    r'<img(?P<rest>(?:(?! width=)[^>])*? src="(?:data:image/png;base64,(?P<head>[\w+/]{32})|(?P<file>[^":]+\.png)))'
    r'(?=[^"]*"(?:(?! width=)[^>])*>)'
)
LOADED = re.compile(r"\s*(?:<link rel=\"stylesheet\"[^>]*>|<script\b[^>]*>[^<]*</script>)")
#: Styles and scripts that Sphinx's extensions put on every page, and what on a page needs them.
EXTRAS = [
    (r"sphinx-design|design-tabs", r'class="(?:[^"]* )?sd-'),
    (
        r"togglebutton|toggleHint|toggleOpenOnPrint",
        r'class="(?:[^"]* )?(?:toggle[ "]|admonition [^"]*dropdown|dropdown admonition)',
    ),
]
#: A script that is loaded before the page is read on; a script in the page asks the first of them for its object.
WAITED = re.compile(r'<script (?=(?:data-[\w-]+="[^"]*" )?src="[^"]*_static/(?!documentation_options))')
#: Rules for icons of a font, a third of the theme's styles.
ICON_RULE = re.compile(r"(?<=[{};/])(?:\.fa[a-z0-9]*(?:-[\w-]+)?(?:::?[a-z-]+)?,?)+\{[^{}]*\}")
NOTATION = "book/notation.html"
FONT = ("fa-solid", "fas")  # names that ask for the font of icons, which has 156 kB
SIZE = "fa-lg"

#: What is replaced on every page, and by what.
MENDED = [
    # MyST-NB's fold: a paragraph may not stand in a summary, and a label that is not what is shown misleads
    (
        r'<summary aria-label="[^"]*">\s*<p class="collapsed admonition-title">(.*?)</p>\s*'
        r'<p class="expanded admonition-title">(.*?)</p>\s*</summary>',
        r'<summary><span class="collapsed">\1</span><span class="expanded">\2</span></summary>',
    ),
    (r'(<meta name="viewport"[^>]*>)\s*<meta name="viewport"[^>]*>', r"\1"),
    # a verdict box is a group with a heading
    (
        r'<div class="claim-card ([^"]*)" id="(claim-[^"]*)"><p class="claim-head">',
        r'<div class="claim-card \1" id="\2" role="group" aria-labelledby="\2-head">'
        r'<p class="claim-head" id="\2-head" role="heading" aria-level="3">',
    ),
    (r'(<th[^>]*) halign="(\w+)"', r'\1 style="text-align: \2"'),
    (r'(<th[^>]*) valign="(\w+)"', r'\1 style="vertical-align: \2"'),
    (r'(<table[^>]*) border="\d"', r"\1"),
    (r'(<input[^>]*) autocorrect="\w+"', r"\1"),
    (r"<style scoped[^>]*>.*?</style>\s*", ""),  # of pandas
    (
        r'^<meta http-equiv="Refresh" content="0; url=([^"]*)" />\s*$',
        r'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Mixture of Experts, Checked</title>'
        r'<meta http-equiv="refresh" content="0; url=\1"></head><body><a href="\1">The book</a></body></html>',
    ),
    (r"<script[^>]*scripts/fontawesome\.js[^>]*></script>", ""),
    # in a bar that is not shown the theme's script would find the first menu buttons, and bind no others
    (r'(<header id="pst-header"[^>]*>).*?(</header>)', r"\1\2"),
    # the theme's button is named by what it shows, and its lists hold items
    (r'(<button class="btn search-button-field[^>]*?) aria-label="[^"]*"', r"\1"),
    (r'(<div class="citation"[^>]*) role="doc-biblioentry"', r'\1 role="listitem"'),
    # parts of code in the colour of all code: more than half of a chapter's elements
    (r'<span class="[npw]">([^<]*)</span>', r"\1"),
    # the title for paper is no second heading
    (r'(<div id="jb-print-docs-body" class="onlyprint">\s*)<h1>(.*?)</h1>', r"\1<p>\2</p>"),
]


@cache
def icons(library: str) -> dict[str, str]:
    """The solid icons of Font Awesome's script by their names: the rest of an `<svg>` from its box on."""
    return {
        f"fa-{name}": f'viewBox="0 0 {width} {height}"><path fill="currentColor" d="{path}"/></svg>'
        for name, width, height, path in DRAWN.findall(library)  # solid ones stand last
    }


def with_icons(page: str, library: str) -> str:
    """Icons drawn into the page; the script with which the theme draws them has half a megabyte.

    Raises:
        ValueError: for an icon that the library does not have.
    """

    def drawn(found: re.Match) -> str:
        names = [name for name in found["names"].split() if name not in FONT]
        icon = next(name for name in names if name.startswith("fa-") and name != SIZE)
        if icon not in icons(library):
            raise ValueError(f"icon: expected one of Font Awesome's, got {icon}")
        attributes = re.sub(r'\s*title="[^"]*"', "", found["rest"])  # its button says it
        return f'<svg class="{" ".join(names)} svg-inline--fa"{attributes} aria-hidden="true" {icons(library)[icon]}'

    return ICON.sub(drawn, page)


def with_formulas(page: str) -> str:
    """Formulas as MathML, those in a line with their signs beside them."""

    def one(found: re.Match) -> str:
        if found["inline"]:
            return f'<span class="math">{mathml(html.unescape(found["inline"]))}</span>'
        if found["display"]:
            return f"{found['open']}{mathml(html.unescape(found['display']), True)}{found['number'] or ''}</div>"
        return found[0]

    def held(found: re.Match) -> str:
        return f'<span class="held">{found[0]}</span>' if found["before"] or found["after"] else found[0]

    return HELD.sub(held, FORMULA.sub(one, page))


def mended(page: str) -> str:
    """What stands in `MENDED`, replaced."""
    for wrong, right in MENDED:
        page = re.sub(wrong, right, page, flags=re.DOTALL)
    return page


def with_light_head(page: str) -> str:
    """A page that is shown before its scripts are there, without styles and scripts that nothing on it needs."""
    unneeded = [names for names, need in EXTRAS if not re.search(need, page)]

    def kept(found: re.Match) -> str:
        return "" if any(re.search(names, found[0]) for names in unneeded) else found[0]

    return WAITED.sub("<script defer ", LOADED.sub(kept, page))


def size(png: bytes) -> str:
    """Width and height of a picture as attributes, from its head: its place is kept free until it is there."""
    width, height = (int.from_bytes(png[at : at + 4]) for at in (16, 20))
    return f'width="{width}" height="{height}"'


def with_sizes(page: str, folder: Path) -> str:
    """Pictures with their sizes; their files lie where the page, which is in a folder, says."""

    def sized(found: re.Match) -> str:
        head = base64.b64decode(found["head"]) if found["head"] else (folder / found["file"]).read_bytes()
        return f"<img {size(head)}{found['rest']}"

    return PICTURE.sub(sized, page)


def with_files(page: str, folder: Path, up: str) -> str:
    """Pictures for a phone as files of a folder `up` from the page, which no other reader loads."""

    def put(found: re.Match) -> str:
        data = base64.b64decode(found[2])
        path = folder / "_images" / f"{hashlib.sha256(data).hexdigest()[:16]}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return f'{found[1]}{size(data)} srcset="{up}_images/{path.name}"'

    return re.sub(r'(<source [^>]*)srcset="data:image/png;base64,([\w+/=]+)"', put, page)


def finish(folder: Path) -> None:
    """Finish every page of a rendered book."""
    static = folder / "_static"
    library = (static / "scripts" / "fontawesome.js").read_text(encoding="utf-8")
    styles = static / "styles" / "pydata-sphinx-theme.css"
    styles.write_text(ICON_RULE.sub("", styles.read_text(encoding="utf-8")), encoding="utf-8")
    symbols = folder / NOTATION
    symbols.write_text(with_anchors(symbols.read_text(encoding="utf-8")), encoding="utf-8")
    rows = notation(symbols.read_text(encoding="utf-8"))
    for path in sorted(folder.rglob("*.html")):
        page, up = path.read_text(encoding="utf-8"), "../" * len(path.relative_to(folder).parent.parts)
        if path.is_relative_to(folder / "notebooks"):
            page = with_reading_time(page)
            if chapter := re.match(r"\d+", path.name):
                page = with_symbols(page, rows_of(int(chapter[0]), rows), up + NOTATION)
        page = joined(mended(with_icons(with_formulas(page), library)))
        page = with_sizes(with_files(with_letters(with_light_head(page)), folder, up), path.parent)
        path.write_text(page, encoding="utf-8")
