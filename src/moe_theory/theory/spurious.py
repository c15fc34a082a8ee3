"""What a router does with directions that carry no signal (Dikkala et al. 2023, Theorem 1 and Appendix D).

The network is softmax(W x + b) over constant experts, the rows of U; its squared loss is taken exactly, as a sum
over Gauss-Hermite nodes. The inputs are x = (x1, x2): the target depends on x1 alone, x2 is an independent Gaussian.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize, minimize_scalar
from scipy.special import softmax
from torch import Tensor
from torch.autograd.functional import hessian

from moe_theory import _validate as check


class Points(NamedTuple):
    """A law on n atoms: inputs, targets and probabilities."""

    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n o"]
    weight: Float[Tensor, " n"]


class Weights(NamedTuple):
    """The mixture's parameters: bias of the router, its rows (an expert each), and the experts' outputs."""

    b: Float[Tensor, " M"]
    W: Float[Tensor, "M d"]
    U: Float[Tensor, "M o"]


class Decay(NamedTuple):
    """Coefficients of |W|^2, |U|^2 and |b|^2 in the loss: lambda_1, lambda_2, and one that the paper has as zero."""

    router: float
    experts: float
    bias: float = 0.0


def gaussian_nodes(d: int, nodes: int) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """Nodes and weights of the Gauss-Hermite product rule for N(0, I_d): exact for powers below 2 `nodes`."""
    z, weight = np.polynomial.hermite_e.hermegauss(check.integer("nodes", nodes, 1))
    z, weight = torch.from_numpy(z), torch.from_numpy(weight / weight.sum())
    if check.integer("d", d, 0) == 0:
        return torch.zeros(1, 0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    grid = torch.cartesian_prod(*[z] * d).reshape(-1, d)
    return grid, torch.cartesian_prod(*[weight] * d).reshape(-1, d).prod(1)


def clusters(
    mean: Float[Tensor, "k r"], y: Float[Tensor, "k o"], spurious: int, *, nodes: int, spurious_nodes: int
) -> Points:
    """Equally likely clusters N(mean, I) with constant targets, and `spurious` standard Gaussian directions after.

    The quadrature has `nodes` in each relevant direction and `spurious_nodes` in each of the others.
    """
    z, a = gaussian_nodes(mean.shape[1], nodes)
    x2, c = gaussian_nodes(spurious, spurious_nodes)
    k, n, m = len(mean), len(z), len(x2)
    x1 = (mean[:, None] + z).reshape(k * n, 1, -1).expand(-1, m, -1)
    x = torch.cat([x1, x2.expand(k * n, -1, -1)], -1).reshape(k * n * m, -1)
    return Points(x, y.repeat_interleave(n * m, 0), (a[:, None] * c).flatten().repeat(k) / k)


def stretched(points: Points, relevant: int, root: Float[Tensor, "s s"]) -> Points:
    """The same law with x2 ~ N(0, C) for N(0, I), C = root root^T; x2 are the inputs after the first `relevant`."""
    x1, x2 = points.x.tensor_split([check.integer("relevant", relevant, 0)], 1)
    return points._replace(x=torch.cat([x1, x2 @ root.T], 1))


def specialists(
    mean: Float[Tensor, "k r"], y: Float[Tensor, "k o"], spurious: int, rng: torch.Generator, *, scale: float = 1.0
) -> Weights:
    """An expert for each of the `clusters`: its logit a quarter of the log-likelihood, its answer the target and noise.

    Weights of the spurious directions are random, with the scale as standard deviation.
    """
    W2, off = (torch.randn(len(mean), n, generator=rng, dtype=mean.dtype) for n in (spurious, y.shape[1]))
    return Weights(-mean.square().sum(1) / 8, torch.cat([mean / 4, scale * W2], 1), y + 0.3 * off)


def two_experts(
    mean: Float[Tensor, "k 1"], y: Float[Tensor, "k o"], border: float, spurious: int, rng: torch.Generator
) -> Weights:
    """A start with one expert for the clusters below `border` and one for those above; each answers their mean target.

    At the border the two logits are equal if the spurious inputs are zero.
    """
    low = mean[:, 0] < border
    W1 = torch.tensor([[-1.0], [1.0]], dtype=mean.dtype)
    W2 = torch.randn(2, spurious, generator=rng, dtype=mean.dtype)
    return Weights(-border * W1[:, 0], torch.cat([W1, W2], 1), torch.stack([y[low].mean(0), y[~low].mean(0)]))


def prediction(theta: Weights, x: Float[Tensor, "n d"]) -> Float[Tensor, "n o"]:
    """sum_m softmax(W x + b)_m u_m, the paper's g_U(W x + b)."""
    return torch.softmax(x @ theta.W.T + theta.b, 1) @ theta.U


