"""The regression MoE of Nguyen et al. (2025): a softmax of router scores times experts `phi(a.x + b)`.

A parameter set is a mixing measure `G = sum_i exp(beta0_i) delta_(beta1_i, eta_i)`. Every `Router`
scores an input by `<s(beta1), u(x)> + beta0`; routers differ in the embedding s and the feature u. A tangent
is a flat vector of length `k (2 d + 2)`, ordered beta0 (k), beta1 (k d), eta (k (d + 1)).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.experts import ACTIVATIONS, Activation
from moe_theory.models.routers import Router

#: Profiles phi of the experts `h(x, (a, b)) = phi(a.x + b)`.
EXPERTS = {
    **{name: ACTIVATIONS[name] for name in ("linear", "relu", "tanh", "gelu", "cubic")},
    "quadratic": Activation(lambda z: z * z, lambda z: 2 * z, 2),
}


@dataclass(frozen=True)
class MixingMeasure:
    """`G = sum_i exp(beta0_i) delta_(beta1_i, eta_i)`, `eta_i = (a_i, b_i)`.

    Args:
        beta0: (k,) log-weights.
        beta1: (k, d) router vectors.
        eta: (k, d + 1) experts, the bias b in the last column.

    Raises:
        ValueError: for shapes or floating types that do not match, k below 1 or numbers that are not finite.
    """

    beta0: Float[Tensor, " k"]
    beta1: Float[Tensor, "k d"]
    eta: Float[Tensor, "k q"]

    def __post_init__(self):
        parts = {name: check.instance(name, getattr(self, name), Tensor) for name in ("beta0", "beta1", "eta")}
        shapes = [tuple(t.shape) for t in parts.values()]
        k, d = (*shapes[1], 0, 0)[:2]
        if k < 1 or shapes != [(k,), (k, d), (k, d + 1)]:
            raise ValueError(f"G: expected beta0 (k,), beta1 (k, d), eta (k, d + 1), got {shapes}")
        for name, part in parts.items():
            check.finite(name, part)
        kinds = {part.dtype for part in parts.values()}
        if len(kinds) > 1 or not self.beta0.is_floating_point():
            raise ValueError(f"G: expected beta0, beta1 and eta of one floating type, got {kinds}")

    def __len__(self) -> int:
        return len(self.beta0)

    @property
    def d(self) -> int:
        """Dimension of the inputs."""
        return self.beta1.shape[1]

    def atoms(self) -> Float[Tensor, "k p"]:
        """`omega_i = (beta1_i, eta_i)`, whose distances make the Voronoi cells of Eq. 5."""
        return torch.cat([self.beta1, self.eta], 1)

    def flat(self) -> Float[Tensor, " p"]:
        """All parameters in the order of a tangent."""
        return torch.cat([self.beta0, self.beta1.flatten(), self.eta.flatten()])

    @classmethod
    def of(cls, flat: Float[Tensor, " p"], k: int) -> "MixingMeasure":
        """The measure of k atoms that `flat` lists the parameters of."""
        d = len(flat) // (2 * k) - 1
        beta0, beta1, eta = flat.split([k, k * d, k * (d + 1)])
        return cls(beta0, beta1.view(k, d), eta.view(k, d + 1))

    def with_(self, **parts: Tensor) -> "MixingMeasure":
        """The same measure with other parts.

        Args:
            parts: any of `beta0`, `beta1` and `eta`, by name.
        """
        return replace(self, **parts)


def draw_measure(k: int, d: int, seed: int, router_scale: float = 1.0, expert_scale: float = 1.0) -> MixingMeasure:
    """A random truth: every parameter normal, with standard deviations `scale / sqrt(d)`; the last beta0 is 0.

    Scales 0.1 and 1 are those of Nguyen et al. (2025), E.1, which then sets two routers to zero.

    Args:
        k: number of atoms; d: dimension of the inputs.
        seed: draws them.
        router_scale, expert_scale: of (beta0, beta1) and of eta, >= 0.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """
    check.integer("k", k, 1)
    check.integer("d", d, 1)
    check.not_negative("router_scale", router_scale)
    check.not_negative("expert_scale", expert_scale)
    rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
    draw = torch.randn(k, 2 * d + 2, generator=rng, dtype=torch.float64) / math.sqrt(d)
    beta0, beta1, eta = draw.split([1, d, d + 1], 1)
    beta0 = router_scale * beta0[:, 0]
    beta0[-1] = 0
    return MixingMeasure(beta0, router_scale * beta1, expert_scale * eta)


def expert_profile(name: str) -> Activation:
    """The profile phi of that name; ValueError names the ones there are."""
    return EXPERTS[check.choice("expert", name, EXPERTS)]


def gates(G: MixingMeasure, x: Float[Tensor, "n d"], router: Router) -> Float[Tensor, "n k"]:
    """`Softmax(<s(beta1_i), u(x)> + beta0_i)`."""
    return torch.softmax(router.scores(G.beta0, G.beta1, x), -1)


def preactivations(G: MixingMeasure, x: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
    """`a_i.x + b_i`."""
    return x @ G.eta[:, :-1].T + G.eta[:, -1]


def mixed(scores: Float[Tensor, "*batch k"], z: Float[Tensor, "*batch k"], phi: Activation) -> Float[Tensor, "*batch"]:
    """`f = sum_i pi_i phi(z_i)` with pi the softmax of the scores."""
    return (torch.softmax(scores, -1) * phi.value(z)).sum(-1)


def regression_function(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu"
) -> Float[Tensor, " n"]:
    """f_G of Eq. 2 (cosine), g_G of Eq. 8 (perturbed), s_G of Appendix F (linear) at n inputs."""
    return mixed(router.scores(G.beta0, G.beta1, x), preactivations(G, x), expert_profile(expert))


class Slopes(NamedTuple):
    """`f` and its derivatives in scores and preactivations: `df = sum_i w_i dscore_i + v_i dz_i`."""

    f: Float[Tensor, "*batch"]
    w: Float[Tensor, "*batch k"]
    v: Float[Tensor, "*batch k"]


def slopes(scores: Float[Tensor, "*batch k"], z: Float[Tensor, "*batch k"], phi: Activation) -> Slopes:
    """`f = sum_i pi_i phi(z_i)`, `w_i = pi_i (phi(z_i) - f)`, `v_i = pi_i phi'(z_i)`.

    As `score_i = beta0_i + <s_i, u>` and `z_i = eta_i.(x, 1)`, the Jacobian of f in (beta0, s, eta) has rows
    `(w_i, w_i u, v_i (x, 1))_i`: what `jacobian` lays out, and least squares multiplies with.
    """
    pi, h = torch.softmax(scores, -1), phi.value(z)
    f = (pi * h).sum(-1)
    return Slopes(f, pi * (h - f[..., None]), pi * phi.slope(z))


def jacobian(
    G: MixingMeasure, x: Float[Tensor, "n d"], router: Router, expert: str = "relu", *, in_s: bool = False
) -> Float[Tensor, "n p"]:
    """Derivatives of the regression function at n inputs in all its parameters, beta_0 included, see `slopes`.

    With `in_s` the embeddings `s_i` are the parameters, free in R^d, in place of the `beta1_i`.
    """
    _, w, v = slopes(router.scores(G.beta0, G.beta1, x), preactivations(G, x), expert_profile(expert))
    by_router = w[:, :, None] * router.feature(x)[:, None]
    if not in_s:
        by_router = router.pull_back(G.beta1, by_router)
    by_expert = v[:, :, None] * torch.cat([x, torch.ones_like(x[:, :1])], 1)[:, None]
    return torch.cat([w, by_router.flatten(1), by_expert.flatten(1)], 1)
