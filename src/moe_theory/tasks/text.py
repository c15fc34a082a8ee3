"""Short English texts in classes, as 16 word numbers each: manual pages, bank queries, Python's documentation."""

import csv
import gzip
import hashlib
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
from moe_theory.tasks.images import data_folder

#: Words in one example.
LENGTH = 16

#: No page gives more windows than this, so that proc(5) alone does not stand for a class.
PAGE_WINDOWS = 200

#: The classes of "manual pages", by section of the manual. Sections 4 and 5 are small and make one class.
SECTIONS = {
    "system calls": "2",
    "library functions": "3",
    "devices and formats": "45",
    "overviews": "7",
}

#: Parts of a page that name its section or other pages, or are the same on all pages of a section.
DROPPED = frozenset({"NAME", "LIBRARY", "ATTRIBUTES", "SEE ALSO", "COLOPHON"})

#: The classes of "python topics". Topics that contain other topics (compound, types, specialnames) are left out.
TOPICS = {
    "statements": (
        "assert assignment async break class continue del for function global if import nonlocal pass raise return "
        "try while with yield"
    ),
    "expressions": (
        "atom-identifiers atom-literals attribute-references await binary bitwise booleans calls comparisons "
        "conversions dict exprlists lambda lists operator-summary power shifting slicings subscriptions unary"
    ),
    "special methods": (
        "attribute-access callable-types context-managers customization numeric-types objects sequence-types"
    ),
    "built-in types": (
        "bltin-code-objects bltin-null-object bltin-type-objects formatstrings specialattrs string-methods truth "
        "typesfunctions typesmapping typesmethods typesmodules typesseq"
    ),
}

#: Banking77 as its authors published it (CC BY 4.0), at a fixed commit, with the SHA-256 of the two files.
BANKING77 = (
    "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/57ec275d8078af65b7731c2a98be812d844a6d6b"
    "/banking_data/"
)
BANKING77_FILES = {
    "train.csv": "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b",
    "test.csv": "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d",
}

#: Seconds to wait for a server.
TIMEOUT = 10

SOURCES = ("manual pages", "banking77", "python topics")

#: One class's examples, 16 words each; a shorter query has empty strings at its end.
Windows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Texts:
    """Examples of 16 words, and their classes.

    Attributes:
        name: the source, one of SOURCES.
        classes: the names of the classes 0, 1, ...
        words: words[i] is the word of number i >= 1; number 0 stands for every other word, and fills up short queries.
        train_tokens, test_tokens: (n, 16) word numbers.
        train_y, test_y: (n,) classes.
    """

    name: str
    classes: tuple[str, ...]
    words: tuple[str, ...]
    train_tokens: Int[Tensor, "n 16"]
    train_y: Int[Tensor, " n"]
    test_tokens: Int[Tensor, "m 16"]
    test_y: Int[Tensor, " m"]

    @property
    def vocabulary(self) -> int:
        """How many word numbers there are, 0 included."""
        return len(self.words)


def load_text(source: str, n_train: int, n_test: int, *, vocabulary: int = 500, seed: int = 0) -> Texts:
    """Draw a text classification task from one of three sources.

    "manual pages": windows of 16 words of Debian's manpages and manpages-dev; class: the section. No page gives
    windows to both parts. "banking77": queries to a bank, 77 intents, their authors' split; needs a network once.
    "python topics": the documentation inside Python (`pydoc_data`), in 4 classes, split by topic; small.

    Args:
        source: one of `SOURCES`.
        n_train, n_test: examples; for the manual pages and the topics, equally many of each of the 4 classes.
        vocabulary: word numbers, 0 included: the most frequent words of the examples drawn for training.
        seed: of the split and of the draw.

    Raises:
        ValueError: the source is not on this machine or does not have so many examples, or an argument is out of range.
    """
    check.choice("source", source, SOURCES)
    check.integer("n_train", n_train, 1)
    check.integer("n_test", n_test, 1)
    check.integer("vocabulary", vocabulary, 2)
    rng = np.random.default_rng(check.integer("seed", seed, 0))
    if source == "banking77":
        parts, classes = _queries(_banking77(), n_train, n_test, rng)
    else:
        pages = _manual_pages() if source == "manual pages" else _python_topics()
        parts, classes = _balanced(pages, n_train, n_test, rng), tuple(pages)
    words = _most_frequent([window for window, _ in parts[0]], vocabulary)
    return Texts(source, classes, words, *_numbers(parts[0], words), *_numbers(parts[1], words))


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
            "source: 'manual pages' needs the Debian packages manpages and manpages-dev (apt-get install manpages "
            "manpages-dev; in a slim container, remove the path-exclude lines in /etc/dpkg/dpkg.cfg.d first)"
        )
    return pages


