"""The task -Rotate: each step against what it should do to images one can think through."""

import math

import pytest
import torch
from scipy.ndimage import gaussian_filter, rotate

from moe_theory.tasks.images import Images
from moe_theory.tasks.rotated import blurred, cropped, padded, plain_task, resized, rotate_task, rotated


@pytest.fixture
def images():
    """Thirty random images of 28 x 28."""
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(30, 1, 28, 28, generator=rng)
    return Images("made", x[:20], torch.arange(20) % 10, x[20:], torch.arange(10))


def disk(side: int = 32) -> torch.Tensor:
    """A smooth image that is not symmetric."""
    y, x = torch.meshgrid(*2 * [torch.arange(side, dtype=torch.float32)], indexing="ij")
    return (-((x - 20) ** 2 / 18 + (y - 13) ** 2 / 8)).exp()[None, None]


def test_quarter_turn():
    """By 90 degrees counterclockwise, exactly as `torch.rot90`."""
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(rotated(x, 90.0), torch.rot90(x, 1, (2, 3)), atol=1e-5, rtol=0)


def test_thirty_degrees_against_scipy():
    """Same direction and angle as another library's, which interpolates by splines."""
    x = disk()
    other = rotate(x[0, 0].numpy(), 30, reshape=False, order=3)
    assert (rotated(x, 30.0)[0, 0] - torch.from_numpy(other)).abs().max() < 0.05
    assert (rotated(x, -30.0)[0, 0] - torch.from_numpy(other)).abs().max() > 0.5


def test_crop_hides_the_corners():
    """Of a white image turned by 30 degrees nothing is black after the crop from 32 to 24, and before it much is."""
    white = rotated(torch.ones(1, 1, 32, 32), 30.0)
    assert (white < 0.5).sum() > 100
    assert cropped(white, 24).shape[-1] == 24 and cropped(white, 24).min() > 0.5 > cropped(white, 28).min()
    assert 32 / (math.cos(math.pi / 6) + math.sin(math.pi / 6)) == pytest.approx(23.4, abs=0.1)


def test_blur_against_scipy():
    """Each image by its own width; as scipy's, cut at three pixels; a blur keeps a constant."""
    x = torch.rand(2, 1, 12, 12)
    found = blurred(x, torch.tensor([0.6, 1.0]))
    for i, sigma in enumerate((0.6, 1.0)):
        other = gaussian_filter(x[i, 0].numpy(), sigma, mode="nearest", radius=3)
        torch.testing.assert_close(found[i, 0], torch.from_numpy(other), atol=1e-5, rtol=0)
    torch.testing.assert_close(blurred(torch.ones(1, 3, 8, 8), torch.tensor([2.0])), torch.ones(1, 3, 8, 8))


def test_rotate_task(images):
    """Every drawn image occurs twice, once with each label; channels are scaled; plain draws the same images."""
    train, test = rotate_task(images, 12, 6, side=16)
    assert train.x.shape == (24, 1, 16, 16) and test.x.shape == (12, 1, 16, 16)
    assert train.y.tolist() == [0] * 12 + [1] * 12 and train.cluster[:12].equal(train.cluster[12:])
    assert abs(float(train.x.mean())) < 1e-5 and float(train.x.std()) == pytest.approx(1, abs=1e-4)
    plain, _ = plain_task(images, 12, 6, side=16)
    assert plain.y.equal(train.cluster[:12]) and plain.cluster.equal(plain.y)


def test_seed_and_noise(images):
    """The same seed gives the same task, another one another; noise adds its variance before scaling."""
    first, again, other = (rotate_task(images, 12, 6, side=16, seed=seed)[0].x for seed in (3, 3, 4))
    assert first.equal(again) and not first.equal(other)
    noisy = rotate_task(images, 12, 6, side=16, noise=3.0)[0].x
    assert float((noisy[:, :, 1:] * noisy[:, :, :-1]).mean()) < 0.1  # neighbours no longer agree


def test_resized_averages():
    """Halving takes means, and a constant stays one."""
    assert resized(torch.ones(1, 1, 32, 32), 16).allclose(torch.ones(1, 1, 16, 16))
    assert resized(torch.eye(32)[None, None], 16).sum() == pytest.approx(32 / 4, rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: padded(torch.zeros(1, 1, 34, 34)), "x: expected square images"),
        (lambda i: padded(torch.zeros(1, 1, 28, 26)), "x: expected square images"),
        (lambda i: padded(torch.zeros(1, 1, 27, 27)), "x: expected square images"),
        (lambda i: plain_task(i, 21, 5), "n_train: expected at most the 20 images of made, got 21"),
        (lambda i: rotate_task(i, 5, 0), "n_test: expected an integer >= 1"),
        (lambda i: rotate_task(i, 5, 5, noise=-1.0), "noise: expected a finite number >= 0"),
    ],
)
def test_bad_arguments(images, call, message):
    """Each is named."""
    with pytest.raises(ValueError, match=message):
        call(images)
