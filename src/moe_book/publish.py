"""Make the publishable tree: the rendered book, and notebooks that run outside of it.

`python -m moe_book.publish --repository owner/name` is what `make site REPOSITORY=owner/name` runs. Colab
and GitHub show MyST as raw text, so published notebooks carry plain Markdown, with the numbers that boxes, equations
and figures have in the book; what the book folds is a form on Colab. Their first cell
installs the package from that repository at the current commit when it cannot be imported. Without a
repository there are no Colab buttons and no such cell.
"""

import argparse
import ast
import copy
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import nbformat
import yaml
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser
from pybtex.database import parse_file

from moe_book import build
from moe_book.claims import MIME
from moe_book.extension import cited
from moe_book.glue import glued, put_in
from moe_book.notebooks import APPENDIX, label, notebooks, page
from moe_book.pages import captioned

SITE = build.BUILD / "site"
HOME = "../"  # from a chapter to the root of the book

INSTALL = """\
#@title Install this book's package (half a minute); what is here already keeps its version
import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

if any(importlib.util.find_spec(name) is None for name in {modules}):
    kept = {{}}
    for found in distributions():  # the first of a name is the one that Python imports
        name, version = found.metadata["Name"], found.version
        if name and re.fullmatch(r"\\d[\\d.]*((a|b|rc|\\.post|\\.dev)\\d+)*(\\+[\\w.]+)?", version or ""):
            kept.setdefault(re.sub("[-_.]+", "-", name).lower(), version)
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("".join(f"{{name}}=={{version}}\\n" for name, version in kept.items()))
        source = "moe-theory[{extras}] @ {address}@{commit}"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", str(pins), source], check=True)
"""
#: What a chapter may need besides the extra `chapters`: extras and their modules, by what its code imports.
EXTRAS = {"transformers": re.compile(r"from moe_theory\.diagnose import .*\btiny\b")}

CONFIG = yaml.safe_load((build.ROOT / "_config.yml").read_text())
#: The parser that renders the book.
MYST = create_md_parser(MdParserConfig(enable_extensions=CONFIG["parse"]["myst_enable_extensions"]), RendererHTML)
NAMED = re.compile(r"\{(?P<name>[\w:]+)\}[ \t]*(?P<argument>.*)")
DOCUMENT = re.compile(r"(?:\.\./)*(?:notebooks/|book/)?(?:appendix/)?(\w+)\.(?:ipynb|md)(#[\w-]+)?")
TITLED = re.compile(r"(?:(?P<own>.+?)\s*<)?(?P<target>[^<>]+)>?", re.DOTALL)
OPTION = re.compile(r":(?P<key>[\w-]+):[ \t]*(?P<value>.*)")
#: The others are notebooks.
PAGES = (
    "index",
    "questions",
    "notation",
    "running",
    "verdicts",
    "api",
    "your_own",
    "ledger",
    "map",
    "errata",
    "references",
)
QUOTED = ("note", "tip", "important", "exercise", "admonition")  # besides all of sphinx-proof: they become block quotes
SOURCE = {  # how an inline token whose content is not Markdown stands in the source
    "code_inline": lambda t: f"{t.markup}{t.content}{t.markup}",
    "math_inline": lambda t: f"{t.markup}{t.content}{t.markup}",
    "math_inline_double": lambda t: f"{t.markup}{t.content}{t.markup}",
    "html_inline": lambda t: t.content,
    "myst_role": lambda t: f"{{{t.meta['name']}}}`{t.content}`",
    "link_open": lambda t: f"]({t.attrs['href']}",
}


class Directive(NamedTuple):
    """A fence with a name: its argument, options, and its body as Markdown."""

    name: str
    argument: str
    options: dict[str, str]
    body: str

    @property
    def kind(self) -> str:
        return self.name.split(":")[-1].capitalize()

    def heading(self, name: str = "") -> str:
        """Its name, such as Theorem 9.2, or else its kind, and its title."""
        if self.name == "admonition":
            return self.argument
        return f"{name or self.kind} ({self.argument})" if self.argument else name or self.kind


