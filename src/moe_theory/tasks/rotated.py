"""The two image tasks of Chen et al. (2022), Section 6.2: name the class, or tell whether the image is rotated.

Without torchvision: a rotation is a bilinear sampling of the image at rotated places, a crop is a slice, and a blur
is two convolutions.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream
from moe_theory.tasks.images import Images

#: Of the paper (A.3): the angle, and the sides before and after the crop.
ANGLE, SIDE, CROP = 30.0, 32, 24

#: The angles of `domain_task`, those of rotated MNIST in DomainBed (Gulrajani & Lopez-Paz, 2021).
ANGLES = (0.0, 15.0, 30.0, 45.0, 60.0, 75.0)

#: Standard deviations of the blur at a side of 32, those of the released code; the paper names none.
SIGMA = (1.1, 2.2)


class Clustered(NamedTuple):
    """Examples of a task: images, labels, and the classes of the images, which no model is told."""

    x: Float[Tensor, "n C side side"]
    y: Int[Tensor, " n"]
    cluster: Int[Tensor, " n"]


def padded(x: Float[Tensor, "n C H W"]) -> Float[Tensor, "n C 32 32"]:
    """Images with a margin of zeros to a side of 32; ValueError if they are larger, or not square with an even side."""
    H, W = x.shape[-2:]
    if H != W or H > SIDE or H % 2:
        raise ValueError(f"x: expected square images with an even side of at most {SIDE}, got {H} x {W}")
    return F.pad(x, [(SIDE - H) // 2] * 4)


def rotated(x: Float[Tensor, "n C H H"], degrees: float) -> Float[Tensor, "n C H H"]:
    """Images turned counterclockwise about their centre; what comes from outside is 0."""
    angle = torch.deg2rad(torch.tensor(float(degrees)))
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    affine = torch.cat([turn, torch.zeros(2, 1)], 1).expand(len(x), 2, 3)
    return F.grid_sample(x, F.affine_grid(affine, list(x.shape), align_corners=False), align_corners=False)


def cropped(x: Float[Tensor, "n C H H"], side: int) -> Float[Tensor, "n C s s"]:
    """The square of that side in the middle; at 24 of 32 hardly a corner of the rotated image's outside is in it."""
    at = (x.shape[-1] - check.integer("side", side, 1)) // 2
    return x[..., at : at + side, at : at + side]


def resized(x: Float[Tensor, "n C H H"], side: int) -> Float[Tensor, "n C s s"]:
    """Images of another side, bilinear, averaged where they shrink."""
    return F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)


