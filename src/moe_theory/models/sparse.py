"""The layer of smooth2025, `F(x) = sum_(m in T) pi_m f_m(x)`, and the three networks of its Section 5.1 around it."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.experts import ACTIVATIONS
from moe_theory.models.layers import Fan, Linear, Stack, Words
from moe_theory.models.routers import MLPRouter, MultiHeadRouter
from moe_theory.models.rules import Rule, known

HEADS = {"single": MLPRouter, "multi": MultiHeadRouter}
#: Hidden units of an expert, and of a router or of each of its heads.
WIDTH = 16


class Experts(nn.Module):
    """M networks of one hidden layer, `f_m(x) = B_m sigma(A_m x + a_m) + b_m`.

    Args:
        d: dimension of an input; experts: number M; width: hidden units; out: dimension of an output.
        activation: a key of `ACTIVATIONS`; rng: draws the weights.
    """

    def __init__(self, d: int, experts: int, width: int, out: int, activation: str, rng: torch.Generator):
        super().__init__()
        self.hidden, self.out = Fan(d, width, experts, rng), Stack(width, out, experts, rng)
        self.sigma = ACTIVATIONS[check.choice("activation", activation, ACTIVATIONS)].value

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M out"]:
        return self.out(self.sigma(self.hidden(x)))


class SparseBlock(nn.Module):
    """`F(x) = scale * sum_m pi_m(x) f_m(x)` with the gates of a rule.

    Every expert is computed and those not selected get the gate 0, so that the block runs under
    `torch.func.vmap`.

    Args:
        d, out: dimensions of an input and an output; experts: number M.
        rule: a `moe_theory.models.rules.Rule`; k: experts selected for an input; heads: "single" or "multi".
        activation: of the experts; seed: draws experts and router from two streams.

    Attributes:
        scale: constant factor of the output, 1 unless set.
    """

    def __init__(self, d: int, experts: int, out: int, *, rule: Rule, k: int, heads: str, activation: str, seed: int):
        super().__init__()
        if check.integer("k", k, 1) > check.integer("experts", experts, 1):
            raise ValueError(f"k: expected at most M = {experts} experts, got {k}")
        rng = torch.Generator().manual_seed(2 * check.integer("seed", seed, 0))
        self.experts = Experts(d, experts, WIDTH, out, activation, rng)
        self.router = HEADS[check.choice("heads", heads, HEADS)](d, experts, WIDTH, 2 * seed + 1)
        self.rule, self.k, self.scale = known(rule), k, 1.0

    def forward(
        self, x: Float[Tensor, "*batch d"], noise: Float[Tensor, "*batch M"]
    ) -> tuple[Float[Tensor, "*batch out"], Float[Tensor, "*batch M"]]:
        """Outputs and gates; `noise` is Gumbel noise, for rules that need it."""
        pi = self.rule.gates(self.router(x), self.k, noise)
        return self.scale * (pi[..., None] * self.experts(x)).sum(-2), pi


class SparseNetwork(nn.Module):
    """What the three networks have in common: a block, and the shape of the routing noise it reads.

    A network maps n inputs and routing noise to logits of the classes (n, classes) and gates.
    """

    block: SparseBlock

    @property
    def noisy(self) -> bool:
        """Whether the routing noise changes the outputs."""
        return self.block.rule.needs_noise

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Shape of the routing noise for n inputs: (n, M), or (n, length, M) for texts."""
        return n, len(self.block.experts.out.b)


class SparseMLP(SparseNetwork):
    """The MLP-MoE of smooth2025, 5.1.1: router and experts of two layers, which read the input itself.

    Args:
        d: dimension of an input; classes: number of classes; experts, rule, k, heads, seed: see `SparseBlock`.
    """

    def __init__(self, d: int, classes: int, experts: int, rule: Rule, k: int, heads: str, seed: int):
        super().__init__()
        self.block = SparseBlock(d, experts, classes, rule=rule, k=k, heads=heads, activation="relu", seed=seed)

    def forward(self, x: Float[Tensor, "n d"], noise: Float[Tensor, "n M"]):
        return self.block(x, noise)


