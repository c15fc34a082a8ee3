"""English text as a stream of characters, for language models: manual pages, or Python's documentation."""

import hashlib
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream
from moe_theory.tasks.text import page_files

#: The characters, by their numbers. Capitals become small letters, all other characters blanks, of which one is kept.
ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,;:()_=/*'\"<>-"

#: Shares of the characters in the three parts.
PARTS = {"train": 0.9, "validation": 0.05, "test": 0.05}

SOURCES = ("manual pages", "python topics")


@dataclass(frozen=True)
class Characters:
    """A text in three parts, as numbers of characters in `ALPHABET`.

    Attributes:
        name: what it is, one of `SOURCES`; it may be another than was asked for.
    """

    name: str
    train: UInt8[Tensor, " n"]
    validation: UInt8[Tensor, " m"]
    test: UInt8[Tensor, " l"]

    @property
    def digest(self) -> str:
        """Tells this text from that of another release of the pages."""
        parts = (self.train, self.validation, self.test)
        return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()[:16]


def load_characters(source: str = "manual pages", *, seed: int = 0) -> Characters:
    """A text in three parts, each of whole pages.

    "manual pages" are those of Debian's packages manpages and manpages-dev as mandoc prints them, and "python topics"
    the documentation inside Python (`pydoc_data`), which stands in, with a warning, where there are none.

    Args:
        source: one of `SOURCES`.
        seed: draws which pages are in which part.

    Raises:
        ValueError: for another source, or a seed below 0.
    """
    check.choice("source", source, SOURCES)
    check.integer("seed", seed, 0)
    pages = manual_pages() if source == "manual pages" else []
    if source == "manual pages" and not pages:
        source = "python topics"
        warnings.warn(
            "Python's documentation stands in for the manual pages, which need the packages manpages, manpages-dev and "
            "mandoc (in a slim container, remove the path-exclude lines in /etc/dpkg/dpkg.cfg.d before installing)",
            stacklevel=2,
        )
    pages = pages or [topics[name] for name in sorted(topics)]
    order = stream(seed, "texts").permutation(len(pages))
    return Characters(source, *_by_pages([_numbers(folded(pages[i])) for i in order]))


def folded(text: str) -> str:
    """The text in the characters of `ALPHABET`."""
    return re.sub(f"[^{re.escape(ALPHABET.strip())}]+", " ", text.lower())


def unfolded(numbers: UInt8[Tensor, " n"]) -> str:
    """The text that numbers of characters stand for."""
    return "".join(ALPHABET[i] for i in numbers.tolist())


def manual_pages() -> list[str]:
    """The manual pages as mandoc prints them, without first and last line, each once; none if they are not there."""
    files = page_files("manpages", "manpages-dev") if shutil.which("mandoc") else []
    return list(dict.fromkeys(filter(None, map(_printed, files))))


def _printed(file: Path) -> str:
    """A page as text, with no line broken; bold letters are overprinted, `x BS x`, and are printed once here."""
    out = subprocess.run(["mandoc", "-T", "utf8", "-O", "width=1000", file], capture_output=True, check=True).stdout
    return "\n".join(re.sub(".\b", "", out.decode("utf-8")).strip().split("\n")[1:-1])


def _numbers(text: str) -> UInt8[Tensor, " n"]:
    """The numbers of a folded text's characters."""
    number = np.zeros(128, np.uint8)
    number[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET), dtype=np.uint8)
    return torch.from_numpy(number[np.frombuffer(text.encode("ascii"), np.uint8)])


def _by_pages(pages: list[Tensor]) -> tuple[Tensor, ...]:
    """The parts, page after page: a page goes where its last character falls."""
    ends = np.cumsum([len(page) for page in pages])
    cuts = np.searchsorted(ends, np.cumsum(list(PARTS.values()))[:-1] * ends[-1])
    groups = [pages[a:b] for a, b in zip([0, *cuts], [*cuts, len(pages)], strict=True)]
    return tuple(torch.cat(group) for group in groups)
