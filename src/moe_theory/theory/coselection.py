"""What gradients of a sparse layer say of its router, counted over the graph of joint selections, and what they miss.

Behind a softmax over the selected experts only differences of the scores of two experts that are selected together
enter the gates. Two experts are joined where that happens on an open set of inputs; what derivatives of the function,
off the boundaries of the selections, say of the router is known for each component of this graph by itself. The
boundaries move with the router, too: no derivative at an input sees that, but the function does.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf, pi, tan

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.integrate import quad
from scipy.optimize import linprog
from scipy.special import owens_t
from scipy.stats import norm
from torch import Tensor
from torch.func import functional_call, jacfwd

from moe_theory import _validate as check
from moe_theory.models.choices import Choice, ChosenMoE, Form
from moe_theory.models.routers import ROUTERS
from moe_theory.models.rules import Rule
from moe_theory.streams import torch_stream
from moe_theory.theory.identifiability import singular_gap

SMALL = 1e-3  # of the largest row of a Jacobian: rows below it would show their rounding if they were scaled


def component_nullity(scores: str, d: int, size: int) -> int:
    """Null directions of the router vectors of one component: `d + 1`, or `size + max(d - size, 0) + 1` on a sphere."""
    router = ROUTERS[check.choice("scores", scores, ROUTERS)]
    return size + max(d - check.integer("size", size, 1), 0) + 1 if router.sphere else d + 1


def router_nullity(scores: str, d: int, sizes: Sequence[int]) -> int:
    """The sum of `component_nullity` over components of such sizes; one of all M experts for a softmax over all."""
    return sum(component_nullity(scores, d, size) for size in sizes)


def router_jacobian(moe: ChosenMoE, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
    """Derivatives of the layer's first output at n inputs in its router's vectors and biases; one mixture, no noise."""
    inputs, rng = x[None, :, None], torch_stream(0, "routing noise")
    theta = {name: p.detach() for name, p in moe.named_parameters() if name.startswith(("router.W", "router.b"))}
    J = jacfwd(lambda p: functional_call(moe, p, (inputs, rng))[0][0, :, 0])(theta)
    return torch.cat([J[name].flatten(1) for name in theta], 1)


def measured_nullity(moe: ChosenMoE, x: Float[Tensor, "n d"]) -> int:
    """Columns of `router_jacobian` less its rank, rows scaled to norm 1; see `singular_gap` for what it refuses.

    A row far below the largest, where two experts nearly agree, is left out: scaling would enlarge its rounding.
    """
    J = router_jacobian(moe, x).detach()
    scale = J.norm(dim=1, keepdim=True)
    if not scale.any():
        return J.shape[1]
    kept = scale[:, 0] > SMALL * scale.max()
    return singular_gap(J[kept] / scale[kept]).nullity


def islands(
    scores: str, rule: Rule, k: int, d: int, sizes: Sequence[int], *, dead: int = 0, seed: int = 0
) -> tuple[ChosenMoE, Float[Tensor, "n d"]]:
    """A random mixture of affine experts in one or two groups that are not selected together, and inputs; float64.

    With two groups half of the inputs lie on either side of the origin along the first axis, and so do the router
    vectors. Left out are inputs with a gate below a hundredth of another, where rounding would decide, and those
    whose set is selected fewer than `4 (d + 1)` times, which would pin some directions of a pair and not all.

    Args:
        scores, rule, k: of the router; d: dimension, at least 2.
        sizes: experts of each group, at least k; dead: experts besides, with biases so low that none is selected.
        seed: draws mixture and inputs.
    """
    if not 1 <= len(sizes) <= 2 or min(sizes) < k:
        raise ValueError(f"sizes: expected one or two, each at least k = {k}, got {list(sizes)}")
    M, rng = sum(sizes) + check.integer("dead", dead, 0), torch_stream(seed, "near")
    moe = ChosenMoE(Form(check.integer("d", d, 2)), Choice(scores=scores, rule=rule, k=k), M, [seed]).double().eval()
    x = torch.randn(30 * M * (d + 1), d, generator=rng, dtype=torch.float64)
    with torch.no_grad():
        W, b = moe.router.W[0][0, 0], moe.router.b[0][0, 0]
        if len(sizes) == 2:
            x[:, 0] = (1.5 + x[:, 0].abs() / 2) * torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)
            side = torch.where(torch.arange(M) < sizes[0], 1.0, -1.0)
            W[:, 0] = side * (2 + W[:, 0].abs())
        b[M - dead :] -= 12
        pi = moe.gates(x[None], rng)[0][0]
    decided = torch.where(pi > 0, pi, torch.inf).amin(1) > 0.01 * pi.amax(1)
    x, chosen = x[decided], pi[decided] > 0
    _, at, counts = chosen.unique(dim=0, return_inverse=True, return_counts=True)
    return moe, x[counts[at] >= 4 * (d + 1)]


def somewhere_above(
    W: Float[Tensor, "M d"], b: Float[Tensor, " M"], upper: Iterable[int], lower: Iterable[int]
) -> bool:
    """Whether on an open subset of the cube `[-10, 10]^d` the scores `W x + b` of `upper` exceed those of `lower`.

    By a linear program: the largest `t <= 1` with `h_u - h_l >= t` for all such pairs.
    """
    pairs = [(u, v) for u in upper for v in lower]
    if not pairs:
        return True
    u, v = map(list, zip(*pairs, strict=True))
    A = np.hstack([(W[v] - W[u]).numpy(), np.ones((len(pairs), 1))])
    objective, box = [0.0] * W.shape[1] + [-1.0], [(-10.0, 10.0)] * W.shape[1] + [(-inf, 1.0)]
    return bool(-linprog(objective, A, (b[u] - b[v]).numpy(), bounds=box).fun > 1e-9)


def selected_pairs(W: Float[Tensor, "M d"], b: Float[Tensor, " M"]) -> Bool[Tensor, "p M"]:
    """The pairs that a linear router with K = 2 selects on an open set of a cube of inputs, a row of M marks each."""
    experts = set(range(check.integer("M", len(b), 2)))
    pairs = [pair for pair in combinations(experts, 2) if somewhere_above(W, b, pair, experts.difference(pair))]
    return torch.eye(len(b), dtype=torch.bool)[torch.tensor(pairs)].any(1)


def never_selected(W: Float[Tensor, "M d"], b: Float[Tensor, " M"]) -> int:
    """How many experts are below two others on the whole cube: K = 2 never selects them."""
    experts = set(range(check.integer("M", len(b), 2)))
    return sum(not any(somewhere_above(W, b, [m], experts - {m, j}) for j in experts - {m}) for m in experts)


def turned_share(M: int, angle: float) -> float:
    """The share of Gaussian inputs that get another expert when one of M orthonormal router vectors turns by an angle.

    K = 1, no biases, the turn leads out of the span of the vectors: `4 E T(Z, tan(angle / 2))`, Z the largest of M - 1
    standard normal numbers, with Owen's function T.
    """
    check.integer("M", M, 2)
    if not 0 <= angle < pi:
        raise ValueError(f"angle: expected a number from 0 to below pi, got {angle!r}")

    def share(z: float) -> float:
        return owens_t(z, tan(angle / 2)) * (M - 1) * norm.pdf(z) * norm.cdf(z) ** (M - 2)

    return 4 * quad(share, -10, 10)[0]
