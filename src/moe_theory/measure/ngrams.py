"""What counts of short strings predict of a text: a plain model beside which others are read."""

import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from moe_theory import _validate as check

#: Characters of an alphabet, at most: numbers of strings then fit in 64 bits up to a length of 10.
SYMBOLS = 64


def ngram_bits(train: UInt8[Tensor, " n"], test: UInt8[Tensor, " m"], order: int) -> float:
    """Bits per character of a text under n-grams of another, interpolated as Witten and Bell do.

    With N(s) occurrences and D(s) different followers of a string s in the training text, the probability of c after
    the last `order` - 1 characters s is `(N(sc) + D(s) p') / (N(s) + D(s))`, p' the same for a string that is shorter
    by its first character; at the end stands 1 / 64.

    Args:
        train, test: numbers of characters, below 64; the first `order` - 1 characters of the test text are not counted.
        order: length n of the strings, 1 to 10.

    Raises:
        ValueError: for another order.
    """
    if check.integer("order", order, 1) > 10:
        raise ValueError(f"order: expected at most 10, got {order}")
    p = np.full(len(test) - order + 1, 1 / SYMBOLS)
    for n in range(1, order + 1):
        strings, N = np.unique(_strings(train.numpy(), n), return_counts=True)
        contexts, first, D = np.unique(strings // SYMBOLS, return_index=True, return_counts=True)
        N_s = np.add.reduceat(N, first)
        asked = _strings(test.numpy()[order - n :], n)
        N_sc, total, followers = _at(strings, N, asked), *(_at(contexts, v, asked // SYMBOLS) for v in (N_s, D))
        p = np.where(total > 0, (N_sc + followers * p) / np.maximum(total + followers, 1), p)
    return float(-np.log2(p).mean())


def _strings(text: UInt8[np.ndarray, " n"], length: int) -> Int[np.ndarray, " m"]:
    """The numbers of all strings of a length, the last character in the lowest place."""
    m = len(text) - length + 1
    return sum(text[i : i + m].astype(np.int64) * SYMBOLS ** (length - 1 - i) for i in range(length))


def _at(
    keys: Int[np.ndarray, " K"], values: Int[np.ndarray, " K"], asked: Int[np.ndarray, " m"]
) -> Float[np.ndarray, " m"]:
    """The value of each key that is asked for, 0 where there is none."""
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0).astype(float)
