"""What a router does with its experts: how evenly, for whom, and how easily a step of training changes its mind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.streams import torch_stream


def effective_experts(chosen: Bool[Tensor, "*R N M"]) -> Float[Tensor, "*R"]:
    """`exp H` of the shares of all selections: M if all experts are selected equally often, 1 if only one is."""
    load = chosen.double().mean(-2)
    if not (load.sum(-1) > 0).all():
        raise ValueError("chosen: expected at least one selected expert, got none")
    return torch.special.entr(load / load.sum(-1, keepdim=True)).sum(-1).exp()


def together(chosen: Bool[Tensor, "N M"]) -> Int[Tensor, " M"]:
    """The component of each expert in the graph that joins two experts wherever they are selected together."""
    a = chosen.double()
    _, label = connected_components((a.T @ a).numpy() > 0, directed=False)
    return torch.from_numpy(label).long()


class PairedSteps(NamedTuple):
    """How far one step takes the losses and the selected sets, of R networks.

    Attributes:
        ratio: mean change of a loss over the distance of the parameters, the L of smooth2025, 5.3.
        flips: share of routed inputs whose selected set differs.
    """

    ratio: Float[Tensor, " R"]
    flips: Float[Tensor, " R"]


def paired_steps(
    network: nn.Module,
    losses: Callable[..., tuple[Float[Tensor, "R n"], Bool[Tensor, "R N M"] | None]],
    data: tuple[Float[Tensor, "R n s d"], Float[Tensor, "R n o"]],
    rate: float,
    *,
    draws: int,
    batch: int,
    seed: int,
) -> PairedSteps:
    """Two steps of SGD from the same point, on two batches, compared on a third (smooth2025, 5.3); means over draws.

    Args:
        network: R networks stacked; it is left as it was.
        losses: `(x, y, rng)` to the losses of all examples and the selected sets, None for none; it reads the network,
            and rng draws its routing noise.
        data: R training sets.
        rate: of the two steps.
        draws, batch: how often, and the size of each of the three batches; seed: draws them, and routing noise.
    """
    check.positive("rate", rate)
    x, y = data
    rng, found = torch_stream(seed, "batches"), []
    for draw in range(check.integer("draws", draws, 1)):
        *two, third = torch.randperm(x.shape[1], generator=rng)[: 3 * batch].split(batch)
        noise = partial(torch_stream, seed, "routing noise", draw)  # the same at both ends
        ends = []
        for at in two:
            with stepped(network, losses(x[:, at], y[:, at], noise())[0].mean(1).sum(), rate) as theta, torch.no_grad():
                ends.append((theta, *losses(x[:, third], y[:, third], noise())))
        (theta1, l1, set1), (theta2, l2, set2) = ends
        r = sum((a - b).square().flatten(1).sum(1) for a, b in zip(theta1, theta2, strict=True)).sqrt()  # pyright: ignore
        moved = torch.zeros_like(r) if set1 is None else (set1 != set2).any(-1).double().mean(1)
        found.append(((l1 - l2).abs().mean(1) / r, moved))
    return PairedSteps(*(torch.stack(part).double().mean(0) for part in zip(*found, strict=True)))


@contextmanager
def stepped(network: nn.Module, loss: Tensor, rate: float) -> Iterator[list[Tensor]]:
    """The network after one step of SGD down a loss, as long as the context lasts; gives its parameters there."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
    start = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, g in zip(parameters, slopes, strict=True):
            p -= 0.0 if g is None else rate * g
        try:
            yield [p.clone() for p in parameters]
        finally:
            for p, p0 in zip(parameters, start, strict=True):
                p.copy_(p0)
