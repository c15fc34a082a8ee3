"""Gradients averaged over routing noise, and how router and experts feed each other (Chen et al. 2022, Lemma E.14)."""

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import Coefficients, PatchBatch
from moe_theory.theory.smoothing import route_probabilities


def expected_gradients(batch: PatchBatch, model: PatchMoE) -> tuple[Float[Tensor, "d M"], Float[Tensor, "M J d"]]:
    """Eq. E.1 and E.2 averaged over uniform routing noise, with the exact routing probabilities P.

    With `a_m = l'(y pi_m f_m) pi_m y`, column m of the router's is the mean over examples of
    `(P_m a_m f_m - pi_m sum_m' P_m' a_m' f_m') sum_p x^(p)`, and a filter's that of
    `P_m a_m sum_p sigma'(<w_mj, x^(p)>) x^(p)`.
    """
    x, y, W = batch.x, batch.y[:, None], model.W.data
    z = (x.flatten(0, 1) @ W.flatten(0, 1).T).view(*x.shape[:2], *W.shape[:2])  # (n, P, M, J)
    f, h = model.sigma.value(z).sum((1, 3)), x.sum(1) @ model.router.theta.data
    pi, p = h.softmax(1), route_probabilities(h)
    a = -torch.sigmoid(-y * pi * f) * pi * y
    sent = p * a * f
    router = x.sum(1).T @ (sent - pi * sent.sum(1, keepdim=True)) / len(x)
    return router, torch.einsum("npmj,npd->mjd", model.sigma.slope(z) * (p * a)[:, None, :, None], x) / len(x)


def first_order_share(M: int) -> float:
    """`1/(M-1) + 1/M^2`: how `P_m pi_m` grows with `h_m` where M logits are tied and the others keep their sum zero.

    The routing probability exceeds 1/M by `M/(M-1) h_m`, the gate value by `h_m / M`.
    """
    check.integer("M", M, 2)
    return 1 / (M - 1) + 1 / M**2


def own_feedback(answers: Float[Tensor, " M"]) -> float:
    """How fast a component along u of the first expert's router grows by itself near a tie, at `l' = -1/2`, per unit.

    Expert 1 has the logit `h_1 = <u, sum_p x^(p)>` and the others share `-h_1`. To first order its router's pull on u
    is half of `c (1 - 1/M) A_1 + c/(M (M-1)) sum_{m != 1} A_m - M^-3 sum_m A_m`, c = `first_order_share(M)`, with the
    answers `A_m = E[<u, sum_p x^(p)>^2 y f_m(x)]`.
    """
    M, total, own = len(answers), float(answers.sum()), float(answers[0])
    c = first_order_share(M)
    return (c * (1 - 1 / M) * own + c / (M * (M - 1)) * (total - own) - total / M**3) / 2


def center_moments(batch: Coefficients, K: int) -> Float[Tensor, "K K"]:
    """The drive of Lemma E.17: entry (k, q) is the sample's mean of `1[cluster k] beta y f` for a cubic filter v_q.

    Such a filter answers `y f = alpha^3` on its own cluster, and `y epsilon gamma^3` where v_q is feature noise. Near a
    tie of M experts, at `l' = -1/2`, minus the router's gradient along c_k is `(g_m - mean_m' g_m') / (2 M^2)` with
    `g_m` the sum over q of this entry and `sum_j <w_mj, v_q>^3`.

    Args:
        batch: the sample's coefficients; K: how many clusters it has.
    """
    own, noise = batch.beta * batch.alpha**3, batch.beta * batch.y * batch.epsilon * batch.gamma**3
    moments = torch.zeros(K, K, dtype=torch.float64)
    for q, part in ((batch.cluster, own), (batch.other, noise)):
        moments.index_put_((batch.cluster, q), part.double(), accumulate=True)
    return moments / len(batch)
