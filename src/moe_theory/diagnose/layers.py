"""The mixture layers of a model of transformers, found by what the library itself records as router logits.

A model class of the library names the class of its routers and the place of the logits in what a router returns
(`_can_record_outputs`). All else is read off the running layer: what its router hands to its experts.
"""

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_theory.diagnose.arrays import linear_logits


class Trace(NamedTuple):
    """What a layer did with n tokens.

    Attributes:
        x: what its router read; exact: the logits of that in float64, `x W^T + b`.
        rounding: how far logits in the layer's precision may be from them.
        chosen: the experts the tokens were sent to; gates: the weights handed on with them, 0 elsewhere.
        F: the output of the experts together.
        masks: whether the experts are handed a mask (n, 1, M) of those selected, or their numbers (n, k).
    """

    x: Float[Tensor, "n d"]
    exact: Float[Tensor, "n M"]
    rounding: Float[Tensor, " n"]
    chosen: Bool[Tensor, "n M"]
    gates: Float[Tensor, "n M"]
    F: Float[Tensor, "n d"]
    masks: bool


@dataclass(frozen=True)
class Layer:
    """A mixture layer.

    Attributes:
        name: of its router in the model.
        block: the module of router and experts; router, experts: these two.
        logits_at: place of the logits in what the router returns.
    """

    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    logits_at: int

    @property
    def W(self) -> nn.Parameter:
        """The router's vectors, (M, d)."""
        return next(p for p in self.router.parameters() if p.ndim == 2)

    @property
    def b(self) -> nn.Parameter | None:
        """The router's biases, (M,), if it has any."""
        return next((p for p in self.router.parameters() if p.ndim == 1), None)

    @property
    def hidden(self) -> int:
        """Terms of the longest sum in an expert: the larger of the model's width and the expert's."""
        return max(max(p.shape) for p in self.experts.parameters())

    def double(self) -> "Layer":
        """A copy in float64, hooks and all, whose roundings are those that the code itself puts in.

        The library multiplies all experts in one call, which knows no float64; the copy has them in a loop.
        """
        block = copy.deepcopy(self.block).double()
        if hasattr(block.experts, "config"):
            block.experts.config._experts_implementation = "eager"
        router = getattr(block, self.name.rpartition(".")[2])
        return Layer(self.name, block, router, block.experts, self.logits_at)

    def _handed(self, index: Tensor, gates: Tensor) -> tuple[Bool[Tensor, "n M"], Float[Tensor, "n M"]]:
        """Experts and gates as a mask and a matrix, from what the experts are called with after the tokens."""
        if index.ndim == 3:
            chosen = index[:, 0].bool()
            return chosen, chosen * gates
        blank = torch.zeros(len(index), len(self.W), dtype=gates.dtype, device=gates.device)
        return blank.bool().scatter(1, index, True), blank.scatter(1, index, gates)

    @contextmanager
    def watched(self):
        """While it is open, every call of the layer appends a `Trace` to the list that it gives."""
        traces, x, given = [], [], []

        def leaves(module, args, out):
            if len(rest := given.pop()) != 2:
                raise ValueError(
                    "model: expected experts that are called with tokens, numbers and gates, "
                    f"got {1 + len(rest)} arguments in {self.name}"
                )
            index, gates = rest
            exact, rounding = linear_logits(x[-1], self.W, self.b)
            traces.append(Trace(x.pop(), exact, rounding, *self._handed(index, gates), out, index.ndim == 3))

        hooks = [
            self.router.register_forward_pre_hook(lambda _, args: x.append(args[0].flatten(0, -2))),
            self.experts.register_forward_pre_hook(
                lambda _, args, kwargs: given.append([*args, *kwargs.values()][1:]), with_kwargs=True
            ),
            self.experts.register_forward_hook(leaves),
        ]
        try:
            yield traces
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(self, x: Float[Tensor, "n d"]) -> Trace:
        """The layer at n tokens."""
        with self.watched() as traces:
            self.block(x[None])
        return traces[0]

    def answers(self, x: Float[Tensor, "n d"], masks: bool) -> Float[Tensor, "n M d"]:
        """What each expert says at each token, asked alone with gate 1; for `masks` see `Trace`."""
        number = torch.arange(len(self.W), device=x.device)[:, None, None].expand(-1, len(x), 1)
        index = torch.nn.functional.one_hot(number, len(self.W)) if masks else number
        return torch.stack([self.experts(x, m, torch.ones_like(x[:, :1])) for m in index], 1)


def layers_of(model: nn.Module) -> list[Layer]:
    """The mixture layers of a model of transformers, in the order in which it names them.

    Raises:
        ValueError: for a model of another kind, or one that has no such layer.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None:
        recorder = next((r for r in map(_recorder, model.modules()) if r is not None), None)
    if recorder is None:
        raise ValueError(
            "model: expected a model of transformers with mixture layers, whose class records router_logits, "
            f"got {type(model).__name__}"
        )
    modules, found = dict(model.named_modules()), []
    for name, router in modules.items():
        if isinstance(router, recorder.target_class):
            block = modules[name.rpartition(".")[0]]
            if not hasattr(block, "experts"):
                raise ValueError(f"model: expected router and experts side by side, got {type(block).__name__}")
            found.append(Layer(name, block, router, block.experts, recorder.index))
    if not found:
        raise ValueError(f"model: expected mixture layers in {type(model).__name__}, got none; is every layer dense?")
    return found


def _recorder(module: nn.Module):
    """How a module's class records its router logits, if it does."""
    return (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
