"""Short English texts in classes, as 16 word numbers each: manual pages, by their section."""

import gzip
import re
import subprocess
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from moe_theory import _validate as check

#: Words in one example.
LENGTH = 16

#: No page gives more windows than this, so that proc(5) alone does not stand for a class.
PAGE_WINDOWS = 200

#: The classes, by section of the manual. Sections 4 and 5 are small and make one class.
SECTIONS = {
    "system calls": "2",
    "library functions": "3",
    "devices and formats": "45",
    "overviews": "7",
}

#: Parts of a page that name its section or other pages, or are the same on all pages of a section.
DROPPED = frozenset({"NAME", "LIBRARY", "ATTRIBUTES", "SEE ALSO", "COLOPHON"})

#: One class's examples, 16 words each.
Windows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Texts:
    """Examples of 16 words, and their classes.

    Attributes:
        words: words[i] is the word of number i >= 1; number 0 stands for every other word.
        train_tokens, test_tokens: (n, 16) word numbers.
        train_y, test_y: (n,) classes.
    """

    words: tuple[str, ...]
    train_tokens: Int[Tensor, "n 16"]
    train_y: Int[Tensor, " n"]
    test_tokens: Int[Tensor, "m 16"]
    test_y: Int[Tensor, " m"]


def load_text(n_train: int, n_test: int, *, vocabulary: int = 500, seed: int = 0) -> Texts:
    """Draw a text classification task: windows of 16 words of Debian's manpages and manpages-dev; class: the section.

    No page gives windows to both parts.

    Args:
        n_train, n_test: examples, equally many of each of the 4 classes.
        vocabulary: word numbers, 0 included: the most frequent words of the examples drawn for training.
        seed: of the split and of the draw.

    Raises:
        ValueError: the pages are not on this machine or do not have so many examples, or an argument is out of range.
    """
    check.integer("n_train", n_train, 1)
    check.integer("n_test", n_test, 1)
    check.integer("vocabulary", vocabulary, 2)
    rng = np.random.default_rng(check.integer("seed", seed, 0))
    train, test = _balanced(_manual_pages(), n_train, n_test, rng)
    words = _most_frequent([window for window, _ in train], vocabulary)
    return Texts(words, *_numbers(train, words), *_numbers(test, words))


def words_of(text: str) -> list[str]:
    """The words of a text in lower case: letters and inner underscores or apostrophes. Digits are no words."""
    return re.findall(r"[a-z]+(?:[_'][a-z]+)*", text.lower())


def strip_roff(page: str, dropped: Collection[str] = DROPPED) -> str:
    """The running text of a manual page's source, without what gives its section away.

    Left out: comments, the title line, headings, tables, requests and font changes, the parts named in `dropped`, and
    every reference to a page such as "open(2)".
    """
    lines, kept, skip, table = page.replace("\\\n", "").split("\n"), [], False, False
    for line in lines:
        if line.startswith(".TS"):
            table = True
        elif line.startswith(".TE"):
            table = False
        elif match := re.match(r"\.\s*S[Hh]\s*(.*)", line):
            skip = match[1].replace("\\ ", " ").strip('" ').upper() in dropped
        elif not skip and not table:
            kept.append(_text_line(line))
    return re.sub(r"[\w.:+@/-]+\s?\(\d\w*\)", " ", "\n".join(kept))


def _text_line(line: str) -> str:
    """One line of roff without markup: the arguments of a font request, the text of a text line, else nothing."""
    line = re.sub(r'\\["#].*', "", line)
    if match := re.match(r"[.']\s*(\w*)\s?(.*)", line):
        font, rest = match.groups()
        if font not in {"B", "I", "SM", "SB", "BR", "RB", "BI", "IB", "IR", "RI"}:
            return ""
        # Alternating fonts join their arguments: `.BR open (2)` prints open(2).
        arguments = [quoted or plain for quoted, plain in re.findall(r'"((?:[^"]|"")*)"?|(\S+)', rest)]
        line = ("" if len(font) == 2 and font[0] != "S" else " ").join(arguments)
    line = re.sub(r"\\f(?:\[\w*\]|\(..|.)|\\s[+-]?\d+|\\\*?\[[^\]]*\]|\\\*\(..|\\\(..|\\\*.", "", line)
    line = re.sub(r"\\[hvwkzoNDlLXY]'[^']*'", "", line)
    return re.sub(r"\\[&|^%/,:c)]", "", line).replace("\\-", "-").replace("\\e", " ").replace("\\", "")


