"""Small images in ten classes: Fashion-MNIST, or scikit-learn's digits where it cannot be had.

A data set is looked for in the folder that the environment variable MOE_THEORY_DATA names, then in Debian's package,
then at its authors' server; the digits come with scikit-learn. What is found is used whole or not at all.
"""

import gzip
import hashlib
import os
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from moe_theory import _validate as check

#: The environment variable with the folder that is searched first.
FOLDER = "MOE_THEORY_DATA"

#: Where Debian's package dataset-fashion-mnist puts the four files, and where the authors published them.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
BUCKET = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

#: Per file: the MD5 of the published .gz (the one torchvision checks), and the SHA-256 of what is in it.
#: Debian compressed the files anew, so that only the second is the same for both.
FILES = {
    "train-images-idx3-ubyte.gz": (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "train-labels-idx1-ubyte.gz": (
        "25c81989df183df01b3e8a0aad5dffbe",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "t10k-images-idx3-ubyte.gz": (
        "bef4ecab320f06d8554ea6380940ec79",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "bb300cfdad3c16e7a12a480ee83cd310",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}

#: The classes in the order of their numbers.
CLASSES = {
    "fashion-mnist": ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"],
    "digits": [str(digit) for digit in range(10)],
}

#: Seconds to wait for the authors' server before the digits stand in.
TIMEOUT = 5

#: The digits have no official split: the first 1,347 of 1,797 train, the rest test, in the order of the file.
DIGITS_TRAIN = 1347


@dataclass(frozen=True)
class Images:
    """Images and their classes, 0..9.

    Attributes:
        name: "fashion-mnist" or "digits".
        train_x, test_x: (n, 1, H, W) grey values in [0, 1].
        train_y, test_y: (n,) classes.
    """

    name: str
    train_x: Float[Tensor, "n 1 H W"]
    train_y: Int[Tensor, " n"]
    test_x: Float[Tensor, "m 1 H W"]
    test_y: Int[Tensor, " m"]


def load_images(name: str = "fashion-mnist") -> Images:
    """A data set from MOE_THEORY_DATA, else from Debian's package, else from its authors' server; else the digits.

    Fashion-MNIST has 60,000 + 10,000 grey images of 28 x 28, the digits 1,347 + 450 of 8 x 8. A warning says when the
    digits stand in, and why.

    Args:
        name: "fashion-mnist" or "digits".

    Raises:
        ValueError: another name; a folder or file that is there, but is not the one expected, not whole, or not all
            there. Other data do not take its place.
    """
    check.choice("name", name, CLASSES)
    if name == "digits":
        return _digits()
    if found := _local():
        return _fashion(found)
    try:
        return _fashion(_download())
    except (ImportError, OSError, ValueError) as error:
        warnings.warn(
            f"scikit-learn's digits (1,797 images of 8 x 8) stand in for {name}: it is not in {FOLDER}, the Debian "
            "package dataset-fashion-mnist is not installed, and the download failed "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return _digits()


def _local() -> dict[str, Path] | None:
    """The four files in the folder or in the package; ValueError if only some of them are there, or no such folder."""
    named = os.environ.get(FOLDER)
    if named and not Path(named).is_dir():
        raise ValueError(f"{FOLDER}: expected the path of a folder, got {named!r}")
    for folder in (Path(named) if named else None, DEBIAN):
        found = {name: folder / name for name in FILES if (folder / name).is_file()} if folder else {}
        if missing := FILES.keys() - found.keys() if found else ():
            raise ValueError(f"{folder}: expected the four files of Fashion-MNIST, got all but {sorted(missing)}")
        if found:
            return found
    return None


def read_idx(content: bytes) -> UInt8[np.ndarray, "..."]:
    """The array of bytes in an IDX file: two zeros, type 8, the number of axes, their lengths (big-endian), the data.

    Raises:
        ValueError: the content is of another kind, or shorter or longer than its header says.
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"content: expected an IDX file of unsigned bytes, got one that begins with {content[:4]!r}")
    data = 4 + 4 * content[3]
    if len(content) < data:
        raise ValueError(f"content: expected a header of {data} bytes, got {len(content)} in all")
    shape = tuple(int(n) for n in np.frombuffer(content[4:data], dtype=">u4"))
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) != data + size:
        raise ValueError(f"content: expected {size} bytes of data for shape {shape}, got {len(content) - data}")
    return np.frombuffer(content, dtype=np.uint8, offset=data).reshape(shape)


def _fashion(paths: dict[str, Path]) -> Images:
    """Fashion-MNIST from its four files."""
    arrays = {name: torch.from_numpy(read_idx(_content(path, FILES[name][1])).copy()) for name, path in paths.items()}
    x = {part: arrays[f"{part}-images-idx3-ubyte.gz"].unsqueeze(1).float() / 255 for part in ("train", "t10k")}
    y = {part: arrays[f"{part}-labels-idx1-ubyte.gz"].long() for part in ("train", "t10k")}
    return Images("fashion-mnist", x["train"], y["train"], x["t10k"], y["t10k"])


def _content(path: Path, sha256: str) -> bytes:
    """What is in a .gz file; ValueError if it cannot be unpacked or is not the content expected."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole .gz file, got: {error}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{path}: expected content of SHA-256 {sha256}, got {found}; install or download it again")
    return content


def _download() -> dict[str, Path]:
    """The files in pooch's cache, fetched from the authors' server if they are not there."""
    pooch = check.library("pooch", "the download")
    how = dict(path=pooch.os_cache("moe_theory") / "fashion-mnist", downloader=pooch.HTTPDownloader(timeout=TIMEOUT))
    return {
        file: Path(pooch.retrieve(BUCKET + file, f"md5:{md5}", fname=file, **how)) for file, (md5, _) in FILES.items()
    }


def _digits() -> Images:
    """The digits of scikit-learn, grey values 0..16 brought to [0, 1]."""
    x, y = check.library("sklearn.datasets", "load_images: digits").load_digits(return_X_y=True)
    x = torch.from_numpy(x / 16).float().reshape(-1, 1, 8, 8)
    y = torch.from_numpy(y).long()
    return Images("digits", x[:DIGITS_TRAIN], y[:DIGITS_TRAIN], x[DIGITS_TRAIN:], y[DIGITS_TRAIN:])
