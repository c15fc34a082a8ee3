"""The gradient a router gets, for softmax before and after the selection, and the part of the risk's slope it misses.

With gates g (zero off the selected set T) and outputs f of the experts the layer is `F = sum_m g_m f_m`. Where the
selection is locally constant, with a the softmax that the gates are taken from (over T, or over all M experts),

    dF/dh_k = g_k f_k - a_k F,

which for "topk_softmax" is `pi_k (f_k - F)` (smooth2025, Eq. 4), and for "softmax_topk" and "sampled_topk" is
`pi^a_k (1[k in T] f_k - F)`, for k in T or not (the corrected Eq. 20).
"""

import math
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.rules import Rule, softmax_topk, topk_set, with_softmax
from moe_theory.models.systems import Gate
from moe_theory.theory.smoothing import _one_thread

#: Loss of n inputs x (n, 2) under linear router weights theta (M, 2), given who is selected (n, M).
PlaneLoss = Callable[[Float[Tensor, "M 2"], Float[Tensor, "n 2"], Bool[Tensor, "n M"]], Float[Tensor, " n"]]

#: What jumps at a boundary, at points of the plane.
Jump = Callable[[Float[Tensor, "*n 2"]], Float[Tensor, "*n"]]

REACH = 8.0  # radius beyond which a standard normal in the plane is ignored; the mass left out is exp(-32)
RADII, ANGLES = 40, 20  # nodes in the radius, and in the angle for each piece of the circle
POINTS = 64  # on a circle over which a function is integrated


def logit_jacobian(
    h: Float[Tensor, "*batch M"],
    f: Float[Tensor, "*batch M o"],
    k: int,
    rule: Rule,
    noise: Float[Tensor, "*batch M"] | None = None,
) -> Float[Tensor, "*batch M o"]:
    """`dF/dh`, row k the derivative of the layer's output in the logit of expert k, selection held fixed.

    ValueError for a rule whose gates are not those of a softmax, NaN logits, or sampling without noise.
    """
    chosen = with_softmax(rule).chosen(check.finite("h", h), k, noise)
    share = rule.shares(h, chosen)
    gates = share * chosen
    F = (gates[..., None] * f).sum(-2, keepdim=True)
    return gates[..., None] * f - share[..., None] * F


def equation_20(
    h: Float[Tensor, " M"], f: Float[Tensor, "M o"], dh: Float[Tensor, "M M *p"], k: int
) -> tuple[Float[Tensor, "o M *p"], Float[Tensor, "o M *p"]]:
    """Derivative of F with a softmax over all in the parameters of every head: smooth2025, Eq. 20, as printed, with
    its last factor the derivative of logit j, and corrected.

    The k largest logits are selected; `dh[j, m]` is the derivative of logit j in the parameters of head m.
    """
    pi, chosen = torch.softmax(check.finite("h", h), -1), topk_set(h, k)
    factor = (pi * chosen)[:, None] * (torch.eye(len(h)).to(pi) - pi)  # pi_j (delta_jm - pi_m)
    printed = torch.einsum("jm,jo,jm...->om...", factor, f, dh)
    corrected = torch.einsum("mo,mm...->om...", logit_jacobian(h, f, k, softmax_topk), dh)
    return printed, corrected


def reaches_router(
    gate: Gate, k: int, h: Float[Tensor, "n M"], f: Float[Tensor, "n M o"], noise: Float[Tensor, "n M"]
) -> str:
    """Whether dF/dh of the layer with a gate is "zero" at every input, "not zero" at every input, or "mixed"."""
    total = lambda h: torch.einsum("nm,nmo->o", gate(h, k, noise), f)  # noqa: E731
    size = torch.autograd.functional.jacobian(total, h).square().sum((0, 2)).sqrt()  # of (o, n, M)
    if size.max() < 1e-14:
        return "zero"
    return "not zero" if size.min() > 1e-6 else "mixed"


def kept_mass(h: Float[Tensor, "*batch M"], k: int) -> Float[Tensor, "*batch"]:
    """`P_T`, the sum of the k largest of the M softmax probabilities: `F_all = P_T F_sel`; K/M <= P_T <= 1."""
    return softmax_topk(h, k).sum(-1)