def windows(x: Float[Tensor, "n c H W"], size: int) -> Float[Tensor, "n L q"]:
    """The L = H W / 4 windows of a convolution with stride 2 that keeps half the side; q = c size^2."""
    return F.unfold(x, size, padding=(size - 1) // 2, stride=2).mT


def convolved(layer: Linear, x: Float[Tensor, "n c H W"], size: int) -> Float[Tensor, "n out H2 W2"]:
    """The layer at all `windows(x, size)`, in the places they were taken from, without forming them."""
    kernel = layer.W.view(-1, x.shape[1], size, size)
    return F.conv2d(x, kernel, layer.b, stride=2, padding=(size - 1) // 2)


class SparseCNN(SparseNetwork):
    """The CNN-MoE of smooth2025, 5.1.2: two convolutions, then the sparse block.

    Convolutions 1-8 (5x5) and 8-8 (2x2), both with stride 2 and ReLU. In training mode they are computed as
    such; in evaluation mode as products with the image's windows, since the estimators of stability stack
    networks, and products of stacked matrices are faster than stacked convolutions.

    Args:
        side: height and width of an image, a multiple of 4.
        classes, experts, rule, k, heads, seed: as in `SparseMLP`.
    """

    def __init__(self, side: int, classes: int, experts: int, *, rule: Rule, k: int, heads: str, seed: int):
        super().__init__()
        if check.integer("side", side, 4) % 4:
            raise ValueError(f"side: expected a multiple of 4, got {side}")
        rng = torch.Generator().manual_seed(2 * seed + 2**31)
        self.first, self.second = Linear(25, 8, rng), Linear(32, 8, rng)
        self.block = SparseBlock(
            side * side // 2, experts, classes, rule=rule, k=k, heads=heads, activation="relu", seed=seed
        )

    def forward(self, x: Float[Tensor, "n 1 side side"], noise: Float[Tensor, "n M"]):
        n, _, side, _ = x.shape
        if self.training:
            z = torch.relu(convolved(self.first, x, 5))
            z = torch.relu(convolved(self.second, z, 2)).flatten(2).mT
        else:
            z = torch.relu(self.first(windows(x, 5))).mT.reshape(n, 8, side // 2, side // 2)
            z = torch.relu(self.second(windows(z, 2)))
        return self.block(z.flatten(1), noise)


class SparseTransformer(SparseNetwork):
    """A small transformer whose feed-forward layer is a sparse block of experts with cubic activation (5.1.3).

    Word vectors and fixed sinusoidal positions, one attention layer, the block applied to every token,
    each with a residual connection and layer normalization; the mean over tokens is classified linearly.

    Args:
        vocabulary: number of words; d: dimension of a token; classes, experts, rule, k, heads, seed: as
            in `SparseMLP`; length: tokens of a text.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        d: int,
        classes: int,
        experts: int,
        *,
        rule: Rule,
        k: int,
        heads: str,
        seed: int,
    ):
        super().__init__()
        rng = torch.Generator().manual_seed(2 * seed + 2**31)
        self.words = Words(vocabulary, d, rng)
        self.query, self.key, self.value, self.mix = (Linear(d, d, rng) for _ in range(4))
        self.classes = Linear(d, classes, rng)
        self.block = SparseBlock(d, experts, d, rule=rule, k=k, heads=heads, activation="cubic", seed=seed)
        angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d])

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return n, len(self.places), super().noise_shape(n)[1]

    def forward(self, tokens: Int[Tensor, "n length"], noise: Float[Tensor, "n length M"]):
        z = self.words(tokens) + self.places
        attention = torch.softmax(self.query(z) @ self.key(z).mT / math.sqrt(z.shape[-1]), -1)
        z = F.layer_norm(z + self.mix(attention @ self.value(z)), z.shape[-1:])
        from_experts, pi = self.block(z, noise)
        return self.classes(F.layer_norm(z + from_experts, z.shape[-1:]).mean(-2)), pi
