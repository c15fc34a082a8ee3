"""`diagnose_layer`: a mixture of one's own, a plain module of PyTorch, put to the questions that models get."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.diagnose.arrays import RouterStream
from moe_theory.diagnose.findings import COLLAPSE
from moe_theory.diagnose.probes import Configured, probe_gates
from moe_theory.diagnose.report import Report
from moe_theory.diagnose.selection import Groups
from moe_theory.diagnose.traces import Delta, Layer, Trace, _tokens

#: Experts that are modules, called with tokens alone.
ALONE = "alone"


@dataclass(frozen=True)
class Plain(Layer):
    """A module with another in it that returns the logits, and some that are its experts.

    What it hands to its experts is not seen. What an expert contributes is: the output with its answer doubled, less
    the output. Its gate is that contribution relative to its answer.

    Attributes:
        each: the experts; ndim: of what the module reads.
        biased, grouped: the bias that selects and the groups of experts, if it has any.
    """

    each: Sequence[nn.Module] = ()
    ndim: int = 2
    biased: Tensor | None = None
    grouped: Groups | None = None

    @property
    def head(self) -> nn.Module:
        return self.router

    @property
    def experts_there(self) -> int:
        return len(self.each)

    @property
    def M(self) -> int:
        return len(self.each)

    @property
    def W(self) -> Tensor | None:
        return self.router.weight if isinstance(self.router, nn.Linear) else None

    def products(self, x: Float[Tensor, "n d"], exact: Float[Tensor, "n M"]) -> Float[Tensor, "n M"]:
        return exact

    @property
    def bias(self) -> Tensor | None:
        return self.biased

    @property
    def groups(self) -> Groups | None:
        return self.grouped

    @property
    def scale(self) -> None:
        return None

    @property
    def idle_bias(self) -> bool:
        return False

    @property
    def hidden(self) -> int:
        return max((max(p.shape) for expert in self.each for p in expert.parameters() if p.ndim), default=1)

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for expert in self.each for p in expert.parameters()), torch.float32)

    def double(self, router: torch.dtype = torch.float64) -> "Plain":
        names = {id(module): name for name, module in self.block.named_modules()}
        block = copy.deepcopy(self.block).double()
        same = [block.get_submodule(names[id(module)]) for module in (self.router, *self.each)]
        return replace(self, block=block, router=same[0], experts=block, each=same[1:])

    def _run(self, u: Float[Tensor, "n d"]) -> Float[Tensor, "n o"]:
        return _tokens(self.block(u if self.ndim == 2 else u[None]))

    @contextmanager
    def shifted(self, delta: Delta):
        def moved(_, __, out):
            return out + (delta(out) if callable(delta) else delta).to(out).view_as(out)

        hook = self.router.register_forward_hook(moved, prepend=True)
        try:
            yield
        finally:
            hook.remove()

    def logits(self, x, recorded):
        if isinstance(self.router, nn.Linear):
            return super().logits(x, recorded)
        exact = check.finite(f"layer: the logits of {self.name}", recorded).double()
        return exact, torch.finfo(recorded.dtype).eps * exact.abs().amax(1)

    def contributions(self, u: Float[Tensor, "n d"], out: Float[Tensor, "n o"]) -> Float[Tensor, "n M o"]:
        """What each expert contributes to the output at each token."""

        def doubled(m: int) -> Float[Tensor, "n o"]:
            hook = self.each[m].register_forward_hook(lambda _, __, said: 2 * said)
            try:
                return self._run(u) - out
            finally:
                hook.remove()

        with torch.no_grad():
            return torch.stack([doubled(m) for m in range(self.M)], 1)

    def __call__(self, u: Float[Tensor, "n d"]) -> Trace:
        x, recorded, y = [], [], []
        with ExitStack() as stack:
            router = self.router
            stack.callback(router.register_forward_pre_hook(lambda _, args: x.append(args[0].flatten(0, -2))).remove)
            stack.callback(router.register_forward_hook(lambda _, __, out: recorded.append(out.flatten(0, -2))).remove)
            for expert in self.each:
                stack.callback(expert.register_forward_pre_hook(lambda _, args: y.append(args[0])).remove)
            out = self._run(u)
        if not recorded or recorded[0].shape != (len(u), self.M):
            came = [tuple(h.shape) for h in recorded]
            raise ValueError(f"logits: expected a module that returns ({len(u)}, {self.M}) numbers, got {came}")
        read = next((t.flatten(0, -2) for t in y if t.numel() == t.shape[-1] * len(u)), u)
        exact, rounding = self.logits(x[0], recorded[0].detach())
        parts = self.contributions(u, out.detach())
        gates = self._gates(read, parts)
        F = out - (out.detach() - parts.sum(1))
        return Trace(u, x[0], read, exact, recorded[0].detach(), rounding, gates != 0, gates, F, out.detach(), ALONE)

    def _gates(self, y: Float[Tensor, "n d"], parts: Float[Tensor, "n M o"]) -> Float[Tensor, "n M"]:
        """Contributions relative to answers; an expert that answers 0 has none."""
        with torch.no_grad():
            f = self.answers(y, ALONE)
        size = f.square().sum(-1)
        gates = torch.where(size > 0, (parts * f).sum(-1) / size.clamp(min=torch.finfo(f.dtype).tiny), 0.0)
        return gates * (parts.norm(dim=-1) > 8 * torch.finfo(f.dtype).eps * parts.norm(dim=-1).sum(1, keepdim=True))

    @contextmanager
    def watched(self) -> Iterator[list[Trace]]:
        raise NotImplementedError  # a plain layer is called, not watched

    def passed(self, u: Float[Tensor, "n d"], F: Float[Tensor, "n o"]) -> Float[Tensor, "n o"]:
        """The output where the experts together say F: what is missing is added to the answer of the largest gate."""
        with torch.no_grad():
            now = self(u)
        m = int(now.gates[0].argmax())
        step = (F - now.F) / now.gates[0, m]
        hook = self.each[m].register_forward_hook(lambda _, __, said: said + step.view_as(said))
        try:
            return self._run(u)
        finally:
            hook.remove()

    def answers(self, y: Float[Tensor, "n d"], handed: str) -> Float[Tensor, "n M o"]:
        said = (_tokens(expert(y)) for expert in self.each)
        return torch.stack([check.finite(f"experts: what number {m} returns", f) for m, f in enumerate(said)], 1)


def diagnose_layer(
    layer: nn.Module,
    x: Float[Tensor, "n d"] | Float[Tensor, "s t d"],
    *,
    logits: nn.Module,
    experts: Sequence[nn.Module],
    bias: Float[Tensor, " M"] | None = None,
    groups: Groups | None = None,
    noise: float = 0.01,
    collapse: float = COLLAPSE,
    seed: int = 0,
) -> Report:
    """Looks into a mixture layer of one's own: which gate it computes, and what gradient its router gets.

    Nothing else of its code is read: a logit is moved where it is returned, an answer doubled where it is given. Each
    of the M experts costs a call of the layer.

    Args:
        layer: reads tokens, and returns what it makes of them, or a tuple with that first.
        x: tokens, one after the other or in sequences.
        logits: the module in it that returns the (n, M) logits; a linear one is known to rounding.
        experts: the modules in it that are the experts, called with tokens and nothing else.
        bias, groups: what it selects by besides the logits, if it does.
        noise, collapse, seed: as in `diagnose`.

    Raises:
        ValueError: for modules that are not in the layer, an x that is no floating matrix, logits for another number of
            experts, NaN, or what `RouterStream` refuses.
    """
    plain = _plain(layer, check.tensor("x", x, ..., "d"), logits, experts, bias, groups)
    u = x.detach().flatten(0, -2)
    learns = plain.learns
    training = {module: module.training for module in layer.modules()}
    try:
        layer.eval()
        with torch.inference_mode(False), torch.enable_grad():
            trace = plain(u)
            trace = trace._replace(F=trace.F.detach())
            k = max(1, int(trace.chosen.sum(1).max()))
            gate = probe_gates(plain, trace, k, configured=Configured(), learns=learns, seed=seed)
    finally:
        for module, was in training.items():
            module.training = was
    stream = RouterStream(plain.M, k, noise=noise, collapse=collapse, where=plain.name)
    scores, off = gate.rule.of(trace.exact, trace.rounding)
    resolution = gate.rule.resolution(trace.exact, trace.recorded.dtype)
    stream.add(trace.exact, scores=scores, chosen=trace.chosen, rounding=off, resolution=resolution)
    router = replace(stream.report(seed=seed), slip=gate.slip)
    unasked = ["what a configuration says: there is none", "the balancing loss: hand a model to diagnose"]
    return Report({plain.name: router}, {plain.name: gate}, unasked=unasked)


def _plain(layer, x: Tensor, logits, experts, bias, groups) -> Plain:
    inside = {id(module) for module in check.instance("layer", layer, nn.Module).modules()}
    if not isinstance(experts, Sequence | nn.ModuleList) or not len(experts):
        raise ValueError(f"experts: expected the modules that are the experts, got {type(experts).__name__}")
    for name, module in (("logits", logits), *(("experts", expert) for expert in experts)):
        if not isinstance(module, nn.Module) or id(module) not in inside:
            raise ValueError(f"{name}: expected a module in the layer, got {type(module).__name__}")
    if bias is not None and check.array("bias", bias).shape != (len(experts),):
        raise ValueError(f"bias: expected {len(experts)} numbers, one for each expert, got {tuple(bias.shape)}")
    return Plain("layer", layer, logits, layer, 0, None, [*experts], x.ndim, bias, groups)
