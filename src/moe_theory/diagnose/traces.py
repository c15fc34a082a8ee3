"""The mixture layers of a model of transformers, found by what the library itself records as router logits.

A model class of the library names the class of its routers and the place of the logits in what a router returns
(`_can_record_outputs`). All else is read off the running layer: what its router hands to its experts.
"""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.diagnose.arrays import linear_logits


class Trace(NamedTuple):
    """What a layer did with n tokens.

    Attributes:
        u: what its block read; x: what its router read; y: what its experts read; mostly one and the same.
        exact: the logits in float64, `x W^T + b`; recorded: those its router returned.
        rounding: how far logits in the layer's precision may be from them.
        chosen: the experts the tokens were sent to; gates: the weights handed on with them, 0 elsewhere.
        F: the output of the experts together; out: that of the block.
        masks: whether the experts are handed a mask (n, 1, M) of those selected, or their numbers (n, k).
    """

    u: Float[Tensor, "n d"]
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n d"]
    exact: Float[Tensor, "n M"]
    recorded: Float[Tensor, "n M"]
    rounding: Float[Tensor, " n"]
    chosen: Bool[Tensor, "n M"]
    gates: Float[Tensor, "n M"]
    F: Float[Tensor, "n d"]
    out: Float[Tensor, "n d"]
    masks: bool

    def of(self, kept: Bool[Tensor, " n"]) -> "Trace":
        """The same of some of the tokens."""
        kept = kept.to(self.x.device)
        return Trace(*(part[kept] if isinstance(part, Tensor) else part for part in self))


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
        return next((p for p in self.router.parameters() if p.shape == self.W.shape[:1]), None)

    @property
    def hidden(self) -> int:
        """Terms of the longest sum in an expert: the larger of the model's width and the expert's."""
        return max(max(p.shape) for p in self.experts.parameters())

    def double(self) -> "Layer":
        """A copy in float64, hooks and all, whose roundings are those that the code itself puts in.

        The library multiplies all experts in one call, which knows no float64; the copy has them in a loop.
        """
        block = copy.deepcopy(self.block).double()
        for module in block.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # pyright: ignore[reportAttributeAccessIssue]
        router = getattr(block, self.name.rpartition(".")[2])
        return Layer(self.name, block, router, block.experts, self.logits_at)

    def _handed(self, index: Tensor, gates: Tensor) -> tuple[Bool[Tensor, "n M"], Float[Tensor, "n M"]]:
        """Experts and gates as a mask and a matrix, from what the experts are called with after the tokens."""
        if index.ndim == 3:
            chosen = index[:, 0].bool()
            return chosen, chosen * gates
        blank = torch.zeros(len(index), len(self.W), dtype=gates.dtype, device=gates.device)
        return blank.bool().scatter(1, index, True), blank.scatter(1, index, gates)

    def _linear(self, x: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n M"], Float[Tensor, " n"]]:
        """`linear_logits` of what the router reads."""
        check.finite(f"model: what {self.name} reads", x)
        if self.W.shape[1] != x.shape[1]:
            raise ValueError(
                f"model: expected a linear router, got vectors of width {self.W.shape[1]} in {self.name}, "
                f"which reads hidden states of width {x.shape[1]}"
            )
        return linear_logits(x, check.finite(f"model: the vectors of {self.name}", self.W), self.b)

    @contextmanager
    def watched(self):
        """While it is open, every call of the layer appends a `Trace` to the list that it gives."""
        traces, u, x, given, recorded, seen = [], [], [], [], [], []

        def returned(_, __, out):
            recorded.append((out[self.logits_at] if isinstance(out, tuple) else out).detach().flatten(0, -2))

        def leaves(_, __, out):
            if len(given[-1]) != 3:
                raise ValueError(
                    "model: expected experts that are called with tokens, numbers and gates, "
                    f"got {len(given[-1])} arguments in {self.name}"
                )
            y, index, gates = given.pop()
            exact, rounding = self._linear(x[-1])
            check.finite(f"model: what the experts beside {self.name} return", out)
            parts = x.pop(), y.flatten(0, -2), exact, recorded.pop(), rounding, *self._handed(index, gates), out
            seen.append((*parts, index.ndim == 3))

        def done(_, __, out):
            read, (*parts, masks) = u.pop(), seen.pop()
            traces.append(Trace(read, *parts, _tokens(out).detach(), masks))  # pyright: ignore[reportCallIssue]

        named = {"with_kwargs": True}
        with ExitStack() as stack:
            for hook in (
                # before what others make of it: the block and the experts are called with it again
                self.block.register_forward_pre_hook(lambda *a: u.append(_tokens(_values(*a))), prepend=True, **named),
                self.experts.register_forward_pre_hook(lambda *a: given.append(_values(*a)), prepend=True, **named),
                self.router.register_forward_hook(returned, prepend=True),
                # after that
                self.router.register_forward_pre_hook(lambda _, args: x.append(args[0].flatten(0, -2))),
                self.experts.register_forward_hook(leaves),
                self.block.register_forward_hook(done),
            ):
                stack.callback(hook.remove)
            yield traces

    def __call__(self, u: Float[Tensor, "n d"]) -> Trace:
        with self.watched() as traces:
            self.block(u[None])
        return traces[0]

    def passed(self, u: Float[Tensor, "n d"], F: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The block's output at n tokens where its experts together say F."""
        hook = self.experts.register_forward_hook(lambda *_: F)
        try:
            return _tokens(self.block(u[None]))
        finally:
            hook.remove()

    def answers(self, y: Float[Tensor, "n d"], masks: bool) -> Float[Tensor, "n M d"]:
        """What each expert says at each token, asked alone with gate 1; for `masks` see `Trace`."""
        number = torch.arange(len(self.W), device=y.device)[:, None, None].expand(-1, len(y), 1)
        index = torch.nn.functional.one_hot(number, len(self.W)) if masks else number
        said = (self.experts(y, m, torch.ones_like(y[:, :1])) for m in index)
        return torch.stack(
            [check.finite(f"model: what expert {m} beside {self.name} returns", f) for m, f in enumerate(said)], 1
        )


def _values(_, args: tuple, kwargs: dict) -> list:
    """All that a module is called with."""
    return [*args, *kwargs.values()]


def _tokens(out) -> Float[Tensor, "n d"]:
    """The first of what a module takes or returns, a row for each token."""
    return (out[0] if isinstance(out, tuple | list) else out).flatten(0, -2)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model of transformers in what `torch.compile` or the library peft put around it.

    Raises:
        ValueError: for what is no model, or in another wrapper.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a model of transformers, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if not hasattr(type(model), "_can_record_outputs") and any(map(_recorded, model.modules())):
        kind = type(model).__name__
        raise ValueError(f"model: expected a model of transformers, got {kind} around one; hand over what it wraps")
    return model


def layers_of(model: nn.Module) -> list[Layer]:
    """The mixture layers of a model of transformers, in the order in which it names them.

    Raises:
        ValueError: for a model of another kind, or one that has no such layer.
    """
    recorders = _recorded(model) or next(filter(None, map(_recorded, model.modules())), [])
    if not recorders:
        raise ValueError(
            "model: expected a model of transformers with mixture layers, whose class records router_logits, "
            f"got {type(model).__name__}"
        )
    modules, found = dict(model.named_modules()), []
    for name, router in modules.items():
        for recorder in recorders:
            if isinstance(router, recorder.target_class):
                block = modules[name.rpartition(".")[0]]
                if not isinstance(getattr(block, "experts", None), nn.Module):
                    raise ValueError(f"model: expected router and experts side by side, got {type(block).__name__}")
                found.append(Layer(name, block, router, block.experts, recorder.index))
    if not found:
        classes = " or ".join(recorder.target_class.__name__ for recorder in recorders)
        raise ValueError(f"model: expected mixture layers with a {classes} in {type(model).__name__}, got none")
    return found


def left_out(model: nn.Module, layers: list[Layer]) -> list[str]:
    """The names of the blocks that have experts, but none of these layers' routers."""
    read = [layer.block for layer in layers]
    named = model.named_modules()
    return [n for n, m in named if isinstance(getattr(m, "experts", None), nn.Module) and not any(m is r for r in read)]


def _recorded(module: nn.Module) -> list:
    """How a module's class records its router logits, if it does."""
    recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
    return recorders if isinstance(recorders, list) else [recorders]
