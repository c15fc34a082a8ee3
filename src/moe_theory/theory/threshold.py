"""The smallest sparse layer: a threshold on the line between two experts that always answer +1 and -1.

The label of x is `sign x`, the logits are `h = (x - b, 0)`, the loss is squared, one expert is selected, and b is
the only parameter. With the renormalized gate the risk over x uniform on [-1, 1] is `2 |b|`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.rules import Rule, topk_set
from moe_theory.theory.router_gradient import legendre
from moe_theory.theory.smoothing import route_probabilities

NODES = 24  # of the quadrature between two kinks


def threshold_logits(x: Float[Tensor, "*n"], b: Float[Tensor, "*#n"]) -> Float[Tensor, "*n 2"]:
    """`h = (x - b, 0)`."""
    return torch.stack([x - b, torch.zeros_like(x)], -1)


def threshold_loss(x: Float[Tensor, "*n"], gates: Float[Tensor, "*n 2"]) -> Float[Tensor, "*n"]:
    """`(F(x) - sign x)^2` for the gates of the two experts."""
    return (gates @ gates.new_tensor([1.0, -1.0]) - x.sign()).square()


def threshold_risk(b: Float[Tensor, ""], rule: Rule, end: float = 1.0) -> Float[Tensor, ""]:
    """Mean loss over x uniform on [-1, end], by quadrature between the kinks at 0 and b.

    Differentiated by autograd in b it gives the mean of the per-example gradients: the nodes are constants, and the
    kinks are taken at a detached copy of b, which is float64.
    """
    kink, end = float(b.detach()), check.positive("end", end)
    x, w = legendre(sorted({-1.0, 0.0, end, *(c for c in (kink,) if -1 < c < end)}), NODES, b.device)
    return w @ threshold_loss(x, rule.gates(threshold_logits(x, b), 1)) / (1 + end)


def noisy_threshold_risk(b: Float[Tensor, ""], width: float) -> Float[Tensor, ""]:
    """`R_s(b)`: the risk over x uniform on [-1, 1] if the expert is drawn and its gate is 1.

    It is 4 times the probability of the wrong expert under uniform noise of the width s; the derivative by autograd
    is exact, since the probabilities are continuous in b.
    """
    at = float(b.detach())
    x, w = legendre(sorted({-1.0, 0.0, 1.0, *(c for c in (at - width, at, at + width) if -1 < c < 1)}), NODES, b.device)
    p = route_probabilities(threshold_logits(x, b), "uniform", width)
    return w @ (4 * torch.where(x > 0, p[:, 1], p[:, 0])) / 2


def learn_threshold(
    rule: Rule, runs: Sequence[torch.Generator], *, noise: float | None = None, score: bool = False, steps: int = 150
) -> Float[np.ndarray, "runs steps"]:
    """Thresholds visited by SGD from b = 0.6 with step size 0.04 and batches of 64, one run for each generator.

    Args:
        rule: gives the gates of the expert that was selected.
        runs: one generator for each run draws its batches, and then its experts; all on one device.
        noise: width of the uniform noise with which the expert is drawn; None selects the larger logit.
        score: whether the gradient has the score term `loss * d log p`, of the probability p of the expert drawn.
        steps: of SGD.
    """
    like: dict[str, Any] = dict(dtype=torch.float64, device=runs[0].device)
    b, path = torch.full((len(runs), 1), 0.6, **like), []
    for _ in range(steps):
        path.append(b[:, 0].cpu().numpy())
        b = b.clone().requires_grad_()
        x = torch.stack([2 * torch.rand(64, generator=g, **like) - 1 for g in runs])
        h = threshold_logits(x, b)
        p = topk_set(h, 1).to(h) if noise is None else route_probabilities(h, "uniform", noise)
        drawn = [torch.multinomial(q, 1, generator=g) for q, g in zip(p.detach(), runs, strict=True)]
        chosen = torch.zeros_like(h, dtype=torch.bool).scatter(-1, torch.stack(drawn), True)
        loss = threshold_loss(x, rule.shares(h, chosen) * chosen)
        surrogate = loss + loss.detach() * p[chosen].view_as(x).log() if score else loss
        b = (b - 0.04 * torch.autograd.grad(surrogate.mean(1).sum(), b)[0]).detach()
    return np.stack(path, 1)
