"""English text as a stream of characters, for language models: manual pages, Wikipedia, Python's documentation."""

import hashlib
import os
import re
import shutil
import subprocess
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream

#: The characters, by their numbers. Capitals become small letters, all other characters blanks, of which one is kept.
ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,;:()_=/*'\"<>-"

#: Shares of the characters in the three parts.
PARTS = {"train": 0.9, "validation": 0.05, "test": 0.05}

#: The archives of Wikipedia's first 10^8 bytes (enwik8) and letters (text8), and their SHA-256: for enwik8 the one by
#: which the data set LTCB/enwik8 checks its download, for text8 that of copies with the MD5 on its author's page.
ARCHIVES = {
    "enwik8": "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    "text8": "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
}
SERVER = "http://mattmahoney.net/dc/"

#: The environment variable that names a folder with archives that are at hand, and seconds to wait for the server.
FOLDER, TIMEOUT = "MOE_THEORY_DATA", 10

SOURCES = ("manual pages", "python topics", *ARCHIVES)


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
    """A text of one of four sources, in three parts.

    "manual pages" are those of Debian's packages manpages and manpages-dev as mandoc prints them, and "python topics"
    the documentation inside Python (`pydoc_data`), which stands in, with a warning, where there are none. Of both,
    whole pages make up the parts. "enwik8" and "text8" are split in their order; their archives are looked for in the
    folder that the variable MOE_THEORY_DATA names, then on their author's server. The marks and capitals of enwik8 are
    folded as all others, so that bits per character are not those of its benchmark; text8 is as published.

    Args:
        source: one of `SOURCES`.
        seed: draws which pages are in which part.

    Raises:
        ValueError: an archive cannot be had, or is not the one with the checksum known of it.
    """
    check.choice("source", source, SOURCES)
    check.integer("seed", seed, 0)
    if source in ARCHIVES:
        return Characters(source, *_cut(_numbers(folded(_archive(source).decode("utf-8")))))
    pages = manual_pages() if source == "manual pages" else []
    if source == "manual pages" and not pages:
        source = "python topics"
        warnings.warn(
            "Python's documentation stands in for the manual pages, which need the packages manpages, manpages-dev and "
            "mandoc (in a slim container, remove the path-exclude lines in /etc/dpkg/dpkg.cfg.d before installing)",
            stacklevel=2,
        )
    pages = pages or python_topics()
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
    if not (shutil.which("mandoc") and shutil.which("dpkg")):
        return []
    listing = subprocess.run(["dpkg", "-L", "manpages", "manpages-dev"], capture_output=True, text=True, check=False)
    files = sorted(f for f in map(Path, listing.stdout.splitlines()) if _is_page(f))
    return list(dict.fromkeys(filter(None, map(_printed, files))))


def python_topics() -> list[str]:
    """The topics of Python's own documentation."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _is_page(file: Path) -> bool:
    """Pages in other languages lie elsewhere; a link is a second name of a page."""
    return bool(re.fullmatch(r"/usr/share/man/man\d", str(file.parent))) and file.is_file() and not file.is_symlink()


def _printed(file: Path) -> str:
    """A page as text, with no line broken; bold letters are overprinted, `x BS x`, and are printed once here."""
    out = subprocess.run(["mandoc", "-T", "utf8", "-O", "width=1000", file], capture_output=True, check=True).stdout
    return "\n".join(re.sub(".\b", "", out.decode("utf-8")).strip().split("\n")[1:-1])


def _numbers(text: str) -> UInt8[Tensor, " n"]:
    """The numbers of a folded text's characters."""
    number = np.zeros(128, np.uint8)
    number[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET), dtype=np.uint8)
    return torch.from_numpy(number[np.frombuffer(text.encode("ascii"), np.uint8)])


def _cut(text: UInt8[Tensor, " n"]) -> tuple[Tensor, ...]:
    """The parts of one text in its order."""
    ends = [round(share * len(text)) for share in np.cumsum(list(PARTS.values()))]
    return torch.tensor_split(text, ends[:-1])


def _by_pages(pages: list[Tensor]) -> tuple[Tensor, ...]:
    """The parts, page after page: a page goes where its last character falls."""
    ends = np.cumsum([len(page) for page in pages])
    cuts = np.searchsorted(ends, np.cumsum(list(PARTS.values()))[:-1] * ends[-1])
    groups = [pages[a:b] for a, b in zip([0, *cuts], [*cuts, len(pages)], strict=True)]
    return tuple(torch.cat(group) for group in groups)


def _archive(name: str) -> bytes:
    """What is in an archive; ValueError if it cannot be had, or is another one."""
    file, sha256 = f"{name}.zip", ARCHIVES[name]
    at_hand = Path(os.environ.get(FOLDER, ".")) / file
    path = at_hand if FOLDER in os.environ and at_hand.is_file() else _download(file, sha256)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path}: expected the archive of SHA-256 {sha256}, got {found}; download it again")
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def _download(file: str, sha256: str) -> Path:
    """The archive in pooch's cache, fetched from its author's server if it is not there."""
    try:
        pooch = check.library("pooch", "the download")
        folder, get = pooch.os_cache("moe_theory"), pooch.HTTPDownloader(timeout=TIMEOUT)
        return Path(pooch.retrieve(SERVER + file, f"sha256:{sha256}", fname=file, path=folder, downloader=get))
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"source: {file} is not in the folder that {FOLDER} names, and was not downloaded "
            f"({type(error).__name__}: {error}); 'manual pages' and 'python topics' need no network"
        ) from error
