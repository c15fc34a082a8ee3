"""One step of Algorithm 1 of Chen et al. (2022) to read, with its closed-form gradients (Eq. E.1, E.2).

`engine.py` takes the same step faster; a test holds the two together.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory.models.experts import Activation
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchBatch
from moe_theory.training.variants import logistic_loss, loss_slope


def router_gradient(
    x: Float[Tensor, "n P d"],
    y: Float[Tensor, " n"],
    m: Int[Tensor, " n"],
    pi: Float[Tensor, "n M"],
    f: Float[Tensor, " n"],
) -> Float[Tensor, "d M"]:
    """Eq. E.1: the gradient of the perturbed loss (3.3) in Theta.

    Column m is `1/n sum_i (1[m_i = m] - pi_m) l'_i pi_{m_i} y_i f_{m_i}(x_i) sum_p x_i^(p)`.

    Args:
        x, y: patches and labels of n examples.
        m: the expert each example was sent to.
        pi: softmax of the noiseless logits.
        f: (n,) the outputs f_{m_i}(x_i).
    """
    chosen = pi.gather(1, m[:, None]).squeeze(1)
    weight = loss_slope(y * chosen * f) * chosen * y * f
    indicator = torch.nn.functional.one_hot(m, pi.shape[1]).to(pi)
    return x.sum(1).T @ ((indicator - pi) * weight[:, None]) / len(y)


def expert_gradient(
    x: Float[Tensor, "n P d"],
    y: Float[Tensor, " n"],
    m: Int[Tensor, " n"],
    pi: Float[Tensor, "n M"],
    f: Float[Tensor, " n"],
    W: Float[Tensor, "M J d"],
    sigma: Activation,
) -> Float[Tensor, "M J d"]:
    """Eq. E.2: the gradient of the perturbed loss (3.3) in every filter.

    `grad_{w_mj} = 1/n sum_{i: m_i = m} sum_p l'_i pi_m y_i sigma'(<w_mj, x_i^(p)>) x_i^(p)`.
    The arguments are those of `router_gradient`.
    """
    chosen = pi.gather(1, m[:, None]).squeeze(1)
    weight = loss_slope(y * chosen * f) * chosen * y / len(y)
    gradient = torch.zeros_like(W)
    for expert in range(len(W)):
        at = (m == expert).nonzero().squeeze(1)
        patches = x[at].flatten(0, 1)
        slope = sigma.slope(patches @ W[expert].T) * weight[at].repeat_interleave(x.shape[1])[:, None]
        gradient[expert] = slope.T @ patches
    return gradient


@torch.no_grad()
def step(model: PatchMoE, batch: PatchBatch, noise: Float[Tensor, "n M"], eta: float, eta_r: float) -> float:
    """One iteration of Algorithm 1 in place (Eq. 3.4, 3.5); returns the loss (3.3) before the step.

    An expert that receives no example, or whose gradient is zero, has no direction to step in and stays.
    """
    x, y, W, theta = batch.x, batch.y, model.W.data, model.router.theta.data
    h = x.sum(1) @ theta
    m, pi = (h + noise).argmax(1), h.softmax(1)
    f = model.dispatched(x, m)
    to_router = router_gradient(x, y, m, pi, f)
    to_experts = expert_gradient(x, y, m, pi, f, W, model.sigma)
    norm = to_experts.flatten(1).norm(dim=1)[:, None, None]
    W -= eta * torch.where(norm > 0, to_experts / norm, 0)
    theta -= eta_r * to_router
    return float(logistic_loss(y * pi.gather(1, m[:, None]).squeeze(1) * f).mean())
