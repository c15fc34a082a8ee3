"""The image loader: its sources in their order, and files that are not what they should be."""

import gzip
import hashlib
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_book.experiments.router_tasks import TRIALS, at_hand
from moe_theory.tasks import images
from moe_theory.tasks.images import load_images, read_idx


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    """Whoever runs the tests may have data of their own."""
    monkeypatch.delenv("MOE_THEORY_DATA", raising=False)


def idx(array: np.ndarray) -> bytes:
    """The IDX file of an array of bytes, written from the format's description."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def no_network(monkeypatch):
    """A download that fails as one without a network does."""

    def fail():
        raise ConnectionError("no route to host")

    monkeypatch.setattr(images, "_download", fail)


@pytest.fixture
def small_files(monkeypatch, tmp_path):
    """A package folder with 5 + 3 images of 4 x 6, and the checksums of those."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 5), ("t10k", 3)):
        arrays[f"{part}-images-idx3-ubyte.gz"] = rng.integers(0, 256, (n, 4, 6), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte.gz"] = rng.integers(0, 10, n, dtype=np.uint8)
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(gzip.compress(idx(array)))
    monkeypatch.setattr(images, "DEBIAN", tmp_path)
    monkeypatch.setattr(images, "FILES", {n: ("", hashlib.sha256(idx(a)).hexdigest()) for n, a in arrays.items()})
    return tmp_path, arrays


def test_idx_round_trip():
    """Axes in the order written, lengths read as big-endian."""
    array = np.arange(2 * 3 * 300, dtype=np.int64).astype(np.uint8).reshape(2, 3, 300)
    assert np.array_equal(read_idx(idx(array)), array)


def test_files_of_the_package(small_files):
    """Each of the four files lands where it belongs, scaled by 255, with the channel axis."""
    _, arrays = small_files
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load_images()
    assert data.name == "fashion-mnist"
    assert data.train_x.shape == (5, 1, 4, 6) and data.test_x.shape == (3, 1, 4, 6)
    expected = torch.from_numpy(arrays["t10k-images-idx3-ubyte.gz"] / np.float32(255))
    assert torch.equal(data.test_x[:, 0], expected)
    assert data.train_y.tolist() == arrays["train-labels-idx1-ubyte.gz"].tolist()
    assert data.test_y.tolist() == arrays["t10k-labels-idx1-ubyte.gz"].tolist()


def test_a_task_of_images_is_at_hand_only_with_the_images(monkeypatch, no_network, tmp_path):
    """Chapter 25 asks before it computes a row again; the others draw their data."""
    monkeypatch.setattr(images, "DEBIAN", tmp_path)
    assert [task for task in TRIALS if not at_hand(task)] == ["fashion"]
    with pytest.warns(UserWarning, match="stand in"), pytest.raises(ValueError, match="^data: expected fashion-mnist"):
        TRIALS["fashion"].sample(0)


def test_images_that_are_there_are_at_hand(small_files):
    assert at_hand("fashion")


@pytest.mark.skipif(not images.DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist():
    """The data as published: 60,000 + 10,000 images, equal classes, the mean and spread everybody normalizes by."""
    data = load_images()
    assert data.name == "fashion-mnist"
    assert data.train_x.shape == (60000, 1, 28, 28) and data.test_x.shape == (10000, 1, 28, 28)
    assert data.train_y.bincount().tolist() == [6000] * 10 and data.test_y.bincount().tolist() == [1000] * 10
    assert data.train_x.min() == 0 and data.train_x.max() == 1
    assert data.train_x.mean().item() == pytest.approx(0.2860, abs=1e-4)
    assert data.train_x.std().item() == pytest.approx(0.3530, abs=1e-4)
    assert data.train_y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def test_digits_stand_in_visibly(monkeypatch, tmp_path, no_network):
    """Without package and network: the digits, named as such, and a warning that says so and why."""
    monkeypatch.setattr(images, "DEBIAN", tmp_path)
    with pytest.warns(UserWarning, match="digits.*stand in for fashion-mnist.*no route to host"):
        data = load_images()
    assert data.name == "digits"
    assert data.train_x.shape == (1347, 1, 8, 8) and data.test_x.shape == (450, 1, 8, 8)
    assert data.train_x.min() == 0 and data.train_x.max() == 1
    counts = torch.cat([data.train_y, data.test_y]).bincount()
    assert len(counts) == 10 and counts.min() > 170


def test_download_checks_and_falls_through(monkeypatch, tmp_path):
    """A server nobody listens at fails at once; a file with another checksum is not used."""
    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(images, "BUCKET", "http://127.0.0.1:9/")
    monkeypatch.setattr(images, "DEBIAN", tmp_path)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.warns(UserWarning, match="stand in"):
        assert load_images().name == "digits"

    def foreign(url, output_file, pooch):
        Path(output_file).write_bytes(b"<html>log in first</html>")

    monkeypatch.setattr(pooch, "HTTPDownloader", lambda timeout: foreign)
    with pytest.warns(UserWarning, match="(?s)stand in.*hash"):
        assert load_images().name == "digits"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "IDX file"),
        (b"\x89PNG....", "IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x01....", "IDX file"),
        (b"\0\0\x08\x03\0\0\0\x02", "header of 16 bytes, got 8"),
        (idx(np.zeros((3, 5), np.uint8))[:-1], "expected 15 bytes of data for shape .3, 5., got 14"),
        (idx(np.zeros((3, 5), np.uint8)) + b"\0", "expected 15 bytes of data for shape .3, 5., got 16"),
    ],
)
def test_bad_idx(content, message):
    """Foreign, truncated and overlong files are refused."""
    with pytest.raises(ValueError, match=message):
        read_idx(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-9], "expected a whole .gz file"),
        (lambda raw: b"plain text", "expected a whole .gz file"),
        (lambda raw: gzip.compress(idx(np.zeros((5, 4, 6), np.uint8))), "expected content of SHA-256"),
    ],
)
def test_bad_file_of_the_package(small_files, change, message):
    """A broken file of the package is an error that names it, not a reason for other data."""
    folder, _ = small_files
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte.gz: {message}"):
        load_images()


def test_folder_comes_first(small_files, monkeypatch, tmp_path):
    """What lies in MOE_THEORY_DATA is read before the package is looked for."""
    folder, arrays = small_files
    monkeypatch.setenv("MOE_THEORY_DATA", str(folder))
    monkeypatch.setattr(images, "DEBIAN", tmp_path / "nowhere")
    assert load_images().train_y.tolist() == arrays["train-labels-idx1-ubyte.gz"].tolist()


def test_not_half_used(small_files, monkeypatch):
    """Three of four files are an error in the package and in the folder, not a reason for other data."""
    folder, _ = small_files
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="four files of Fashion-MNIST, got all but .'t10k-labels-idx1-ubyte.gz'"):
        load_images()
    monkeypatch.setenv("MOE_THEORY_DATA", str(folder))
    monkeypatch.setattr(images, "DEBIAN", folder / "nowhere")
    with pytest.raises(ValueError, match="four files"):
        load_images()


def test_bad_folder_and_name(monkeypatch, tmp_path):
    """A folder that is not there, and a data set nobody has heard of."""
    with pytest.raises(ValueError, match="name: expected one of"):
        load_images("imagenet")
    monkeypatch.setenv("MOE_THEORY_DATA", str(tmp_path / "no such folder"))
    with pytest.raises(ValueError, match="MOE_THEORY_DATA: expected the path of a folder"):
        load_images()


def test_digits_by_name():
    """They can be asked for, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_images("digits").name == "digits"