def page_sources(*packages: str, language: str = "", sections: str = "0-9") -> dict[Path, str]:
    """The roff sources of all manual pages in Debian packages, by their files; none where they are not installed.

    Args:
        packages: names of Debian packages.
        language: of the pages, such as "fr"; pages in English lie in no folder of their own.
        sections: of the manual, digits or a range of them.
    """
    try:
        listing = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    folder = re.compile(f"/usr/share/man/{language}/man[{sections}]".replace("//", "/"))
    # A second name of a page is a link, or a line `.so man2/open.2`.
    files = sorted(f for f in map(Path, listing.stdout.splitlines()) if folder.fullmatch(str(f.parent)))
    sources = {f: _source(f) for f in files if f.is_file() and not f.is_symlink()}
    return {f: text for f, text in sources.items() if text}


def _source(file: Path) -> str:
    """The roff source of a page; empty where it only points to another page."""
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8", errors="replace")
    return "" if re.search(r"^\.so ", text, re.MULTILINE) else text


def _python_topics() -> dict[str, list[Windows]]:
    """The windows of Python's own documentation topics, by class; a topic this version of Python lacks is skipped."""
    from pydoc_data.topics import topics

    return {
        name: [_windows(_body(topics[topic])) for topic in chosen.split() if topic in topics]
        for name, chosen in TOPICS.items()
    }


def _body(topic: str) -> str:
    """A topic without its title, the underlined first line."""
    return re.sub(r"\A[^\n]*\n[*=~-]+\n", "", topic)


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
    return _shuffled(parts[0], rng), _shuffled(parts[1], rng)


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


def _banking77() -> dict[str, list[tuple[str, str]]]:
    """The rows (text, class) of both files: from MOE_THEORY_DATA, else from pooch's cache, fetched if not there."""
    if folder := data_folder():
        paths = {name: folder / "banking77" / name for name in BANKING77_FILES}
        if any(path.is_file() for path in paths.values()):
            return {name: _rows(_checked(path, BANKING77_FILES[name])) for name, path in paths.items()}
    try:
        pooch = check.library("pooch", "the download")
        get = pooch.HTTPDownloader(timeout=TIMEOUT)
        folder = pooch.os_cache("moe_theory") / "banking77"
        paths = [
            pooch.retrieve(BANKING77 + name, f"sha256:{sha}", fname=name, path=folder, downloader=get)
            for name, sha in BANKING77_FILES.items()
        ]
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(
            f"source: 'banking77' needs pooch, and a network the first time ({type(error).__name__}: {error}); "
            "'manual pages' and 'python topics' need none"
        ) from error
    return {name: _rows(Path(path)) for name, path in zip(BANKING77_FILES, paths, strict=True)}


def _checked(path: Path, sha256: str) -> Path:
    """The path of a file; ValueError if it is missing or not the one expected."""
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if found != sha256:
        raise ValueError(f"{path}: expected a file of SHA-256 {sha256}, got {found}")
    return path


def _rows(path: Path) -> list[tuple[str, str]]:
    """The rows (text, class) of a file with the header `text,category`."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != ["text", "category"]:
            raise ValueError(f"{path}: expected the header text,category, got {reader.fieldnames}")
        return [(row["text"], row["category"]) for row in reader]


def _queries(rows: dict, n_train: int, n_test: int, rng) -> tuple[tuple[list, list], tuple[str, ...]]:
    """`n_train` and `n_test` queries drawn without replacement from the two files, cut or filled up to 16 words."""
    classes = tuple(sorted({category for _, category in rows["train.csv"]}))
    parts = []
    for file, name, n in (("train.csv", "n_train", n_train), ("test.csv", "n_test", n_test)):
        if n > len(rows[file]):
            raise ValueError(f"{name}: expected at most the {len(rows[file])} rows of {file}, got {n}")
        drawn = [rows[file][i] for i in rng.permutation(len(rows[file]))[:n]]
        padded = [(words_of(text) + [""] * LENGTH, category) for text, category in drawn]
        parts.append([(tuple(words[:LENGTH]), classes.index(category)) for words, category in padded])
    return (parts[0], parts[1]), classes


def _most_frequent(windows: Windows, vocabulary: int) -> tuple[str, ...]:
    """The empty string and the `vocabulary` - 1 most frequent words, in order; ties by the alphabet."""
    counts = Counter(word for window in windows for word in window if word)
    return ("", *sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1])


def _numbers(part: list, words: tuple[str, ...]) -> tuple[Int[Tensor, "n 16"], Int[Tensor, " n"]]:
    """Word numbers and classes of the examples; 0 for what is not in `words`."""
    number = {word: i for i, word in enumerate(words)}
    tokens = torch.tensor([[number.get(word, 0) for word in window] for window, _ in part])
    return tokens, torch.tensor([label for _, label in part])


def _shuffled(items: list, rng) -> list:
    """The items in random order."""
    return [items[i] for i in rng.permutation(len(items))]
