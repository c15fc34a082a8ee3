"""The networks of Chen et al. (2022) for small images: the CNN, and MobileNetV2 and ResNet18 made small for two cores.

Each is a stack of layers and a linear head, which reads the embedding of Figure 4. In a mixture each expert normalizes
a batch by its own examples in training, down to the pixels of a single one, and by running means in the test.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from moe_theory import _validate as check


class ImageNetwork(nn.Module):
    """Layers that give a vector for an image, and a linear function of it.

    Args:
        layers: give (n, d).
        d, outputs: dimensions of the vector and of an answer.
        rng: draws all weights: of convolutions and of the head from N(0, 2/fan_in) and N(0, 1/fan_in), biases zero.
    """

    def __init__(self, layers: nn.Module, d: int, outputs: int, rng: Generator):
        super().__init__()
        self.layers, self.head = layers, nn.Linear(d, check.integer("outputs", outputs, 1))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                fan_in = layer.weight[0].numel()
                gain = 2 if isinstance(layer, nn.Conv2d) else 1
                nn.init.normal_(layer.weight, std=math.sqrt(gain / fan_in), generator=rng)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def embedding(self, x: Float[Tensor, "n C side side"]) -> Float[Tensor, "n d"]:
        return self.layers(x)

    def forward(self, x: Float[Tensor, "n C side side"]) -> Float[Tensor, "n o"]:
        return self.head(self.layers(x))


def _convolution(channels: int, out: int, size: int, stride: int = 1, *, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, and batch normalization."""
    conv = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out)]


class Residual(nn.Module):
    """`x + f(x)`, or `g(x) + f(x)` where f changes the shape, with or without a ReLU on the sum."""

    def __init__(self, f: list[nn.Module], g: list[nn.Module] | None = None, *, relu: bool):
        super().__init__()
        self.f, self.g, self.relu = nn.Sequential(*f), nn.Sequential(*(g or [])), relu

    def forward(self, x: Float[Tensor, "n C H H"]) -> Float[Tensor, "n D G G"]:
        z = self.g(x) + self.f(x)
        return F.relu(z) if self.relu else z


def cnn(channels: int, side: int, outputs: int, width: int, rng: Generator) -> ImageNetwork:
    """The paper's CNN (A.3): two convolutions of size 3, each with ReLU and max pooling, and a linear layer.

    The first has `width` filters, the second twice as many; the paper's width is 64.
    """
    layers = []
    for c, out in ((channels, width), (width, 2 * width)):
        layers += [nn.Conv2d(c, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return ImageNetwork(nn.Sequential(*layers, nn.Flatten()), 2 * width * (side // 4) ** 2, outputs, rng)


def resnet18(channels: int, side: int, outputs: int, width: int, rng: Generator) -> ImageNetwork:
    """ResNet18 (He et al. 2016) made small: one block of two convolutions to a stage where it has two.

    The first convolution halves the side and has `width` filters, ResNet18's 64. Each of four stages has twice the
    channels of the one before, the middle two half its side; the last is averaged over its pixels.
    """
    layers, c = [*_convolution(channels, width, 3, 2), nn.ReLU()], width
    for stage in range(4):
        out, stride = width * 2**stage, 2 if stage in (1, 2) else 1
        f = [*_convolution(c, out, 3, stride), nn.ReLU(), *_convolution(out, out, 3)]
        layers.append(Residual(f, _convolution(c, out, 1, stride) if c != out else None, relu=True))
        c = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return ImageNetwork(nn.Sequential(*layers), c, outputs, rng).to(memory_format=torch.channels_last)  # pyright: ignore


def mobilenet(channels: int, side: int, outputs: int, width: int, rng: Generator) -> ImageNetwork:
    """MobileNetV2 (Sandler et al. 2018) made small: five blocks where it has 17, which widen 4 times in place of 6.

    A block widens by 1 x 1, filters each channel by 3 x 3, and narrows by 1 x 1. The first convolution halves the side
    and has `width` filters, MobileNetV2's 32.
    """
    layers, c = [*_convolution(channels, width, 3, 2), nn.ReLU6()], width
    for out, stride in ((width, 1), (2 * width, 2), (2 * width, 1), (4 * width, 2), (4 * width, 1)):
        f = [*_convolution(c, 4 * c, 1), nn.ReLU6(), *_convolution(4 * c, 4 * c, 3, stride, groups=4 * c), nn.ReLU6()]
        f += _convolution(4 * c, out, 1)
        layers += [Residual(f, relu=False)] if c == out else f
        c = out
    layers += [*_convolution(c, 8 * width, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return ImageNetwork(nn.Sequential(*layers), 8 * width, outputs, rng).to(memory_format=torch.channels_last)  # pyright: ignore


#: The networks by the names that stored rows have for them.
NETWORKS = {"CNN": cnn, "MobileNetV2": mobilenet, "ResNet18": resnet18}
