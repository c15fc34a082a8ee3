"""The stream of characters: its alphabet, its parts, and archives that are not what they should be."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch

from moe_theory.tasks import characters
from moe_theory.tasks.characters import ALPHABET, PARTS, folded, load_characters, unfolded

TEXT = "".join(chr(97 + (i * i) % 26) + " " * (i % 3 == 0) for i in range(1000))


@pytest.fixture
def no_pages(monkeypatch):
    monkeypatch.setattr(characters, "manual_pages", list)


@pytest.fixture
def archive(monkeypatch, tmp_path):
    """A folder with a small archive in place of text8, whose checksum is known."""
    file = tmp_path / "text8.zip"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("text8", TEXT)
    monkeypatch.setenv(characters.FOLDER, str(tmp_path))
    monkeypatch.setitem(characters.ARCHIVES, "text8", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


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


def test_archive(archive):
    """An archive that is at hand is read in its order, 90, 5 and 5 of 100 characters."""
    text = load_characters("text8")
    whole = folded(TEXT)
    assert text.name == "text8" and len(text.train) == round(0.9 * len(whole))
    assert unfolded(torch.cat([text.train, text.validation, text.test])) == whole
    assert abs(len(text.validation) - len(text.test)) <= 1


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "other", "empty"])
def test_bad_archives_are_refused(archive, damage):
    """A file that is not bit for bit the archive is named, and nothing of it is read."""
    content = archive.read_bytes()
    half = len(content) // 2
    damaged = {
        "truncated": content[:half],
        "corrupt": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
        "other": b"<html>log in first</html>",
        "empty": b"",
    }
    archive.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"text8.zip: expected the archive of SHA-256 .*, got "):
        load_characters("text8")


def test_bad_download(monkeypatch, tmp_path):
    """Neither a folder nor a network; and a server that sends something else."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.delenv(characters.FOLDER, raising=False)
    monkeypatch.setattr(characters, "SERVER", "http://127.0.0.1:9/")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ValueError, match="enwik8.zip is not in the folder that MOE_THEORY_DATA names"):
        load_characters("enwik8")

    def foreign(url, output_file, pooch):
        Path(output_file).write_bytes(b"<html>log in first</html>")

    monkeypatch.setattr(pooch, "HTTPDownloader", lambda timeout: foreign)
    with pytest.raises(ValueError, match="(?s)was not downloaded.*hash"):
        load_characters("enwik8")


def test_bad_arguments():
    """What is not a source or a seed is named."""
    with pytest.raises(ValueError, match="source: expected one of .*enwik8.*, got 'enwik9'"):
        load_characters("enwik9")
    with pytest.raises(ValueError, match="seed: expected an integer >= 0, got -1"):
        load_characters(seed=-1)
