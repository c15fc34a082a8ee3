"""Networks that train side by side, each on data of its own: a whole curve over sample sizes and seeds at once."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.soft import SoftMoE
from moe_theory.streams import stream
from moe_theory.tasks.gaussians import Examples
from moe_theory.training.fit import fit

#: The optimizers of Dikkala et al. (2023), C.1.
OPTIMIZERS = {
    "adam": lambda groups: torch.optim.Adam(groups),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}


def train(
    networks: nn.Module,
    data: Sequence[Examples],
    *,
    steps: int,
    batch: int,
    seeds: Sequence[int],
    optimizer: str = "adam",
    rate: float,
    router_rate: float | None = None,
    decay: Sequence[float] | None = None,
    frozen: Sequence[bool] | None = None,
) -> Iterator[float]:
    """Minimizes each network's mean squared error in place; yields the sum of their losses before every step.

    The R losses share no parameter, and both optimizers treat every number by itself: network r learns what it would
    learn alone.

    Args:
        networks: R of them, a `moe_theory.models.soft.SoftMoE` or `DenseNets`.
        data: R data sets, which may differ in size.
        steps, batch: number of steps, and examples of each, drawn with replacement.
        seeds: R of them; `seeds[r]` draws the batches of network r.
        optimizer: "adam" or "sgd", the latter with momentum 0.9.
        rate, router_rate: of the experts or the dense nets, and of the routers.
        decay: R coefficients lambda of `lambda |W|^2` in the loss, W the router's weights.
        frozen: R of them, whose routers stay as they are.

    Raises:
        ValueError: for numbers of data sets, seeds, coefficients that differ, an argument outside its range, or decay
            or frozen routers where there are none.
    """
    R = len(next(networks.parameters()))
    given = {"data": data, "seeds": seeds, "decay": decay, "frozen": frozen}
    for name, value in given.items():
        if value is not None and len(value) != R:
            raise ValueError(f"{name}: expected {R} entries, one for each network, got {len(value)}")
    check.integer("steps", steps, 1)
    check.integer("batch", batch, 1)
    routers = list(networks.router.parameters()) if isinstance(networks, SoftMoE) else []
    groups = [{"params": routers, "lr": check.positive("router_rate", router_rate)}] if routers else []
    if not routers and (any(decay or ()) or any(frozen or ())):
        raise ValueError("decay, frozen: expected none for networks without a router")
    rest = [p for p in networks.parameters() if all(p is not own for own in routers)]
    groups.append({"params": rest, "lr": check.positive("rate", rate)})
    hold = torch.tensor([*map(bool, frozen or [False] * R)], device=rest[0].device)
    handles = [p.register_hook(lambda g: g.masked_fill(_beside(hold, g), 0)) for p in routers if p.requires_grad]
    penalty = rest[0].new_tensor([*(decay or [0.0] * R)])

    def loss(some: tuple[Tensor, Tensor]) -> Tensor:
        x, y = some
        total = (networks(x) - y).square().mean((1, 2)).sum()
        if not any(decay or ()):
            return total
        return total + sum((penalty * W.square().flatten(1).sum(1)).sum() for W in networks.router.W)  # pyright: ignore

    how = OPTIMIZERS[check.choice("optimizer", optimizer, OPTIMIZERS)](groups)
    try:
        yield from fit(loss, batches(data, steps, batch, seeds), how)
    finally:
        for handle in handles:
            handle.remove()


def _beside(hold: Tensor, g: Tensor) -> Tensor:
    return hold.view(-1, *[1] * (g.ndim - 1))


def batches(
    data: Sequence[Examples], steps: int, batch: int, seeds: Sequence[int]
) -> Iterator[tuple[Float[Tensor, "R B D"], Float[Tensor, "R B o"]]]:
    """Inputs and labels of `batch` examples of each data set, `steps` times, drawn with replacement."""
    x, y = (torch.cat([getattr(part, name) for part in data]) for name in ("x", "y"))
    first = torch.tensor([0, *(len(part.x) for part in data)]).cumsum(0)
    streams = [stream(seed, "order") for seed in seeds]
    for _ in range(steps):
        drawn = [torch.from_numpy(rng.integers(len(d.x), size=batch)) for rng, d in zip(streams, data, strict=True)]
        at = (torch.stack(drawn) + first[:-1, None]).to(x.device)
        yield x[at], y[at]


@torch.no_grad()
def losses(
    networks: nn.Module, data: Sequence[Examples], *, weighted: bool = False, rows: int = 500
) -> Float[Tensor, " R"]:
    """Mean squared error of each network on data of its own, R sets of one size, some `rows` at a time.

    Every input is sent to one expert, or the experts are `weighted` by the gates, as in training.
    """
    x, y = (torch.stack([getattr(part, name) for part in data]) for name in ("x", "y"))
    answer = networks if weighted else networks.routed
    parts = zip(x.split(rows, 1), y.split(rows, 1), strict=True)
    return sum((answer(a) - b).square().sum((1, 2)) for a, b in parts) / y[0].numel()  # pyright: ignore
