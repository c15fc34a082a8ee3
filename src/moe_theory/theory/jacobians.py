"""Jacobians of a block of selected experts in closed form, and bounds on L and beta (smooth2025, Eq. 4 to 15).

The block is `F(z) = sum_k pi_k(z) f_k(z)` over the K selected experts, pi the softmax of their logits h, whose
gradients are dh; `phi_k = f_k - F`. A router is *row-disjoint* if every logit has parameters of its own, as those of
the linear and of the multi-headed router do.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check


def deviations(pi: Float[Tensor, "*batch K"], f: Float[Tensor, "*batch K o"]) -> Float[Tensor, "*batch K o"]:
    """`phi_k = f_k - F`, what expert k says beyond the block."""
    return f - (pi[..., None] * f).sum(-2, keepdim=True)


def router_jacobian(
    pi: Float[Tensor, "*batch K"], f: Float[Tensor, "*batch K o"], dh: Float[Tensor, "*batch K p"]
) -> Float[Tensor, "*batch o p"]:
    """`dF/dTheta^g = sum_k pi_k phi_k (x) dh_k = Cov_pi(f, dh)`, dh in the p parameters of the router; Eq. 4."""
    return torch.einsum("...k,...ko,...kp->...op", pi, deviations(pi, f), dh)


def router_norm(
    pi: Float[Tensor, "*batch K"], f: Float[Tensor, "*batch K o"], dh: Float[Tensor, "*batch K d"]
) -> Float[Tensor, "*batch"]:
    """Frobenius norm of the router's Jacobian if the rows are disjoint: `sqrt(sum_k pi_k^2 |phi_k|^2 |dh_k|^2)`.

    dh_k is the gradient of logit k in its own d parameters.
    """
    return (pi.square() * deviations(pi, f).square().sum(-1) * dh.square().sum(-1)).sum(-1).sqrt()


def input_terms(
    pi: Float[Tensor, "*batch K"],
    f: Float[Tensor, "*batch K o"],
    dh: Float[Tensor, "*batch K d"],
    A: Float[Tensor, "*batch K o d"],
) -> Float[Tensor, "*batch K o d"]:
    """The terms `c_k = pi_k (f_k (x) (dh_k - E_pi dh) + A_k)` whose sum is dF/dz, Eq. 8.

    dh are gradients of the logits, and A Jacobians of the experts, in the input.
    """
    centred = dh - (pi[..., None] * dh).sum(-2, keepdim=True)
    return pi[..., None, None] * (f[..., :, None] * centred[..., None, :] + A)


def pair_sum(c: Float[Tensor, "*batch K o d"]) -> Float[Tensor, "*batch"]:
    """`S = sum_{p != q} <c_p, c_q>`, the double sum of smooth2025, Eq. 9: `|sum c|^2 - sum |c|^2`."""
    return c.sum(-3).square().sum((-2, -1)) - c.square().sum((-3, -2, -1))


def pair_cosine(c: Float[Tensor, "*batch K o d"]) -> Float[Tensor, "*batch"]:
    """The mean cosine of two different terms, weighted by their norms: `S / sum_{p != q} |c_p| |c_q|`; two or more."""
    if c.shape[-3] < 2:
        raise ValueError(f"c: expected at least two terms, got {c.shape[-3]}")
    norms = c.square().sum((-2, -1)).sqrt()
    return pair_sum(c) / (norms.sum(-1).square() - norms.square().sum(-1))


def equicorrelated(a: float, mu: float, k_eff: float) -> float:
    """Norm of `sum_k pi_k C_k` if `|C_k| = a` and `<C_p, C_q> = mu a^2`: `a sqrt(mu + (1 - mu) / K_eff)`.

    ValueError where no such vectors exist (the square would be negative).
    """
    square = mu + (1 - mu) / check.positive("k_eff", k_eff)
    if not 0 <= square <= 1:
        raise ValueError(f"mu: expected a cosine of some vectors, -1/(K_eff - 1) to 1, got {mu!r}")
    return check.positive("a", a) * math.sqrt(square)


def relative_jacobian(mu: float, k_eff: float) -> float:
    """`|dF/dW| / |F|` of a block over that of one expert: `1 / sqrt(1 + mu (K_eff - 1))`.

    For experts whose outputs all have one length and pairwise the cosine mu, and whose Jacobians have one norm.
    ValueError where no such outputs exist.
    """
    return 1 / (math.sqrt(check.positive("k_eff", k_eff)) * equicorrelated(1.0, mu, k_eff))


class Constants(NamedTuple):
    """What the bounds on L and beta are made of, each a maximum over the selected experts at one input."""

    slope: Float[Tensor, "*batch"]  # `|l'(F)|`
    bend: Float[Tensor, "*batch"]  # the largest eigenvalue of `l''(F)`
    G: Float[Tensor, "*batch"]  # operator norm of an expert's Jacobian in its parameters
    Gh: Float[Tensor, "*batch"]  # norm of a logit's gradient in its row
    R: Float[Tensor, "*batch"]  # `|phi_k|`
    Hf: Float[Tensor, "*batch"]  # norm of the Hessian of `<u, f_k>` in the expert's parameters, `u = l'/|l'|`
    Hh: Float[Tensor, "*batch"]  # norm of the Hessian of a logit
    energy: Float[Tensor, "*batch"]  # `sum pi^2 = 1 / K_eff`
    top: Float[Tensor, "*batch"]  # the largest gate


def lipschitz_bound(c: Constants) -> Float[Tensor, "*batch"]:
    """`L <= |l'| sqrt((G^2 + Gh^2 R^2) / K_eff)` for one block, disjoint experts, a row-disjoint router."""
    return c.slope * ((c.G.square() + (c.Gh * c.R).square()) * c.energy).sqrt()


def smoothness_bound(c: Constants) -> Float[Tensor, "*batch"]:
    """The bound on the norm of the Hessian of one example's loss, of order 1/K (the sharp form of Lemma 1).

    `bend (G^2 + Gh^2 R^2) / K_eff + slope (max(top Hf, R Hh top + Gh^2 R (top + 2/K_eff)) + G Gh min(top, 1/2))`.
    """
    gauss_newton = c.bend * (c.G.square() + (c.Gh * c.R).square()) * c.energy
    router = c.R * c.Hh * c.top + c.Gh.square() * c.R * (c.top + 2 * c.energy)
    mixed = c.G * c.Gh * c.top.clamp(max=0.5)
    return gauss_newton + c.slope * (torch.maximum(c.top * c.Hf, router) + mixed)
