"""Which of a sparse layer's router parameters its function determines: a count over the graph of joint selections.

Behind a softmax over the selected experts only differences of the scores of two experts that are selected together
enter the function. Two experts are joined where that happens on an open set of inputs; what the function says of the
router is known for each component of this graph by itself.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, jacfwd

from moe_theory import _validate as check
from moe_theory.models.choices import Choice, ChosenMoE, Form
from moe_theory.models.routers import ROUTERS
from moe_theory.models.rules import Rule
from moe_theory.streams import torch_stream
from moe_theory.theory.identifiability import singular_gap


def component_nullity(scores: str, d: int, size: int) -> int:
    """Null directions of the router vectors of one component: `d + 1`, or `size + max(d - size, 0) + 1` on a sphere.

    Args:
        scores: a key of `ROUTERS`; d: dimension of an input; size: experts of the component.
    """
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
    """Columns of `router_jacobian` less its rank, rows scaled to norm 1; see `singular_gap` for what it refuses."""
    J = router_jacobian(moe, x).detach()
    scale = J.norm(dim=1, keepdim=True)
    if not scale.any():
        return J.shape[1]
    kept = scale[:, 0] > 0
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
