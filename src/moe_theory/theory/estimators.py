"""What the estimators of smooth2025, 5.3 measure: exact counterparts and predictions without free parameters.

Gradients and Hessians are those of single examples' losses in all parameters of a small network, flattened to
vectors of P numbers in the order of `model.named_parameters()`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from moe_theory import _validate as check
from moe_theory.measure import stability
from moe_theory.measure.stability import BATCH, Batches, Routed, chunk, draw_batches, losses
from moe_theory.models.sparse import SparseMLP


def parameter_vector(model: Routed) -> Float[Tensor, "P"]:
    """All parameters, one after the other."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])  # pyright: ignore[reportAttributeAccessIssue]


def vector_losses(model: Routed):
    """`(theta, x, y) -> losses (b,), gates` of a batch as functions of the parameter vector.

    ValueError for a network whose routing is random.
    """
    if model.noisy:
        raise ValueError(f"model: expected routing without noise, got a {type(model).__name__} that is `noisy`")
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)  # pyright: ignore

    def function(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        parts = theta.split([shape.numel() for shape in shapes])
        named = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return losses(model)(named, x, y, theta.new_zeros(model.noise_shape(len(x))))

    return function


def loss_of_one(model: Routed):
    """`(theta, x_i, y_i) -> loss` of one example."""
    function = vector_losses(model)
    return lambda theta, x_i, y_i: function(theta, x_i[None], y_i[None])[0][0]


def example_gradients(model: Routed, x: Float[Tensor, "n ..."], y: Int[Tensor, "n"]) -> Float[Tensor, "n P"]:
    """The gradient `g_x` of every example's loss."""
    return vmap(grad(loss_of_one(model)), (None, 0, 0))(parameter_vector(model), x, y)


def exact_constants(
    model: Routed, x: Float[Tensor, "n ..."], y: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """`|g_x|` and `|Hess l_x|`, the largest absolute eigenvalue, of every example; their maxima are L and beta."""
    H = vmap(hessian(loss_of_one(model)), (None, 0, 0))(parameter_vector(model), x, y)
    return example_gradients(model, x, y).norm(dim=1), torch.linalg.eigvalsh(H).abs().amax(1)


def constants_by_differences(model: Routed, x: Float[Tensor, "n ..."], y: Int[Tensor, "n"]) -> tuple[float, float]:
    """L and beta again, in the examples in which `exact_constants` finds them: by differences over 2h.

    L is a slope of the loss along its gradient, beta the norm of a Hessian whose columns are differences of gradients.
    """
    theta, each, h = parameter_vector(model), vector_losses(model), 1e-5
    i, j = (int(v.argmax()) for v in exact_constants(model, x, y))
    g = example_gradients(model, x[i : i + 1], y[i : i + 1])[0]
    up, down = (each(theta + s * h * g / g.norm(), x, y)[0][i] for s in (1, -1))
    slope = vmap(grad(lambda w: each(w, x[j : j + 1], y[j : j + 1])[0][0]))
    way = h * torch.eye(len(theta), dtype=theta.dtype)
    H = (slope(theta + way) - slope(theta - way)) / (2 * h)
    return float(up - down) / (2 * h), float(torch.linalg.matrix_norm(H, 2))


class Steps(NamedTuple):
    """The two networks of each draw and the examples they are compared on."""

    one: Float[Tensor, "D P"]
    two: Float[Tensor, "D P"]
    third: Int[Tensor, "D b"]


def two_steps(model: Routed, x: Tensor, y: Tensor, rate: float, draws: int, batch: int, seed: int) -> Steps:
    """Theta_1, Theta_2 and B3 of the draws that `estimate` makes with these arguments."""
    check.positive("rate", rate)
    plan = draw_batches(model, len(x), draws, batch, seed=seed)
    pairs = (stability.step_parameters(model, x, y, rate, part) for part in plan.chunks(chunk(model)))
    vectors = [[torch.cat([p.flatten(1) for p in theta.values()], 1) for theta in pair] for pair in pairs]
    one, two = (torch.cat(parts) for parts in zip(*vectors, strict=True))
    return Steps(one, two, plan.index[:, 2])


def parts_of_eps(
    model: Routed, x: Tensor, y: Tensor, rate: float, draws: int, *, batch: int = BATCH, seed: int = 0
) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
    """What inputs with the same selected sets, and inputs with different ones, add to the eps of each draw."""
    check.positive("rate", rate)
    plan, evaluate = draw_batches(model, len(x), draws, batch, seed=seed), vmap(losses(model))

    def parts(plan: Batches) -> Tensor:
        third = x[plan.index[:, 2]], y[plan.index[:, 2]], plan.noise[:, 2]
        (l1, pi1), (l2, pi2) = (evaluate(theta, *third) for theta in stability.step_parameters(model, x, y, rate, plan))
        flipped, apart = ((pi1 > 0) != (pi2 > 0)).flatten(2).any(-1), (l1 - l2).abs()
        return torch.stack([(apart * ~flipped).mean(1), (apart * flipped).mean(1)])

    return tuple(torch.cat([parts(part) for part in plan.chunks(chunk(model))], 1))


class Segment(NamedTuple):
    """Means over a segment from Theta_1 to Theta_2 of direction u, D segments at once."""

    slope: Float[Tensor, "D"]  # of `mean_x |<g_x, u>|`
    curvature: Float[Tensor, "D"]  # of `mean_x |Hess l_x u|`


def segment_means(model: Routed, x: Tensor, y: Tensor, ends: Steps, nodes: int = 3) -> Segment:
    """What the estimates L and beta of a draw cannot exceed if no selected set and no kink changes on the way.

    `ends` is what `two_steps` gives, `nodes` the number of midpoints at which a segment is evaluated.
    """
    way = ends.two - ends.one
    u = way / way.norm(dim=1, keepdim=True)
    gradient = grad(loss_of_one(model))

    def along(theta: Tensor, u: Tensor, x_i: Tensor, y_i: Tensor) -> tuple[Tensor, Tensor]:
        g, Hu = jvp(lambda w: gradient(w, x_i, y_i), (theta,), (u,))
        return (g @ u).abs(), Hu.norm()

    evaluate, data = vmap(vmap(along, (None, None, 0, 0))), (x[ends.third], y[ends.third])
    middle = (torch.arange(check.integer("nodes", nodes, 1)) + 0.5) / nodes
    found = [evaluate(ends.one + float(t) * way, u, *data) for t in middle]
    return Segment(*(torch.stack(part).mean((0, 2)) for part in zip(*found, strict=True)))


class Changed(NamedTuple):
    """The inputs of D draws whose selected set differs between Theta_1 and Theta_2, C of them."""

    where: Bool[Tensor, "D b"]  # which inputs these are
    apart: Float[Tensor, "C"]  # how far their two losses are apart
    jump: Float[Tensor, "C"]  # how far the loss before both steps is apart with the one set and with the other


def changed_sets(model: SparseMLP, x: Float[Tensor, "n d"], y: Int[Tensor, "n"], ends: Steps) -> Changed:
    """The inputs that change their set between the two networks of each draw, and what that does to their losses.

    The network has the softmax over the selected experts; `ends` is what `two_steps` gives.
    """
    each, third = vmap(vector_losses(model), chunk_size=100), (x[ends.third], y[ends.third])
    (l1, pi1), (l2, pi2) = (each(theta, *third) for theta in (ends.one, ends.two))
    where = ((pi1 > 0) != (pi2 > 0)).any(-1)
    with torch.no_grad():
        one, two = (_loss_of_sets(model, third[0][where], third[1][where], pi[where] > 0) for pi in (pi1, pi2))
    return Changed(where, (l1 - l2).abs()[where], (one - two).abs())


def _loss_of_sets(model: SparseMLP, x: Tensor, y: Tensor, kept: Bool[Tensor, "n M"]) -> Float[Tensor, "n"]:
    """Losses with the selected sets given, all else as it is."""
    pi = model.block.router(x).masked_fill(~kept, -torch.inf).softmax(-1)
    return F.cross_entropy((pi[..., None] * model.block.experts(x)).sum(-2), y, reduction="none")


def slopes_and_jumps(model: SparseMLP, x: Tensor, y: Tensor, ends: Steps, changed: Changed) -> Float[Tensor, "D"]:
    """L of each draw, put together from slopes half-way where the set is the same, and from `changed` where not."""
    each, way = vector_losses(model), ends.two - ends.one

    def along(theta: Tensor, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return jvp(lambda w: each(w, x, y)[0], (theta,), (u,))[1]

    middle, third = (ends.one + ends.two) / 2, (x[ends.third], y[ends.third])
    part = vmap(along, chunk_size=100)(middle, way, *third).detach().abs()
    part[changed.where] = changed.jump
    return part.mean(1) / way.norm(dim=1)


def first_order_eps(g: Float[Tensor, "n P"], rate: float, batch: int) -> tuple[float, float]:
    """`E eps` to first order in the rate, from the gradients of all n training examples, in two versions.

    Two steps lead apart by `rate (gbar_1 - gbar_2)`, whose covariance is `(2/b)(1 - b/n) Sigma` for batches
    of b drawn without repetition, Sigma that of the gradients. If it were Gaussian,

        E eps = rate sqrt(2/pi) mean_x sigma_x,    sigma_x^2 = (2/b)(1 - b/n) g_x' Sigma g_x.

    The second version has the next term of Edgeworth's expansion: `sigma_x (1 - kappa_x / (48 b))`, kappa_x
    the excess kurtosis of `<g_x, g>` over the examples. ValueError for batches that leave nothing out.
    """
    check.positive("rate", rate)
    if not check.integer("batch", batch, 1) < len(g):
        raise ValueError(f"batch: expected fewer than n = {len(g)}, got {batch}")
    along = g @ (g - g.mean(0)).T
    second = along.square().mean(1)
    kurtosis = torch.where(second > 0, along.pow(4).mean(1) / second.square() - 3, 0)
    sigma = (second * len(g) / (len(g) - 1) * 2 / batch * (1 - batch / len(g))).sqrt()
    scale = rate * math.sqrt(2 / math.pi)
    return scale * float(sigma.mean()), scale * float((sigma * (1 - kurtosis / (48 * batch))).mean())


def one_step_stability(g: Float[Tensor, "n P"], rate: float) -> float:
    """Eq. 1 of smooth2025 after one step of gradient descent on all n examples, up to terms of order rate^2 / n.

    The largest change of a loss when one example of the data is replaced by another of them,
    `(rate / n) max_(i, j, x) <g_x, g_i - g_j>`.
    """
    products = g @ g.T
    return check.positive("rate", rate) / len(g) * float((products.amax(1) - products.amin(1)).max())


def stability_by_exchange(model: Routed, x: Float[Tensor, "n ..."], y: Int[Tensor, "n"], rate: float) -> float:
    """The same with every exchange carried out: both steps taken, and all losses read."""
    theta, each = parameter_vector(model), vector_losses(model)
    step = check.positive("rate", rate) * example_gradients(model, x, y) / len(x)
    whole = theta - step.sum(0)
    others = whole + step[:, None] - step  # example i replaced by j
    read = vmap(vmap(lambda w: each(w, x, y)[0]))
    return float((read(others) - each(whole, x, y)[0]).abs().max())


def first_order_draws(g: Float[Tensor, "n P"], batch: int, draws: int, rng: torch.Generator) -> Float[Tensor, "D"]:
    """`mean_x |<g_x, gbar_1 - gbar_2>|` over all n examples, for two batches of at most n in each draw: no step."""
    if check.integer("batch", batch, 1) > len(g):
        raise ValueError(f"batch: expected at most n = {len(g)}, got {batch}")
    order = torch.rand(2, check.integer("draws", draws, 1), len(g), generator=rng)
    drawn = order.topk(batch, 2, largest=False).indices
    one, two = torch.zeros_like(order, dtype=g.dtype).scatter_(2, drawn, 1 / batch)
    return ((one - two) @ (g @ g.T)).abs().mean(1)


def largest_normal(n: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of n independent standard normal variables."""
    check.integer("n", n, 1)

    def moment(power: int) -> float:
        density = lambda z: z**power * n * math.exp(norm.logpdf(z) + (n - 1) * norm.logcdf(z))  # noqa: E731
        return quad(density, -12, 12, epsabs=1e-12, limit=200)[0]

    mean = moment(1)
    return mean, math.sqrt(moment(2) - mean**2)