def top1_norm(h: Float[Tensor, "*batch M"], f: Float[Tensor, "*batch M o"]) -> Float[Tensor, "*batch"]:
    """Frobenius norm of `logit_jacobian` for "softmax_topk" at k = 1, with m the largest logit:

    `pi_m |f_m| sqrt((1 - pi_m)^2 + sum_{j != m} pi_j^2)`, which lies between `sqrt(M/(M-1))` and `sqrt(2)` times
    `pi_m (1 - pi_m) |f_m|`; the upper bound is approached if one other logit takes the rest, so for `pi_m >= 1/2`.
    """
    pi = torch.softmax(check.finite("h", h), -1)
    top, m = pi.max(-1, keepdim=True)
    others = pi.scatter(-1, m, 0.0)  # 1 - top as a sum, which loses no digits
    spread = (others.sum(-1).square() + others.square().sum(-1)).sqrt()
    return top.squeeze(-1) * f.norm(dim=-1).gather(-1, m).squeeze(-1) * spread


class Ray(NamedTuple):
    """A half-line from the origin across which, counterclockwise, one expert enters the selection and one leaves."""

    angle: float
    enters: int
    leaves: int


def _ties(theta: Float[Tensor, "M 2"]) -> list[Ray]:
    """Every half-line on which two logits of a linear router tie, in order of the angle.

    Turning left, i overtakes j where x is orthogonal to `theta_i - theta_j` and a quarter turn behind it. ValueError
    for two equal rows, whose tie is everywhere.
    """
    rays = []
    for i, j in permutations(range(len(theta)), 2):
        n = theta[i] - theta[j]
        if not n.any():
            raise ValueError(f"theta: expected distinct rows, got rows {i} and {j} equal")
        rays.append(Ray((math.atan2(float(n[1]), float(n[0])) - math.pi / 2) % (2 * math.pi), i, j))
    return sorted(rays)


def boundary_rays(theta: Float[Tensor, "M 2"], k: int) -> list[Ray]:
    """Where the k largest of the logits `<theta_m, x>` of a linear router in the plane change, in order of the angle.

    These are the half-lines on which two logits tie as the k-th and the (k+1)-th largest. ValueError for two equal
    rows, or three logits that tie all along such a half-line.
    """
    theta = check.finite("theta", theta.detach())
    topk_set(theta[:, 0], k)
    rays = []
    for ray in _ties(theta):
        h = theta @ theta.new_tensor([math.cos(ray.angle), math.sin(ray.angle)])
        lead = h[[m for m in range(len(h)) if m not in ray[1:]]] - (h[ray.enters] + h[ray.leaves]) / 2
        level = lead.abs() <= 1e-12 * theta.abs().max()
        larger, tied = int(((lead > 0) & ~level).sum()), int(level.sum())
        if larger <= k - 1 <= larger + tied:
            if tied:
                raise ValueError(f"theta: expected two logits tied at the angle {ray.angle:.4f}, got {2 + tied}")
            rays.append(ray)
    return rays


def legendre(cuts: list[float], nodes: int, device: torch.device) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"]]:
    """Gauss-Legendre nodes and weights (float64) on the intervals between sorted cuts, `nodes` on each."""
    z, w = (torch.from_numpy(a).to(device) for a in np.polynomial.legendre.leggauss(nodes))
    x = torch.cat([(a + b) / 2 + (b - a) / 2 * z for a, b in pairwise(cuts)])
    return x, torch.cat([(b - a) / 2 * w for a, b in pairwise(cuts)])


def _radii(device: torch.device) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"]]:
    """Nodes and weights for `int_0^inf g(r) e^(-r^2/2) dr / (2 pi)`."""
    r, w = legendre([0.0, REACH], RADII, device)
    return r, w * torch.exp(-r.square() / 2) / (2 * math.pi)


def plane_nodes(theta: Float[Tensor, "M 2"]) -> tuple[Float[Tensor, "n 2"], Float[Tensor, " n"]]:
    """Nodes and weights (float64) for means over a standard normal x in the plane.

    The circle is cut where two logits of the linear router theta tie, so that within a piece the selection does not
    change and the softmax has no narrow transition, and at four fixed angles.
    """
    cuts = sorted([ray.angle for ray in _ties(theta.detach())] + [i * math.pi / 2 for i in range(5)])
    r, w_r = _radii(theta.device)
    phi, w_phi = legendre(cuts, ANGLES, theta.device)
    x = r[:, None, None] * torch.stack([phi.cos(), phi.sin()], -1)
    return x.flatten(0, 1), ((w_r * r)[:, None] * w_phi).flatten()


def plane_risk(theta: Float[Tensor, "M 2"], k: int, loss: PlaneLoss) -> Float[Tensor, ""]:
    """Mean loss of a linear router over standard normal x in the plane.

    Differentiated by autograd in theta it gives the mean of the per-example gradients: nodes and selection are taken
    from a detached theta.
    """
    x, w = plane_nodes(theta)
    return w @ loss(theta, x, topk_set(x @ theta.detach().T, k))


