"""The ratio `|f_G - f_*| / L_2(G, G_*)` of Theorem 4 of Nguyen et al. (2025) where G has one expert more than G_*.

Atom j of G_* is two in G, at `omega_j + t v sqrt((1 - q) / q)` and `omega_j - t v sqrt(q / (1 - q))` with shares
q and 1 - q of its weight; then everything moves by `t^2 M y`. As t goes to 0, the function changes by
`t^2 (w_j / 2 v^T grad^2 Psi_j v / D + J M y)` and L_2 is `t^2 (w_j |v|^2 + N(M y))`, N without the moves of atom j.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.mixture import MixingMeasure, expert_profile, jacobian, mixed, regression_function
from moe_theory.models.routers import Router
from moe_theory.theory.function_sets import tangent_functions
from moe_theory.theory.identifiability import centred_tangents
from moe_theory.theory.lower_bound import Price, descended, whitened

LOWEST = 0.2  # the smaller of the shares is at least this


@dataclass(frozen=True)
class OneTooMany:
    """Measures about a centred G_* with atom j in two, by coordinates `p = (v, z)`, and the logit of a share.

    v and z together have norm 1, and `y = |z| z`: scaling p by c moves v by c and y by c^2.
    """

    G: MixingMeasure  # the truth, centred
    j: int  # the atom that is two
    x: Float[Tensor, "n d"]  # the inputs, whose root mean square is the norm
    router: Router
    expert: str  # a key of `moe_theory.models.mixture.EXPERTS`, twice differentiable

    def parts(self) -> tuple[Float[Tensor, "p m"], Float[Tensor, "n m"], Float[Tensor, "n q q"]]:
        """M (see `whitened`, on centred tangents), `J M`, and `w_j / 2 grad^2 Psi_j / D`."""
        J = jacobian(self.G, self.x, self.router, self.expert, in_s=True)
        M = whitened(J, centred_tangents(self.G, self.router))
        _, second = tangent_functions(self.G, self.x, self.router, self.expert)
        return M, J @ M, 0.5 * self.G.beta0[self.j].exp() * second[:, self.j]

    def split(self, p: Float[Tensor, " c"]) -> tuple[Tensor, Tensor]:
        """v and y."""
        v, z = (p / p.norm()).split([2 * self.G.d + 1, len(p) - 2 * self.G.d - 1])
        return v, z * z.norm()

    def moves(self, delta: Float[Tensor, " p"]) -> tuple[Tensor, Tensor]:
        """A tangent as moves of beta0 (k) and of omega = (s, eta) (k, 2 d + 1)."""
        k, d = self.G.beta1.shape
        by_beta0, by_s, by_eta = delta.split([k, k * d, k * (d + 1)])
        return by_beta0, torch.cat([by_s.view(k, d), by_eta.view(k, d + 1)], 1)

    def size(self, omega: Float[Tensor, "i q"]) -> Float[Tensor, "i 2"]:
        """Norms of the parts s and eta."""
        return torch.stack([omega[:, : self.G.d].norm(dim=1), omega[:, self.G.d :].norm(dim=1)], 1)

    def limit(self) -> Price:
        """p to the changes of f and L_2 over t^2, as t goes to 0."""
        M, JM, second = self.parts()
        w, others = self.G.beta0.exp(), torch.arange(len(self.G)) != self.j

        def price(p: Tensor) -> tuple[Tensor, Tensor]:
            v, y = self.split(p)
            by_beta0, by_omega = self.moves(M @ y)
            change = torch.einsum("a,nab,b->n", v, second, v) + JM @ y
            loss = w[self.j] * v @ v + w @ by_beta0.abs() + w[others] @ self.size(by_omega)[others].sum(1)
            return change.square().mean().sqrt(), loss

        return price

    def measure(self, p: Float[Tensor, " c"], t: float, M: Float[Tensor, "p m"]) -> tuple[Tensor, Tensor]:
        """Logarithms of the weights (k + 1), and atoms (s, eta), centred; the two halves of atom j come last."""
        (k, d), j = self.G.beta1.shape, self.j
        v, y = self.split(p[:-1])
        q = LOWEST + (1 - 2 * LOWEST) * torch.sigmoid(p[-1])
        by_beta0, by_omega = self.moves(t * t * (M @ y))
        beta0 = torch.log_softmax(self.G.beta0 + by_beta0, 0)
        omega = torch.cat([self.router.embedding(self.G.beta1), self.G.eta], 1) + by_omega
        halves = t * torch.stack([((1 - q) / q).sqrt() * v, -(q / (1 - q)).sqrt() * v])
        rest = [i for i in range(k) if i != j]
        beta0 = torch.cat([beta0[rest], beta0[j] + torch.stack([q, 1 - q]).log()])
        omega = torch.cat([omega[rest], omega[j] + halves])
        centre = beta0.exp() @ omega[:, :d]
        return beta0, torch.cat([omega[:, :d] - centre, omega[:, d:]], 1)

    def at(self, t: float) -> Price:
        """(p, logit of a share) to `|f_G - f_*|` and L_2(G, G_*), with s for beta1."""
        (k, d), j, M = self.G.beta1.shape, self.j, self.parts()[0]
        phi, u = expert_profile(self.expert), self.router.feature(self.x)
        X = torch.cat([self.x, torch.ones_like(self.x[:, :1])], 1)
        f_star = regression_function(self.G, self.x, self.router, self.expert)
        cell = torch.tensor([i for i in range(k) if i != j] + [j, j])
        omega_star = torch.cat([self.router.embedding(self.G.beta1), self.G.eta], 1)[cell]
        power = torch.ones(k + 1, 1, dtype=X.dtype)
        power[-2:] = 2

        def price(p: Tensor) -> tuple[Tensor, Tensor]:
            beta0, omega = self.measure(p, t, M)
            f, w = mixed(u @ omega[:, :d].T + beta0, X @ omega[:, d:].T, phi), beta0.exp()
            weight = torch.zeros(k, dtype=w.dtype).index_add(0, cell, w) - self.G.beta0.exp()
            loss = weight.abs().sum() + w @ (self.size(omega - omega_star) ** power).sum(1)
            return (f - f_star).square().mean().sqrt(), loss

        return price

    def ratio(self, p: Float[Tensor, " c"], t: float) -> float:
        """`|f_G - f_*| / L_2` at (p, logit of a share)."""
        change, loss = self.at(t)(p)
        return float(change / loss)


class Lowest(NamedTuple):
    """The lowest ratios that descents find."""

    limit: float  # as t goes to 0
    p: Float[Tensor, " c"]  # where, with the logit 0 of the share 1/2 appended
    near: dict[float, tuple[float, float]]  # by t, the lowest ratio and the loss L_2 there
    first: Float[Tensor, " c"]  # (p, logit) from which the descents at the distances t begin


def lowest(pair: OneTooMany, starts: Float[Tensor, "m c"], distances: Sequence[float]) -> Lowest:
    """The lowest `|f_G - f_*| / L_2` in the limit and at distances t.

    The last of the starts p is for the distances, the others for the limit. Either search also starts where the other
    ended, so that the lowest values differ by what the limit neglects.
    """
    at_0 = pair.limit()
    ends = [descended(at_0, p) for p in starts[:-1]]
    best = min(ends, key=lambda end: end[2])[0]
    begin = torch.cat([torch.stack([best / best.norm(), starts[-1]]), starts.new_zeros(2, 1)], 1)
    near = {}
    for t in distances:
        descents = [descended(pair.at(t), p) for p in begin]
        near[t] = min((ratio, loss) for _, loss, ratio in descents)
    ends += [descended(at_0, p[:-1]) for p, *_ in descents]
    p, _, limit = min(ends, key=lambda end: end[2])
    return Lowest(limit, torch.cat([p, p.new_zeros(1)]), near, begin[0])
