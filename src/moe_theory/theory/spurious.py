"""What a router does with directions that carry no signal (Dikkala et al. 2023, Theorem 1 and Appendix D).

The network is softmax(W x + b) over constant experts, the rows of U; its squared loss is taken exactly, as a sum
over Gauss-Hermite nodes. The inputs are x = (x1, x2): the target depends on x1 alone, x2 is an independent Gaussian.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor
from torch.func import grad, grad_and_value, hessian

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

    Args:
        mean: of each cluster, in the relevant directions; y: its target.
        spurious: number of directions that are the same for all clusters.
        nodes: of the quadrature in each relevant direction; spurious_nodes: in each of the others.
    """
    z, a = gaussian_nodes(mean.shape[1], nodes)
    x2, c = gaussian_nodes(spurious, spurious_nodes)
    k, n, m = len(mean), len(z), len(x2)
    x1 = (mean[:, None] + z).reshape(k * n, 1, -1).expand(-1, m, -1)
    x = torch.cat([x1, x2.expand(k * n, -1, -1)], -1).reshape(k * n * m, -1)
    return Points(x, y.repeat_interleave(n * m, 0), (a[:, None] * c).flatten().repeat(k) / k)


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


def bias_hessian(theta: Weights, points: Points) -> Float[Tensor, "M M"]:
    """H, the second derivative of the data's loss in the bias; a bias of zero counts where the router has none."""
    return hessian(lambda b: data_loss(theta._replace(b=b), points))(theta.b)


def averaged_loss(
    theta: Weights, points: Points, relevant: int, *, epsilon: float, variance: float, nodes: int
) -> Float[Tensor, ""]:
    """E_z of the data's loss at bias b + z, the spurious columns W_2 times 1 - epsilon (Appendix D).

    Args:
        theta, points: where, and the law of the data.
        relevant: number of columns of W before W_2.
        epsilon: how much W_2 shrinks.
        variance: z is Gaussian with covariance `variance` times W_2 W_2^T.
        nodes: of the quadrature over z, in each spurious direction.
    """
    W2 = theta.W[:, check.integer("relevant", relevant, 0) :]
    small = torch.cat([theta.W[:, :relevant], (1 - epsilon) * W2], 1)
    zeta, weight = gaussian_nodes(W2.shape[1], nodes)
    b = theta.b + check.positive("variance", variance) ** 0.5 * zeta @ W2.T
    return weight @ torch.stack([data_loss(theta._replace(b=own, W=small), points) for own in b])


def descend(theta: Weights, points: Points, decay: Decay, *, rate: float, steps: int, bias: bool = True):
    """Gradient descent on the exact loss, weights after each step; without `bias` the router's stays as it is."""
    check.positive("rate", rate)
    for _ in range(check.integer("steps", steps, 1)):
        slope = grad(loss)(theta, points, decay)
        b = theta.b - rate * slope.b if bias else theta.b
        theta = Weights(b, theta.W - rate * slope.W, theta.U - rate * slope.U)
        yield theta


class Minimum(NamedTuple):
    """Where the loss was found to be smallest nearby.

    Attributes:
        theta: the weights; loss: the regularized loss there.
        slope: largest entry of its gradient.
        curvature: eigenvalues of its Hessian, ascending; with an undecayed bias one is zero, a common shift of it.
    """

    theta: Weights
    loss: float
    slope: float
    curvature: Float[Tensor, " p"]


def find_minimum(theta: Weights, points: Points, decay: Decay, *, bias: bool = True) -> Minimum:
    """A local minimum of the loss: quasi-Newton steps from `theta`, then Newton's to rounding.

    Args:
        theta: where the search starts; points: the law of the data; decay: the coefficients.
        bias: whether the router's bias is trained too; it stays as it is otherwise.

    Raises:
        RuntimeError: where the search ends at no minimum, as at a saddle.
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
        slope, at = grad_and_value(value)(torch.from_numpy(v))
        return float(at), slope.numpy()

    slope, options = grad(value), {"gtol": 1e-7, "maxiter": 2_000}
    found = minimize(value_and_slope, whole[fixed:].numpy(), jac=True, method="BFGS", options=options)
    v = torch.from_numpy(found.x)
    for _ in range(4):
        v = v - torch.linalg.pinv(hessian(value)(v), rtol=1e-9, hermitian=True) @ slope(v)
    curvature, left = torch.linalg.eigvalsh(hessian(value)(v)), float(slope(v).abs().max())
    if not (left <= 1e-9 and curvature[0] >= -1e-9):
        raise RuntimeError(f"no minimum: the search ended at slope {left:.0e}, smallest curvature {curvature[0]:.0e}")
    return Minimum(unpack(v), float(value(v)), left, curvature)


def mode_rates(
    theta: Weights, points: Points, decay: Decay, *, rate: float, steps: int, size: float = 1e-3
) -> tuple[Float[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """Rates at which a small spurious weight vanishes near a minimum: H_i + 2 lambda_1, and those of a descent.

    Args:
        theta: a minimum; points: the law of the data, the last direction spurious; decay: the coefficients.
        rate, steps: of a descent on all weights.
        size: length of the spurious weight, along each eigenvector of H, from which it starts.
    """
    eigenvalue, vectors = torch.linalg.eigh(bias_hessian(theta, points))
    measured = []
    for v in vectors.T:
        tilted = theta._replace(W=torch.cat([theta.W[:, :-1], size * v[:, None]], 1))
        *_, end = descend(tilted, points, decay, rate=rate, steps=steps)
        left = float(end.W[:, -1] @ v) / size
        measured.append((1 - left ** (1 / steps)) / rate)
    return (eigenvalue + 2 * decay.router).numpy(), np.array(measured)


def quartic_minimum(
    x: Float[np.ndarray, " n"], p: Float[np.ndarray, " n"], *, decay_w: float, decay_b: float = 0.0
) -> tuple[float, float]:
    """The minimum (b, w) of E((b + w x)^2 - 1)^2 + decay_w w^2 + decay_b b^2 that a search from (0.01, 0.6) finds.

    Args:
        x, p: values of the spurious input, and their probabilities.
        decay_w, decay_b: lambda_1 and lambda_b.
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

    Args:
        x, p: values of the spurious input, and their probabilities.
    """
    off = x - np.linspace(-3, 3, 13)[:, None]
    bump = np.exp(-(off**2) / 2)
    first, second = -off * bump, (off**2 - 1) * bump
    return np.stack([first @ (x * p), first @ p, second @ p, second @ (x**2 * p)], 1)


def relevant_share(W: Float[Tensor, "*batch M d"], relevant: int) -> Float[Tensor, "*batch"]:
    """Dikkala, Section 3.1: sum of |w'_i|^2 over sum of |w_i|^2, w' the first `relevant` coordinates of w."""
    square = W.square().sum(-2)
    return square[..., : check.integer("relevant", relevant, 1)].sum(-1) / square.sum(-1)
