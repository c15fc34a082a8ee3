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
