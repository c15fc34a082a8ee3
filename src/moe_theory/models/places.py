"""A network for small images with a mixture of experts that routes every place of an image by itself."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.language import Dense, Mixture, TokenRouter
from moe_theory.models.layers import Linear, drawn
from moe_theory.models.routers import Router
from moe_theory.streams import torch_stream


class PlacesNetwork(nn.Module):
    """Two convolutions, a feed-forward layer on each place of what they give, and a linear function of all places.

    A convolution has a kernel of 3, a ReLU, and halves the side. As the tokens of a vision transformer, the d channels
    of a place have a vector added that is learned for the place; around the feed-forward layer is a residual
    connection, and normalization before it and after it.

    Args:
        side: of the images, a multiple of 4; outputs: dimension of the answer.
        d: channels of a place, an even number; width: hidden units of an expert, or of the dense layer.
        experts: number M of experts; 0 for a dense layer.
        k: experts selected; kind: of `TokenRouter`; low: the dimension to which it projects.
        seed: draws experts, router and all else by three streams, as for `LanguageModel`.

    Raises:
        ValueError: for a side that is no multiple of 4, or an odd d.
    """

    def __init__(
        self,
        side: int,
        outputs: int,
        d: int,
        width: int,
        *,
        experts: int = 0,
        k: int = 2,
        kind: Router | str = "linear",
        low: int = 8,
        seed: int = 0,
    ):
        super().__init__()
        if check.integer("side", side, 4) % 4:
            raise ValueError(f"side: expected a multiple of 4, got {side}")
        if check.integer("d", d, 2) % 2:
            raise ValueError(f"d: expected an even number, got {d}")
        around, inside, routing = (torch_stream(seed, p) for p in ("outer weights", "weights", "router weights"))
        self.filters = nn.ParameterList([drawn(d // 2, 9, rng=around), drawn(d, 9 * d // 2, rng=around)])
        places = (side // 4) ** 2
        self.place, self.answer = drawn(places, d, rng=around), Linear(places * d, outputs, around)
        if experts:
            self.feed = Mixture(d, width, experts, k, TokenRouter(kind, d, experts, low, routing), inside)
        else:
            self.feed = Dense(d, width, inside)

    def tokens(self, x: Float[Tensor, "n 1 side side"]) -> Float[Tensor, "n L d"]:
        for W in self.filters:
            x = F.max_pool2d(torch.relu(F.conv2d(x, W.view(len(W), -1, 3, 3), padding=1)), 2)
        return x.flatten(2).mT + self.place

    def forward(self, x: Float[Tensor, "n 1 side side"]) -> Float[Tensor, "n o"]:
        z = self.tokens(x)
        z = z + self.feed(_normalized(z).flatten(0, 1)).view_as(z)
        return self.answer(_normalized(z).flatten(1))


def _normalized(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Layer normalization without parameters."""
    return F.layer_norm(x, x.shape[-1:])
