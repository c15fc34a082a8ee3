"""The mixture layers of a model of transformers, found by what the library itself records as router logits.

A model class of the library names the class of its routers and the place of the logits in what a router returns
(`_can_record_outputs`). All else is read off the running layer: what its router hands to its experts.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_theory import _validate as check
from moe_theory.diagnose.arrays import linear_logits
from moe_theory.diagnose.selection import Groups, groups_of

#: How experts are called: with tokens and, of the experts selected, numbers and gates or a mask and one gate; or with
#: each token once for every expert, times its gate.
NUMBERS, MASK, INPUTS = "numbers", "mask", "inputs"

#: What multiplies a router's input by its vectors.
PRODUCTS = (nn.functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


#: What is added to the products of a router, (n, M), or what makes it of them.
Delta = Tensor | Callable[[Tensor], Tensor]


class Trace(NamedTuple):
    """What a layer did with n tokens.

    Attributes:
        u: what its block read; x: what its router multiplied by its vectors; y: what its experts read.
        exact: the logits in float64; recorded: those its router returned.
        rounding: how far logits in the layer's precision may be from them.
        chosen: the experts selected; gates: what is handed to the experts.
        F: the output of the experts together; out: that of the block.
        handed: how the experts are called, `NUMBERS`, `MASK` or `INPUTS`.
    """

    u: Float[Tensor, "n e"]
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n l"]
    exact: Float[Tensor, "n M"]
    recorded: Float[Tensor, "n r"]
    rounding: Float[Tensor, " n"]
    chosen: Bool[Tensor, "n M"]
    gates: Float[Tensor, "n M"]
    F: Float[Tensor, "n l"]
    out: Float[Tensor, "n o"]
    handed: str

    def of(self, kept: Bool[Tensor, " n"]) -> "Trace":
        """The same of some of the tokens."""
        kept = kept.to(self.x.device)
        return Trace(*(part[kept] if isinstance(part, Tensor) else part for part in self))


class Pair(nn.Module):
    """Router and experts of a block that does much else besides; it reads what they read, side by side."""

    def __init__(self, router: nn.Module, experts: nn.Module):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, u: Float[Tensor, "1 n e"]) -> Float[Tensor, "n d"]:
        read, y = u[0].chunk(2, -1)
        _, gates, numbers = self.router(read)
        return self.experts(y, numbers, gates)


@dataclass(frozen=True)
class Layer:
    """A mixture layer.

    Attributes:
        name: of its router in the model.
        block: the module of router and experts; router, experts: these two.
        logits_at: place of the logits in what the router returns.
        config: what the configuration says of it.
    """

    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    logits_at: int
    config: object = None

    @cached_property
    def head(self) -> nn.Module:
        """The module in the router, or the router, that multiplies by its vectors."""
        inside = [m for m in self.router.modules() if _rows(m) >= self.experts_there]
        outermost = [m for m in inside if not any(m is not o and m in [*o.modules()] for o in inside)]
        if not outermost:
            raise ValueError(
                f"model: expected a router with a matrix of {self.experts_there} rows, one for each expert, "
                f"got none in {self.name}"
            )
        return outermost[-1]

    @cached_property
    def experts_there(self) -> int:
        """How many experts have weights."""
        stacked = [len(p) for p in self.experts.parameters() if p.ndim == 3]
        listed = [m for m in self.experts.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)] or [self.experts]
        return min(stacked, default=sum(any(True for _ in m.parameters()) for m in listed[0].children()))

    @property
    def W(self) -> Any:
        """The router's vectors (M, d) as they act: with what an adapter adds to them."""
        weight: Any = getattr(self.head, "base_layer", self.head).weight
        added = [part for module in (*_around(self.outer, self.router), self.head) for part in _deltas(module)]
        return sum((part.detach().to(weight) for part in added), weight.detach()) if added else weight

    @property
    def outer(self) -> nn.Module:
        """The router in what an adapter of its weights put around it, or the router."""
        outer = getattr(self.block, self.name.rpartition(".")[2], self.router)
        return outer if hasattr(outer, "base_layer") and any(m is self.router for m in outer.modules()) else self.router

    @property
    def b(self) -> Float[Tensor, " M"] | None:
        """The biases that the router adds to its logits, if it has any."""
        return getattr(getattr(self.head, "base_layer", self.head), "bias", None)

    @property
    def M(self) -> int:
        """How many logits it has for a token."""
        return len(self.W)

    @property
    def learns(self) -> bool:
        """Whether any of the router's vectors is to be trained."""
        return any(p.requires_grad for module in (self.head, self.outer) for p in module.parameters())

    @property
    def bias(self) -> Float[Tensor, " M"] | None:
        """The bias that only selects, if router or block have one that is not 0."""
        bias = self._of_experts("bias")
        return bias if bias is not None and bias.any() else None

    @property
    def idle_bias(self) -> bool:
        """Whether there is a bias that only selects, and it is 0."""
        return self._of_experts("bias") is not None and self.bias is None

    @property
    def scale(self) -> Float[Tensor, " M"] | None:
        """A factor on each expert's gate, if the router has one."""
        return self._of_experts("scale")

    def _of_experts(self, word: str) -> Float[Tensor, " M"] | None:
        """A vector with a number for each expert, by a word in its name."""
        held = [(n, t) for n, t in _tensors(self.router) if self.b is None or t is not self.b]
        held += [(n, t) for n, t in _tensors(self.block, recurse=False)]
        fits = [t for n, t in held if word in n and t.numel() in (self.experts_there, self.M) and t.numel() > 1]
        return fits[0].detach().flatten() if fits else None

    @property
    def groups(self) -> Groups | None:
        """The groups of experts that tokens are limited to, if there are any."""
        return groups_of(self.router, self.config)

    @property
    def hidden(self) -> int:
        """Terms of the longest sum in an expert: the larger of the model's width and the expert's."""
        return max(max(p.shape) for p in self.experts.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """In which the experts are stored."""
        return next(self.experts.parameters()).dtype

    def double(self, router: torch.dtype = torch.float64) -> "Layer":
        """A copy in float64, hooks and all, whose roundings are those that the code itself puts in.

        The library multiplies all experts in one call, which knows no float64; the copy has them in a loop.

        Args:
            router: precision of the router's copy, for one that has a type written into its code.
        """
        block = copy.deepcopy(self.block).double()
        for module in block.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"  # pyright: ignore[reportAttributeAccessIssue]
        routes: Any = getattr(block, self.name.rpartition(".")[2], None) or block.router
        routes = routes.to(router)
        while self.outer is not self.router and hasattr(routes, "base_layer"):
            routes = routes.base_layer
        for module in routes.modules():  # a router that says in which precision it computes
            if isinstance(getattr(module, "dtype", None), torch.dtype) and "dtype" in vars(module):
                module.dtype = router
        return Layer(self.name, block, routes, block.experts, self.logits_at, self.config)

    def squash(self, z: Float[Tensor, "*n M"]) -> Float[Tensor, "*n M"]:
        """Logits from the products of the router, which some routers multiply, or cap by a hyperbolic tangent."""
        z = z * getattr(self.router, "output_multiplier", 1.0)
        cap = float(getattr(self.router, "router_logit_softcapping", 0.0) or 0.0)
        return torch.tanh(z / cap) * cap if cap > 0 else z

    def products(self, x: Float[Tensor, "n d"], exact: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        """The products, in float64, of which logits are made by `squash`, with the router's biases if they are in."""
        both = [linear_logits(x.double(), self.W, b)[0] for b in dict.fromkeys((self.b, None))]
        return min(both, key=lambda z: float((self.squash(z) - exact).abs().max()))

    def _handed(
        self, u: Float[Tensor, "n e"], given: list
    ) -> tuple[Tensor, Bool[Tensor, "n M"], Float[Tensor, "n M"], str]:
        """What the experts read, experts and gates as a mask and a matrix, from what the experts are called with."""
        y, M = given[0].flatten(0, -2), self.M
        if len(given) == 1 and y.shape == (M * len(u), u.shape[1]):
            gates = torch.einsum("mnd,nd->nm", y.unflatten(0, (M, -1)), u) / u.square().sum(1, keepdim=True).clamp(
                min=torch.finfo(u.dtype).tiny
            )
            return u, gates != 0, gates, INPUTS
        if len(given) != 3:
            raise ValueError(
                "model: expected experts that are called with tokens, numbers and gates, "
                f"got {len(given)} arguments in {self.name}"
            )
        index, gates = given[1:]
        if index.ndim == 3:
            chosen = index[:, 0].bool()
            return y, chosen, chosen * gates, MASK
        blank = torch.zeros(len(index), M, dtype=gates.dtype, device=gates.device)
        return y, blank.bool().scatter(1, index, True), blank.scatter(1, index, gates), NUMBERS

    def logits(
        self, x: Float[Tensor, "n d"], recorded: Float[Tensor, "n r"]
    ) -> tuple[Float[Tensor, "n M"], Float[Tensor, " n"]]:
        """Logits of what the router reads in float64, and how far those that it recorded may be from them.

        Where it reads half precision, products may be added in single or in half precision: the narrower limit is
        taken where it holds.

        Raises:
            ValueError: for NaN, or a router whose vectors have another width than what it reads.
        """
        check.finite(f"model: what {self.name} reads", x)
        W = check.finite(f"model: the vectors of {self.name}", self.W.detach())
        if W.shape[1] != x.shape[1]:
            raise ValueError(
                f"model: expected a linear router, got vectors of width {W.shape[1]} in {self.name}, "
                f"which reads hidden states of width {x.shape[1]}"
            )
        fits, limit = torch.zeros(0), torch.zeros(0)
        for b in dict.fromkeys((self.b, None)):
            z, rounding = linear_logits(x.double(), W, b)
            exact, limit = self._fitting(self.squash(z), recorded, rounding, x.dtype)
            fits = exact if not len(fits) else fits
            if recorded.shape == exact.shape and not self.off(exact, recorded, limit):
                return exact, limit
        return fits, limit

    def _fitting(
        self,
        exact: Float[Tensor, "n M"],
        recorded: Float[Tensor, "n r"],
        rounding: Float[Tensor, " n"],
        read: torch.dtype,
    ) -> tuple[Float[Tensor, "n M"], Float[Tensor, " n"]]:
        """Logits and the narrowest limit within which those that were recorded are, if any is."""
        times, eps = abs(float(getattr(self.router, "output_multiplier", 1.0))), torch.finfo(recorded.dtype).eps
        limit = rounding
        for precision in dict.fromkeys((torch.promote_types(recorded.dtype, torch.float32), read)):
            limit = times * rounding * torch.finfo(precision).eps / torch.finfo(torch.float64).eps
            if precision != recorded.dtype:  # and once more as it is stored
                limit = limit + eps / 2 * exact.abs().amax(1)
            if recorded.shape == exact.shape and not self.off(exact, recorded, limit):
                break
        return exact, limit

    def unbiased(self, trace: Trace) -> bool:
        """Whether the logits are those without the biases of the router's matrix."""
        with_biases = self.squash(linear_logits(trace.x.double(), self.W, self.b)[0])
        return bool(self.off(with_biases, trace.recorded, trace.rounding))

    def off(self, exact: Float[Tensor, "n M"], recorded: Float[Tensor, "n M"], limit: Float[Tensor, " n"]) -> float:
        """How far logits are from those that were recorded, or their softmax, which some return for them; 0 within."""
        eps, far = torch.finfo(recorded.dtype).eps, torch.inf
        soft = 2 * limit + (exact.shape[1] + 8) * eps
        for meant, allowed in ((exact, 2 * limit), (exact.softmax(1), soft)):
            distance = (recorded - meant).abs().amax(1)
            far = min(far, 0.0 if bool((distance <= allowed).all()) else float(distance.max()))
        return far

    def linear(self, trace: Trace) -> None:
        """Refuses a router whose logits are not `x W^T + b`, up to what `squash` knows, nor a softmax of that."""
        if trace.recorded.shape != trace.exact.shape:
            one, other = trace.exact.shape[1], trace.recorded.shape[1]
            raise ValueError(
                f"model: expected a linear router of {one} experts, got {other} logits of a token in {self.name}"
            )
        if off := self.off(trace.exact, trace.recorded, trace.rounding):
            raise ValueError(
                f"model: expected a linear router, x W^T + b, got logits that are {off:.2g} off in {self.name}"
            )

    @contextmanager
    def watched(self) -> Iterator[list[Trace]]:
        """While it is open, every call of the layer appends a `Trace` to the list that it gives."""
        traces, u, x, given, recorded, seen = [], [], [], [], [], []
        paired = isinstance(self.block, Pair)

        def returned(_, __, out):
            logits = (out[self.logits_at] if isinstance(out, tuple) else out).detach()
            recorded.append(logits.flatten(0, -2))

        def enters(_, args, kwargs):
            given.append(_values(args, kwargs))
            if paired:
                u[-1] = torch.cat([u[-1], given[-1][0].flatten(0, -2)], -1)

        def leaves(_, __, out):
            read, logits = x.pop(), recorded.pop()
            exact, rounding = self.logits(read, logits)
            y, chosen, gates, handed = self._handed(u[-1], given.pop())
            check.finite(f"model: what the experts beside {self.name} return", out)
            F = out.unflatten(0, (self.M, -1)).sum(0) if handed == INPUTS else out.flatten(0, -2)
            seen.append((read, y, exact, logits, rounding, chosen, gates, F, handed))
            if paired:
                done(None, None, F)

        def done(_, __, out):
            *parts, handed = seen.pop()
            traces.append(Trace(u.pop(), *parts, _tokens(out).detach(), handed))  # pyright: ignore[reportCallIssue]

        def multiplies(_, args):
            x[-1] = args[0].flatten(0, -2)  # what the router multiplies, where it makes something else of what it reads

        def reads(_, args, kwargs):
            read, *others = _values(args, kwargs)
            beside = [t for t in others if isinstance(t, Tensor) and t.is_floating_point() and t.ndim == read.ndim == 3]
            if beside:
                raise ValueError(
                    f"model: expected blocks that read hidden states, got one that reads {[*beside[0].shape]} beside "
                    f"{[*read.shape]}: {self.name}"
                )
            u.append(read.flatten(0, -2))

        named = {"with_kwargs": True}
        with ExitStack() as stack:
            for hook in (
                # before what others make of it: the block and the experts are called with it again
                (self.router if paired else self.block).register_forward_pre_hook(reads, prepend=True, **named),
                self.experts.register_forward_pre_hook(enters, prepend=True, **named),
                self.router.register_forward_hook(returned, prepend=True),
                # after that
                self.router.register_forward_pre_hook(lambda _, args: x.append(args[0].flatten(0, -2))),
                self.head.register_forward_pre_hook(multiplies),
                self.experts.register_forward_hook(leaves),
            ):
                stack.callback(hook.remove)
            if not paired:
                stack.callback(self.block.register_forward_hook(done).remove)
            yield traces

    def __call__(self, u: Float[Tensor, "n e"]) -> Trace:
        with self.watched() as traces:
            self.block(u[None])
        return traces[0]

    def shifted(self, delta: Delta):
        """While it is open, a shift is added to the products from which the router's logits are made; see `shifted`."""
        return shifted([(self, delta)])

    def passed(self, u: Float[Tensor, "n e"], F: Float[Tensor, "n l"]) -> Float[Tensor, "n o"]:
        """The block's output at n tokens where its experts together say F."""

        def says(_, args, kwargs, out):
            if out.shape == F.shape or out.numel() == F.numel():
                return F.view_as(out)
            return torch.cat([F, F.new_zeros(len(out) - len(F), F.shape[1])]).view_as(out)  # those of each summed

        hook = self.experts.register_forward_hook(says, with_kwargs=True)
        try:
            return _tokens(self.block(u[None]))
        finally:
            hook.remove()

    def says(self, y: Float[Tensor, "n l"], gates: Float[Tensor, "n M"], handed: str) -> Float[Tensor, "n M l"]:
        """What each expert contributes at each token with some gates, asked alone; for `handed` see `Trace`."""
        if handed == INPUTS:
            read = (gates.T[:, :, None] * y).flatten(0, 1)
            return self.experts(read).unflatten(0, (self.M, -1)).transpose(0, 1)
        return gates[..., None] * self.answers(y, handed)

    def answers(self, y: Float[Tensor, "n l"], handed: str) -> Float[Tensor, "n M l"]:
        """What each expert says at each token, asked alone with gate 1; for `handed` see `Trace`."""
        if handed == INPUTS:
            said: Iterable[Tensor] = self.says(y, y.new_ones(len(y), self.M), handed).unbind(1)
        else:
            number = torch.arange(self.M, device=y.device)[:, None, None].expand(-1, len(y), 1)
            gates = torch.ones_like(y[:, :1])
            if handed == MASK:
                number = nn.functional.one_hot(number, self.M)
            else:  # and once more with gate 0, for the library's loops do not all take one number for a token
                number, gates = number.expand(-1, -1, 2), torch.cat([gates, 0 * gates], 1)
            said = (self.experts(y, m, gates).flatten(0, -2) for m in number)
        return torch.stack(
            [check.finite(f"model: what expert {m} beside {self.name} returns", f) for m, f in enumerate(said)], 1
        )


class _Shift(TorchFunctionMode):
    """Adds to the first product with a number for each of M experts, once it is told to."""

    due: tuple[int, Delta] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.due is None or func not in PRODUCTS or out.shape[-1] != self.due[0]:
            return out
        (_, delta), self.due = self.due, None
        return out + (delta(out) if callable(delta) else delta).to(out).view_as(out)


@contextmanager
def shifted(layers: list[tuple[Layer, Delta]]):
    """While it is open, shifts are added to the products from which routers make their logits.

    Args:
        layers: each with its shift, (n, M), or with what makes it of the products.
    """
    with _Shift() as shift, ExitStack() as stack:
        for layer, delta in layers:
            due = (layer.M, delta)
            for module in (layer.router, layer.head):  # not every router calls the module that has its vectors
                enters = module.register_forward_pre_hook(lambda *_, due=due: setattr(shift, "due", due))
                leaves = module.register_forward_hook(lambda *_: setattr(shift, "due", None), always_call=True)
                stack.callback(enters.remove)
                stack.callback(leaves.remove)
        yield


def _around(outer: Any, inner: nn.Module) -> Iterator[Any]:
    """The modules that adapters put around another one, from the outermost."""
    while outer is not inner:
        yield outer
        outer = outer.base_layer


def _deltas(module: Any) -> list[Tensor]:
    """What an adapter adds to the vectors of a router, if a module is one and in use."""
    of_vectors = hasattr(module, "get_delta_weight") and getattr(module, "parameter_name", "weight") == "weight"
    if not of_vectors or module.merged or module.disable_adapters:
        return []
    return [module.get_delta_weight(name) for name in module.active_adapters if name in module.lora_A]


def _rows(module: nn.Module) -> int:
    """Rows of a module's matrix, 0 if it has none."""
    weight = getattr(module, "weight", None)
    return len(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else 0


def _tensors(module: nn.Module, recurse: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    return [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]


def _values(args: tuple, kwargs: dict) -> list:
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
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    for name, router in modules.items():
        for recorder in recorders:
            if isinstance(router, recorder.target_class):
                outer = name
                while outer.endswith(".base_layer"):  # an adapter of the router's weights stands around it
                    outer = outer.removesuffix(".base_layer")
                block = modules[outer.rpartition(".")[0]]
                if not isinstance(experts := getattr(block, "experts", None), nn.Module):
                    raise ValueError(f"model: expected router and experts side by side, got {type(block).__name__}")
                if hasattr(block, "self_attn"):  # a decoder's layer, which takes more than hidden states
                    block = Pair(modules[outer], experts)
                found.append(Layer(outer, block, router, experts, recorder.index, config))
    if not found:
        classes = " or ".join(recorder.target_class.__name__ for recorder in recorders)
        raise ValueError(f"model: expected mixture layers with a {classes} in {type(model).__name__}, got none")
    return found


def left_out(model: nn.Module, layers: list[Layer]) -> list[str]:
    """The names of the blocks that have experts, but none of these layers' routers."""
    read = {id(layer.experts) for layer in layers}
    held = ((name, getattr(module, "experts", None)) for name, module in model.named_modules())
    return [name for name, experts in held if isinstance(experts, nn.Module) and id(experts) not in read]


def _recorded(module: nn.Module) -> list:
    """How a module's class records its router logits, if it does."""
    recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
    return recorders if isinstance(recorders, list) else [recorders]
