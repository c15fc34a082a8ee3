"""Sampling without replacement (Gumbel top-K), exactly: smooth2025, Section 4.2 and Appendix C.

Experts are drawn one after the other with probabilities proportional to `w_m = e^{h_m}` among those not
yet drawn (Plackett and Luce). The K largest of `h + Gumbel noise` are such a sample T. Its law, the
inclusion probabilities `p_m = P(m in T)`, expected outputs, and the two parts of a gradient follow here;
all are differentiable in h.
"""

import itertools
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.theory.smoothing import _one_thread

ENUMERATED = 12  # up to this M inclusion probabilities are sums over sets
STEP, BELOW, ABOVE = 0.1, 400, 40  # of the trapezoidal rule in log t, and its steps below and above the arrivals
WIDEST = 600  # largest spread of the logits; beyond it the weights e^h underflow
GATES = ("all", "selected", "inclusion")


def _logits(h: Float[Tensor, " M"], k: int) -> Float[Tensor, " M"]:
    """h in float64 with its largest entry at 0; ValueError unless it is one finite row, and k in 1..M."""
    if h.ndim != 1 or not len(h):
        raise ValueError(f"h: expected the logits of one input, shape (M,), got shape {tuple(h.shape)}")
    if check.integer("k", k, 1) > len(h):
        raise ValueError(f"k: expected at most M = {len(h)} experts, got {k}")
    h = check.finite("h", h).double()
    h = h - h.detach().max()
    if h.detach().min() < -WIDEST:
        raise ValueError(f"h: expected logits within {WIDEST} of the largest, got one {-h.detach().min():.6g} below")
    return h


def orders(experts: int, k: int) -> Int[Tensor, "R k"]:
    """Every ordered choice of k among the experts, R = M!/(M-k)! rows."""
    return torch.tensor(list(itertools.permutations(range(experts), k)))


def subsets(experts: int, k: int) -> Bool[Tensor, "S M"]:
    """Every choice of k among the experts, S = M choose k rows, True for its members."""
    members = torch.tensor(list(itertools.combinations(range(experts), k)))
    return torch.zeros(len(members), experts, dtype=torch.bool).scatter(1, members, True)


def order_probability(h: Float[Tensor, " M"], order: Int[Tensor, "R k"]) -> Float[Tensor, " R"]:
    """`P(s_1, ..., s_K) = prod_r w_{s_r} / (W - w_{s_1} - ... - w_{s_{r-1}})`, W the sum of all weights.

    In logarithms, and what is left is summed anew at each step, so that no digits are lost. Experts in a row of `order`
    are distinct.
    """
    h = _logits(h, order.shape[1])
    chosen = torch.nn.functional.one_hot(order, len(h))
    drawn = chosen.cumsum(1)
    if (drawn > 1).any():
        raise ValueError("order: expected distinct experts in each row, got one named twice")
    left = h.masked_fill((drawn - chosen).bool(), -torch.inf)
    return (h[order] - left.logsumexp(2)).sum(1).exp()


def set_probability(h: Float[Tensor, " M"], members: Bool[Tensor, "S M"]) -> Float[Tensor, " S"]:
    """`P(T = S) = sum_{Q subset of S} (-1)^|Q| Lam / (Lam + w(Q))`, Lam the weight of the experts not in S.

    For K = M, where there are none, the probability is 1. All rows have K members, and M is at most 12: the sum has 2^K
    terms of alternating sign.
    """
    sizes = members.sum(1)
    if members.shape[1] != len(h) or (sizes != sizes[0]).any():
        raise ValueError(f"members: expected rows of length M = {len(h)} with one number of members, got sizes {sizes}")
    if len(h) > ENUMERATED:
        raise ValueError(f"h: expected at most {ENUMERATED} experts for sums over sets, got {len(h)}")
    k = int(sizes[0])
    w = _logits(h, k).exp()
    if k == len(w):
        return torch.ones_like(w[:1]).expand(len(members))
    rest = (w * ~members).sum(1, keepdim=True)
    inside = w[members.nonzero()[:, 1].reshape(-1, k)]
    taken = torch.cartesian_prod(*[w.new_tensor([0.0, 1.0])] * k).reshape(-1, k)
    return (rest / (rest + inside @ taken.mT)) @ (1 - 2 * (taken.sum(1) % 2))


def inclusion_by_orders(h: Float[Tensor, " M"], k: int) -> Float[Tensor, " M"]:
    """`p_m` as a sum over ordered samples; M!/(M-k)! terms, for M up to 8 or so."""
    _logits(h, k)
    order = orders(len(h), k).to(h.device)
    return torch.nn.functional.one_hot(order, len(h)).sum(1).double().mT @ order_probability(h, order)


def inclusion_by_sets(h: Float[Tensor, " M"], k: int) -> Float[Tensor, " M"]:
    """`p_m` as a sum over sets, M at most 12."""
    _logits(h, k)
    members = subsets(len(h), k).to(h.device)
    return members.double().mT @ set_probability(h, members)


