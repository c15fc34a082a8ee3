"""The gates of well-known sparse systems, each written from the formulas of its own paper."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.rules import sampled_topk, softmax_topk, topk_set, topk_softmax

#: `gate(h, k, noise)`: gates of n inputs from their logits h (n, M), the number selected and noise (n, M).
Gate = Callable[[Float[Tensor, "n M"], int, Float[Tensor, "n M"]], Float[Tensor, "n M"]]


def divided(h: Float[Tensor, "n M"], k: int, noise: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Softmax over all, keep k, divide by what was kept."""
    kept = softmax_topk(h, k)
    return kept / kept.sum(-1, keepdim=True)


def drawn(h: Float[Tensor, "n M"], k: int, noise: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Softmax over the k experts that the noisy logits select."""
    chosen = topk_set(h + noise, k)
    return topk_softmax.shares(h, chosen) * chosen


def sigmoid_kept(h: Float[Tensor, "n M"], k: int, noise: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Sigmoids of the k largest logits."""
    return torch.sigmoid(h) * topk_set(h, k)


def sigmoid_divided(h: Float[Tensor, "n M"], k: int, noise: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Sigmoids of the k largest logits, divided by their sum."""
    kept = sigmoid_kept(h, k, noise)
    return kept / kept.sum(-1, keepdim=True)


def noisy(h: Float[Tensor, "n M"], k: int, noise: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Softmax over the k largest noisy logits."""
    return topk_softmax(h + noise, k)


def dense(h: Float[Tensor, "n M"], k: int, noise: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
    """Softmax over all, all kept, whatever k."""
    return torch.softmax(h, -1)


class System(NamedTuple):
    """A system of a paper.

    Attributes:
        name: with its year.
        about: its gate in words.
        gate: the same as a function.
        used: the numbers of experts that the paper selects, out of ten; empty where all are kept.
    """

    name: str
    about: str
    gate: Gate
    used: tuple[int, ...]


SYSTEMS = (
    System("Shazeer et al. 2017", "keep K noisy logits, softmax", noisy, tuple(range(2, 10))),
    System("GShard 2021", "softmax, keep 2, divide by their sum", divided, (2,)),
    System("BASE 2021", "keep 1, sigmoid of its logit", sigmoid_kept, (1,)),
    System("Switch 2022", "softmax, keep 1", softmax_topk, (1,)),
    System("Mixtral 2024", "keep 2 logits, softmax", topk_softmax, (2,)),
    System("OLMoE 2024", "softmax, keep 8", softmax_topk, (8,)),
    System("DeepSeek-V3 2024", "sigmoid, keep 8, divide by their sum", sigmoid_divided, (8,)),
    System("Chen et al. 2022", "softmax; the noisy logits select", sampled_topk, (1,)),
    System("Dikkala et al. 2023", "softmax, all kept while training", dense, ()),
    System("Smoothness 2025, 3.1", "keep K logits, softmax", topk_softmax, tuple(range(1, 6))),
    System("Smoothness 2025, 4.2", "draw K, softmax over those", drawn, tuple(range(1, 6))),
    System("Smoothness 2025, App. C", "softmax, draw K", sampled_topk, tuple(range(1, 6))),
    System("Cosine router 2025", "softmax of cosines, all kept", dense, ()),
)
