"""Algorithm 1 by automatic differentiation: slower than `engine.py`, for what is not the paper's.

Data, routing noise, gate and router may each be another one; `train_patch_moe` comes here when one is. On what is the
paper's, both take the same steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.models.experts import ACTIVATIONS, Activation
from moe_theory.models.rules import top1_noisy
from moe_theory.tasks.patches import PatchBatch
from moe_theory.training.minibatch import balancing_loss
from moe_theory.training.variants import VARIANTS, logistic_loss

Elementwise = Callable[[Tensor], Tensor]
Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
GateFunction = Callable[[Float[Tensor, "n M"], Int[Tensor, " n"]], Float[Tensor, " n"]]
RouterFunction = Callable[[Float[Tensor, "n P d"], Float[Tensor, "d M"]], Float[Tensor, "n M"]]

#: Laws of the routing noise by name, at scale 1.
LAWS: dict[str, Noise] = {
    "uniform": lambda rng, shape: rng.random(shape, dtype=np.float32),
    "gaussian": lambda rng, shape: rng.standard_normal(shape, dtype=np.float32),
}


def softmax_gate(h: Float[Tensor, "n M"], m: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The gate value of Chen et al.: the softmax probability of the expert selected, from the noiseless logits."""
    return h.softmax(1).gather(1, m[:, None]).squeeze(1)


def linear_router(x: Float[Tensor, "n P d"], theta: Float[Tensor, "d M"]) -> Float[Tensor, "n M"]:
    """The logits of Chen et al.: `h_m(x) = sum_p <theta_m, x_p>`."""
    return x.sum(1) @ theta


@dataclass(frozen=True)
class Layer:
    """The patch MoE with one function for each of its parts.

    Attributes:
        sigma: the activation, elementwise.
        router: `router(x, theta)` gives the logits (n, M).
        gate: `gate(h, m)` gives the factor (n,) in front of the selected experts' outputs.
        noise: `noise(rng, (M, n))` draws what the selection adds to the logits in training.
    """

    sigma: Elementwise
    router: RouterFunction = linear_router
    gate: GateFunction = softmax_gate
    noise: Noise = LAWS["uniform"]

    def draw(self, like: Tensor, M: int, rng: np.random.Generator) -> Float[Tensor, "n M"]:
        """Routing noise for the examples in `like`."""
        try:
            found = self.noise(rng, (M, len(like)))
        except TypeError as error:
            raise ValueError(
                f"noise: expected a function of a NumPy generator and a shape, got one that fails ({error})"
            ) from error
        found = check.array("noise", found).to(like)
        if found.shape != (M, len(like)):
            raise ValueError(f"noise: expected draws of shape {(M, len(like))}, got {tuple(found.shape)}")
        return found.T

    def forward(self, x: Float[Tensor, "n P d"], theta: Tensor, W: Float[Tensor, "M J d"], noise: Tensor | None = None):
        """Outputs F(x_i) (n,), logits (n, M) and the selected experts (n,); without noise the test-time rule."""
        h = _given("router", self.router, (x, theta), len(x), len(W))
        m = top1_noisy(h, noise)
        f = x.new_zeros(len(x))
        for expert, filters in enumerate(W):
            at = (m == expert).nonzero().squeeze(1)
            f = f.index_put((at,), self.sigma(x[at] @ filters.T).sum((1, 2)))
        return _given("gate", self.gate, (h, m), len(x)) * f, h, m

    def gradients(self, batch: PatchBatch, theta: Tensor, W: Tensor, rng: np.random.Generator, balance: float):
        """The loss (3.3) at fresh routing noise, and its gradients in theta and W, a balancing loss included."""
        theta, W = (t.detach().requires_grad_() for t in (theta, W))
        with torch.enable_grad():
            F, h, m = self.forward(batch.x, theta, W, self.draw(batch.x, len(W), rng))
            loss = logistic_loss(batch.y * F).mean()
            whole = loss + balance * balancing_loss(h.softmax(1), m) if balance else loss
            slopes = torch.autograd.grad(whole, (theta, W), allow_unused=True, materialize_grads=True)
        return loss.detach(), *slopes

    def tested(self, batch: PatchBatch, theta: Tensor, W: Tensor) -> dict:
        """Test accuracy, dispatch entropy and table, as the engine gives them."""
        F, _, m = self.forward(batch.x, theta, W)
        return {
            "test_accuracy": float((batch.y * F > 0).double().mean()),
            "dispatch_entropy": dispatch_entropy(batch.cluster, m),
            "dispatch": dispatch_counts(batch.cluster, m, len(W)),
        }


