"""Blocks of tanh experts with a head of its own for each logit (smooth2025, Section 4.2): derivatives and bounds.

Experts are `f_m(x) = B_m tanh(A_m x)`, heads `h_m(x) = <V_m, relu(U_m x + b_m)> + c_m`. The loss of an example is
the cross-entropy of `F = sum_m gate_m f_m`; the gate is a function `(h, k, noise) -> gates`. Many blocks are stacked
along a first dimension, called count.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import grad, hessian, jacrev, vmap
from torch.nn.functional import cross_entropy

from moe_theory import _validate as check
from moe_theory.models.rules import gumbel, sampled_topk
from moe_theory.models.systems import Gate
from moe_theory.streams import torch_stream
from moe_theory.theory import plackett_luce as pl


def appendix_c(h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
    """The softmax over all M, kept for the k experts that were drawn (smooth2025, Appendix C)."""
    return sampled_topk.gates(h, k, noise)


def section_42(h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
    """The softmax over the k experts that were drawn (smooth2025, Section 4.2)."""
    kept = appendix_c(h, k, noise)
    return kept / kept.sum(-1, keepdim=True)


def times_constant(h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
    """A control: Section 4.2's gate times the constant k / M."""
    return k / h.shape[-1] * section_42(h, k, noise)


def times_mass(h: Float[Tensor, "*batch M"], k: int, noise: Float[Tensor, "*batch M"]) -> Float[Tensor, "*batch M"]:
    """A control: Section 4.2's gate times P_T, whose derivative is left out."""
    mass = appendix_c(h, k, noise).sum(-1, keepdim=True).detach()
    return mass * section_42(h, k, noise)


class Block(NamedTuple):
    """Parameters of experts (A, B) and of heads (U, V, b, c)."""

    A: Float[Tensor, "*count M width d"]
    B: Float[Tensor, "*count M out width"]
    U: Float[Tensor, "*count M width d"]
    V: Float[Tensor, "*count M width"]
    b: Float[Tensor, "*count M width"]
    c: Float[Tensor, "*count M"]


class Data(NamedTuple):
    """Inputs, labels and Gumbel noise for each of `count` blocks."""

    x: Float[Tensor, "count inputs d"]
    y: Int[Tensor, "count inputs"]
    noise: Float[Tensor, "count inputs M"]


class Sizes(NamedTuple):
    """What the bounds are made of, at an input: maxima over the M experts."""

    G: Float[Tensor, "*batch"]  # operator norm of an expert's Jacobian in its own parameters
    Gh: Float[Tensor, "*batch"]  # norm of a head's gradient in its own parameters
    F0: Float[Tensor, "*batch"]  # length of an expert's output
    spread: Float[Tensor, "*batch"]  # largest logit less the smallest


def draw_blocks(count: int, M: int, d: int, width: int, out: int, shrink: float, *, seed: int) -> Block:
    """Random blocks, entries of variance one over the number of inputs; the heads' last layer is times `shrink`."""
    rng = torch_stream(seed, "weights", M)

    def layer(*shape: int) -> Tensor:
        return torch.randn(count, M, *shape, generator=rng, dtype=torch.float64) / shape[-1] ** 0.5

    A, B, U, V = layer(width, d), layer(out, width), layer(width, d), shrink * layer(width)
    return Block(A, B, U, V, torch.zeros_like(V), torch.zeros_like(V[..., 0]))


def draw_data(count: int, inputs: int, M: int, d: int, out: int, *, seed: int) -> Data:
    """Standard normal inputs, uniform labels, standard Gumbel noise."""
    rng = torch_stream(seed, "inputs", M)
    x = torch.randn(count, inputs, d, generator=rng, dtype=torch.float64)
    y = torch.randint(out, (count, inputs), generator=rng)
    return Data(x, y, gumbel((count, inputs, M), rng, x.dtype))


def logits(block: Block, x: Float[Tensor, " d"]) -> Float[Tensor, " M"]:
    """`h_m(x)` of one block."""
    hidden = torch.relu(torch.einsum("mwd,d->mw", block.U, x) + block.b)
    return (hidden * block.V).sum(-1) + block.c


def experts(block: Block, x: Float[Tensor, " d"]) -> Float[Tensor, "M out"]:
    """`f_m(x)` of one block."""
    hidden = torch.tanh(torch.einsum("mwd,d->mw", block.A, x))
    return torch.einsum("mow,mw->mo", block.B, hidden)


def loss(
    block: Block, x: Float[Tensor, " d"], y: Int[Tensor, ""], noise: Float[Tensor, " M"], gate: Gate, k: int
) -> Float[Tensor, ""]:
    """Cross-entropy of one example, for the set that its noise draws."""
    return cross_entropy(gate(logits(block, x), k, noise) @ experts(block, x), y)


def mean_loss(block: Block, x: Float[Tensor, " d"], y: Int[Tensor, ""], gate: str, k: int) -> Float[Tensor, ""]:
    """`sum_S P(T = S) l(F_S)`, the cross-entropy averaged over all draws of k experts; M at most 12.

    `gate` is one of `plackett_luce.GATES`.
    """
    h = logits(block, x)
    members = pl.subsets(len(h), k)
    F = pl.set_gates(h, members, gate) @ experts(block, x)
    return pl.set_probability(h, members) @ cross_entropy(F, y.expand(len(F)), reduction="none")


def _squares(g: Block, batch: int) -> tuple[Tensor, Tensor]:
    """Squared norms of the experts' and of the heads' part of gradients with `batch` leading dimensions."""
    A, B, *heads = (part.square().flatten(batch).sum(batch) for part in g)
    return A + B, sum(heads)