def _directive(token: Token, lines: list[str]) -> Directive | None:
    """The directive that a token of these source lines is, if it is one.

    Raises:
        ValueError: for a fence that is not closed or has no name in braces.
    """
    if token.type != "colon_fence" and not (token.type == "fence" and token.info.startswith("{")):
        return None
    named = NAMED.fullmatch(token.info.strip())
    last = lines[token.map[1] - 1].lstrip("> \t").rstrip()  # pyright: ignore[reportOptionalSubscript]
    if not named or len(last) < len(token.markup) or set(last) != {token.markup[0]}:
        what = "the fence is not closed" if named else "expected a name in braces"
        raise ValueError(f"directive {token.info.strip()!r}: {what}")
    options, body = {}, token.content.split("\n")
    while body and (option := OPTION.fullmatch(body[0])):
        options[option["key"]] = option["value"].strip()
        body.pop(0)
    return Directive(named["name"], named["argument"].strip(), options, "\n".join(body).rstrip())


def parsed(text: str) -> Iterator[Directive | Token]:
    """Directives and numbered equations of Markdown in reading order, those inside of directives included."""
    lines = text.split("\n")
    for token in MYST.parse(text):
        if directive := _directive(token, lines):
            yield directive
            yield from parsed(directive.body)
        elif token.type == "math_block_label":
            yield token


@dataclass
class References:
    """Where labels, documents and citations point, over all chapters; `site` leads from a chapter to the root."""

    site: str
    titles: dict[str, str] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    citations: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, chapters: list[Path], site: str) -> "References":
        refs = cls(site)
        for path in chapters:
            cells = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]
            refs.pages[path.stem] = page(path)
            refs.titles[path.stem] = cells[0].split("\n")[0].removeprefix("# ")
            number, prefix = Counter(), f"{start}." if (start := label(page(path))) else ""
            for part in (part for source in cells for part in parsed(source)):
                if isinstance(part, Token):  # an equation
                    number["equation"] += 1
                    refs.labels[part.info] = (f"({prefix}{number['equation']})", path.stem)
                elif part.name == "exercise" or (part.name.startswith("prf:") and part.name != "prf:proof"):
                    number[part.kind] += 1
                    if "label" in part.options:
                        refs.labels[part.options["label"]] = (f"{part.kind} {prefix}{number[part.kind]}", path.stem)
        for name in PAGES:
            refs.titles[name] = name.replace("_", " ").capitalize()
        for key, entry in parse_file(build.ROOT / "book" / "references.bib").entries.items():
            refs.citations[key] = cited(entry)
        return refs

    def page(self, stem: str, here: str) -> str:
        """The address of a page, from another one."""
        site = f"../{self.site}" if self.pages.get(here, "").startswith(APPENDIX) and self.site == HOME else self.site
        return f"{site}book/{stem}.html" if stem in PAGES else f"{site}notebooks/{self.pages.get(stem, stem)}.html"

    def folder(self, stem: str) -> str:
        """The address of the folder that a page is in, from the page itself."""
        return self.page(stem, stem).rpartition("/")[0] + "/"

    @staticmethod
    def _known(of: dict, role: str, target: str):
        if target not in of:
            raise ValueError(f"role {role!r}: nothing in the book is called {target!r}")
        return of[target]

    def role(self, name: str, text: str, here: str) -> str:
        """Plain Markdown for one role, or for one with its own text, `text <target>`; ValueError for an unknown one."""
        if name.startswith("cite"):
            return "(" + "; ".join(self._known(self.citations, name, key.strip()) for key in text.split(",")) + ")"
        own, target = TITLED.fullmatch(text).group("own", "target")  # pyright: ignore[reportOptionalMemberAccess]
        if name == "doc":
            stem = target.split("/")[-1]
            return f"[{own or self._known(self.titles, name, stem)}]({self.page(stem, here)})"
        if name in ("eq", "ref", "prf:ref", "numref"):
            heading, stem = self._known(self.labels, name, target)
            return f"[{own or heading}]({'' if stem == here else self.page(stem, here)}#{target})"
        raise ValueError(f"role {name!r}: no plain form is known")