def blurred(x: Float[Tensor, "n C H H"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n C H H"]:
    """Each image under a Gaussian of its own standard deviation in pixels, cut at three pixels."""
    n, C, H, W = x.shape
    grid = torch.arange(-3.0, 4.0)
    g = (-grid.square() / (2 * sigma[:, None].square())).exp()
    g = (g / g.sum(1, keepdim=True)).repeat_interleave(C, 0)
    flat = F.pad(x.reshape(1, n * C, H, W), [3] * 4, mode="replicate")
    flat = F.conv2d(flat, g[:, None, None, :], groups=n * C)
    return F.conv2d(flat, g[:, None, :, None], groups=n * C).reshape(x.shape)


def plain_task(images: Images, n_train: int, n_test: int, *, side: int = SIDE, seed: int = 0) -> tuple[Clustered, ...]:
    """Training and test examples of the 10 classes: the label is the class.

    Args:
        images: of `moe_theory.tasks.images.load_images`.
        n_train, n_test: images, drawn without replacement from the two parts.
        side: of what the models see; the paper's is 32.
        seed: of the draw.
    """
    return _scaled(
        Clustered(resized(padded(x), side), y, y) for x, y in _drawn(images, n_train, n_test, stream(seed, "examples"))
    )


def rotate_task(
    images: Images, n_train: int, n_test: int, *, side: int = SIDE, noise: float = 0.0, seed: int = 0
) -> tuple[Clustered, ...]:
    """The task -Rotate: every image twice, as it is (label 0) and turned by 30 degrees (label 1).

    Both are cropped from 32 to 24, resized, blurred by a Gaussian of random width, and covered with Gaussian noise, in
    training and test alike. The paper names noise in its text and blur under its picture.

    Args:
        images, n_train, n_test, side, seed: as in `plain_task`, which draws the same images; there are twice as many
            examples.
        noise: its standard deviation, where the images' values are between 0 and 1.
    """
    rng, parts = stream(seed, "examples"), []
    drawn = _drawn(images, n_train, n_test, rng)
    for x, y in drawn:
        both = torch.cat([padded(x), rotated(padded(x), ANGLE)])
        sigma = torch.from_numpy(rng.uniform(*SIGMA, len(both))).float() * side / SIDE
        x = resized(cropped(both, CROP), side)
        x = torch.cat([blurred(a, s) for a, s in zip(x.split(1_000), sigma.split(1_000), strict=True)])
        if check.not_negative("noise", noise):
            x = x + noise * torch.from_numpy(rng.standard_normal(x.shape, dtype="float32"))
        parts.append(Clustered(x, torch.arange(2).repeat_interleave(len(y)), y.repeat(2)))
    return _scaled(parts)


def domain_task(
    images: Images, held_out: int, sizes: tuple[int, int, int], *, side: int = SIDE, seed: int = 0
) -> tuple[Clustered, Clustered, Clustered]:
    """Garments at six angles, the domains: training and validation at five, test at the one that is held out.

    The label is the class, the cluster is the number of the angle. No image is in two domains or in two parts.

    Args:
        images: of `moe_theory.tasks.images.load_images`.
        held_out: number of the angle in `ANGLES`.
        sizes: images for training and for validation at each angle, and for the test.
        side: of what the models see.
        seed: of the draw, which is the same for every angle that is held out.

    Raises:
        ValueError: for another number of an angle, or more images than there are.
    """
    if check.integer("held_out", held_out, 0) >= len(ANGLES):
        raise ValueError(f"held_out: expected the number of one of {len(ANGLES)} angles, got {held_out}")
    n_train, n_valid, n_test = sizes
    (x, y), (x_test, y_test) = _drawn(images, len(ANGLES) * (n_train + n_valid), n_test, stream(seed, "examples"))
    seen = [i for i in range(len(ANGLES)) if i != held_out]
    at = [torch.arange(n_train + n_valid) + i * (n_train + n_valid) for i in range(len(ANGLES))]
    parts = [
        [_turned(x[at[i][cut]], y[at[i][cut]], i, side) for i in seen]
        for cut in (slice(None, n_train), slice(n_train, None))
    ]
    whole = [Clustered(*map(torch.cat, zip(*part, strict=True))) for part in parts]
    return _scaled([*whole, _turned(x_test, y_test, held_out, side)])


def _turned(x: Tensor, y: Tensor, number: int, side: int) -> Clustered:
    """Images at one of the angles."""
    return Clustered(resized(rotated(padded(x), ANGLES[number]), side), y, torch.full_like(y, number))


def _drawn(images: Images, n_train: int, n_test: int, rng) -> list[tuple[Tensor, Tensor]]:
    """Images and classes drawn without replacement from both parts; ValueError for more than there are."""
    drawn = []
    for name, n, x, y in (
        ("train", n_train, images.train_x, images.train_y),
        ("test", n_test, images.test_x, images.test_y),
    ):
        if check.integer(f"n_{name}", n, 1) > len(x):
            raise ValueError(f"n_{name}: expected at most the {len(x)} images of {images.name}, got {n}")
        at = torch.from_numpy(rng.permutation(len(x))[:n])
        drawn.append((x[at], y[at]))
    return drawn


def _scaled(parts) -> tuple[Clustered, ...]:
    """Each channel with mean 0 and standard deviation 1 over the training part."""
    parts = tuple(parts)
    sd, mean = torch.std_mean(parts[0].x, dim=(0, 2, 3), keepdim=True)
    return tuple(part._replace(x=(part.x - mean) / sd) for part in parts)
