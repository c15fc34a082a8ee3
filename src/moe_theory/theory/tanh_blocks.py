"""A sparse block whose experts are `V tanh(W x)` and whose router is linear: its derivatives in closed form.

What the bounds of smooth2025 (Eq. 2-15) are made of can be computed for it exactly. The gate is `topk_softmax`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory.models.rules import topk_softmax
from moe_theory.streams import torch_stream
from moe_theory.theory import jacobians as jac

GAIN = 1.5  # of the weights drawn


class Block(NamedTuple):
    """A block of M experts `f_m(x) = V_m tanh(W_m x)` with logits `h = theta x`."""

    theta: Float[Tensor, "M d"]
    W: Float[Tensor, "M H d"]
    V: Float[Tensor, "M o H"]


class Terms(NamedTuple):
    """What the closed forms are made of, at n inputs over their K selected experts."""

    pi: Float[Tensor, "n K"]
    f: Float[Tensor, "n K o"]
    dh: Float[Tensor, "n K d"]
    A: Float[Tensor, "n K o d"]
    t: Float[Tensor, "n K H"]
    V: Float[Tensor, "n K o H"]


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def correlated(rng: torch.Generator, rho: float, experts: int, out: int, d: int) -> Float[Tensor, "M out d"]:
    """The weights of M layers, of standard deviation `GAIN / sqrt(d)`; those of two are correlated by rho."""
    return GAIN * (rho**0.5 * normal(rng, 1, out, d) + (1 - rho) ** 0.5 * normal(rng, experts, out, d)) / d**0.5


def output(block: Block, x: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n o"]:
    """F(x), with all experts computed and the gates of those not selected zero."""
    hidden = torch.tanh(x @ block.W.flatten(0, 1).T).unflatten(1, block.W.shape[:2])
    f = torch.einsum("nmh,moh->nmo", hidden, block.V)
    return torch.einsum("nm,nmo->no", topk_softmax.gates(x @ block.theta.T, k), f)


def terms(block: Block, x: Float[Tensor, "n d"], k: int) -> Terms:
    """Gates, outputs and derivatives of the selected experts at n inputs."""
    h, T = (x @ block.theta.T).topk(k, -1)
    W, V = block.W[T], block.V[T]
    t = torch.tanh(torch.einsum("nkhd,nd->nkh", W, x))
    A = torch.einsum("nkoh,nkh,nkhd->nkod", V, 1 - t.square(), W)
    return Terms(h.softmax(-1), torch.einsum("nkoh,nkh->nko", V, t), block.theta[T], A, t, V)


def gradient_squares(
    s: Terms, x: Float[Tensor, "n d"], residual: Float[Tensor, "n o"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Squared norm of the gradient of each example's loss, in the parameters of the experts and of the router."""
    back = torch.einsum("no,nkoh->nkh", residual, s.V) * (1 - s.t.square())
    x2 = x.square().sum(1)
    experts = residual.square().sum(1)[:, None] * s.t.square().sum(-1) + x2[:, None] * back.square().sum(-1)
    phi = torch.einsum("no,nko->nk", residual, jac.deviations(s.pi, s.f))
    return (s.pi.square() * experts).sum(1), (s.pi * phi).square().sum(1) * x2


def constants(s: Terms, x: Float[Tensor, "n d"], residual: Float[Tensor, "n o"]) -> jac.Constants:
    """The constants of the bounds on L and beta, for tanh experts, a linear router and the squared loss.

    An expert's Jacobian J has `J J^T = |t|^2 I + |x|^2 V diag(t')^2 V^T`. The Hessian of <u, f> falls
    apart into one 2 x 2 matrix per hidden unit, `[[0, b], [b, a]]` with `b = t' |x|`, `a = (V^T u) t'' |x|^2`.
    """
    slope, length = residual.norm(dim=1), x.norm(dim=1)
    dt = 1 - s.t.square()
    top = torch.linalg.matrix_norm(s.V * dt[..., None, :], 2).square()
    G = (s.t.square().sum(-1) + (length**2)[:, None] * top).sqrt().amax(1)
    b = dt * length[:, None, None]
    pulled = torch.einsum("no,nkoh->nkh", residual / slope[:, None], s.V)
    a = (pulled * -2 * s.t * dt).abs() * (length**2)[:, None, None]
    Hf = (a / 2 + (a.square() / 4 + b.square()).sqrt()).amax((1, 2))
    R = jac.deviations(s.pi, s.f).norm(dim=-1).amax(1)
    return jac.Constants(
        slope=slope,
        bend=torch.ones_like(slope),
        G=G,
        Gh=length,
        R=R,
        Hf=Hf,
        Hh=torch.zeros_like(slope),
        energy=s.pi.square().sum(1),
        top=s.pi.amax(1),
    )