def _anchor(label: str) -> str:
    """The place that links to a label lead to; Colab reads names, other viewers ids."""
    return f'<a name="{label}" id="{label}"></a>' if label else ""


def _box(directive: Directive, refs: References, here: str) -> str:
    """One directive as plain Markdown."""
    name, body = directive.name, plain(directive.body, refs, here)
    if name == "solution":
        of, _ = refs.labels.get(directive.argument, ("", ""))
        return f"<details><summary>Solution{' of ' * bool(of)}{of}</summary>\n\n{body}\n\n</details>"
    if name == "prf:proof":
        return f"*Proof.*\n\n{body}\n\n∎"
    if name.startswith("prf:") or name in QUOTED:
        label = directive.options.get("label", "")
        heading = f"{_anchor(label)}**{directive.heading(refs.labels.get(label, ('',))[0])}.**"
        return "\n".join(f"> {line}".rstrip() for line in (heading, "", *body.split("\n")))
    raise ValueError(f"directive {name!r}: no plain form is known")


def _within(line: str, marker: str, text: str) -> str:
    """Lines in place of those from `marker` on, which may stand in a quote or a list."""
    head = line[: line.index(marker)]
    rest = re.sub(r"[^>\s]", " ", head)
    return head + text.replace("\n", f"\n{rest}")


class Edit(NamedTuple):
    """What replaces the characters from start to end."""

    start: int
    end: int
    text: str


def _inline(token: Token, text: str, at: int, refs: References, here: str) -> Iterator[Edit]:
    """Roles, and links to documents of the book, of the paragraph that begins at `at`; the last one only moves on."""
    for child in token.children or ():
        if child.type not in SOURCE:
            continue
        pieces = map(re.escape, SOURCE[child.type](child).split())  # a line may end between them, also in a quote
        if not (found := re.compile(r"[\s>]+".join(pieces)).search(text, at)):
            continue
        at = found.end()
        if child.type == "myst_role":
            yield Edit(*found.span(), refs.role(child.meta["name"], child.content, here))
        elif child.type == "link_open" and (document := DOCUMENT.fullmatch(str(child.attrs["href"]))):
            yield Edit(*found.span(), f"]({refs.page(document[1], here)}{document[2] or ''}")
    yield Edit(at, at, "")


def _edits(text: str, refs: References, here: str) -> Iterator[Edit]:
    """What makes MyST Markdown plain, in the order of the text."""
    lines, at = text.split("\n"), 0
    starts = [0, *(m.end() for m in re.finditer("\n", text)), len(text) + 1]
    for token in MYST.parse(text):
        if token.type == "inline":
            for edit in _inline(token, text, max(at, starts[token.map[0]]), refs, here):  # pyright: ignore
                yield edit
                at = edit.end
            continue
        line, span = lines[token.map[0]] if token.map else "", [starts[i] for i in token.map or ()]
        if directive := _directive(token, lines):
            yield Edit(span[0], span[1] - 1, _within(line, token.markup, _box(directive, refs, here)))
        elif token.type == "math_block_label":
            number = refs.labels[token.info][0].strip("()")
            tagged = f"{_anchor(token.info)}\n\n$${token.content.rstrip()} \\tag{{{number}}}$$"
            yield Edit(span[0], span[1] - 1, _within(line, "$$", tagged))
        elif token.type == "myst_target":
            yield Edit(span[0], span[1], "")


def plain(text: str, refs: References, here: str) -> str:
    """MyST Markdown as plain Markdown: block quotes, details, links and tagged equations."""
    for edit in reversed([*_edits(text, refs, here)]):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _install(code: str, address: str) -> str:
    """The first cell of a chapter with this code, for an address and commit, `git+https://...@commit`."""
    more = [extra for extra, needed in EXTRAS.items() if needed.search(code)]
    where, _, commit = address.rpartition("@")
    modules = ("moe_theory", *more)
    return INSTALL.format(modules=modules, extras=",".join(("chapters", *more)), address=where, commit=commit)