@_one_thread()
def boundary_term(theta: Float[Tensor, "M 2"], k: int, loss: PlaneLoss) -> Float[Tensor, "M 2"]:
    """What the mean of the per-example gradients lacks of the gradient of `plane_risk` in theta.

    On a boundary where logits i and j tie, with u = h_i - h_j, it adds `int (loss with i - loss with j)
    (du/dtheta) / |grad_x u| p(x) dS`; here `du/dtheta_i = x = -du/dtheta_j` and `grad_x u = theta_i - theta_j`.
    Both losses have the k - 1 larger logits selected besides. It refuses what `boundary_rays` does.
    """
    theta = theta.detach()
    missing = torch.zeros_like(theta)
    r, w = _radii(theta.device)
    for angle, i, j in boundary_rays(theta, k):
        x = r[:, None] * theta.new_tensor([math.cos(angle), math.sin(angle)])
        with_i = topk_set(x @ theta.T, k)
        with_i[:, i], with_i[:, j] = True, False
        with_j = with_i.clone()
        with_j[:, i], with_j[:, j] = False, True
        jump = loss(theta, x, with_i) - loss(theta, x, with_j)
        speed = (w * jump) @ x / (theta[i] - theta[j]).norm()
        missing[i] += speed
        missing[j] -= speed
    return missing


def affine_loss(W: Float[Tensor, "M 2"], c: Float[Tensor, " M"], rule: Rule) -> PlaneLoss:
    """The squared loss of M affine experts `<W_m, x> + c_m` for the target `sin(x_1)`, under the gates of a rule."""

    def loss(theta, x, chosen):
        gates = rule.shares(x @ theta.T, chosen) * chosen
        return ((gates * (x @ W.T + c)).sum(-1) - x[:, 0].sin()).square()

    return loss


@_one_thread()
def mean_gradient(theta: Float[Tensor, "M 2"], k: int, loss: PlaneLoss) -> Float[Tensor, "M 2"]:
    """Mean over x of the gradients in theta of the examples' losses, by autograd of `plane_risk`."""
    theta = theta.detach().clone().requires_grad_()
    return torch.autograd.grad(plane_risk(theta, k, loss), theta)[0]


@_one_thread()
def risk_differences(theta: Float[Tensor, "M 2"], k: int, loss: PlaneLoss) -> Float[Tensor, "M 2"]:
    """The slope of `plane_risk` in every entry of theta, by central differences of fourth order.

    Their step is smaller where two rows are near each other: a boundary turns as fast as their distance is small.
    """
    slope = torch.zeros_like(theta)
    step = 1e-4 * torch.pdist(theta.detach()).min().clamp(max=1.0)
    for i in range(theta.numel()):
        for at, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
            moved = theta.clone()
            moved.view(-1)[i] += at * step
            slope.view(-1)[i] += weight * plane_risk(moved, k, loss) / (12 * step)
    return slope


def _circle(device: torch.device) -> Float[Tensor, "n 2"]:
    """Equally spaced points of the unit circle (float64), for the trapezoidal rule."""
    angle = 2 * math.pi * torch.arange(POINTS, dtype=torch.float64, device=device) / POINTS
    return torch.stack([angle.cos(), angle.sin()], -1)


def disc_integral(jump: Jump, center: Float[Tensor, " 2"], a: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """`int jump(x) dx` over the disc `|x - center|^2 < a`; the nodes move with it, so that autograd sees its edge.

    For two experts with losses l_1, l_2 and logits `h = (a - |x - center|^2, 0)`, and `jump = (l_1 - l_2) p`, it is
    the risk at K = 1, gates 1 and 0, less that of the second expert alone.
    """
    e = _circle(center.device)
    r, w = (t[:, None] for t in legendre([0.0, 1.0], RADII, center.device))
    return a * (w * r * jump(center + a.sqrt() * r[..., None] * e)).sum() * 2 * math.pi / len(e)


def circle_term(jump: Jump, center: Float[Tensor, " 2"], a: Float[Tensor, ""]) -> Float[Tensor, " 3"]:
    """The boundary term in (center, a) of the same router: `int jump du / |grad_x u| dS` over the circle.

    Here `u = a - |x - center|^2`, so `du = (2 (x - center), 1)` and `|grad_x u| = 2 sqrt(a)`.
    """
    e, radius = _circle(center.device), a.sqrt()
    du = torch.cat([2 * radius * e, torch.ones_like(e[:, :1])], 1)
    return (jump(center + radius * e)[:, None] * du / (2 * radius)).sum(0) * radius * 2 * math.pi / len(e)
