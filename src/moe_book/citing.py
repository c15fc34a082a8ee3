"""How the book is cited, from its CITATION.cff: as a line and as an entry of BibTeX."""

from pathlib import Path

import yaml

import moe_book

CITATION = Path(moe_book.__file__).parents[2] / "CITATION.cff"


def cited() -> dict:
    """What CITATION.cff says."""
    return yaml.safe_load(CITATION.read_text(encoding="utf-8"))


def which(commit: str = "") -> str:
    """The version of the book, and the commit it was built from, if it is known."""
    return cited()["version"] + f", commit {commit[:12]}" * bool(commit)


def line(commit: str = "") -> str:
    """The book in a line, to which a script adds a page or a claim."""
    book = cited()
    authors = ", ".join(author["name"] for author in book["authors"])
    return f"{authors} ({book['date-released'].year}). {book['title']}, version {which(commit)}"


def bibtex(commit: str = "") -> str:
    """The book as an entry of BibTeX."""
    book = cited()
    fields = {
        "author": " and ".join(f"{{{author['name']}}}" for author in book["authors"]),
        "title": f"{{{book['title']}}}",
        "version": which(commit),
        "year": book["date-released"].year,
    }
    lines = ",\n".join(f"  {field:7} = {{{value}}}" for field, value in fields.items())
    return f"@{book['type']}{{moe_theory,\n{lines}\n}}"