KINDS = {int: "integer", float: "number", str: "string", bool: "boolean"}  # of fields; what else there is stays code
PARAMETER = re.compile(r"(\w+) = (\"[^\"]*\"|[^#\"]+?)(?:  # (.+))?")


def _fields(code: str) -> str:
    """The first cell of a chapter as a form: a field for each number, and above it what it is."""
    lines = ["#@title Numbers to change"]
    for line in code.splitlines():
        if not (found := PARAMETER.fullmatch(line)):
            raise ValueError(f"parameters: expected lines `name = value  # what it is`, got {line!r}")
        name, value, about = found.groups()
        try:
            value = ast.literal_eval(value)
        except ValueError as error:
            raise ValueError(f"parameters: expected a plain value, got {line!r}") from error
        about = f": {about}" if about else ""
        kind = KINDS.get(type(value), "raw")
        lines += [f"#@markdown **{name}**{about}", f'{name} = {value!r}  #@param {{type: "{kind}"}}']
    return "\n".join(lines)


FOLDED = {"hide-cell", "hide-input", "remove-cell", "remove-input"}
RELATIVE = re.compile(r'href="(?!\w+:|#)')  # leads nowhere from a copy
CHECK = re.compile(r'claims\.check\(\s*"([^"]+)"')


def _title(cell: nbformat.NotebookNode) -> str:
    """What a folded cell is called on Colab: as in the book, or by what it shows."""
    if name := cell.metadata.get("mystnb", {}).get("code_prompt_show"):
        return name
    shown = {kind for output in cell.outputs for kind in output.get("data", {})}
    if MIME in shown:
        return "What the verdict box compares"
    if "image/png" in shown:
        return "Code of the figure"
    if "text/html" in shown:
        return "Code of the table"
    return "Imports" if re.match(r"(import|from) ", cell.source) else "Code"


def _for_colab(cell: nbformat.NotebookNode) -> None:
    """What the book folds as a form, in place; JupyterLab folds it, too, but for the numbers to change."""
    tags = {*cell.metadata.get("tags", [])}
    if "parameters" in tags:
        cell.source = _fields(cell.source)
    elif tags & FOLDED:
        cell.source = f"#@title {_title(cell)}\n{cell.source}"
        cell.metadata["jupyter"] = {"source_hidden": True}
    else:
        return
    cell.metadata["cellView"] = "form"


