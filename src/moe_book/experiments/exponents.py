"""How norms of Jacobians, L and beta of a block change with the number K of selected experts (smooth2025, Eq. 2-15).

The block has M = 64 experts `V tanh(W x)` and a linear router; the gate is `topk_softmax`. It is
measured at random initialization and after it has learned one function, the same for every K. Lemma 1 is about any
number of blocks: `two_blocks` measures L and beta behind two of them.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.curvature import largest_curvature
from moe_theory.streams import torch_stream
from moe_theory.theory import jacobians as jac
from moe_theory.theory.tanh_blocks import (
    Block,
    behind_two_blocks,
    constants,
    correlated,
    example_loss,
    first_term,
    gradient_squares,
    normal,
    output,
    own_curvatures,
    terms,
)
from moe_theory.training.fit import fit

M, D, WIDTH, OUT = 64, 16, 16, 4
SELECTED = (1, 2, 4, 8, 16, 32, 64)
SPREADS, CORRELATIONS, STAGES, REPETITIONS = (0.1, 1.0), (0.0, 0.5, 1.0), ("start", "trained"), 10
INPUTS, CURVED = 64, 2  # inputs that the norms are averaged over; of these, inputs whose Hessian is looked at
STEPS, BATCH, RATE = 500, 32, 0.02  # SGD at rate RATE * K: the gates divide the step that the block sees by about K
SMOKE = {}  # a row takes seconds as it is


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


def draw_block(seed: int, spread: float, rho: float, *, purpose: str = "weights") -> Block:
    """A random block: logits of standard deviation `spread`, weights of two experts correlated by `rho`."""
    rng = torch_stream(seed, purpose)
    theta = spread * normal(rng, M, D) / D**0.5
    return Block(theta, correlated(rng, rho, M, WIDTH, D), correlated(rng, rho, M, OUT, WIDTH))


def target(seed: int) -> Callable[[Tensor], Tensor]:
    """One network of the experts' shape, the function that blocks of every K are to learn."""
    one = draw_block(seed, 0.0, 1.0, purpose="target")
    return lambda x: torch.tanh(x @ one.W[0].T) @ one.V[0].T


def inputs(n: int, seed: int) -> Float[Tensor, "n d"]:
    """Standard normal inputs."""
    return torch.randn(n, D, generator=torch_stream(seed, "inputs"), dtype=torch.float64)


def train(block: Block, f_star: Callable[[Tensor], Tensor], k: int, seed: int) -> Block:
    """SGD on the squared loss `|F - f*|^2 / 2` with fresh inputs at every step."""
    block = Block(*(p.clone().requires_grad_() for p in block))
    rng = torch_stream(seed, "training")
    batches = (torch.randn(BATCH, D, generator=rng, dtype=torch.float64) for _ in range(STEPS))

    def loss(x):
        return (output(block, x, k) - f_star(x)).square().sum(1).mean() / 2

    for _ in fit(loss, batches, torch.optim.SGD(block, RATE * k)):
        pass
    return Block(*(p.detach() for p in block))


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
    own, of_router = gradient_squares(s, x, F - y)
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
    return rounded(means, 6)


def parts_grid() -> list[dict]:
    """Blocks before training, at the inputs whose Hessian is looked at; a spread of 1e-6 stands for equal gates."""
    return [
        dict(k=k, spread=spread, rho=rho, rep=rep, input=i)
        for spread in (1e-6, *SPREADS)
        for rho in (0.0, 1.0)
        for k in SELECTED[1:]
        for rep in range(REPETITIONS)
        for i in range(CURVED)
    ]


def parts_row(key: dict) -> dict:
    """What the Hessian of one example's loss is made of; all are norms.

    L: of the gradient; whole: of the Hessian; first, second: of its two terms; largest, mean: over the second
    term's blocks that belong to one expert and its row of the router; slope: |l'|.
    """
    k, i = key["k"], key["input"]
    block = draw_block(key["rep"], key["spread"], key["rho"])
    x = inputs(INPUTS, 30_000 + key["rep"])[i : i + 1]
    s, y, F = terms(block, x, k), target(key["rep"])(x), output(block, x, k)
    loss, w = example_loss(block, x[0], y[0], k)
    fitted, _ = example_loss(block, x[0], F[0], k)  # l' = 0: the first term is left
    own = own_curvatures(s, x, F - y)
    values = dict(
        L=sum(gradient_squares(s, x, F - y)).sqrt(),  # pyright: ignore[reportAttributeAccessIssue]
        whole=abs(largest_curvature(loss, w).value),
        first=first_term(s, x),
        second=abs(largest_curvature(lambda w: loss(w) - fitted(w), w).value),
        largest=own.max(),
        mean=own.mean(),
        slope=(F - y).norm(),
    )
    return rounded({name: float(value) for name, value in values.items()}, 6)


def row(key: dict) -> dict:
    """A block drawn, trained if the stage says so, and measured."""
    f_star, block = target(key["rep"]), draw_block(key["rep"], key["spread"], key["rho"])
    if key["stage"] == "trained":
        block = train(block, f_star, key["k"], 20_000 + key["rep"])
    return measure(block, f_star, inputs(INPUTS, 30_000 + key["rep"]), key["k"])


def two_blocks() -> list[dict]:
    """Every correlation of the experts, outputs as they are or divided by their size, every K, a hundred draws."""
    return [
        dict(rho=rho, normalized=normalized, k=k, rep=rep)
        for rho in (1.0, 0.5, 0.0)
        for normalized in (0, 1)
        for k in (2, 4, 8, 16, 32)
        for rep in range(100)
    ]


def two_blocks_row(key: dict) -> dict:
    """L: norm of the gradient; beta: the largest |eigenvalue| of the Hessian; in the parameters of both blocks."""
    loss, w = behind_two_blocks(key["k"], key["rho"], bool(key["normalized"]), 40_000 + key["rep"])
    return rounded(dict(L=float(grad(loss)(w).norm()), beta=abs(largest_curvature(loss, w).value)), 6)
