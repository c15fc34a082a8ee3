"""The variant of Algorithm 1 that the notebooks released with Chen et al. (2022) run.

It differs from the algorithm as written in: inputs times 10; experts with two logits and biases,
started at 0.001 times a convolution's default; the gate value is the raw noisy logit of the winner
instead of a softmax probability; the output passes through a softmax and then through a
cross-entropy that applies another; the norm an expert's gradient is divided by adds the norms of
its weights' and its biases' gradients; training stops once the loss is at most 0.314, or 0.02 above
its minimum; and the routing noise stays on at test time.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.models.experts import activation as named_activation
from moe_theory.tasks.patches import PatchBatch
from moe_theory.training.algorithm1 import Run

INPUT_SCALE, WEIGHT_SCALE, LOSS_TARGET, LOSS_SLACK = 10.0, 0.001, 0.314, 0.02


def _initial(experts: int, filters: int, d: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    draw = (
        (torch.rand(experts, filters, d + 1, generator=rng, dtype=torch.float64) * 2 - 1) * WEIGHT_SCALE / math.sqrt(d)
    )
    return draw[..., :d].contiguous(), draw[..., d].contiguous()


def _forward(x, theta, W, b, sigma, noise) -> tuple[Tensor, Tensor]:
    """Class probabilities (n, 2), order (y = -1, y = +1), and the chosen experts (n,)."""
    gate, m = (x.sum(1) @ theta + noise).max(1)
    filters = W.shape[1]
    logits = x.new_zeros(len(x), 2)
    for expert in range(len(W)):
        at = (m == expert).nonzero().squeeze(1)
        z = sigma.value(x[at] @ W[expert].T + b[expert]).sum(1)
        pair = torch.stack([z[:, : filters // 2].sum(1), z[:, filters // 2 :].sum(1)], 1)
        logits = logits.index_put((at,), pair)
    return (gate[:, None] * logits).softmax(1), m


def _loss(probabilities: Float[Tensor, "n 2"], y: Float[Tensor, " n"]) -> Tensor:
    return torch.nn.functional.cross_entropy(probabilities, (y > 0).long())


def _measure(x, batch, theta, W, b, sigma, rng) -> dict[str, float]:
    noise = torch.rand(len(x), len(W), generator=rng, dtype=x.dtype, device=x.device)
    with torch.no_grad():
        probabilities, m = _forward(x, theta, W, b, sigma, noise)
    right = probabilities.argmax(1) == (batch.y > 0).long()
    return {"test_accuracy": float(right.double().mean()), "dispatch_entropy": dispatch_entropy(batch.cluster, m)}


def train_released_moe(
    train: PatchBatch,
    test: PatchBatch,
    *,
    experts: int = 8,
    filters: int = 16,
    activation: str = "cubic",
    steps: int = 601,
    seeds: tuple[int, ...] = (0,),
    eta: float = 1e-3,
    eta_r: float = 0.1,
    record_every: int = 100,
) -> list[Run]:
    """Train as the released notebooks do, once for each seed; see the module's description.

    Args, returns and errors are those of `moe_theory.training.train_patch_moe`; `filters` is even,
    half for each logit, and the parameters are `theta` (d, M), `W` (M, J, d) and `b` (M, J), acting
    on inputs times 10. Test numbers carry the routing noise.
    """
    check.integer("steps", steps, 1)
    check.integer("record_every", record_every, 1)
    if check.integer("filters", filters, 2) % 2:
        raise ValueError(f"filters: expected an even number, half for each logit, got {filters}")
    check.positive("eta", eta)
    check.positive("eta_r", eta_r)
    sigma = named_activation(activation)
    x, x_test, d = train.x * INPUT_SCALE, test.x * INPUT_SCALE, train.x.shape[2]
    runs = []
    for seed in seeds:
        W, b = (t.to(x).requires_grad_() for t in _initial(experts, filters, d, torch.Generator().manual_seed(seed)))
        theta = torch.zeros(d, experts, dtype=x.dtype, device=x.device, requires_grad=True)
        rng = torch.Generator(x.device).manual_seed(seed)
        history, least = [], math.inf
        for t in range(steps):
            noise = torch.rand(len(x), experts, generator=rng, dtype=x.dtype, device=x.device)
            loss = _loss(_forward(x, theta, W, b, sigma, noise)[0], train.y)
            least = min(least, loss.item())
            stop = loss.item() <= LOSS_TARGET or loss.item() > least + LOSS_SLACK or t + 1 == steps
            if stop or (t + 1) % record_every == 0:
                history.append({"step": t + 1, "loss": loss.item(), **_measure(x_test, test, theta, W, b, sigma, rng)})
            if stop:
                break
            to_theta, to_W, to_b = torch.autograd.grad(loss, (theta, W, b))
            norm = to_W.flatten(1).norm(dim=1) + to_b.norm(dim=1)
            with torch.no_grad():
                W -= eta * torch.where(norm[:, None, None] > 0, to_W / norm[:, None, None], 0)
                b -= eta * torch.where(norm[:, None] > 0, to_b / norm[:, None], 0)
                theta -= eta_r * to_theta
        parameters = {"theta": theta.detach(), "W": W.detach(), "b": b.detach()}
        runs.append(Run(seed, history[-1]["test_accuracy"], history[-1]["dispatch_entropy"], history, parameters))
    return runs
