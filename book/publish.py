"""Make the publishable tree: the rendered book, and notebooks that run outside of it.

`python book/publish.py --repository owner/name` is what `make site REPOSITORY=owner/name` runs. Colab
and GitHub show MyST as raw text, so published notebooks carry plain Markdown; their first cell
installs the package from that repository at the current commit when it cannot be imported. Without a
repository there are no Colab buttons and no such cell.
"""

import argparse
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import build
import nbformat
import yaml
from pybtex.database import parse_file

SITE = build.BUILD / "site"

INSTALL = """\
# Installs this book's package if it is not here yet; whatever is already installed keeps its version.
import importlib.util
import subprocess
import sys
import tempfile
from importlib.metadata import distributions

if importlib.util.find_spec("moe_theory") is None:
    kept = {{d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{{name}}=={{version}}\\n" for name, version in kept.items())
        pins.flush()
        source = "{address}@{commit}"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", pins.name, source], check=True)
"""

FENCE = re.compile(r"^(?P<fence>:{3,})\{(?P<name>[\w:]+)\}[ \t]*(?P<argument>.*)$")
OPTION = re.compile(r"^:(?P<key>[\w-]+):[ \t]*(?P<value>.*)$")
ROLE = re.compile(r"\{(?P<name>[\w:]+)\}`(?P<text>[^`]+)`")
EQUATION = re.compile(r"\$\$(?P<body>(?:(?!\$\$).)+)\$\$[ \t]*\((?P<label>[\w-]+)\)", re.DOTALL)
TARGET = re.compile(r"^\([\w-]+\)=\n", re.MULTILINE)


@dataclass
class Directive:
    """A colon fence: its name, argument, options and body."""

    name: str
    argument: str
    options: dict[str, str] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.name.split(":")[-1].capitalize()

    @property
    def heading(self) -> str:
        return f"{self.kind} ({self.argument})" if self.argument else self.kind


def directives(text: str) -> list[str | Directive]:
    """Split Markdown into plain lines and directives; ValueError for a fence that is not closed."""
    parts, open_fence, current = [], "", None
    for line in text.split("\n"):
        start = FENCE.match(line)
        if current is None and start:
            current, open_fence = Directive(start["name"], start["argument"].strip()), start["fence"]
        elif current is None:
            parts.append(line)
        elif line.strip() == open_fence:
            parts.append(current)
            current = None
        elif not current.body and (option := OPTION.match(line)):
            current.options[option["key"]] = option["value"].strip()
        else:
            current.body.append(line)
    if current is not None:
        raise ValueError(f"directive {current.name!r}: the fence is not closed")
    return parts


@dataclass
class References:
    """Where labels, documents and citations point, over all chapters."""

    site: str
    titles: dict[str, str] = field(default_factory=dict)
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    citations: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, chapters: list[Path], site: str) -> "References":
        refs = cls(site)
        for path in chapters:
            cells = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown"]
            refs.titles[path.stem] = cells[0].split("\n")[0].removeprefix("# ")
            found = [d for source in cells for d in directives(source) if isinstance(d, Directive)]
            refs.labels |= {d.options["label"]: (d.heading, path.stem) for d in found if "label" in d.options}
            numbered = (match["label"] for source in cells for match in EQUATION.finditer(source))
            refs.labels |= {label: (f"({number})", path.stem) for number, label in enumerate(numbered, 1)}
        for page in ("notation", "running", "ledger", "errata"):
            refs.titles[page] = page.capitalize()
        for key, entry in parse_file(build.ROOT / "book" / "references.bib").entries.items():
            names = [str(p).split(",")[0].strip("{}") for p in entry.persons["author"]]
            who = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
            refs.citations[key] = f"{who}, {entry.fields['year']}"
        return refs

    def page(self, stem: str) -> str:
        return f"{self.site}{'notebooks' if stem[0].isdigit() else 'book'}/{stem}.html"

    def role(self, match: re.Match, here: str) -> str:
        """Plain Markdown for one role; ValueError for a role or target that is not known."""
        name, text = match["name"], match["text"]
        if name.startswith("cite"):
            return "(" + "; ".join(self.citations[key.strip()] for key in text.split(",")) + ")"
        if name == "doc":
            stem = text.split("/")[-1]
            return f"[{self.titles[stem]}]({self.page(stem)})"
        if name in ("eq", "ref", "prf:ref", "numref"):
            heading, stem = self.labels[text]
            return heading if stem == here else f"[{heading}]({self.page(stem)})"
        raise ValueError(f"role {name!r}: no plain form is known")


def _block(directive: Directive, refs: References) -> list[str]:
    """One directive as plain Markdown lines."""
    name, body = directive.name, directive.body
    while body and not body[-1].strip():
        body.pop()
    if name == "solution":
        return ["<details><summary>Solution</summary>", "", *body, "", "</details>"]
    if name == "prf:proof":
        return ["*Proof.*", "", *body, "", "∎"]
    if name.startswith("prf:") or name in ("exercise", "note", "tip", "important"):
        return [f"> **{directive.heading}.**", ">", *(f"> {line}".rstrip() for line in body)]
    raise ValueError(f"directive {name!r}: no plain form is known")


def plain(text: str, refs: References, here: str) -> str:
    """MyST Markdown as plain Markdown: block quotes, details, links and tagged equations."""
    lines = []
    for part in directives(text):
        lines += [part] if isinstance(part, str) else _block(part, refs)
    text = TARGET.sub("", "\n".join(lines))
    text = EQUATION.sub(lambda m: f"$${m['body'].rstrip()} \\tag{{{refs.labels[m['label']][0].strip('()')}}}$$", text)
    text = ROLE.sub(lambda m: refs.role(m, here), text)
    return re.sub(r"\]\((?:\.\./)?(?:notebooks/|book/)?(\w+)\.(?:ipynb|md)\)", lambda m: f"]({refs.page(m[1])})", text)


def published(path: Path, refs: References, install: str | None) -> nbformat.NotebookNode:
    """A chapter for Colab and GitHub: plain Markdown, and the cell that installs the package first."""
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = plain(cell.source, refs, path.stem)
    if install is not None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(install, id="install"))
    return notebook


def configuration(repository: str | None) -> str:
    """`_config.yml`, with Colab buttons that open the published notebooks if there is a repository."""
    config = yaml.safe_load((build.ROOT / "_config.yml").read_text())
    if repository:
        config["repository"] = {"url": f"https://github.com/{repository}", "branch": "gh-pages", "path_to_book": ""}
        config["launch_buttons"]["colab_url"] = "https://colab.research.google.com"
    return yaml.safe_dump(config, sort_keys=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", metavar="owner/name")
    repository = parser.parse_args().repository
    if repository is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise SystemExit(f"--repository: expected owner/name, got {repository!r}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=build.ROOT, capture_output=True, text=True, check=True)
    install, home = None, "../"
    if repository:
        owner, name = repository.split("/")
        home = f"https://{owner}.github.io/{name}/"
        install = INSTALL.format(address=f"git+https://github.com/{repository}", commit=commit.stdout.strip())
    build.execute_changed()
    build.render(build.BUILD / "site-source", SITE, configuration(repository))
    chapters = [build.EXECUTED / n.name for n in build.chapters()]
    refs = References.of(chapters, home)
    for path in chapters:
        notebook = nbformat.writes(published(path, refs, install)) + "\n"
        for folder in ("notebooks", "_sources/notebooks"):
            (SITE / folder / path.name).write_text(notebook)
    (SITE / ".nojekyll").touch()
    print(f"== publish {SITE.relative_to(build.ROOT)}")


if __name__ == "__main__":
    main()
