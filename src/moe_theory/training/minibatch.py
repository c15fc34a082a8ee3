"""Algorithm 1 of Chen et al. (2022) for experts of any kind, in minibatches and by autograd: its use in A.3."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.dispatched import DispatchedMoE
from moe_theory.streams import torch_stream
from moe_theory.training.fit import fit

#: Of A.3, for single networks and mixtures alike.
MOMENTUM, DECAY = 0.9, 5e-4


def balancing_loss(pi: Float[Tensor, "n M"], m: Int[Tensor, " n"]) -> Float[Tensor, ""]:
    """`M sum_m rho_m q_m`: rho_m is the share of examples sent to expert m, q_m its mean gate (Fedus et al. 2021)."""
    rho = m.bincount(minlength=pi.shape[1]).to(pi) / len(m)
    return pi.shape[1] * (rho * pi.mean(0)).sum()


def normalize(networks: nn.ModuleList) -> None:
    """Divides each expert's gradient by its norm (Eq. 3.4), in place; one that got no example has none, and stays."""
    for expert in networks:
        gradients = [p.grad for p in expert.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])) if gradients else 0
        for g in gradients if norm > 0 else ():
            g /= norm


def train(
    model: nn.Module,
    data: tuple[Tensor, Int[Tensor, " n"]],
    *,
    steps: int,
    batch: int = 128,
    rate: float,
    router_rate: float | None = None,
    normalized: bool = True,
    balance: float = 0.0,
    seed: int,
) -> Iterator[float]:
    """Minimizes the cross-entropy in place, and yields the loss of every batch before its step.

    Rates fall to zero along a cosine over the steps; the paper does not say how its rates fall. A frozen router is one
    whose parameters need no gradient.

    Args:
        model: a `DispatchedMoE`, or a single network.
        data: examples and labels.
        steps, batch: number of steps, and examples in each, which are drawn with repetition.
        rate: of the experts, or of the single network.
        router_rate: of the router; None for a single network.
        normalized: whether the gradient of each expert, or of the single network, is divided by its norm.
        balance: coefficient of the balancing loss.
        seed: of the batches and the routing noise.

    Raises:
        ValueError: for an argument outside its range, or a router's rate where there is no router.
    """
    mixture = isinstance(model, DispatchedMoE)
    if mixture != (router_rate is not None):
        raise ValueError(f"router_rate: expected a rate for a mixture and only for one, got {router_rate!r}")
    experts = model.experts if mixture else nn.ModuleList([model])
    groups = [{"params": experts.parameters(), "lr": check.positive("rate", rate)}]
    if mixture:
        groups.append({"params": model.router.parameters(), "lr": check.positive("router_rate", router_rate)})
    optimizer = torch.optim.SGD(groups, momentum=MOMENTUM, weight_decay=DECAY)
    if normalized:
        optimizer.register_step_pre_hook(lambda *_: normalize(experts))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, check.integer("steps", steps, 1))
    rng = torch_stream(seed, "training")

    def loss(index: Int[Tensor, " b"]) -> Tensor:
        x, y = data[0][index], data[1][index]
        if not mixture:
            return F.cross_entropy(model(x), y)
        out, pi, m = model(x, torch.rand(len(x), len(experts), generator=rng))
        return F.cross_entropy(out, y) + check.not_negative("balance", balance) * balancing_loss(pi, m)

    drawn = (torch.randint(len(data[1]), (batch,), generator=rng) for _ in range(steps))
    for value in fit(loss, drawn, optimizer):
        fall.step()
        yield value


@torch.no_grad()
def answers(model: nn.Module, x: Tensor, rows: int = 1_000) -> tuple[Float[Tensor, "n o"], Int[Tensor, " n"]]:
    """Outputs by the test-time rule, and the experts selected (0 for a single network), some examples at a time."""
    model.eval()
    parts = [model(a) for a in x.split(rows)]
    model.train()
    if not isinstance(model, DispatchedMoE):
        return torch.cat(parts), torch.zeros(len(x), dtype=torch.long)
    return torch.cat([out for out, _, _ in parts]), torch.cat([m for _, _, m in parts])