def published(path: Path, refs: References, address: str | None, numbers: Mapping[str, str]) -> nbformat.NotebookNode:
    """A chapter for Colab and GitHub.

    Args:
        path: the executed chapter.
        refs: where labels point.
        address: of the repository for pip, with `@commit`; the first cell installs the package from there.
        numbers: what the chapters have glued, by `chapter/name`.
    """
    notebook = nbformat.read(path, 4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for _, caption, name in captioned(notebook, page(path)):
        caption["data"] = dict.fromkeys(caption["data"], f"**{name}.** {caption['data']['text/markdown']}")
    above = notebook.cells[0]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = plain(put_in(cell.source, numbers, path.stem), refs, path.stem)
            text = text.replace("in the first cell", "in the cell *Numbers to change*")
            book = f'<a href="{refs.page(path.stem, path.stem)}">rendered book</a>'
            cell.source = text.replace("<p>In the rendered book", f"<p>In the {book}")  # where a figure moves
            above = cell
        else:
            for data in (o["data"] for o in cell.outputs if "text/html" in o.get("data", {})):
                data["text/html"] = RELATIVE.sub(f'href="{refs.folder(path.stem)}', data["text/html"])
            for claim in CHECK.findall(cell.source):  # links to an output lead nowhere on Colab
                above.source += f"\n\n{_anchor(f'claim-{claim}')}"
            _for_colab(cell)
    if address is not None:
        first = nbformat.v4.new_code_cell(_install(code, address), id="install", metadata={"cellView": "form"})
        notebook.cells.insert(0, first)
    return notebook


def address_of(repository: str) -> str:
    """Where the pages of a repository are read."""
    owner, name = repository.split("/")
    return f"https://{owner}.github.io/{name}/"


def configuration(repository: str | None, commit: str = "") -> str:
    """`_config.yml`; with a repository also addresses, buttons to it and, for the published notebooks, to Colab.

    A citation names the commit if one is given.
    """
    config = copy.deepcopy(CONFIG)
    if repository:
        config["html"]["baseurl"] = address_of(repository)
        config["sphinx"]["config"]["html_context"]["commit"] = commit
        config["repository"] = {"url": f"https://github.com/{repository}", "branch": "gh-pages", "path_to_book": ""}
        config["html"]["use_repository_button"] = True
        config["launch_buttons"]["colab_url"] = "https://colab.research.google.com"
    return yaml.safe_dump(config, sort_keys=False)


def write_copies(folder: Path, chapters: list[Path], home: str, address: str | None) -> None:
    """The copies of chapters for Colab, under the names of their pages.

    Args:
        folder: where to.
        chapters: executed ones.
        home: the address of the book, which links lead to.
        address: as in `published`.
    """
    refs, numbers = References.of(chapters, home), glued(chapters)
    for path in chapters:
        copied = folder / f"{page(path)}.ipynb"
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(nbformat.writes(published(path, refs, address, numbers)) + "\n")


NOT_FOUND = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex"><meta name="color-scheme" content="light dark">
<title>{title}: no such page</title>
<style>body {{ font: 1.1rem/1.6 sans-serif; max-width: 38rem; margin: 4rem auto; padding: 0 1rem }}</style></head>
<body><h1>There is no such page</h1>
<p>The address may be old, because we sometimes rename chapters. See the list of chapters in
<a href="{home}">{title}</a>, look up a word in
<a href="{home}book/questions.html">Questions</a>, or <a href="{home}search.html">search</a> for a theorem.</p>
</body></html>
"""


def not_found(home: str) -> str:
    """What is shown for an address below `home`, that of the book, at which there is no page."""
    return NOT_FOUND.format(home=home, title=CONFIG["title"])


def sitemap(home: str, folder: Path) -> str:
    """The addresses of the pages to read in a folder, below `home`, as search engines read them."""
    read = [folder / "index.html", *sorted(folder.glob("book/*.html")), *sorted(folder.glob("notebooks/**/*.html"))]
    pages = "".join(f"<url><loc>{home}{path.relative_to(folder).as_posix()}</loc></url>\n" for path in read)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    return f"{head}{pages}</urlset>\n"


def main() -> None:
    """Entry point: the tree to publish, with links to Colab where `--repository` names the place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", metavar="owner/name")
    parser.add_argument("--copies", metavar="FOLDER", help="only the copies, which install this commit")
    options = parser.parse_args()
    repository = options.repository
    if repository is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise SystemExit(f"--repository: expected owner/name, got {repository!r}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=build.ROOT, capture_output=True, text=True, check=True)
    commit = commit.stdout.strip()
    if options.copies:
        write_copies(Path(options.copies), notebooks(), HOME, f"git+file://localhost{build.ROOT}@{commit}")
        return
    address, home = None, HOME
    if repository:
        home = address_of(repository)
        address = f"git+https://github.com/{repository}@{commit}"
    build.check_registries()
    build.execute_changed(build.chapters())
    build.render(build.BUILD / "site-source", SITE, configuration(repository, commit))
    chapters = [build.executed(n) for n in build.chapters()]
    for folder in ("notebooks", "_sources/notebooks"):
        write_copies(SITE / folder, chapters, home, address)
    if repository:
        (SITE / "404.html").write_text(not_found(home), encoding="utf-8")
        (SITE / "sitemap.xml").write_text(sitemap(home, SITE), encoding="utf-8")
    (SITE / ".nojekyll").touch()
    print(f"== publish {SITE.relative_to(build.ROOT)}")


if __name__ == "__main__":
    main()
