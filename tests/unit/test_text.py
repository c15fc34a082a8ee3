"""The text loader: markup, windows, split by page, vocabulary from the training part, and pages that are missing."""

import re
import subprocess

import numpy as np
import pytest

from moe_theory.tasks import text
from moe_theory.tasks.text import load_text, strip_roff, words_of

PAGE = r"""'\" t
.\" A comment about close(2)
.TH TITLEWORD 2 2022-12-04 "Linux man-pages 6.03"
.SH NAME
nameword \- one line
.SH LIBRARY
libraryword
.SH DESCRIPTION
The
.BR accept (2)
call and
.BR "epoll_wait" (2),
with \fBbold\fP \(co \-1\c
 words\f[I]joined\fR.  \" aside
.SS "Headingword"
.TP
.BI "int " first ", char " second ;
.B two words
.IB un done
See also getline(3) and size_t(3type).
.TS
tableword
.TE
.SH SEE ALSO
.BR seeword (7)
alsoword
.SH NOTES
Last\&word, \s-1SMALL\s0 \*(lqquoted\*(rq.
"""


def pages_of(windows_per_page: dict[str, list[int]]) -> dict:
    """Pages with the windows asked for: every word says its class and page, no window occurs twice."""
    made = {}
    for name, counts in windows_per_page.items():
        letters = "abcdefghijklmnopqrstuvwxyz"[: len(counts)]
        made[name] = [
            [(f"{name}_{page}",) * 15 + (f"{name}_{page}{i}",) for i in range(n)]
            for page, n in zip(letters, counts, strict=True)
        ]
    return made


@pytest.fixture
def pages(monkeypatch):
    """Four classes of different size in place of the manual pages."""
    made = pages_of({"a": [10] * 8, "b": [40, 5, 5, 5, 20, 5], "c": [7] * 12, "d": [30, 30, 30]})
    monkeypatch.setattr(text, "_manual_pages", lambda: made)
    return made


def test_words():
    """Lower case; digits and signs separate; underscores and apostrophes inside a word stay."""
    assert words_of("The O_RDONLY flag isn't 0x1F, _x_ 'q'.") == [
        "the", "o_rdonly", "flag", "isn't", "x", "f", "x", "q",
    ]  # fmt: skip


def test_roff_markup():
    """Text and arguments of font requests stay; markup, headings, tables, dropped parts and references go."""
    expected = (
        "the call and with bold words joined int first char second two words undone see also and lastword small quoted"
    )
    assert words_of(strip_roff(PAGE).replace("wordsjoined", "words joined")) == expected.split()


def test_windows():
    """Consecutive, without overlap; what is left at the end is dropped."""
    words = [a + b for a in "abcdefg" for b in "vwxyz"]
    assert text._windows(" ".join(words)) == [tuple(words[:16]), tuple(words[16:32])]
    assert text._windows("too short") == []


def test_balanced_and_split_by_page(pages):
    """Equally many examples of each class, none twice, and no page in both parts."""
    data = load_text(n_train=40, n_test=16, vocabulary=1000)
    assert data.train_y.bincount().tolist() == [10] * 4 and data.test_y.bincount().tolist() == [4] * 4
    assert data.train_y.tolist() != sorted(data.train_y.tolist())
    train = [[data.words[i] for i in row] for row in data.train_tokens.tolist()]
    assert len({tuple(row) for row in train}) == 40
    for row, y in zip(train, data.train_y, strict=True):
        assert row[0][0] == "abcd"[y]
    # The first word names the page: none of the test part is known from training, so that all 16 numbers are 0.
    assert (data.test_tokens == 0).all()


def test_windows_drawn_once_and_pages_capped(monkeypatch):
    """A page gives at most PAGE_WINDOWS windows, and a window that other pages repeat counts once."""
    monkeypatch.setattr(text, "PAGE_WINDOWS", 6)
    made = pages_of({"a": [9, 9, 3]})["a"]
    seen = set()
    train, test = text._split([*made, made[0]], 0.4, seen, np.random.default_rng(0))
    counts = [sum(w[0] == page[0][0] for w in train + test) for page in made]
    assert len(seen) == 21 and len(set(train + test)) == len(train + test)
    # Three windows of the first page beyond the cap are known, so that its copy gives none.
    assert counts == [6, 6, 3]
    assert not {w[0] for w in train} & {w[0] for w in test}
    assert len(test) >= 0.4 * 15