def whole_loss(
    batch: PatchBatch,
    theta: Float[Tensor, "d M"],
    W: Float[Tensor, "M J D"],
    noise: Float[Tensor, "M n"],
    *,
    variant: str = "as written",
    activation: str = "cubic",
    balance: float = 0.0,
) -> Float[Tensor, ""]:
    """The loss (3.3) of a variant and `balance` times its load-balancing loss, for automatic differentiation.

    Every patch goes through every expert, and the choice is a one-hot factor.

    Args:
        batch, theta, W: data, router and experts, all of one dtype; in the released variants D is d + 1, for biases.
        noise: routing noise, added to the logits before the choice.
        variant: a key of `moe_theory.training.variants.VARIANTS`.
        activation: a key of `moe_theory.models.experts.ACTIVATIONS`.
        balance: coefficient of the load-balancing loss.

    Raises:
        ValueError: for another variant or activation.
    """
    how, sigma = VARIANTS[check.choice("variant", variant, VARIANTS)], _named(activation).value
    x, (M, J, _) = how.input_scale * batch.x, W.shape
    h = x.sum(1) @ theta
    noisy = h + noise.T
    chosen = torch.nn.functional.one_hot(noisy.argmax(1), M).to(x)
    rho = chosen.mean(0) - how.centered / M
    gate = noisy if how.raw_gate else h.softmax(1)
    weights, bias = (W[..., :-1], W[:, None, :, -1]) if how.biases else (W, 0.0)
    f = sigma(torch.einsum("npd,mjd->nmpj", x, weights) + bias).sum(2)
    f = f[..., J // 2 :].sum(2) - f[..., : J // 2].sum(2) if how.biases else f.sum(2)
    loss = how.loss(batch.y * (gate * f * chosen).sum(1)).mean()
    return loss + balance * M * (rho * gate.mean(0)).sum()


def _given(name: str, part: Callable[..., Tensor], inputs: tuple[Tensor, ...], *sizes: int) -> Tensor:
    """What a part of one's own makes of its inputs: floating numbers of these sizes, or a ValueError that names it."""
    try:
        found = part(*inputs)
    except (RuntimeError, TypeError) as error:
        asked = f"a function of {len(inputs)} tensors" if len(inputs) > 1 else "a function of a tensor"
        raise ValueError(f"{name}: expected {asked}, got one that fails ({error})") from error
    return check.tensor(name, found, *sizes)


@torch.enable_grad()
def resolve_activation(value: str | Activation | Elementwise, like: Tensor) -> Activation:
    """An activation by its name, or one's own: a function of a tensor, elementwise, whose slope autograd takes.

    Raises:
        ValueError: for another name, what cannot be called, or a function that on a tensor with the dtype and device
            of `like` is not elementwise or has no slope.
    """
    if isinstance(value, Activation):
        return value
    if not callable(value):
        return _named(value)
    z = torch.linspace(-1, 1, 6).to(like).view(2, 3).requires_grad_()
    if not _given("activation", value, (z,), 2, 3).requires_grad:
        raise ValueError("activation: expected a function that autograd differentiates, got one without a slope")
    return Activation(value, partial(_slope, value))


def _named(value: str) -> Activation:
    return ACTIVATIONS[check.choice("activation", value, ACTIVATIONS)]


def _slope(value: Elementwise, z: Tensor) -> Tensor:
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(value(z).sum(), z)[0]


def resolve_noise(value: str | tuple[str, float] | Noise) -> Noise:
    """Routing noise by its law, by law and scale, or a function of one's own.

    Raises:
        ValueError: for another law, or a scale that is not > 0.
    """
    if callable(value):
        return value
    law, scale = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    draw = LAWS[check.choice("noise", law, LAWS)]
    check.positive("noise", scale)
    return draw if scale == 1 else lambda rng, shape: scale * draw(rng, shape)
