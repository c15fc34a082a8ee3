"""A network that routes by an image and computes on a vector beside it (Dikkala et al. 2023, Section 3.4)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.image_networks import cnn
from moe_theory.models.soft import Nets
from moe_theory.streams import torch_stream


class ImageRoutedMoE(nn.Module):
    """`F(image, v) = sum_m pi_m(image) f_m(v, z(image))`: a CNN routes, experts are networks of three layers.

    z is the CNN's penultimate layer; that experts read it is to help them where the router is frozen.

    Args:
        side: of the images, which have one channel.
        d: dimension of v.
        experts: number M of experts.
        width: of the experts' hidden layers; the CNN has 8 and 16 filters.
        reads: "v and z", or "v" for experts that know of the image by the router alone.
        frozen: "nothing", "head" for the gates as a function of z, or "CNN" for z as well.
        seed: draws the weights.
    """

    def __init__(self, side: int, d: int, experts: int, width: int, *, reads: str, frozen: str, seed: int):
        super().__init__()
        self.router = cnn(1, side, check.integer("experts", experts, 1), 8, torch_stream(seed, "router weights"))
        self.reads_z = check.choice("reads", reads, ("v", "v and z")) == "v and z"
        z = self.router.head.in_features * self.reads_z
        self.experts = Nets([d + z, width, width, 1], experts, [seed])
        fixed = {"nothing": [], "head": [*self.router.head.parameters()], "CNN": [*self.router.parameters()]}
        for p in fixed[check.choice("frozen", frozen, fixed)]:
            p.requires_grad_(False)

    def parts(
        self, image: Float[Tensor, "n 1 side side"], v: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n M"], Float[Tensor, "n M"]]:
        """The router's logits, and what all experts say."""
        z = self.router.embedding(image)
        said = self.experts(torch.cat([v, z], 1)[None] if self.reads_z else v[None])
        return self.router.head(z), said[0, :, :, 0].mT

    def forward(self, image: Float[Tensor, "n 1 side side"], v: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        h, said = self.parts(image, v)
        return (h.softmax(1) * said).sum(1)
