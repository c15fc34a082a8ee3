"""A batch taken apart for the products of a training step.

Three of an example's P patches are multiples s u of 2K known signals u. If sigma(z) = z^p, an expert's answer
to such a patch is a polynomial in s with one set of coefficients for each signal, so a table of M x 2K numbers
serves all examples, and only the P - 3 noise patches enter a matrix product. Other activations send all P
patches through that product.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory.models.experts import Activation
from moe_theory.tasks.patches import NOISE, SIGNAL, PatchBatch


@dataclass(frozen=True)
class Parts:
    """A batch taken apart for the products of a step.

    Attributes:
        total: (n, d) the sum of an example's patches, all that a linear router sees.
        dense: (n, Q D) the Q patches of an example that need a product with its expert's filters;
            D is d, or d + 1 where a 1 is appended for a bias.
        u: (2K, d) the signals v_1..v_K, c_1..c_K; the other patches are multiples s u of them.
        powers: the powers r of s that an expert's answer to those holds; none if Q = P.
        known: (R 2K, n) for each of the R powers and each signal, `s**r`; 0 where an example has no such patch.
        y, cluster: (n,) labels and clusters.
    """

    total: Float[Tensor, "n d"]
    dense: Float[Tensor, "n QD"]
    u: Float[Tensor, "S d"]
    powers: tuple[int, ...]
    known: Float[Tensor, "RS n"]
    y: Float[Tensor, " n"]
    cluster: Int[Tensor, " n"]


def _signals(batch: PatchBatch) -> tuple[Float[Tensor, "S d"], Float[Tensor, "3 n"], Int[Tensor, "3 n"]]:
    """The signals, and for the three patches that hold one, its coefficient and its number."""
    u = torch.cat([batch.v, batch.c])
    s = torch.stack([batch.y * batch.alpha, batch.beta, batch.epsilon * batch.gamma])
    return u, s, torch.stack([batch.cluster, batch.cluster + len(batch.v), batch.other])


def described(batch: PatchBatch) -> bool:
    """Whether a batch's patches are those that its coefficients describe, up to rounding."""
    u, s, k = _signals(batch)
    off = (batch.patch(role) - s[q, :, None] * u[k[q]] for q, role in enumerate(range(SIGNAL, NOISE)))
    room = 8 * torch.finfo(u.dtype).eps * s.abs().amax(1)
    return all(bool(o.abs().max() <= limit) for o, limit in zip(off, room, strict=True))


def take_apart(
    name: str, batch: PatchBatch, sigma: Activation, input_scale: float = 1.0, biases: bool = False
) -> Parts:
    """The `Parts` of a batch, its patches multiplied by `input_scale`, for experts with or without biases.

    Raises:
        ValueError: if the patches are not those that the batch's coefficients describe.
    """
    if not described(batch):
        raise ValueError(f"{name}: expected the patches that its coefficients describe, got others")
    u, s, k = _signals(batch)
    p = sigma.degree
    powers = () if p is None else tuple(range(0 if biases else p, p + 1))
    by_product = range(NOISE if powers else SIGNAL, batch.role.shape[1])
    x, ones = input_scale * batch.x, batch.x.new_ones(len(batch), int(biases))
    dense = [torch.cat([input_scale * batch.patch(role), ones], 1) for role in by_product]
    dense = torch.cat([x.new_zeros(len(x), 0), *dense], 1)
    known = x.new_zeros(len(powers), len(u), len(x))
    for table, r in zip(known, powers, strict=True):
        table.scatter_(0, k, (input_scale * s) ** r)
    return Parts(x.sum(1), dense, u, powers, known.flatten(0, 1), batch.y, batch.cluster)
