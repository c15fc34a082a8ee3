"""The CNN of Chen et al. (2022) for small images: layers and a linear head, which reads the embedding of Figure 4."""

import math

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
                nn.init.zeros_(layer.bias)

    def embedding(self, x: Float[Tensor, "n C side side"]) -> Float[Tensor, "n d"]:
        """What the head reads."""
        return self.layers(x)

    def forward(self, x: Float[Tensor, "n C side side"]) -> Float[Tensor, "n o"]:
        """The answers to n images."""
        return self.head(self.layers(x))


def cnn(channels: int, side: int, outputs: int, width: int, rng: Generator) -> ImageNetwork:
    """The paper's CNN (A.3): two convolutions of size 3, each with ReLU and max pooling, and a linear layer.

    The first has `width` filters, the second twice as many; the paper's width is 64.
    """
    layers = []
    for c, out in ((channels, width), (width, 2 * width)):
        layers += [nn.Conv2d(c, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return ImageNetwork(nn.Sequential(*layers, nn.Flatten()), 2 * width * (side // 4) ** 2, outputs, rng)


def multiplications() -> dict[str, int]:
    """How many the convolutions of the paper's larger networks need for one image with 3 channels and a side of 32.

    ResNet18 (He et al. 2016) and MobileNetV2 (Sandler et al. 2018, Table 2), their first convolution at full size.
    """
    resnet, c = 9 * 3 * 64 * 32**2, 64
    for stage in range(4):  # four convolutions of size 3, and beside the first a 1 x 1
        out, pixels = 64 * 2**stage, (32 >> stage) ** 2
        resnet += pixels * out * (9 * (c + 3 * out) + c * (stage > 0))
        c = out
    mobilenet, c, side = 9 * 3 * 32 * 32**2, 32, 32
    blocks = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for t, out, repeats, stride in blocks:  # widen t times by 1 x 1, filter each channel, narrow by 1 x 1
        for step in [stride] + [1] * (repeats - 1):
            mobilenet += side**2 * t * c**2 * (t > 1)
            side //= step
            mobilenet += side**2 * t * c * (9 + out)
            c = out
    return {"MobileNetV2": mobilenet + side**2 * c * 1280, "ResNet18": resnet}