def data_loss(theta: Weights, points: Points) -> Float[Tensor, ""]:
    """E |y - f(x)|^2."""
    return points.weight @ (prediction(theta, points.x) - points.y).square().sum(1)


def loss(theta: Weights, points: Points, decay: Decay) -> Float[Tensor, ""]:
    """The regularized loss of Theorem 3, with |b|^2 beside it."""
    penalty = decay.router * theta.W.square().sum() + decay.experts * theta.U.square().sum()
    return data_loss(theta, points) + penalty + decay.bias * theta.b.square().sum()


def slope(value: Callable[..., Float[Tensor, ""]], theta: Weights, *more) -> Weights:
    """The gradient of `value(theta, *more)` in all weights."""
    leaves = Weights(*(t.detach().requires_grad_() for t in theta))
    return Weights(*torch.autograd.grad(value(leaves, *more), leaves, materialize_grads=True))


def bias_hessian(theta: Weights, points: Points) -> Float[Tensor, "M M"]:
    """H, the second derivative of the data's loss in the bias; a bias of zero counts where the router has none."""
    return hessian(lambda b: data_loss(theta._replace(b=b), points), theta.b)


def implied_decay(theta: Weights, points: Points) -> Decay:
    """The coefficients under which W and U would not grow or shrink: -<W, dD/dW> / (2 |W|^2), and for U alike."""
    down = slope(data_loss, theta, points)
    return Decay(*(float(-(a * g).sum() / (2 * a.square().sum())) for a, g in ((theta.W, down.W), (theta.U, down.U))))


def averaged_loss(
    theta: Weights,
    points: Points,
    relevant: int,
    *,
    root: Float[Tensor, "s s"],
    epsilon: float,
    variance: float,
    nodes: int,
) -> Float[Tensor, ""]:
    """E_z of the data's loss at bias b + z, the spurious columns W_2 times 1 - epsilon (Appendix D).

    The first `relevant` columns of W are before W_2, the spurious inputs have the covariance C = root root^T, and z is
    Gaussian with covariance `variance` times W_2 C W_2^T; the quadrature has `nodes` in each spurious direction.
    """
    W2 = theta.W[:, check.integer("relevant", relevant, 0) :]
    small = torch.cat([theta.W[:, :relevant], (1 - epsilon) * W2], 1)
    zeta, weight = gaussian_nodes(W2.shape[1], nodes)
    b = theta.b + check.positive("variance", variance) ** 0.5 * zeta @ (W2 @ root).T
    return weight @ torch.stack([data_loss(theta._replace(b=own, W=small), points) for own in b])


def descend(theta: Weights, points: Points, decay: Decay, *, rate: float, steps: int, bias: bool = True):
    """Gradient descent on the exact loss, weights after each step; without `bias` the router's stays as it is."""
    check.positive("rate", rate)
    for _ in range(check.integer("steps", steps, 1)):
        up = slope(loss, theta, points, decay)
        b = theta.b - rate * up.b if bias else theta.b
        theta = Weights(b, theta.W - rate * up.W, theta.U - rate * up.U)
        yield theta


class Carried(NamedTuple):
    """A descent of T steps, and what the curvature in the bias alone makes of the spurious weights it began with."""

    spurious: Float[Tensor, "T+1 M s"]  # W_2 before the first step and after each
    predicted: Float[Tensor, "T+1 M s"]  # the same, as the product of the matrices of every step says
    lowest: Float[Tensor, " T"]  # smallest eigenvalue of H before each step


