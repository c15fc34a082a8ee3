"""How norms of Jacobians, L and beta of a block change with the number K of selected experts (smooth2025, Eq. 2-15).

The block has M = 64 experts `V tanh(W x)` and a linear router; the gate is `topk_softmax`. It is
measured at random initialization and after it has learned one function, the same for every K.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.curvature import largest_curvature
from moe_theory.models.routers import gate_values
from moe_theory.theory import jacobians as jac

M, D, WIDTH, OUT, GAIN = 64, 16, 16, 4, 1.5
SELECTED = (1, 2, 4, 8, 16, 32, 64)
SPREADS, CORRELATIONS, STAGES, REPETITIONS = (0.1, 1.0), (0.0, 0.5, 1.0), ("start", "trained"), 10
INPUTS, CURVED = 64, 2  # inputs that the norms are averaged over; of these, inputs whose Hessian is looked at
STEPS, BATCH, RATE = 500, 32, 0.02  # SGD at rate RATE * K: the gates divide the step that the block sees by about K


def grid() -> list[dict]:
    """Every K, spread of the logits, correlation of the experts and stage, ten blocks each."""
    return [
        dict(k=k, spread=spread, rho=rho, stage=stage, rep=rep)
        for spread in SPREADS
        for rho in CORRELATIONS
        for stage in STAGES
        for k in SELECTED
        for rep in range(REPETITIONS)
    ]


def smoke(grid: list[dict]) -> list[dict]:
    """Two rows before training."""
    return grid[:1] + grid[REPETITIONS : REPETITIONS + 1]


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


def draw_block(seed: int, spread: float, rho: float) -> Block:
    """A random block: logits of standard deviation `spread`, weights of two experts correlated by `rho`."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def weights(*shape):
        return GAIN * (rho**0.5 * normal(1, *shape) + (1 - rho) ** 0.5 * normal(M, *shape)) / shape[-1] ** 0.5

    return Block(spread * normal(M, D) / D**0.5, weights(WIDTH, D), weights(OUT, WIDTH))


def target(seed: int) -> Callable[[Tensor], Tensor]:
    """One network of the experts' shape, the function that blocks of every K are to learn."""
    one = draw_block(10_000 + seed, 0.0, 1.0)
    return lambda x: torch.tanh(x @ one.W[0].T) @ one.V[0].T


def inputs(n: int, seed: int) -> Float[Tensor, "n d"]:
    """Standard normal inputs."""
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def output(block: Block, x: Float[Tensor, "n d"], k: int) -> Float[Tensor, "n o"]:
    """F(x), with all experts computed and the gates of those not selected zero."""
    hidden = torch.tanh(x @ block.W.flatten(0, 1).T).unflatten(1, block.W.shape[:2])
    f = torch.einsum("nmh,moh->nmo", hidden, block.V)
    return torch.einsum("nm,nmo->no", gate_values(x @ block.theta.T, k, "topk_softmax"), f)


def train(block: Block, f_star: Callable[[Tensor], Tensor], k: int, seed: int) -> Block:
    """SGD on the squared loss `|F - f*|^2 / 2` with fresh inputs at every step."""
    block = Block(*(p.clone().requires_grad_() for p in block))
    rng = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        x = torch.randn(BATCH, D, generator=rng, dtype=torch.float64)
        loss = (output(block, x, k) - f_star(x)).square().sum(1).mean() / 2
        slopes = torch.autograd.grad(loss, block)
        with torch.no_grad():
            for p, slope in zip(block, slopes, strict=True):
                p -= RATE * k * slope
    return Block(*(p.detach() for p in block))


def terms(block: Block, x: Float[Tensor, "n d"], k: int) -> Terms:
    """Gates, outputs and derivatives of the selected experts at n inputs."""
    h, T = (x @ block.theta.T).topk(k, -1)
    W, V = block.W[T], block.V[T]
    t = torch.tanh(torch.einsum("nkhd,nd->nkh", W, x))
    A = torch.einsum("nkoh,nkh,nkhd->nkod", V, 1 - t.square(), W)
    return Terms(h.softmax(-1), torch.einsum("nkoh,nkh->nko", V, t), block.theta[T], A, t, V)


