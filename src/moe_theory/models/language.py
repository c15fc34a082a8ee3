"""A small language model over characters, whose feed-forward layers are dense or mixtures of experts.

A decoder as in T5, the kind of model that Dikkala et al. (2023), C.4, narrow: attention with a learned bias for each
distance, normalization before each layer, residual connections. The width d of what runs through all layers and the
hidden width h of an expert are free; the attention has its own.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.layers import Linear, Stack, Words, drawn
from moe_theory.models.routers import Router, as_router
from moe_theory.streams import torch_stream

#: Heads of the attention and their dimension, at every width d; and how fast their biases fall with the distance at
#: the start, from a head that sees little but the last characters to one that sees them all.
HEADS, HEAD = 2, 16
SLOPES = (1.0, 0.125)

#: The temperature that the scores of cosine routers are divided by at the start: our choice.
TEMPERATURE = 0.07


class TokenRouter(nn.Module):
    """Logits of the experts for tokens, by one of the routers in `models.routers.ROUTERS`.

    The linear one reads the token; of the others, as in Chi et al. (2022), the token's projection to `low`
    dimensions, and their scores are divided by a temperature that is learned. The one called "projected" has all this
    and no normalization: it divides by `sqrt(low)`, about the norm that a projection has at the start.

    Args:
        kind: "linear", "projected", "cosine" or "perturbed", or a router itself.
        d: dimension of a token; experts: number M; low: dimension of the projection.
        rng: draws the projection (low, d), and `beta1` (M, d or low), a row of norm about 1 for each expert; the last
            three kinds get the same from one generator.
    """

    def __init__(self, kind: Router | str, d: int, experts: int, low: int, rng: torch.Generator):
        super().__init__()
        self.router = as_router("linear" if kind == "projected" else kind)
        self.project, self.sharpness = None, None
        if kind != "linear":
            self.project = drawn(low, d, rng=rng)
            self.sharpness = nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))
        self.divisor = math.sqrt(low) if kind == "projected" else 1.0
        self.beta1 = drawn(experts, d if kind == "linear" else low, rng=rng)

    def read(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch low"]:
        """What the scores are products with before any normalization: the token or its projection."""
        return x if self.project is None else x @ self.project.mT

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch M"]:
        """The logits, `<s(beta1_m), u(x)>`, of all but the linear router over the temperature."""
        scores = self.router.feature(self.read(x)) @ self.router.embedding(self.beta1).mT
        return scores if self.sharpness is None else self.sharpness.exp() / self.divisor * scores


class Dense(nn.Module):
    """`W_2 relu(W_1 x + b_1) + b_2` with `width` hidden units."""

    def __init__(self, d: int, width: int, rng: torch.Generator):
        super().__init__()
        self.hidden, self.out = Linear(d, width, rng), Linear(width, d, rng)

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return self.out(torch.relu(self.hidden(x)))


class Mixture(nn.Module):
    """`sum_(m in T(x)) pi_m(x) f_m(x)`, T the k largest logits and pi a softmax over those (`topk_softmax`).

    The experts f_m are as `Dense`. Only selected experts are computed: the n k pairs of token and expert are sorted
    by expert, and each expert multiplies its own rows. That takes 4 k d h + 2 d M operations for a token, where all M
    experts would take 4 M d h + 2 d M.

    Args:
        d: dimension of a token; width: hidden units h of an expert; experts: number M; k: experts selected.
        scores: the router, which maps tokens to M logits.
        rng: draws the experts.
    """

    def __init__(self, d: int, width: int, experts: int, k: int, scores: nn.Module, rng: torch.Generator):
        super().__init__()
        if check.integer("k", k, 1) > experts:
            raise ValueError(f"k: expected at most M = {experts} experts, got {k}")
        self.router, self.k = scores, k
        self.hidden, self.out = Stack(d, width, experts, rng), Stack(width, d, experts, rng)

    def choice(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Gates and numbers of the selected experts, the largest first."""
        top = self.router(x).topk(self.k, -1)
        return top.values.softmax(-1), top.indices

    def forward(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        pi, m = self.choice(x)
        order = m.flatten().argsort(stable=True)
        token, sizes = order // self.k, m.flatten().bincount(minlength=len(self.out.b)).tolist()
        parts = (x[token].split(sizes), *(p.unbind() for p in (self.hidden.W, self.hidden.b, self.out.W, self.out.b)))
        own = zip(*parts, strict=True)
        answers = torch.cat([F.linear(torch.relu(F.linear(z, A, a)), B, b) for z, A, a, B, b in own])
        return torch.zeros_like(x).index_add(0, token, pi.flatten()[order, None] * answers)


class Attention(nn.Module):
    """Causal attention of `HEADS` heads with a learned bias for each head and distance."""

    def __init__(self, d: int, length: int, rng: torch.Generator):
        super().__init__()
        self.read, self.mix = Linear(d, 3 * HEADS * HEAD, rng), Linear(HEADS * HEAD, d, rng)
        self.bias = nn.Parameter(-torch.outer(torch.tensor(SLOPES), torch.arange(length)))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        self.register_buffer("distance", distance.clamp(min=0))
        self.register_buffer("later", distance < 0)

    def forward(self, x: Float[Tensor, "n L d"]) -> Float[Tensor, "n L d"]:
        L = x.shape[1]
        q, k, v = self.read(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        mask = self.bias[:, self.distance[:L, :L]].masked_fill(self.later[:L, :L], -math.inf)
        return self.mix(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Logits of the next character, from those before it.

    Args:
        symbols: characters of the alphabet; length: the longest text that is read.
        d: dimension of what runs through all layers; width: hidden units h of an expert, or of the dense layer.
        blocks: number of blocks, each an attention and a feed-forward layer.
        experts: number M of experts in each feed-forward layer; 0 for dense layers.
        k: experts selected; kind: of `TokenRouter`; low: the dimension to which it projects.
        frozen: whether routers stay as they were drawn.
        seed: draws experts and all else by three streams, so that models of one seed differ only where they must:
            learned and frozen routers start alike, and so does what lies outside the feed-forward layers of any.
    """

    def __init__(
        self,
        symbols: int,
        length: int,
        d: int,
        width: int,
        *,
        blocks: int = 2,
        experts: int = 0,
        k: int = 2,
        kind: Router | str = "linear",
        low: int = 8,
        frozen: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        self.length = check.integer("length", length, 1)
        around, inside, routing = (torch_stream(seed, p) for p in ("outer weights", "weights", "router weights"))
        self.words, self.next = Words(symbols, d, around), Linear(d, symbols, around)
        self.attention = nn.ModuleList(Attention(d, length, around) for _ in range(blocks))
        self.feed = nn.ModuleList()
        for _ in range(blocks):
            if experts:
                scores = TokenRouter(kind, d, experts, low, routing).requires_grad_(not frozen)
                self.feed.append(Mixture(d, width, experts, k, scores, inside))
            else:
                self.feed.append(Dense(d, width, inside))

    def forward(self, tokens: Int[Tensor, "n L"]) -> Float[Tensor, "n L symbols"]:
        x = self.words(tokens)
        for attention, feed in zip(self.attention, self.feed, strict=True):
            x = x + attention(_normalized(x))
            x = x + feed(_normalized(x).flatten(0, 1)).view_as(x)
        return self.next(_normalized(x))

    @torch.no_grad()
    def routed(self, tokens: Int[Tensor, "n L"]) -> list[tuple[Float[Tensor, "N d"], Int[Tensor, "N k"]]]:
        """What the router of each block reads of N = n L tokens, and the experts that it selects, the first first."""
        seen = []
        hooks = [feed.register_forward_pre_hook(lambda _, x: seen.append(x[0])) for feed in self.feed]
        self(tokens)
        for hook in hooks:
            hook.remove()
        return [(x, feed.choice(x)[1]) for x, feed in zip(seen, self.feed, strict=True)]  # pyright: ignore


def _normalized(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Layer normalization without parameters."""
    return F.layer_norm(x, x.shape[-1:])


def dense_width(width: int, experts: int, k: int) -> int:
    """Hidden units h_D of the dense layer with as many operations as a mixture: `4 d h_D = 4 k d h + 2 d M`.

    The sum is over multiplications and additions of the matrix products, those of a linear router included.

    Raises:
        ValueError: for an odd number M of experts, for which there is none.
    """
    if check.integer("experts", experts, 1) % 2:
        raise ValueError(f"experts: expected an even number, got {experts}")
    return check.integer("k", k, 1) * check.integer("width", width, 1) + experts // 2
