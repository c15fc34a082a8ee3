"""A narrow language model with learned and frozen routers, and a dense one (Dikkala et al. 2023, Figures 5 and 7).

The paper trains encoder and decoder of T5, 12 layers each, for 500,000 steps on mC4. What a machine without an
accelerator cannot do is reduced here: two blocks of a decoder, characters of manual pages in passages of 32, and the
steps. As there, two experts are selected, and the dense layer has as many operations as a mixture.
"""

import lzma
import time
from functools import cache
from itertools import islice

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from moe_book.experiments.catalogue import peak_memory, rounded
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.measure.ngrams import ngram_bits
from moe_theory.models.language import LanguageModel, dense_width
from moe_theory.tasks.characters import ALPHABET, Characters, load_characters, unfolded
from moe_theory.training.passages import evaluated, train_language

KINDS = ("learned", "frozen", "dense")
#: Passages' length and number in a step, largest rate of Adam, experts selected, an expert's hidden units by d.
LENGTH, BATCH, RATE, K, TIMES = 32, 64, 0.04, 2, 2
#: The width of Figures 5 and 7 in proportion, and the steps of the rows that are compared.
NARROW, STEPS = 16, 1_000
#: Points of a curve, characters of the validation part for each; steps that a live recomputation takes.
POINTS, CURVE, FIRST = 10, 32 * 256, 50
#: Passages of the test part in which routing is measured.
SEEN = 1_024
SMOKE = dict(steps=FIRST)


def routers() -> list[dict]:
    """Figures 5 and 7: over the number of experts; the dense model is that of 32, which has the most operations.

    Seeds 4 to 6 were added when the rows of the first four had been seen: claims.yml says why.
    """
    cases = [(kind, M) for M in (4, 8, 16, 32) for kind in KINDS if kind != "dense" or M == 32]
    return [dict(kind=kind, d=NARROW, experts=M, steps=STEPS, seed=seed) for seed in range(7) for kind, M in cases]


def widths() -> list[dict]:
    """Learned and frozen routers with 16 experts at two other widths; seeds 3 and 4 were added as there."""
    cases = [(kind, d) for d in (8, 64) for kind in KINDS[:2]]
    return [dict(kind=kind, d=d, experts=16, steps=STEPS, seed=seed) for seed in range(5) for kind, d in cases]


def plain() -> list[dict]:
    """N-grams of each order, which have read the whole training part, and a compressor."""
    return [dict(model=f"{n}-gram") for n in range(1, 9)] + [dict(model="lzma")]


def untrained() -> list[dict]:
    """The routers with 16 experts of `routers` before their training; learned and frozen ones are the same there."""
    return [dict(kind="frozen", d=NARROW, experts=16, seed=seed) for seed in range(7)]


@cache
def text() -> Characters:
    """The manual pages, or what stands in for them."""
    return load_characters("manual pages")


def build_model(key: dict) -> LanguageModel:
    """The model of a row before its training."""
    d, M, dense = key["d"], key["experts"], key["kind"] == "dense"
    width = dense_width(TIMES * d, M, K) if dense else TIMES * d
    how = dict(experts=0 if dense else M, k=K, frozen=key["kind"] == "frozen", seed=key["seed"])
    return LanguageModel(len(ALPHABET), LENGTH, d, width, **how)


def trained(model: LanguageModel, key: dict):
    """The training of a row; yields the bits per character of its batches."""
    how = dict(steps=key["steps"], batch=BATCH, rate=RATE, seed=key["seed"])
    return train_language(model, text().train, **how)


def row(key: dict) -> dict:
    """Bits per character on the way and at the end, what the experts see, and what the training took."""
    model, began = build_model(key), time.process_time()
    bits, curve = [], []
    for step, of_batch in enumerate(trained(model, key), 1):
        bits.append(of_batch)
        if step % (key["steps"] // POINTS) == 0:
            curve.append(evaluated(model, text().validation[:CURVE])[0])
    spent = time.process_time() - began
    test, accuracy = evaluated(model, text().test)
    return rounded(
        {
            **dict(test=test, accuracy=accuracy, curve=curve, first=np.mean(bits[:FIRST])),
            **seen(model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "speed": key["steps"] * BATCH * LENGTH / spent,
            "memory": peak_memory(),
            **dict(text=text().name, digest=text().digest),
        },
        6,
    )


def passages() -> Int[Tensor, "n length"]:
    """The first passages of the test part, in which routing is measured."""
    test = text().test
    return test[: len(test) // LENGTH * LENGTH].view(-1, LENGTH)[:SEEN].long()


def seen(model: LanguageModel) -> dict[str, list[float]]:
    """For each block what a token's first expert tells of its character, of those beside it; and the loads.

    `of_this`, `of_last` and `of_next` are mutual informations in bits, `spread` is the entropy of the loads; all are
    empty for a dense model. The first and the last character of a passage, which lack a neighbour, are left out.
    """
    names = ("of_this", "of_last", "of_next", "spread")
    if not hasattr(model.feed[0], "router"):
        return {name: [] for name in names}
    x = passages()
    inner, found = x[:, 1:-1], []
    for _, m in model.routed(x):
        first = m[:, 0].view_as(x)[:, 1:-1].flatten()
        beside = [c.flatten() for c in (inner, x[:, :-2], x[:, 2:])]
        found.append([information(c, first) for c in beside] + [information(first, first)])
    return dict(zip(names, map(list, zip(*found, strict=True)), strict=True))


def untrained_row(key: dict) -> dict:
    """What the routers of a model that nobody trained tell of characters, and the entropy of these, in bits."""
    inner = passages()[:, 1:-1].flatten()
    told = {**seen(build_model(key)), "characters": information(inner, inner)}
    return rounded({**told, **dict(text=text().name, digest=text().digest)}, 6)


def information(a: Int[Tensor, " n"], b: Int[Tensor, " n"]) -> float:
    """`I(a; b) = H(a) - H(a | b)` of two labels, in bits; of a label with itself it is its entropy `H(a)`."""
    entropy = dispatch_entropy(a, torch.zeros_like(a))  # given a label that tells nothing
    return (entropy - dispatch_entropy(a, b)) / np.log(2)


def live(key: dict) -> dict:
    """The start of a row's training: the mean over its first batches."""
    start = islice(trained(build_model(key), key), FIRST)
    return rounded({"first": np.mean(list(start))}, 6)


def plain_row(key: dict) -> dict:
    """Bits per character of the test part, given the training part."""
    if key["model"] == "lzma":
        both = torch.cat([text().train, text().test])
        before, after = (len(lzma.compress(unfolded(t).encode(), preset=9)) for t in (text().train, both))
        bits = 8 * (after - before) / len(text().test)
    else:
        bits = ngram_bits(text().train, text().test, int(key["model"][0]))
    return rounded({"test": bits, "text": text().name, "digest": text().digest}, 6)
