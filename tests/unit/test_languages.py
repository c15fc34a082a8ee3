"""Manual pages in five languages: windows, the split by page, the embedding, and packages that are missing."""

import numpy as np
import pytest

from moe_theory.tasks import languages, text
from moe_theory.tasks.languages import DROPPED, LANGUAGES, embedded, load_languages
from moe_theory.tasks.text import strip_roff


@pytest.fixture
def pages(monkeypatch):
    """Twelve pages of four windows for every language and class; a window names its cell and page."""
    made = {
        (i, y): {f"page{p}.{4 + 3 * y}": [f"l{i} c{y} p{p} w{w}" for w in range(4)] for p in range(12)}
        for i in range(5)
        for y in range(2)
    }
    monkeypatch.setattr(languages, "_pages", lambda: made)


def test_balanced_and_split_by_page(pages):
    """Equally many of each cell, no window twice, and no page, in whatever language, in both parts."""
    train, test = load_languages(100, 40, seed=1)
    for part, n in ((train, 10), (test, 4)):
        cells = [(int(i), int(y)) for i, y in zip(part.language, part.y, strict=True)]
        assert {cells.count(cell) for cell in cells} == {n} and len(set(cells)) == 10
        assert all(words.startswith(f"l{i} c{y} ") for words, (i, y) in zip(part.texts, cells, strict=True))
    names = [{tuple(words.split()[1:3]) for words in part.texts} for part in (train, test)]
    assert not names[0] & names[1] and len(set(train.texts + test.texts)) == 140


def test_seed(pages):
    """The same seed gives the same task, another one another."""
    first, again, other = (load_languages(100, 40, seed=seed)[0].texts for seed in (3, 3, 4))
    assert first == again and first != other


def test_windows_of_any_alphabet():
    """Letters with marks and of other alphabets are letters; digits and signs are not."""
    page = "Übung макет_x1 " * 16 + "rest"
    assert languages._windows(page) == [" ".join(["übung", "макет"] + ["x", "übung", "макет"] * 10)]
    assert len(languages._windows("a " * 32 * 100)) == languages.PAGE_WINDOWS


def test_headings_in_other_languages():
    """What names the page or its translators is left out in each language, with escaped blanks, too."""
    page = ".SH BEZEICHNUNG\nname\n.SH BESCHREIBUNG\ntext\n.SH SIEHE\\ AUCH\nother(7)\n.SH ÜBERSETZUNG\ncredits\n"
    assert strip_roff(page, DROPPED).split() == ["text"]
    assert set(["name", "text", "other", "credits"]) - {"other"} <= set(strip_roff(page).split())


def test_embedding():
    """Learned from the training part, centred there, one scale for all; texts of one language lie together."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice([f"{c}{w}" for w in "abcdefgh"], 8)) for c in "xyz" for _ in range(40)]
    a, b = embedded(texts[::2], texts[1::2], d=3)
    assert a.shape == (60, 3) and abs(float(a.mean())) < 1e-5
    assert float(a.square().mean()) == pytest.approx(1, abs=0.2)
    middle = np.stack([a[i : i + 20].mean(0) for i in (0, 20, 40)])
    nearest = ((b[:, None].numpy() - middle) ** 2).sum(2).argmin(1)
    assert (nearest == np.repeat([0, 1, 2], 20)).mean() > 0.95
    assert embedded(texts[::2], texts[1::2], d=3)[0].equal(a)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(n_train=105), "n_train: expected a multiple of the 10 pairs"),
        (dict(n_test=0), "n_test: expected an integer >= 10"),
        (
            dict(n_train=1000),
            "n_train, n_test: expected at most the .* windows of English, 'devices and formats', got 100",
        ),
    ],
)
def test_bad_arguments(pages, change, message):
    """Every argument out of range is named."""
    with pytest.raises(ValueError, match=message):
        load_languages(**{"n_train": 100, "n_test": 40} | change)


def test_missing_package(monkeypatch):
    """The first package that has no pages is named, and how to get it."""
    monkeypatch.setattr(languages, "_pages", languages._pages.__wrapped__)  # else pages read before are remembered
    monkeypatch.setattr(text, "page_sources", lambda package, **_: {} if package == "manpages-ru" else {"x": "y"})
    monkeypatch.setattr(languages, "LANGUAGES", {"Russian": LANGUAGES["Russian"]})
    with pytest.raises(ValueError, match="package manpages-ru to be installed, .*apt-get install"):
        load_languages(2, 2)