def carried(
    theta: Weights,
    points: Points,
    decay: Decay,
    relevant: int,
    *,
    C: Float[Tensor, "s s"],
    rate: float,
    steps: int,
) -> Carried:
    """Descent from `theta`, and beside it W_2 <- W_2 - rate (H W_2 C + 2 lambda_1 W_2), which never looks at its W_2.

    C is the covariance of the spurious inputs; the first `relevant` columns of W are before W_2.
    """
    spurious, predicted, lowest = [theta.W[:, relevant:]], [theta.W[:, relevant:]], []
    for after in descend(theta, points, decay, rate=rate, steps=steps):
        H, W2 = bias_hessian(theta, points), predicted[-1]
        lowest.append(torch.linalg.eigvalsh(H)[0])
        predicted.append(W2 - rate * (H @ W2 @ C + 2 * decay.router * W2))
        spurious.append(after.W[:, relevant:])
        theta = after
    return Carried(*(torch.stack(v) for v in (spurious, predicted, lowest)))


class Minimum(NamedTuple):
    """Where the loss was found to be smallest nearby."""

    theta: Weights
    loss: float  # the regularized loss there
    curvature: Float[Tensor, " p"]  # eigenvalues of its Hessian, ascending; one is zero with an undecayed bias


def find_minimum(theta: Weights, points: Points, decay: Decay, *, bias: bool = True) -> Minimum:
    """A local minimum of the loss: quasi-Newton steps from `theta`, then Newton's to rounding.

    Without `bias` the router's stays as it is. RuntimeError where the search ends at no minimum, as at a saddle.
    """
    shapes = [t.shape for t in theta]
    fixed = theta.b.numel() if not bias else 0
    whole = torch.cat([t.flatten() for t in theta])

    def unpack(v: Tensor) -> Weights:
        parts = torch.cat([whole[:fixed], v]).split([s.numel() for s in shapes])
        return Weights(*(p.reshape(s) for p, s in zip(parts, shapes, strict=True)))

    def value(v: Tensor) -> Tensor:
        return loss(unpack(v), points, decay)

    def value_and_slope(v) -> tuple[float, np.ndarray]:
        leaf = torch.as_tensor(v).requires_grad_()
        at = value(leaf)
        return float(at.detach()), torch.autograd.grad(at, leaf)[0].numpy()

    options = {"gtol": 1e-7, "maxiter": 2_000}
    found = minimize(value_and_slope, whole[fixed:].numpy(), jac=True, method="BFGS", options=options)
    v = torch.from_numpy(found.x)
    for _ in range(4):
        up = torch.from_numpy(value_and_slope(v.clone())[1])
        v = v - torch.linalg.pinv(hessian(value, v), rtol=1e-9, hermitian=True) @ up
    up = torch.from_numpy(value_and_slope(v.clone())[1])
    curvature, left = torch.linalg.eigvalsh(hessian(value, v)), float(up.abs().max())
    if not (left <= 1e-9 and curvature[0] >= -1e-9):
        raise RuntimeError(f"no minimum: the search ended at slope {left:.0e}, smallest curvature {curvature[0]:.0e}")
    return Minimum(unpack(v), float(value(v)), curvature)


