"""Small sparse networks of one shape, trained side by side: a step of all of them costs little more than one's."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from moe_theory import _validate as check
from moe_theory.models.sparse import SparseMLP
from moe_theory.tasks.gaussians import Labelled


class Networks:
    """R networks that differ in weights, rule and K only, their parameters stacked.

    Args:
        networks: have one shape, one kind of heads and rules that need no noise; neighbours with one rule and K are
            fastest.

    Attributes:
        parameters: by their names in the block, each (R, ...), copies of those of the networks.

    Raises:
        ValueError: for a rule that needs noise, or blocks that differ in more.
    """

    def __init__(self, networks: Sequence[SparseMLP]):
        for network in networks:
            if network.noisy:
                raise ValueError(f"networks: expected rules without noise, got {network.block.rule.name}")
        blocks = [network.block for network in networks]
        shapes = {(block.scale, *((n, p.shape) for n, p in block.named_parameters())) for block in blocks}
        if len(shapes) != 1:
            raise ValueError(f"networks: expected blocks of one shape, heads and scale, got {len(shapes)} kinds")
        self.block = blocks[0]
        self.groups = [(*key, len(list(same))) for key, same in groupby(blocks, lambda b: (b.rule, b.k))]
        own = stack_module_state(blocks)[0]
        self.parameters = {name: p.detach().clone().requires_grad_() for name, p in own.items()}

    def take_experts(self, other: "Networks") -> None:
        """Start from the experts of S other networks: network r from copies of those of network r mod S."""
        for name, p in self.parameters.items():
            if name.startswith("experts"):
                own = other.parameters[name].detach()
                self.parameters[name] = _repeated(own, len(p)).requires_grad_()

    def _part(self, name: str, x: Float[Tensor, "R n d"]) -> Tensor:
        """What the routers or the experts of all networks say."""
        own = {n.removeprefix(name + "."): p for n, p in self.parameters.items() if n.startswith(name)}
        module = getattr(self.block, name)
        return vmap(lambda p, x: functional_call(module, p, (x,)))(own, x)

    def experts(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n M o"]:
        """Answers of all experts."""
        return self._part("experts", x)

    def __call__(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n o"]:
        """Outputs; network r reads `x[r]`."""
        parts = self._part("router", x).split([size for *_, size in self.groups])
        pi = torch.cat([rule.gates(h, k) for h, (rule, k, _) in zip(parts, self.groups, strict=True)])
        return self.block.scale * (pi[..., None] * self.experts(x)).sum(-2)


def _repeated(v: Tensor, R: int) -> Tensor:
    """v (S, ...) over and over along its first dimension, R long; ValueError unless S divides R."""
    if R % len(v):
        raise ValueError(f"parts: expected a number that divides the {R} networks, got {len(v)}")
    return v.repeat(R // len(v), *[1] * (v.ndim - 1))


def entropies(outputs: Float[Tensor, "R n o"], y: Int[Tensor, "R n"]) -> Float[Tensor, " R"]:
    """Mean cross-entropy of each network."""
    return F.cross_entropy(outputs.movedim(-1, 1), y, reduction="none").mean(1)


def stacked(parts: Sequence[Labelled]) -> Labelled:
    """Data sets of one size as one, x (S, N, d) and y (S, N)."""
    return Labelled(torch.stack([part.x for part in parts]), torch.stack([part.y for part in parts]))


def train_specialists(networks: Networks, data: Labelled, rate: float, batch: int, steps: int) -> None:
    """SGD in place on the experts alone: expert m learns its examples of the classes 2m and 2m + 1.

    Args:
        networks: R of them.
        data: x (R, N, d), y (R, N), read in turn in whole batches, over and over.
        rate, batch, steps: step size, examples of a step, steps.

    Raises:
        ValueError: for a batch larger than N.
    """
    names = [name for name in networks.parameters if name.startswith("experts")]
    if check.integer("batch", batch, 1) > data.y.shape[1]:
        raise ValueError(f"batch: expected at most N = {data.y.shape[1]}, got {batch}")
    whole = data.y.shape[1] // batch * batch
    for t in range(steps):
        at = torch.arange(batch * t, batch * (t + 1)) % whole
        x, y = data.x[:, at], data.y[:, at]
        own = networks.experts(x).take_along_dim((y // 2)[..., None, None], 2)[:, :, 0]
        _step(networks, names, torch.autograd.grad(entropies(own, y).sum(), _of(networks, names)), rate)


def train(
    networks: Networks, data: Labelled, rate: float, batch: int, steps: int, frozen: Bool[Tensor, " R"]
) -> Float[Tensor, "R steps"]:
    """SGD in place on experts and routers; the norms of the loss gradient in the router's parameters before each step.

    Args:
        networks: R of them.
        data: x (S, N, d), y (S, N), read in turn, over and over; network r reads part r mod S.
        rate, batch, steps: step size, examples of a step, steps.
        frozen: whose router stays as it is; its gradient is measured all the same.
    """
    names, norms = list(networks.parameters), []
    routers = [i for i, name in enumerate(names) if name.startswith("router")]
    for t in range(steps):
        at = torch.arange(batch * t, batch * (t + 1)) % data.y.shape[1]
        x, y = (_repeated(part[:, at], len(frozen)) for part in data)
        loss = entropies(networks(x), y).sum()
        gradients = list(torch.autograd.grad(loss, _of(networks, names)))
        norms.append(torch.cat([gradients[i].flatten(1) for i in routers], 1).norm(dim=1))
        for i in routers:
            gradients[i][frozen] = 0.0
        _step(networks, names, gradients, rate)
    return torch.stack(norms, 1)


def accuracies(networks: Networks, data: Labelled) -> Float[Tensor, " R"]:
    """Accuracy of each network in percent; network r reads part r mod S of x (S, N, d), y (S, N)."""
    x, y = (_repeated(part, sum(size for *_, size in networks.groups)) for part in data)
    with torch.no_grad():
        return 100 * (networks(x).argmax(-1) == y).float().mean(1)


def _of(networks: Networks, names: Sequence[str]) -> list[Tensor]:
    return [networks.parameters[name] for name in names]


def _step(networks: Networks, names: Sequence[str], gradients: Sequence[Tensor], rate: float) -> None:
    with torch.no_grad():
        for p, g in zip(_of(networks, names), gradients, strict=True):
            p.sub_(g, alpha=rate)
