"""Algorithm 1 of Chen et al. (2022) as written, with its closed-form gradients (Eq. E.1, E.2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.models.experts import Activation
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchBatch


@dataclass(frozen=True)
class Run:
    """One trained MoE.

    Attributes:
        seed: the seed of initialization and routing noise.
        test_accuracy: share of test examples with y F(x) > 0, in [0, 1].
        dispatch_entropy: Eq. 6.1 on the test examples, in nats.
        history: one dict per recorded step: step, loss, test_accuracy, dispatch_entropy.
        parameters: the trained tensors by name; `theta` (d, M) and `W` (M, J, d) for Algorithm 1.
    """

    seed: int
    test_accuracy: float
    dispatch_entropy: float
    history: list[dict]
    parameters: dict[str, Tensor]


def logistic_loss(z: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """`l(z) = log(1 + e^-z)` (Eq. 3.2), without the threshold at which torch's softplus turns linear."""
    return -torch.nn.functional.logsigmoid(z)


def loss_slope(z: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """`l'(z) = -1 / (1 + e^z)` for the logistic loss l(z) = log(1 + e^-z); negative, -1/2 at 0."""
    return -torch.sigmoid(-z)


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


@torch.no_grad()
def evaluate(model: PatchMoE, test: PatchBatch) -> dict[str, float]:
    """Test accuracy (a tie y F = 0 is an error, as in Theorem 4.1) and dispatch entropy, without noise."""
    F, m = model(test.x)
    return {
        "test_accuracy": float((test.y * F > 0).double().mean()),
        "dispatch_entropy": dispatch_entropy(test.cluster, m),
    }


@torch.no_grad()
def train_patch_moe(
    train: PatchBatch,
    test: PatchBatch,
    *,
    experts: int = 8,
    filters: int = 16,
    activation: str = "cubic",
    steps: int,
    seeds: tuple[int, ...] = (0,),
    eta: float = 1e-3,
    eta_r: float = 0.1,
    sigma_0: float = 0.01,
    record_every: int = 100,
) -> list[Run]:
    """Algorithm 1 of Chen et al. (2022), as written, once for each seed.

    Experts step by per-expert normalized gradient (Eq. 3.4), the router by plain gradient (Eq. 3.5)
    from zero, selection adds Unif[0, 1] noise in training and none at test time, and the gate value
    is the softmax of the noiseless logits. The defaults are those of Appendix A.2; the paper names
    no sigma_0.

    Args:
        train, test: batches of `PatchTask.sample`, on the device and in the dtype to train with.
        experts, filters: M and J.
        activation: a key of `moe_theory.models.experts.ACTIVATIONS`.
        steps: number T of full-batch iterations, at least 1.
        seeds: one run each; a seed draws the initialization and the routing noise.
        eta, eta_r: learning rates of experts and router, > 0.
        sigma_0: scale of the initialization, > 0.
        record_every: steps between two entries of `Run.history`, at least 1.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """
    check.integer("steps", steps, 1)
    check.integer("record_every", record_every, 1)
    check.positive("eta", eta)
    check.positive("eta_r", eta_r)
    runs = []
    for seed in seeds:
        model = PatchMoE(train.x.shape[2], experts, filters, activation, sigma_0, seed, train.x.dtype).to(
            train.x.device
        )
        rng = torch.Generator(train.x.device).manual_seed(seed)
        history = []
        for t in range(steps):
            noise = torch.rand(len(train), experts, generator=rng, dtype=train.x.dtype, device=train.x.device)
            loss = step(model, train, noise, eta, eta_r)
            if (t + 1) % record_every == 0 or t + 1 == steps:
                history.append({"step": t + 1, "loss": loss, **evaluate(model, test)})
        last = history[-1]
        parameters = {"theta": model.router.theta.data, "W": model.W.data}
        runs.append(Run(seed, last["test_accuracy"], last["dispatch_entropy"], history, parameters))
    return runs