def mode_rates(
    theta: Weights, points: Points, decay: Decay, *, rate: float, steps: int
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """Rates at which a small spurious weight vanishes near a minimum: H_i + 2 lambda_1, and those of a descent.

    The last direction is spurious; the descent, on all weights, starts from a small one along each eigenvector of H.
    """
    size = 1e-3
    eigenvalue, vectors = torch.linalg.eigh(bias_hessian(theta, points))
    measured = []
    for v in vectors.T:
        tilted = theta._replace(W=torch.cat([theta.W[:, :-1], size * v[:, None]], 1))
        *_, end = descend(tilted, points, decay, rate=rate, steps=steps)
        left = float(end.W[:, -1] @ v) / size
        measured.append((1 - left ** (1 / steps)) / rate)
    return (eigenvalue + 2 * decay.router).numpy(), np.array(measured)


def coin_minimum(decay: Decay) -> tuple[float, float]:
    """The best a, and its loss, of three constant experts behind logits (a x, -a x, 0), x ~ N(0, 1), target 1.

    An independent route: the best answers come from normal equations, expectations are sums over an even grid.
    """
    x = np.linspace(-8, 8, 1601)
    p = np.exp(-(x**2) / 2) / (2 * np.pi) ** 0.5 * 0.01

    def value(a: float) -> float:
        gates = softmax(np.outer(x, (a, -a, 0)), axis=1)
        both = gates.T @ (p[:, None] * gates) + decay.experts * np.eye(3)
        mean = p @ gates
        return 1 - mean @ np.linalg.solve(both, mean) + 2 * decay.router * a * a

    found = minimize_scalar(value, bounds=(1, 4), method="bounded")
    return float(found.x), float(found.fun)  # pyright: ignore[reportAttributeAccessIssue]


def two_valleys(h: Float[np.ndarray, "*n"], w: float = 0.0) -> Float[np.ndarray, "*n"]:
    """E phi(h + w xi), xi ~ N(0, 1), for phi(h) = 1 - exp(-h^2 / 2) / 2 - exp(-(h - 6)^2 / 2)."""
    v = 1 + w**2
    shallow, deep = (np.exp(-((h - c) ** 2) / 2 / v) / v**0.5 for c in (0, 6))
    return 1 - shallow / 2 - deep


def three_values(kurtosis: float) -> tuple[Float[np.ndarray, "3"], Float[np.ndarray, "3"]]:
    """Values and probabilities of a symmetric law of variance 1 on three points; at kurtosis 1 it is a coin."""
    if check.positive("kurtosis", kurtosis) < 1:
        raise ValueError(f"kurtosis: expected a number >= 1, got {kurtosis!r}")
    return np.array([-1, 0, 1]) * kurtosis**0.5, np.array([0.5, kurtosis - 1, 0.5]) / kurtosis


def quartic_minimum(
    x: Float[np.ndarray, " n"], p: Float[np.ndarray, " n"], *, decay_w: float, decay_b: float = 0.0
) -> tuple[float, float]:
    """The minimum (b, w) of E((b + w x)^2 - 1)^2 + decay_w w^2 + decay_b b^2 that a search from (0.01, 0.6) finds.

    The spurious input has the values x with probabilities p; the decays are lambda_1 and lambda_b.
    """

    def value_and_slope(v: np.ndarray) -> tuple[float, np.ndarray]:
        h = v[0] + v[1] * x
        slope = 4 * p * (h * h - 1) * h
        value = p @ (h * h - 1) ** 2 + decay_w * v[1] ** 2 + decay_b * v[0] ** 2
        return value, np.array([slope.sum() + 2 * decay_b * v[0], slope @ x + 2 * decay_w * v[1]])

    b, w = minimize(value_and_slope, (0.01, 0.6), jac=True, method="BFGS", options={"gtol": 1e-10}).x
    return float(b), float(w)


def bump_moments(x: Float[np.ndarray, " n"], p: Float[np.ndarray, " n"]) -> Float[np.ndarray, "13 4"]:
    """E x phi', E phi', E phi'' and E x^2 phi'' for the bumps phi = exp(-(x - c)^2 / 2), c = -3, -2.5, ..., 3.

    The spurious input has the values x with probabilities p.
    """
    off = x - np.linspace(-3, 3, 13)[:, None]
    bump = np.exp(-(off**2) / 2)
    first, second = -off * bump, (off**2 - 1) * bump
    return np.stack([first @ (x * p), first @ p, second @ p, second @ (x**2 * p)], 1)


def stein_fit(x: Float[np.ndarray, " n"], p: Float[np.ndarray, " n"], moments: int = 2) -> tuple[np.ndarray, float]:
    """Least squares of E x phi' by the next `moments` of `bump_moments`: coefficients, and what is left of its norm."""
    of = bump_moments(x, p)
    y, A = of[:, 0], of[:, 1 : check.integer("moments", moments, 1) + 1]
    c = np.linalg.lstsq(A, y, rcond=None)[0]
    return c, float(np.linalg.norm(A @ c - y) / np.linalg.norm(y))


def relevant_share(W: Float[Tensor, "*batch M d"], relevant: int) -> Float[Tensor, "*batch"]:
    """Dikkala et al., Section 3.1: sum of |w'_i|^2 over sum of |w_i|^2, w' the first `relevant` coordinates of w."""
    square = W.square().sum(-2)
    return square[..., : check.integer("relevant", relevant, 1)].sum(-1) / square.sum(-1)
