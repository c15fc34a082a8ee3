"""The stream of characters: its alphabet, its parts, and what stands in for them."""

import pytest
import torch

from moe_theory.tasks import characters
from moe_theory.tasks.characters import ALPHABET, PARTS, folded, load_characters, unfolded


@pytest.fixture
def no_pages(monkeypatch):
    monkeypatch.setattr(characters, "manual_pages", list)


def test_folding():
    """Capitals fold, blanks of all kinds merge, and so does what the alphabet lacks."""
    assert len(set(ALPHABET)) == len(ALPHABET) == 52
    assert folded("The\tfork(2)\n\n  CALL… [x]: 3×4 = 12") == "the fork(2) call x : 3 4 = 12"
    assert folded(ALPHABET) == ALPHABET
    numbers = characters._numbers(ALPHABET)
    assert numbers.tolist() == list(range(52)) and unfolded(numbers) == ALPHABET


def test_parts_are_whole_pages(monkeypatch):
    """No page is in two parts, none is lost, and the shares are met within a page."""
    pages = [f"{i} " * (20 + i) for i in range(200)]
    monkeypatch.setattr(characters, "manual_pages", lambda: pages)
    text = load_characters(seed=3)
    assert text.name == "manual pages"
    parts = [unfolded(p) for p in (text.train, text.validation, text.test)]
    words = [set(part.split()) for part in parts]
    assert not words[0] & words[1] and not words[0] & words[2] and not words[1] & words[2]
    assert sorted("".join(parts)) == sorted("".join(pages))
    for part, share in zip(parts, PARTS.values(), strict=True):
        assert abs(len(part) / sum(map(len, pages)) - share) < max(map(len, pages)) / sum(map(len, pages))


def test_seed_and_digest(monkeypatch):
    """The split depends on the seed alone, and the digest on the text and the split."""
    pages = [f"{i} " * 30 for i in range(100)]
    monkeypatch.setattr(characters, "manual_pages", lambda: pages)
    first, again, other = (load_characters(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train, again.train) and first.digest == again.digest
    assert not torch.equal(first.test, other.test) and first.digest != other.digest


@pytest.mark.skipif(not characters.manual_pages(), reason="no manual pages on this machine")
def test_manual_pages():
    """The pages are there, without the marks of bold letters and the lines at head and foot."""
    text = load_characters()
    assert text.name == "manual pages" and len(text.train) > 3_000_000
    train = unfolded(text.train)
    assert "\b" not in train and " description the " in train and "manual pages 6" not in train.replace("-", " ")
    assert min(len(text.validation), len(text.test)) > 100_000
    assert int(text.train.max()) == len(ALPHABET) - 1


def test_python_stands_in_visibly(no_pages):
    """Without manual pages: Python's documentation, named as such, and a warning."""
    with pytest.warns(UserWarning, match="stands in for the manual pages.*mandoc"):
        text = load_characters()
    assert text.name == "python topics" and len(text.train) > 300_000
    assert torch.equal(text.train, load_characters("python topics").train)


def test_bad_arguments():
    """What is not a source or a seed is named."""
    with pytest.raises(ValueError, match="source: expected one of .*manual pages.*, got 'enwik8'"):
        load_characters("enwik8")
    with pytest.raises(ValueError, match="seed: expected an integer >= 0, got -1"):
        load_characters(seed=-1)