def test_seed(pages):
    """The same seed gives the same task, another one another split."""
    first, again, other = (load_text(40, 16, seed=seed) for seed in (3, 3, 4))
    assert first.words == again.words and first.train_tokens.equal(again.train_tokens)
    assert first.test_y.equal(again.test_y)
    assert first.words != other.words


def test_vocabulary(monkeypatch):
    """The most frequent words of the training examples in order, ties by the alphabet, everything else 0."""
    windows = [("x",) * 8 + ("n", "m") * 2 + ("k", "l", "y", "y"), ("x",) * 12 + ("y",) * 4]
    words = text._most_frequent(windows, 5)
    assert words == ("", "x", "y", "m", "n")
    tokens, y = text._numbers([(windows[0], 1), (("q",) * 16, 0)], words)
    assert tokens.tolist() == [[1] * 8 + [4, 3] * 2 + [0, 0, 2, 2], [0] * 16]
    assert y.tolist() == [1, 0]


def test_vocabulary_size(pages):
    """`vocabulary` counts number 0, and word numbers stay below it."""
    data = load_text(40, 16, vocabulary=3)
    assert len(data.words) == 3 and data.words[0] == ""
    assert set(data.train_tokens.unique().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.CalledProcessError(1, "dpkg"), None])
def test_bad_no_manual_pages(monkeypatch, error):
    """Without dpkg, without the packages, or with their files left out: what to install."""

    def run(*args, **kwargs):
        if error:
            raise error
        return subprocess.CompletedProcess(args, 0, stdout="/.\n/usr/share/man/man2/left_out_by_dpkg.2.gz\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match="manual pages: .* packages manpages and manpages-dev .apt-get install"):
        load_text(4, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(n_train=0), "n_train: expected an integer >= 1"),
        (dict(n_test=2.0), "n_test: expected an integer >= 1"),
        (dict(vocabulary=1), "vocabulary: expected an integer >= 2"),
        (dict(seed=-1), "seed: expected an integer >= 0"),
        (dict(n_train=42), "n_train: expected a multiple of the 4 classes, got 42"),
        (dict(n_train=400), "n_train, n_test: expected at most the windows there are of class 'a', .* got 100 and 4"),
    ],
)
def test_bad_arguments(pages, change, message):
    """Every argument out of range is named."""
    with pytest.raises(ValueError, match=message):
        load_text(**{"n_train": 40, "n_test": 16} | change)


@pytest.fixture(scope="module")
def manual_pages():
    """The windows of the manual pages on this machine."""
    try:
        return text._manual_pages()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_manual_pages(manual_pages, monkeypatch):
    """Enough windows for 8,000 + 2,000 examples; no word tells the section by itself."""
    monkeypatch.setattr(text, "_manual_pages", lambda: manual_pages)
    data = load_text(8000, 2000)
    assert data.train_y.bincount().tolist() == [2000] * 4 and data.test_y.bincount().tolist() == [500] * 4
    assert 0.1 < (data.train_tokens == 0).float().mean() < 0.4
    tokens, y = data.train_tokens.numpy(), data.train_y.numpy()
    for word in range(1, len(data.words)):
        has = (tokens == word).any(1)
        counts = np.bincount(y[has], minlength=4)
        assert has.mean() < 0.02 or counts.max() < 0.8 * counts.sum(), data.words[word]


@pytest.mark.slow
def test_manual_pages_hold_no_reference(manual_pages):
    """Words are letters only, and a page full of references loses them all, but not its text."""
    words = {word for of_class in manual_pages.values() for page in of_class for window in page for word in window}
    assert all(re.fullmatch(r"[a-z]+(?:[_'][a-z]+)*", word) for word in words)
    source = text._source(next(f for f in text.Path("/usr/share/man/man2").glob("open.2*")))
    assert ".BR openat (2)" in source or ".BR read (2)" in source
    left = strip_roff(source)
    assert "flags" in left and not re.search(r"\w\s?\(\d\)|\\f|^\.[A-Z]", left, re.MULTILINE)