def _manual_pages() -> dict[str, list[Windows]]:
    """The windows of every manual page, by class; ValueError if the Debian packages are not there."""
    sources = page_sources("manpages", "manpages-dev")
    pages = {
        name: [_windows(strip_roff(text)) for f, text in sources.items() if f.parent.name[-1] in digits]
        for name, digits in SECTIONS.items()
    }
    if not all(pages.values()):
        raise ValueError(
            "manual pages: expected the Debian packages manpages and manpages-dev (apt-get install manpages "
            "manpages-dev; in a slim container, remove the path-exclude lines in /etc/dpkg/dpkg.cfg.d first)"
        )
    return pages


def page_files(*packages: str, language: str = "", sections: str = "0-9") -> list[Path]:
    """The files of all manual pages in Debian packages, each page once; none where they are not installed.

    Args:
        packages: names of Debian packages.
        language: of the pages, such as "fr"; pages in English lie in no folder of their own.
        sections: of the manual, digits or a range of them.
    """
    try:
        listing = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    folder = re.compile(f"/usr/share/man/{language}/man[{sections}]".replace("//", "/"))
    files = sorted(f for f in map(Path, listing.stdout.splitlines()) if folder.fullmatch(str(f.parent)))
    return [f for f in files if f.is_file() and not f.is_symlink()]  # a link is a second name of a page


def page_sources(*packages: str, language: str = "", sections: str = "0-9") -> dict[Path, str]:
    """The roff sources of `page_files`, by their files, without those that only point to another page."""
    sources = {f: _source(f) for f in page_files(*packages, language=language, sections=sections)}
    return {f: text for f, text in sources.items() if text}


def _source(file: Path) -> str:
    """The roff source of a page; empty where it only points to another page."""
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8", errors="replace")
    return "" if re.search(r"^\.so ", text, re.MULTILINE) else text


def _windows(text: str) -> Windows:
    """Consecutive windows of 16 words, without overlap; the rest of the text, shorter than a window, is dropped."""
    words = words_of(text)
    return [tuple(words[i : i + LENGTH]) for i in range(0, len(words) - LENGTH + 1, LENGTH)]


def _balanced(pages: dict[str, list[Windows]], n_train: int, n_test: int, rng) -> tuple[list, list]:
    """Equally many windows of each class for both parts, drawn without replacement from different pages.

    A class's pages go to the test part in random order until this has its share n_test / (n_train + n_test) of the
    windows, the others to the training part. A window that occurs twice counts once.
    """
    for name, n in (("n_train", n_train), ("n_test", n_test)):
        if n % len(pages):
            raise ValueError(f"{name}: expected a multiple of the {len(pages)} classes, got {n}")
    need = (n_train // len(pages), n_test // len(pages))
    parts, seen = ([], []), set()
    for label, (name, windows_of) in enumerate(pages.items()):
        pools = _split(windows_of, n_test / (n_train + n_test), seen, rng)
        if any(len(pool) < n for pool, n in zip(pools, need, strict=True)):
            found = " and ".join(str(len(pool)) for pool in pools)
            raise ValueError(
                f"n_train, n_test: expected at most the windows there are of class {name!r}, {found} at this split, "
                f"got {need[0]} and {need[1]} (per class)"
            )
        for part, pool, n in zip(parts, pools, need, strict=True):
            part += [(pool[i], label) for i in rng.permutation(len(pool))[:n]]
    return tuple([part[i] for i in rng.permutation(len(part))] for part in parts)


def _split(windows_of: list[Windows], share: float, seen: set, rng) -> tuple[Windows, Windows]:
    """The windows of a class's pages, `share` of them (by whole pages) in the second part; `seen` grows."""
    unique = []
    for windows in windows_of:
        fresh = [w for w in dict.fromkeys(windows) if w not in seen]
        seen.update(fresh)
        unique.append([fresh[i] for i in rng.permutation(len(fresh))[:PAGE_WINDOWS]])
    total, train, test = sum(map(len, unique)), [], []
    for i in rng.permutation(len(unique)):
        (test if len(test) < share * total else train).extend(unique[i])
    return train, test


def _most_frequent(windows: Windows, vocabulary: int) -> tuple[str, ...]:
    """The empty string and the `vocabulary` - 1 most frequent words, in order; ties by the alphabet."""
    counts = Counter(word for window in windows for word in window)
    return ("", *sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1])


def _numbers(part: list, words: tuple[str, ...]) -> tuple[Int[Tensor, "n 16"], Int[Tensor, " n"]]:
    """Word numbers and classes of the examples; 0 for what is not in `words`."""
    number = {word: i for i, word in enumerate(words)}
    tokens = torch.tensor([[number.get(word, 0) for word in window] for window, _ in part])
    return tokens, torch.tensor([label for _, label in part])
