"""Training of a language model, and what it predicts of a text it has not seen."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from moe_theory.models.language import LanguageModel
from moe_theory.streams import torch_stream
from moe_theory.training.fit import annealed

CHUNK = 128  # passages that an evaluation reads at once


def passages(
    text: UInt8[Tensor, " n"], length: int, batch: int, steps: int, *, seed: int
) -> Iterator[Int[Tensor, "batch L_1"]]:
    """Batches of passages of `length` + 1 characters from random places of a text."""
    rng, offsets = torch_stream(seed, "training"), torch.arange(length + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), generator=rng)
        yield text[starts + offsets].long()


def bits_per_character(logits: Float[Tensor, "n L S"], y: Int[Tensor, "n L"]) -> Float[Tensor, ""]:
    """The mean of `-log2` of the probabilities that the logits give to the characters y."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) / math.log(2)


def train_language(
    model: LanguageModel, text: UInt8[Tensor, " n"], *, steps: int, batch: int, rate: float, seed: int
) -> Iterator[float]:
    """Adam on passages of the length that the model reads; yields the bits per character of each batch before its step.

    The model is trained in place, with the rate of `annealed`; parameters that need no gradient stay as they are.
    Models trained with one seed read the same passages.
    """
    read = passages(text, model.length, batch, steps, seed=seed)

    def bits(p: Int[Tensor, "batch L_1"]) -> Float[Tensor, ""]:
        return bits_per_character(model(p[:, :-1]), p[:, 1:])

    return annealed(bits, read, model.parameters(), rate=rate, steps=steps)


@torch.no_grad()
def evaluated(model: LanguageModel, text: UInt8[Tensor, " n"]) -> tuple[float, float]:
    """Bits per character of a text, and the share of its characters that were the model's first guess.

    The text is read in passages one after the other, of the length that the model reads: the first character of a
    passage is predicted from one, the last from all.
    """
    L = model.length
    n = (len(text) - 1) // L
    x, y = text[: n * L].view(n, L).long(), text[1 : n * L + 1].view(n, L).long()
    bits = hits = 0.0
    for inputs, targets in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        logits = model(inputs)
        bits += float(bits_per_character(logits, targets)) * targets.numel()
        hits += float((logits.argmax(-1) == targets).sum())
    return bits / y.numel(), hits / y.numel()