def gradient_squares(
    blocks: Block, data: Data, gate: Gate, k: int
) -> tuple[Float[Tensor, "count inputs"], Float[Tensor, "count inputs"]]:
    """`|dl/d experts|^2` and `|dl/d heads|^2` of each block at each of its inputs, for the sets that were drawn."""
    slopes = vmap(vmap(grad(lambda *example: loss(*example, gate, k)), (None, 0, 0, 0)))(blocks, *data)  # pyright: ignore
    return _squares(slopes, 2)


def mean_gradient_squares(
    blocks: Block, data: Data, gate: str, k: int
) -> tuple[Float[Tensor, " count"], Float[Tensor, " count"]]:
    """The same for the loss averaged over all draws, exactly, at the first input of each block."""
    slope = grad(lambda *example: mean_loss(*example, gate, k))  # pyright: ignore[reportCallIssue]
    found = [slope(Block(*(p[i] for p in blocks)), data.x[i, 0], data.y[i, 0]) for i in range(len(data.x))]
    return _squares(Block(*map(torch.stack, zip(*found, strict=True))), 1)


def sizes(blocks: Block, x: Float[Tensor, "count inputs d"]) -> Sizes:
    """G, G_h, F_0 and the spread of the logits for each block and input, in closed form.

    With `t = tanh(A x)`, an expert's Jacobian J has `J J^T = |t|^2 I + |x|^2 B diag(1 - t^2)^2 B^T`.
    """
    t = torch.tanh(torch.einsum("cmwd,cid->cimw", blocks.A, x))
    z = torch.einsum("cmwd,cid->cimw", blocks.U, x) + blocks.b[:, None]
    B, V, x2 = blocks.B[:, None], blocks.V[:, None], x.square().sum(2)[..., None]
    top = torch.linalg.eigvalsh((B * (1 - t**2).square()[..., None, :]) @ B.mT)[..., -1]
    G2 = t.square().sum(3) + x2 * top
    Gh2 = z.relu().square().sum(3) + 1 + (V * (z > 0)).square().sum(3) * (x2 + 1)
    h = (z.relu() * V).sum(3) + blocks.c[:, None]
    F0 = (B @ t[..., None])[..., 0].norm(dim=3)
    return Sizes(G2.amax(2).sqrt(), Gh2.amax(2).sqrt(), F0.amax(2), h.amax(2) - h.amin(2))


def sizes_by_jacobians(block: Block, x: Float[Tensor, " d"]) -> Sizes:
    """The same for one block at one input, every derivative by automatic differentiation."""
    each = [Block(*(part[m : m + 1] for part in block)) for m in range(len(block.c))]
    of_f, of_h = jacrev(experts), jacrev(logits)
    df = [torch.cat([j[0].flatten(1) for j in of_f(one, x)], 1) for one in each]
    dh = [torch.cat([j.flatten() for j in of_h(one, x)]) for one in each]
    f, h = experts(block, x), logits(block, x)
    G = torch.stack([torch.linalg.matrix_norm(J, 2) for J in df]).max()
    return Sizes(G, torch.stack([g.norm() for g in dh]).max(), f.norm(dim=1).max(), h.max() - h.min())


def lipschitz_bound(slope: float, s: Sizes, M: int, k: int) -> Float[Tensor, "*batch"]:
    """`L <= lambda_1 e^Delta sqrt(K)/M sqrt(G^2 + G_h^2 F_0^2)`: gates of a softmax over all M, a set held fixed.

    The slope lambda_1 bounds `|l'(F)|`, the spread Delta is that of all M logits.
    """
    if check.integer("k", k, 1) > M:
        raise ValueError(f"k: expected at most M = {M} experts, got {k}")
    return slope * torch.exp(s.spread) * k**0.5 / M * (s.G**2 + (s.Gh * s.F0) ** 2).sqrt()


def mean_lipschitz_bound(slope: float, s: Sizes, M: int) -> Float[Tensor, "*batch"]:
    """`lambda_1 e^Delta / sqrt(M) sqrt(G^2 + G_h^2 F_0^2 (1 + 2 e^{Delta/2})^2)`: the averaged loss, gates over T.

    It holds at every K; arguments as in `lipschitz_bound`.
    """
    heads = s.Gh * s.F0 * (1 + 2 * torch.exp(s.spread / 2))
    return slope * torch.exp(s.spread) / check.integer("M", M, 1) ** 0.5 * (s.G**2 + heads**2).sqrt()


def copied(blocks: Block, times: int) -> Block:
    """Every expert with its head, `times` times over."""
    return Block(*(torch.cat([part] * times, 1) for part in blocks))


def curvature(blocks: Block, data: Data, gate: Gate, k: int) -> tuple[Float[Tensor, " count"], Float[Tensor, " count"]]:
    """Largest |eigenvalue| of the exact Hessian of the loss, and `|gradient|^2`, at the first input of each block."""
    shapes = [part.shape[1:] for part in blocks]
    flat = torch.cat([part.flatten(1) for part in blocks], 1)

    def of(v: Tensor, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        parts = v.split([shape.numel() for shape in shapes])
        block = Block(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))
        return loss(block, x, y, noise, gate, k)

    examples = [flat, *(part[:, 0] for part in data)]
    H = torch.cat([vmap(hessian(of))(*four) for four in zip(*(e.split(4) for e in examples), strict=True)])
    return torch.linalg.eigvalsh(H).abs().amax(1), vmap(grad(of))(*examples).square().sum(1)