def example_loss(
    block: Block, x: Float[Tensor, " d"], y: Float[Tensor, " o"], k: int
) -> tuple[Callable[[Tensor], Tensor], Float[Tensor, " p"]]:
    """The squared loss of one example in the parameters of its selected experts and their router rows, as a vector."""
    chosen = Block(*(p[(block.theta @ x).topk(k).indices] for p in block))
    sizes = [p.numel() for p in chosen]

    def loss(w: Tensor) -> Tensor:
        theta, W, V = (part.reshape(p.shape) for part, p in zip(w.split(sizes), chosen, strict=True))
        f = torch.einsum("koh,kh->ko", V, torch.tanh(W @ x))
        return ((theta @ x).softmax(0) @ f - y).square().sum() / 2

    return loss, torch.cat([p.flatten() for p in chosen])


def first_term(s: Terms, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Largest eigenvalue of `J^T J`, the first term of the Hessian of the squared loss: that of the small `J J^T`.

    `J J^T = sum_k pi_k^2 (|t_k|^2 I + |x|^2 (V_k diag(t_k')^2 V_k^T + phi_k phi_k^T))`, J in all parameters.
    """
    phi, dt2 = jac.deviations(s.pi, s.f), (1 - s.t.square()).square()
    by_input = torch.einsum("nkoh,nkh,nkph->nkop", s.V, dt2, s.V) + phi[..., :, None] * phi[..., None, :]
    eye = torch.eye(s.f.shape[-1], dtype=x.dtype, device=x.device)
    each = s.t.square().sum(-1)[..., None, None] * eye + x.square().sum(1)[:, None, None, None] * by_input
    return torch.linalg.eigvalsh(torch.einsum("nk,nkop->nop", s.pi.square(), each))[:, -1]


def own_curvatures(s: Terms, x: Float[Tensor, "n d"], residual: Float[Tensor, "n o"]) -> Float[Tensor, "n K"]:
    """Norm of each expert's own block in the Hessian of `<l', F>`: its parameters and its row of the router.

    In coordinates along what the block sees, V_k in the direction of l' and W_k and the row in that of x, it is a
    matrix of 2H + 1 rows: `pi_k [[0, b], [b, a]]` for each hidden unit, as in `constants`, bordered by
    `pi_k (1 - pi_k) |x|` times the expert's gradient, and `pi_k (1 - 2 pi_k) <l', phi_k> |x|^2` in the corner.
    """
    n, K, H = s.t.shape
    pi, dt, length = s.pi[..., None], 1 - s.t.square(), x.norm(dim=1)[:, None, None]
    pulled, slope = torch.einsum("no,nkoh->nkh", residual, s.V), residual.norm(dim=1)[:, None, None]
    V, W, row = slice(0, H), slice(H, 2 * H), 2 * H
    upper = torch.zeros(n, K, 2 * H + 1, 2 * H + 1, dtype=x.dtype, device=x.device)
    upper[..., V, W] = torch.diag_embed(pi * slope * length * dt)
    upper[..., W, W] = torch.diag_embed(pi * length.square() * pulled * -s.t * dt)  # half of it, as in the corner
    upper[..., V, row], upper[..., W, row] = slope * s.t, length * pulled * dt
    upper[..., :row, row] *= pi * (1 - pi) * length
    phi = torch.einsum("no,nko->nk", residual, jac.deviations(s.pi, s.f))
    upper[..., row, row] = s.pi * (1 - 2 * s.pi) * phi * length[..., 0].square() / 2
    return torch.linalg.eigvalsh(upper + upper.mT).abs().amax(-1)


def behind_two_blocks(
    k: int, rho: float, normalized: bool, seed: int
) -> tuple[Callable[[Tensor], Tensor], Float[Tensor, " p"]]:
    """The cross-entropy of one example behind two blocks of k tanh experts in 8 dimensions, and its parameters.

    Of 32 experts drawn, the weights of two correlated by rho, the first k are there; logits have standard deviation
    0.1. If `normalized`, each block's output is divided by its root mean square.
    """
    rng, d = torch_stream(seed, "weights"), 8
    x, start = normal(rng, d), []
    for _ in range(2):
        theta = 0.1 * normal(rng, 32, d) / d**0.5
        start += [p[:k] for p in (theta, correlated(rng, rho, 32, d, d), correlated(rng, rho, 32, d, d))]

    def loss(w: Tensor) -> Tensor:
        z, parts = x, [q.reshape(p.shape) for q, p in zip(w.split([p.numel() for p in start]), start, strict=True)]
        for theta, W, V in (parts[:3], parts[3:]):
            z = (theta @ z).softmax(0) @ torch.einsum("koh,kh->ko", V, torch.tanh(W @ z))
            z = z * d**0.5 / z.norm() if normalized else z
        return -z[:4].log_softmax(0)[0]

    return loss, torch.cat([p.flatten() for p in start])
