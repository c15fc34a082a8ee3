"""What the book adds to Sphinx: chapters numbered by their files, names in cells that lead to their source, a
description for each page, labels of references.
"""

import ast
import html
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import nbformat
from docutils import nodes
from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style
from pybtex.style.labels import BaseLabelStyle
from sphinx.ext.mathjax import html_visit_displaymath, html_visit_math
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles as Collector

import moe_book
import moe_theory
from moe_book import citing
from moe_book.notebooks import label
from moe_book.search import plain_formula

PACKAGE_NAMES = ("moe_theory", "moe_book")
PACKAGES = [Path(package.__file__).parent for package in (moe_theory, moe_book)]
DESCRIBED = 160  # characters that a search engine shows of a page's description


def number_by_file(assign):
    """Section numbers that begin with the number in the file's name, so that they do not shift with the others."""

    def assigned(self, env):
        changed = assign(self, env)
        for name, sections in env.toc_secnumbers.items():
            if not (first := label(name.removeprefix("notebooks/"))):
                continue
            for anchor, number in sections.items():
                sections[anchor] = (first, *number[1:])
            env.titles[name]["secnumber"] = list(sections[""])
            for reference in env.tocs[name].findall(nodes.reference):
                reference["secnumber"] = sections[reference["anchorname"]]
        return changed

    return assigned


FORMULA = re.compile(r"\\\((.+?)\\\)", re.DOTALL)


def _plain(paragraph: nodes.Node) -> str:
    """What a paragraph says, its formulas as a reader would type them."""
    texts = (text for text in paragraph.findall(nodes.Text) if not isinstance(text.parent, nodes.raw))
    said = "".join(plain_formula(text) if isinstance(text.parent, nodes.math) else text for text in texts)
    return re.sub(r"\s+", " ", FORMULA.sub(lambda formula: plain_formula(formula[1]), said)).strip()


def _first_words(doctree: nodes.document) -> str:
    """What a page says first: in its box with the result, or in its first paragraph."""
    boxes = [box for box in doctree.findall(nodes.admonition) if "result" in box["classes"]]
    for part in (*boxes, doctree):
        for text in map(_plain, part.findall(nodes.paragraph)):
            if len(text) > 40:
                return re.sub(r"^What you will (?:do|see): (.)", lambda found: found[1].upper(), text)
    return ""


def _cut(text: str) -> str:
    """As much of a description as is shown, cut at a word."""
    return text if len(text) <= DESCRIBED else text[: DESCRIBED - 1].rpartition(" ")[0].rstrip(",;:") + " …"


def _meta(kind: str, of: dict[str, str]) -> str:
    """Tags of a page's head."""
    return "".join(f'\n    <meta {kind}="{name}" content="{html.escape(text)}" />' for name, text in of.items() if text)


def describe(app, pagename, templatename, context, doctree):
    """What search engines and links to a page show of it; the front page does not say the book's title twice.

    Its address is known where the book is published only; there the theme writes it as canonical.
    """
    front = pagename == app.config.root_doc
    if front:
        context["title"] = "What it found"
    about = _cut(_first_words(doctree) if doctree is not None else context.get("about", SEARCH))
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title", "Search")))
    shared = {
        "og:title": app.config.html_title if front else FORMULA.sub(lambda found: plain_formula(found[1]), title),
        "og:description": about,
        "og:type": "website" if front else "article",
        "og:url": context.get("pageurl") or "",
    }
    commit = app.config.html_context.get("commit", "")
    named = {"description": about, "citation": citing.line(commit), "bibtex": citing.bibtex(commit)}
    context["metatags"] = context.get("metatags", "") + _meta("name", named) + _meta("property", shared)


SEARCH = "Search the sections, theorems, verdict boxes and questions of the book."


def citable(app, pagename, templatename, context, doctree):
    """The foot of a page has a button that says how to cite it; book.js does the work."""
    if doctree is not None:
        context["body"] += (
            '\n<p class="cite-page pst-js-only"><button type="button" class="cite">Cite this page</button></p>'
        )


def titled_proofs(app, pagename, templatename, context, doctree):
    """A proof that is folded has its first word as the title that opens it."""
    if doctree is not None:
        folded = r'(<div class="proof dropdown admonition"[^>]*>\s*)<p>Proof\. ?'
        context["body"] = re.sub(folded, r'\1<p class="admonition-title">Proof</p>\n<p>', context["body"])