@_one_thread()
def inclusion_by_quadrature(h: Float[Tensor, " M"], k: int) -> Float[Tensor, " M"]:
    """`p_m = int w_m e^{-w_m t} P(fewer than K of the others arrive before t) dt`, any M.

    Expert j arrives at an exponential time of rate w_j, so the number of arrivals is a sum of
    independent coins (probabilities `1 - e^{-w_j t}`), whose law is built up coin by coin. In `log t` the
    integrand is analytic in a strip about the real line and decays exponentially or faster at both ends:
    the trapezoidal rule of step 0.1 is exact to rounding.
    """
    h = _logits(h, k)
    w = h.exp()
    steps = BELOW + ABOVE + int(-h.detach().min() / STEP)
    t = torch.exp(STEP * (torch.arange(steps, dtype=w.dtype, device=w.device) - BELOW))
    coins = 1 - torch.exp(-t[:, None] * w)
    law = torch.nn.functional.one_hot(torch.zeros_like(coins, dtype=torch.int64), k).to(w)
    for j in range(len(w)):
        heads = coins[:, j, None].expand(-1, len(w)) * (torch.arange(len(w), device=w.device) != j)
        shifted = torch.nn.functional.pad(law[..., :-1], (1, 0))
        law = law * (1 - heads)[..., None] + shifted * heads[..., None]
    density = STEP * t[:, None] * w * torch.exp(-t[:, None] * w)
    return (density * law.sum(2)).sum(0)


def inclusion_probabilities(h: Float[Tensor, " M"], k: int) -> Float[Tensor, " M"]:
    """`p_m = P(m in T)`, in float64; by sets for M up to 12, by quadrature beyond."""
    return (inclusion_by_sets if len(h) <= ENUMERATED else inclusion_by_quadrature)(h, k)


def set_gates(h: Float[Tensor, " M"], members: Bool[Tensor, "S M"], gate: str) -> Float[Tensor, "S M"]:
    """Gates of each set, zero for experts outside it; all sets have the same number of members.

    The gate is "all" for the softmax over all M (Appendix C of smooth2025), "selected" for the softmax over the set
    (its Section 4.2), "inclusion" for the softmax over all M divided by p_m (Horvitz and Thompson).
    """
    check.choice("gate", gate, GATES)
    h = _logits(h, int(members[0].sum()))
    if gate == "selected":
        return torch.softmax(h.masked_fill(~members, -torch.inf), 1)
    pi = torch.softmax(h, 0)
    return members * (pi if gate == "all" else pi / inclusion_probabilities(h, int(members[0].sum())))


def expected_output(h: Float[Tensor, " M"], f: Float[Tensor, "M o"], k: int, gate: str) -> Float[Tensor, " o"]:
    """`E F_T = sum_S P(T = S) sum_{m in S} gate_m f_m` over all samples of k experts, M at most 12; f in float64."""
    members = subsets(len(h), k).to(h.device)
    return set_probability(h, members) @ (set_gates(h, members, gate) @ f)


def pathwise_and_score(
    h: Float[Tensor, " M"], k: int, losses: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """The two parts of the gradient of `sum_S P(T = S; h) l(S; h)` in h, by enumeration (M at most 12).

    They are `sum_S P dl` (what differentiating through a draw gives on average) and `sum_S l dP` (what it omits);
    `losses` takes (h, members) to the losses l of the sets, shape (S,).
    """
    members = subsets(len(h), k).to(h.device)
    h = h.detach().double().requires_grad_()
    P, l = set_probability(h, members), losses(h, members)  # noqa: E741
    (pathwise,) = torch.autograd.grad(P.detach() @ l, h, retain_graph=True, allow_unused=True, materialize_grads=True)
    (score,) = torch.autograd.grad(P @ l.detach(), h)
    return pathwise, score


def score_by_orders(h: Float[Tensor, " M"], k: int, losses: Callable[[Tensor, Tensor], Tensor]) -> Float[Tensor, " M"]:
    """`sum P l d log P` over ordered samples, by the closed form of `d log P`: the second part of `pathwise_and_score`.

    `d log P(s_1, ..., s_K) / dh_m = sum_r (1[m = s_r] - 1[m not drawn before r] w_m / (weight left at r))`.
    """
    order = orders(len(h), k)
    chosen = torch.nn.functional.one_hot(order, len(h))
    left = _logits(h, k).masked_fill((chosen.cumsum(1) - chosen).bool(), -torch.inf)
    dlogP = (chosen - left.softmax(2)).sum(1)
    return (order_probability(h, order) * losses(h, chosen.sum(1).bool())) @ dlogP


def slope_bound(p: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """`phi(p) = -(1 - p) log(1 - p) <= min(p, 1/e)`: no inclusion probability p has a larger slope in its own logit."""
    return -torch.special.xlog1py(1 - p, -p)


def largest_jump(losses: Float[Tensor, " S"], members: Bool[Tensor, "S M"]) -> Float[Tensor, ""]:
    """The largest difference of the losses of two sets that differ by the exchange of one expert."""
    exchanged = (members[:, None] != members[None]).sum(2) == 2
    return ((losses[:, None] - losses).abs() * exchanged).max()