def example_gradients(
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
    energy, one = s.pi.square().sum(1), torch.ones_like(slope)
    return jac.Constants(slope, one, G, length, R, Hf, 0 * one, energy, s.pi.amax(1))


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


def measure(block: Block, f_star: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"], k: int) -> dict[str, float]:
    """One row's values.

    Root mean squares over the inputs: router, expert, input (norms of the three Jacobians), output, residual.
    Means: diagonal and pairs (the two sums of Eq. 9), cosine (of two different terms of Eq. 8; 1 where there is
    one term), pi_max, and k_eff = 1 / mean of sum pi^2. Maxima: L, L_unit (gradient over residual), worst
    (residual), beta and its bound over the first inputs, the bound on L.
    """
    s, y = terms(block, x, k), f_star(x)
    F = (s.pi[..., None] * s.f).sum(1)
    dt2, x2 = (1 - s.t.square()).square(), x.square().sum(1)
    expert = OUT * s.t.square().sum(-1) + x2[:, None] * torch.einsum("nkoh,nkh->nk", s.V.square(), dt2)
    c = jac.input_terms(s.pi, s.f, s.dh, s.A)
    own, of_router = example_gradients(s, x, F - y)
    bounds = constants(s, x, F - y)
    curvatures = [abs(largest_curvature(*example_loss(block, x[i], y[i], k)).value) for i in range(CURVED)]
    means = dict(
        router=jac.router_norm(s.pi, s.f, x[:, None].expand(-1, k, -1)).square().mean().sqrt(),
        expert=(s.pi.square() * expert).sum(1).mean().sqrt(),
        input=c.sum(1).square().sum((1, 2)).mean().sqrt(),
        output=F.square().sum(1).mean().sqrt(),
        diagonal=c.square().sum((1, 2, 3)).mean(),
        pairs=jac.pair_sum(c).mean(),
        cosine=jac.pair_cosine(c).mean() if k > 1 else torch.ones(()),
        k_eff=1 / bounds.energy.mean(),
        pi_max=bounds.top.mean(),
        residual=(F - y).square().sum(1).mean().sqrt(),
        worst=(F - y).norm(dim=1).max(),
        L=(own + of_router).max().sqrt(),
        L_unit=((own + of_router) / (F - y).square().sum(1)).max().sqrt(),
        L_bound=jac.lipschitz_bound(bounds).max(),
        beta=torch.tensor(max(curvatures)),
        beta_bound=jac.smoothness_bound(bounds)[:CURVED].max(),
    )
    return {name: float(f"{float(value):.6g}") for name, value in means.items()}


def row(key: dict) -> dict:
    """A block drawn, trained if the stage says so, and measured."""
    f_star, block = target(key["rep"]), draw_block(key["rep"], key["spread"], key["rho"])
    if key["stage"] == "trained":
        block = train(block, f_star, key["k"], 20_000 + key["rep"])
    return measure(block, f_star, inputs(INPUTS, 30_000 + key["rep"]), key["k"])


class Floor(NamedTuple):
    """What carries a block from one end of a segment to the other; see `floor`."""

    slope: Float[Tensor, " s"]
    jumps: Float[Tensor, " s"]
    needed: Float[Tensor, " s"]


def floor(
    block: Block, f_star: Callable[[Tensor], Tensor], ends: Float[Tensor, "2 s d"], k: int, cells: int = 200
) -> Floor:
    """The floor under slope and jumps of F, on a grid of each of s segments.

    Args:
        ends: both ends of the segments.
        cells: of the grid.

    Returns:
        slope: largest operator norm of dF/dz at a point of the grid, times the length.
        jumps: lengths of the increments of F over the cells in which the selected set changes, summed.
        needed: `|f*(x) - f*(x')|` less the errors at both ends, which slope + jumps cannot fall below, up to the grid.

    Raises:
        ValueError: for fewer than one cell.
    """
    share = torch.linspace(0, 1, check.integer("cells", cells, 1) + 1, dtype=ends.dtype)
    path, shape = torch.lerp(ends[0, :, None], ends[1, :, None], share[:, None]).flatten(0, 1), (-1, cells + 1)
    s = terms(block, path, k)
    F, F_star = output(block, path, k).unflatten(0, shape), f_star(path).unflatten(0, shape)
    steepest = torch.linalg.matrix_norm(jac.input_terms(s.pi, s.f, s.dh, s.A).sum(1), 2).unflatten(0, shape).amax(1)
    chosen = (path @ block.theta.T).unflatten(0, shape).topk(k).indices.sort(-1).values
    changed = (chosen[:, 1:] != chosen[:, :-1]).any(-1)
    jumps = (changed * F.diff(dim=1).norm(dim=-1)).sum(1)
    errors = (F - F_star).norm(dim=-1)[:, [0, -1]].sum(1)
    return Floor(steepest * (ends[1] - ends[0]).norm(dim=1), jumps, (F_star[:, -1] - F_star[:, 0]).norm(dim=1) - errors)


def two_blocks(
    k: int, rho: float, normalized: bool, seed: int
) -> tuple[Callable[[Tensor], Tensor], Float[Tensor, " p"]]:
    """The cross-entropy of one example behind two blocks of k tanh experts in 8 dimensions, and its parameters.

    Of 32 experts drawn, correlated by rho, the first k are there; logits have standard deviation 0.1.

    Args:
        normalized: whether each block's output is divided by its root mean square.
    """
    rng, d = torch.Generator().manual_seed(seed), 8

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def weights():
        return GAIN * (rho**0.5 * normal(1, d, d) + (1 - rho) ** 0.5 * normal(32, d, d)) / d**0.5

    x = normal(d)
    start = [p[:k] for _ in range(2) for p in (0.1 * normal(32, d) / d**0.5, weights(), weights())]

    def loss(w: Tensor) -> Tensor:
        z, parts = x, [q.reshape(p.shape) for q, p in zip(w.split([p.numel() for p in start]), start, strict=True)]
        for theta, W, V in (parts[:3], parts[3:]):
            z = (theta @ z).softmax(0) @ torch.einsum("koh,kh->ko", V, torch.tanh(W @ z))
            z = z * d**0.5 / z.norm() if normalized else z
        return -z[:4].log_softmax(0)[0]

    return loss, torch.cat([p.flatten() for p in start])