def without_repeated_ids(app, pagename, templatename, context, doctree):
    """Proofs, and the insides of boxes, all have one id from sphinx-proof and sphinx-exercise; nothing refers to it."""
    if doctree is not None:
        context["body"] = re.sub(r' id="(proof|(proof|exercise|solution)-content)"', "", context["body"])


NAME = re.compile(r'<span class="n">(\w+)</span>((?:<span class="o">\.</span><span class="n">\w+</span>)*)')


def imported(notebook: Path) -> dict[str, Any]:
    """What the names are that a chapter's cells import from the package."""
    found = {}
    for cell in nbformat.read(notebook, 4).cells:
        for node in ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGE_NAMES:
                names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name: resolve_name(path) for name, path in names.items()}
    return found


def lead_to_source(app, pagename, templatename, context, doctree):
    """Names of the package become links to their source where a cell of a chapter uses them first."""
    if doctree is None or not pagename.startswith("notebooks/"):
        return
    names = imported(Path(app.srcdir) / f"{pagename}.ipynb")
    seen: set[str] = set()

    def linked(match: re.Match) -> str:
        if match[0] in seen:
            return match[0]
        what, attributes = names.get(match[1]), re.findall(r'"n">(\w+)', match[2])
        while inspect.ismodule(what) and attributes:
            what = getattr(what, attributes.pop(0), None)
        module = getattr(what, "__module__", None) or ""
        if attributes or not module.startswith(("moe_theory.", "moe_book.")) or not hasattr(what, "__qualname__"):
            return match[0]
        seen.add(match[0])
        address = f"{'../' * pagename.count('/')}_modules/{module.replace('.', '/')}.html#{what.__qualname__}"  # pyright: ignore
        return f'<a class="source-link" href="{address}">{match[0]}</a>'

    parts = []
    for part in re.split(r'(?=<div class="highlight-)', context["body"]):
        seen.clear()
        parts.append(NAME.sub(linked, part))
    context["body"] = "".join(parts)


def _defined(tree: ast.Module):
    """Line and name of each function and class of a module, and of their methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield first, node.name
            methods = node.body if isinstance(node, ast.ClassDef) else []
            yield from ((m.lineno, f"{node.name}.{m.name}") for m in methods if isinstance(m, ast.FunctionDef))


def source_pages(app):
    """A page for each module of the package: its source, in which every function has an address."""
    modules = []
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(PACKAGES[0].parent).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(source)
        before, _, code = app.builder.highlighter.highlight_block(source, "python").partition("<pre>")
        lines = code.split("\n")
        for number, anchor in _defined(tree):
            lines[number - 1] = f'<span id="{anchor}"></span>' + lines[number - 1]
        page = f"_modules/{name.replace('.', '/')}"
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        modules.append(f'<li><a href="{page.removeprefix("_modules/")}.html">{name}</a>: {html.escape(about)}</li>')
        body = f"<h1>{name}</h1>{before}<pre>" + "\n".join(lines)
        said = f"The source of {name}: {about}"
        yield page, {"title": name, "body": body, "parents": [], "about": said}, "page.html"
    title = "The source of all modules"
    listing = f"<h1>{title}</h1><ul>{''.join(modules)}</ul>"
    said = f"{title} of the packages {' and '.join(PACKAGE_NAMES)}."
    yield "_modules/index", {"title": title, "body": listing, "parents": [], "about": said}, "page.html"


def cited(entry) -> str:
    """Who wrote it, and when, as the text cites it."""
    names = [" ".join((*p.prelast_names, *p.last_names)).strip("{}") for p in entry.persons["author"]]
    who = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
    return f"{who}, {entry.fields['year']}"


class AuthorYear(BaseLabelStyle):
    """Labels of references as the text cites them."""

    def format_labels(self, sorted_entries):
        yield from map(cited, sorted_entries)


class Labelled(Style):
    """The plain style with those labels."""

    default_label_style = AuthorYear


def setup(app):
    """What Sphinx calls to load this module."""
    register_plugin("pybtex.style.formatting", "authoryear", Labelled)
    Collector.assign_section_numbers = number_by_file(Collector.assign_section_numbers)
    app.add_config_value("comments_config", {}, "html")  # which Jupyter Book sets for an extension that is left out
    app.add_html_math_renderer("marked", (html_visit_math, None), (html_visit_displaymath, None))
    app.connect("html-page-context", describe)
    app.connect("html-page-context", citable)
    app.connect("html-page-context", without_repeated_ids)
    app.connect("html-page-context", titled_proofs)
    app.connect("html-page-context", lead_to_source)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
