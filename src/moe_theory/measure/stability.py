"""The finite-difference estimators of smooth2025, 5.3: stability, Lipschitz constant and smoothness of a network.

One draw takes three batches B1, B2, B3 of 64 training examples. A step of SGD on B1 leads from Theta_0
to Theta_1, one on B2 to Theta_2, and the two networks are compared on B3:

    eps  = mean over B3 of |l(Theta_1; x) - l(Theta_2; x)|
    L    = eps / r,                                             r = |Theta_1 - Theta_2|
    beta = mean over B3 of |grad l(Theta_1; x) - grad l(Theta_2; x)| / r

The estimates are the largest values of 200 draws, each for itself.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from moe_theory import _validate as check
from moe_theory.models.layers import Fan, Linear, Stack, Words
from moe_theory.models.rules import gumbel

DRAWS, BATCH = 200, 64

Parameters = dict[str, Tensor]
LAYERS = (Linear, Stack, Words)


@runtime_checkable
class Routed(Protocol):
    """What the estimators ask of a model, which is an `nn.Module` whose parameters sit in `models.layers`.

    A layer may be called any number of times. It has to read an array whose first dimension counts the examples.

    Attributes:
        noisy: whether `noise` changes the outputs.
    """

    noisy: bool

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Shape (n, ...) of the Gumbel noise that n inputs are routed with."""

    def __call__(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the classes (n, classes), and gates (n, ..., M), 0 for experts that are not selected."""


class Draws(NamedTuple):
    """What each of D draws gives.

    Attributes:
        eps, L, beta: (D,) as defined above; distance: (D,) the r of the definition.
        eps_independent: (D,) eps where Theta_1 and Theta_2 are evaluated each with routing noise of its
            own; equal to eps for rules without noise.
        flips: (D,) share of the block's inputs on B3 for which the two networks select different sets.
    """

    eps: Float[Tensor, " D"]
    L: Float[Tensor, " D"]
    beta: Float[Tensor, " D"]
    distance: Float[Tensor, " D"]
    eps_independent: Float[Tensor, " D"]
    flips: Float[Tensor, " D"]


class Batches(NamedTuple):
    """Examples and routing noise of D draws: three batches each, and a second noise for the third.

    The noise is zero for a model whose outputs it does not change.
    """

    index: Int[Tensor, "D 3 b"]
    noise: Float[Tensor, "D 4 b ..."]

    def chunks(self, size: int) -> Iterator["Batches"]:
        """The same draws, at most `size` at a time."""
        return map(Batches, self.index.split(size), self.noise.split(size))


def chunk(model: nn.Module) -> int:
    """Draws computed together: enough for large products, few enough that their parameters stay small."""
    return max(20, 1_200_000 // sum(p.numel() for p in model.parameters()))


@functools.lru_cache(maxsize=8)
def _index(n: int, count: int, batch: int, seed: int) -> tuple[Int[Tensor, "count b"], Tensor]:
    """`count` batches, and the state of the generator after them; many networks are measured on the same ones."""
    rng = torch.Generator().manual_seed(check.integer("seed", seed, 0))
    return torch.stack([torch.randperm(n, generator=rng)[:batch] for _ in range(count)]), rng.get_state()


def draw_batches(model: Routed, n: int, draws: int, batch: int, *, seed: int) -> Batches:
    """Batches without repetition within each, out of n examples, and noise of the model's shape, zero if it is unread.

    Raises:
        ValueError: for a model that is not `Routed`, or a batch larger than n.
    """
    if not (isinstance(model, nn.Module) and isinstance(model, Routed)):
        missing = [name for name in ("noisy", "noise_shape") if not hasattr(model, name)]
        raise ValueError(
            f"model: expected an nn.Module with `noisy` and `noise_shape(n)` (see measure.stability.Routed), "
            f"got {type(model).__name__} without {missing}"
        )
    if check.integer("batch", batch, 1) > n:
        raise ValueError(f"batch: expected at most n = {n}, got {batch}")
    index, state = _index(n, 3 * check.integer("draws", draws, 1), batch, seed)
    shape, dtype = (draws, 4, *model.noise_shape(batch)), next(model.parameters()).dtype
    if not model.noisy:
        return Batches(index.view(-1, 3, batch), torch.zeros((), dtype=dtype).expand(shape))
    rng = torch.Generator()
    rng.set_state(state)
    return Batches(index.view(-1, 3, batch), gumbel(shape, rng, dtype))


def losses(model: Routed) -> Callable:
    """`(parameters, x, y, noise) -> cross-entropies (b,), gates` of a batch of b examples."""

    def function(parameters: Parameters, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        F, pi = functional_call(model, parameters, (x, noise))
        return -torch.log_softmax(F, -1).gather(1, y[:, None])[:, 0], pi

    return function


def step_parameters(
    model: Routed, x: Shaped[Tensor, "n ..."], y: Int[Tensor, " n"], rate: float, plan: Batches
) -> tuple[Parameters, Parameters]:
    """Theta_1 and Theta_2 of the D draws of a plan: every parameter with a first dimension of D."""
    theta_0 = {name: p.detach() for name, p in model.named_parameters()}  # pyright: ignore[reportAttributeAccessIssue]
    step = vmap(grad(lambda *args: losses(model)(*args)[0].mean()), in_dims=(None, 0, 0, 0))

    def stepped(i: int) -> Parameters:
        slopes = step(theta_0, x[plan.index[:, i]], y[plan.index[:, i]], plan.noise[:, i])
        return {name: theta_0[name] - rate * g for name, g in slopes.items()}

    return stepped(0), stepped(1)


def traces(model: Routed) -> Callable:
    """`(parameters, zeros, x, y, noise) -> losses (b,), gates, {layer: (a, delta)}`.

    a is what a layer read, and delta the gradient of an example's loss in what the layer gave, both as
    `positions` lays them out; `zeros` has a tensor of the shape of each output of each layer. A layer's
    gradient for one example is the sum of `delta_t (x) a_t` over its positions t (tokens, windows of a
    convolution, calls), which need not be formed to know its norm.
    """
    layers = _layers(model)

    def total(push: dict[str, list[Tensor]], parameters: Parameters, *data: Tensor):
        read = {name: [] for name in push}

        def pushed(name: str) -> Callable:
            def hook(_, inputs: tuple[Tensor], output: Tensor) -> Tensor:
                read[name].append(inputs[0])
                return output + push[name][len(read[name]) - 1]

            return hook

        handles = [layer.register_forward_hook(pushed(name)) for name, layer in layers.items()]
        try:
            value, pi = losses(model)(parameters, *data)
        finally:
            for handle in handles:
                handle.remove()
        return value.sum(), (value, pi, read)

    def function(parameters: Parameters, zeros: dict[str, list[Tensor]], *data: Tensor):
        delta, (value, pi, read) = grad(total, has_aux=True)(zeros, parameters, *data)
        return value, pi, {name: positions(layers[name], read[name], delta[name]) for name in zeros}

    return function


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that hold all parameters of the model, each parameter in one of them.

    Raises:
        ValueError: for a parameter that is elsewhere, and would be missed, or in two layers.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LAYERS)}
    held = [(f"{name}.{own}", p) for name, layer in layers.items() for own, p in layer.named_parameters()]
    if outside := sorted({name for name, _ in model.named_parameters()} - {name for name, _ in held}):
        raise ValueError(f"model: expected all parameters in layers of models.layers, got {outside} elsewhere")
    first = {}
    if twice := [(first[p], name) for name, p in held if first.setdefault(p, name) != name]:
        raise ValueError(f"model: expected every parameter in one layer, got one tensor under the names {twice[0]}")
    return layers


def _zeros(model: Routed, x: Tensor, noise: Tensor) -> dict[str, list[Tensor]]:
    """Zero tensors of the shapes of each layer's outputs, one for each call, for b examples.

    Raises:
        ValueError: for a layer that does not read its examples side by side, or a model that does not give
            logits and gates.
    """
    found = {}

    def zero(name: str) -> Callable:
        def hook(_, inputs: tuple[Tensor], output: Tensor) -> None:
            if inputs[0].shape[:1] != x.shape[:1]:
                got = tuple(inputs[0].shape)
                raise ValueError(f"model: expected {name} to read ({len(x)}, ...) for {len(x)} examples, got {got}")
            found.setdefault(name, []).append(torch.zeros_like(output))

        return hook

    handles = [layer.register_forward_hook(zero(name)) for name, layer in _layers(model).items()]
    try:
        with torch.no_grad():
            given = model(x, noise)
    finally:
        for handle in handles:
            handle.remove()
    if not (isinstance(given, tuple) and len(given) == 2 and all(len(part) == len(x) for part in given)):
        raise ValueError(f"model: expected logits and gates of {len(x)} examples, got {type(given).__name__}")
    return found


def positions(
    layer: nn.Module, read: list[Shaped[Tensor, "b ..."]], delta: list[Float[Tensor, "b ..."]]
) -> tuple[Shaped[Tensor, "b T ..."], Float[Tensor, "b T ..."]]:
    """What a layer read, and the gradients in what it gave, at all T positions of all its calls.

    a is (b, T, G, d) and delta (b, T, G, out), for G layers side by side that read their own a: the M of a
    `Stack`, otherwise 1, where the outputs of a `Fan` are one after the other. For `Words`, a is (b, T).
    """

    def flat(a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(layer, Words):
            return a.reshape(len(a), -1), delta.reshape(len(delta), -1, delta.shape[-1])
        if not isinstance(layer, Stack) or isinstance(layer, Fan):
            a, delta = a[..., None, :], (delta.flatten(-2) if isinstance(layer, Fan) else delta)[..., None, :]
        return a.reshape(len(a), -1, *a.shape[-2:]), delta.reshape(len(delta), -1, *delta.shape[-2:])

    return tuple(torch.cat(parts, 1) for parts in zip(*map(flat, read, delta), strict=True))


def squared_difference(
    layer: nn.Module, one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]
) -> Float[Tensor, "D b"]:
    """`|g1 - g2|^2` for a layer's gradients `g = (sum_t delta_t (x) a_t, sum_t delta_t)` in its W and b.

    With d the difference of one and two, `g1 - g2 = sum_t d_delta_t (x) a1_t + delta2_t (x) d_a_t`: terms
    as small as the difference, so that nothing cancels in single precision. Where there is one position
    the norm follows from scalar products, `|u (x) v|^2 = |u|^2 |v|^2`, and no gradient is formed.

    Args:
        layer: whether it is `Words`, whose gradient has no part in b.
        one, two: a and delta as `positions` lays them out, for b examples of D draws.
    """
    if isinstance(layer, Words):
        (tokens, delta1), (_, delta2) = one, two
        same = (tokens[..., :, None] == tokens[..., None, :]).to(delta1)
        return (same * ((delta1 - delta2) @ (delta1 - delta2).mT)).sum((-2, -1))
    (a1, delta1), (a2, delta2) = one, two
    d_a, d_delta = a1 - a2, delta1 - delta2
    if a1.shape[2] == 1:
        own = d_delta.square().sum(-1) * (1 + a1.square().sum(-1)) + delta2.square().sum(-1) * d_a.square().sum(-1)
        return (own + 2 * (d_delta * delta2).sum(-1) * (a1 * d_a).sum(-1)).sum((-2, -1))
    u, v = torch.cat([d_delta, delta2], 2).permute(0, 1, 3, 4, 2), torch.cat([a1, d_a], 2).transpose(2, 3)
    return (u @ v).square().sum((-3, -2, -1)) + d_delta.sum(2).square().sum((-2, -1))


def estimate(
    model: Routed,
    x: Shaped[Tensor, "n ..."],
    y: Int[Tensor, " n"],
    rate: float,
    *,
    draws: int = DRAWS,
    batch: int = BATCH,
    seed: int = 0,
) -> Draws:
    """The estimators of all draws, in evaluation mode: networks stacked with torch.func, no example's gradient formed.

    Args:
        model: maps (x, noise) to logits of classes and gates, see `Routed`.
        x, y: the training set.
        rate: step size alpha of the two steps.
        draws, batch: 200 and 64 in the paper; seed: draws batches and routing noise.

    Raises:
        ValueError: for a rate that is not positive, a batch larger than n, a model that is not `Routed`, a
            parameter outside `models.layers` or in two of them, a layer that does not read its examples side
            by side, or steps that lead to the same point, where L and beta are not defined.
    """
    check.positive("rate", rate)
    plan = draw_batches(model, len(x), draws, batch, seed=seed)
    mode = model.training  # pyright: ignore[reportAttributeAccessIssue]
    model.eval()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        parts = [_estimate(model, x, y, rate, part) for part in plan.chunks(chunk(model))]
    finally:
        model.train(mode)  # pyright: ignore[reportAttributeAccessIssue]
    found = Draws(*(torch.cat(column) for column in zip(*parts, strict=True)))
    if not (found.distance > 0).all():
        raise ValueError("model: expected two steps on different batches to lead apart, got the same point")
    return found


def _estimate(model: Routed, x: Tensor, y: Tensor, rate: float, plan: Batches) -> Draws:
    """`estimate` for one chunk of draws."""
    third = x[plan.index[:, 2]], y[plan.index[:, 2]], plan.noise[:, 2]
    zeros, traced = _zeros(model, third[0][0], third[2][0]), vmap(traces(model), in_dims=(0, None, 0, 0, 0))
    theta = step_parameters(model, x, y, rate, plan)
    (l1, pi1, trace1), (l2, pi2, trace2) = (traced(p, zeros, *third) for p in theta)
    layers = _layers(model)
    apart = sum(squared_difference(layers[name], trace1[name], trace2[name]) for name in zeros)
    r = _norm({name: theta[0][name] - p for name, p in theta[1].items()})
    eps = (l1 - l2).abs().mean(1)
    flips = ((pi1 > 0) != (pi2 > 0)).any(-1).flatten(1).to(eps).mean(1)
    if model.noisy:
        l2, _ = vmap(losses(model))(theta[1], *third[:2], plan.noise[:, 3])
    return Draws(eps, eps / r, apart.sqrt().mean(1) / r, r, (l1 - l2).abs().mean(1), flips)  # pyright: ignore


def _norm(tensors: Parameters) -> Float[Tensor, " D"]:
    """Euclidean norm over all parameters, for every entry of the first dimension."""
    return sum(t.square().flatten(1).sum(1) for t in tensors.values()).sqrt()  # pyright: ignore


def estimate_loop(
    model: Routed, x: Tensor, y: Tensor, rate: float, *, draws: int = DRAWS, batch: int = BATCH, seed: int = 0
) -> Draws:
    """`estimate` as the definition reads: one draw, one example after the other, by ordinary autograd."""
    check.positive("rate", rate)
    plan = draw_batches(model, len(x), draws, batch, seed=seed)
    theta_0 = {name: p.detach() for name, p in model.named_parameters()}  # pyright: ignore[reportAttributeAccessIssue]
    return Draws(*torch.stack([_one_draw(model, theta_0, x, y, rate, *pair) for pair in zip(*plan, strict=True)]).T)


def _one_draw(model: Routed, theta_0: Parameters, x: Tensor, y: Tensor, rate: float, index, noise) -> Tensor:
    """The entries of `Draws` for one draw."""

    def gradient(theta: Parameters, *data: Tensor) -> tuple[Parameters, Tensor, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in theta.items()}
        value, pi = losses(model)(leaves, *data)
        g = torch.autograd.grad(value.mean(), list(leaves.values()))
        return dict(zip(leaves, g, strict=True)), value.detach().mean(), pi > 0

    def distance(one: Parameters, two: Parameters) -> Tensor:
        return _norm({name: (one[name] - two[name])[None] for name in one})[0]

    steps = [gradient(theta_0, x[index[i]], y[index[i]], noise[i])[0] for i in (0, 1)]
    theta = [{name: theta_0[name] - rate * g[name] for name in g} for g in steps]
    values = []
    for i, u, v in zip(index[2], noise[2, :, None], noise[3, :, None], strict=True):
        (g1, l1, set1), (g2, l2, set2) = (gradient(p, x[i][None], y[i][None], u) for p in theta)
        other = losses(model)(theta[1], x[i][None], y[i][None], v)[0][0].detach()
        flips = (set1 != set2).any(-1).to(l1).mean()
        values.append(torch.stack([(l1 - l2).abs(), distance(g1, g2), (l1 - other).abs(), flips]))
    eps, apart, independent, flips = torch.stack(values).mean(0)
    r = distance(*theta)
    return torch.stack([eps, eps / r, apart / r, r, independent, flips])
