"""The gate of the selected experts: how large it can be, and its derivatives (smooth2025, Eq. 2 to 4 and 13)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.rules import Rule, known, with_softmax
from moe_theory.theory.jacobians import deviations


def gate_range(k: int, spread: float) -> tuple[float, float]:
    """Least and largest value of one gate among k whose logits differ by at most `spread`; both are attained.

    `1 / (1 + (k-1) e^spread) <= pi <= 1 / (1 + (k-1) e^-spread)`, the sharp form of smooth2025, Eq. 2 and 3.
    """
    others, spread = check.integer("k", k, 1) - 1, check.not_negative("spread", spread)
    return 1 / (1 + others * math.exp(spread)), 1 / (1 + others * math.exp(-spread))


def energy_bound(k: int, spread: float) -> float:
    """The largest `sum pi^2` of k gates whose logits differ by at most `spread`: `cosh(spread/2)^2 / k`.

    It is attained where a share `1 / (1 + e^spread)` of the logits is at the top and the others at the bottom.
    """
    return math.cosh(check.not_negative("spread", spread) / 2) ** 2 / check.integer("k", k, 1)


def jump_bound(k: int, rule: Rule) -> float:
    """The largest gate of the last of k selected experts at a tie with the best of the others.

    When the two change places, the output jumps by this gate times the difference of the two experts: `1/k` for
    `topk_softmax`, `1/(k+1)` where the softmax is over all. ValueError for a rule without a softmax.
    """
    with_softmax(rule)
    return 1 / (check.integer("k", k, 1) + known(rule).over_all)


def jumps_at_ties(k: int, rule: Rule, h: Float[Tensor, "n M"], f: Float[Tensor, "n M o"]) -> Float[Tensor, " n"]:
    """Jump of F over `|f_i - f_j|`, i the last selected expert and j the next, by evaluating F beside their tie.

    The logits k and k + 1 in size, k < M, are both moved to their mean.
    """
    order = h.argsort(-1, descending=True)
    h, f = h.gather(-1, order), f.gather(1, order[..., None].expand_as(f))
    h[:, k - 1 : k + 1] = h[:, k - 1 : k + 1].mean(-1, keepdim=True)
    side = 1e-12 * torch.eye(h.shape[1], dtype=h.dtype, device=h.device)[k - 1]
    jump = torch.einsum("nm,nmo->no", rule.gates(h + side, k) - rule.gates(h - side, k), f)
    return jump.norm(dim=1) / (f[:, k - 1] - f[:, k]).norm(dim=1)


def gate_jacobian(pi: Float[Tensor, "K"], f: Float[Tensor, "K o"]) -> Float[Tensor, "K o"]:
    """`dF/dh_k = pi_k phi_k` with `phi_k = f_k - F`, for `F = sum pi_k f_k` and pi the softmax of the k logits."""
    return pi[:, None] * deviations(pi, f)


def gate_hessian(pi: Float[Tensor, "K"], f: Float[Tensor, "K o"]) -> Float[Tensor, "K K o"]:
    """`d^2F/dh_k dh_l = delta_kl pi_k phi_k - pi_k pi_l (phi_k + phi_l)`: third joint cumulants under pi."""
    phi = deviations(pi, f)
    pairs = pi[:, None, None] * pi[None, :, None] * (phi[:, None] + phi[None, :])
    return torch.diag_embed((pi[:, None] * phi).T).permute(1, 2, 0) - pairs


def router_hessian(
    pi: Float[Tensor, "K"], f: Float[Tensor, "K"], dh: Float[Tensor, "K p"], d2h: Float[Tensor, "K p p"]
) -> Float[Tensor, "p p"]:
    """`d^2F/dTheta^2 = sum_k pi_k phi_k (d^2h_k + (dh_k - E dh)^2)`: smooth2025, Eq. 13, corrected; one output.

    dh and d2h are gradients and Hessians of the K logits in the p parameters of the router, which they may share.
    """
    centred = dh - pi @ dh
    return torch.einsum("k,kab->ab", pi * (f - pi @ f), d2h + centred[:, :, None] * centred[:, None])


def printed_router_hessian(
    pi: Float[Tensor, "K"], f: Float[Tensor, "K"], dh: Float[Tensor, "K p"], d2h: Float[Tensor, "K p p"]
) -> Float[Tensor, "p p"]:
    """smooth2025, Eq. 13, as printed, with the arguments of `router_hessian`.

    `sum_j pi_j f_j ((dh_j - E dh)^2 + sum_k pi_k^2 (dh_j - dh_k)^2 + sum_k pi_k (d^2h_j - d^2h_k))`.
    """
    centred, pairs = dh - pi @ dh, dh[:, None] - dh[None]
    squares = centred[:, :, None] * centred[:, None] + torch.einsum("k,jka,jkb->jab", pi.square(), pairs, pairs)
    return torch.einsum("j,jab->ab", pi * f, squares + d2h - torch.einsum("k,kab->ab", pi, d2h))
