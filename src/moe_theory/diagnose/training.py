"""What routers do while a model trains, read in the steps of the training itself: nothing runs a second time.

`watch` is for a loop of one's own, `watch_trainer` for the Trainer of transformers. Every so many steps the logits and
the experts selected are taken from where the layers hand them on, and become a `RouterState`, whose `scalars` are what
is logged.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moe_theory import _validate as check
from moe_theory.diagnose.arrays import _flips, _probabilities
from moe_theory.diagnose.balance import configured_coefficient
from moe_theory.diagnose.batches import arguments_of, real_tokens
from moe_theory.diagnose.selection import Rule, rule_of, widths
from moe_theory.diagnose.tiny import library
from moe_theory.diagnose.traces import NUMBERS, Layer, _values, layers_of, unwrapped
from moe_theory.measure.tables import effective_experts
from moe_theory.theory.kept_sets import keep_probability

#: Tokens from which it is read by which numbers a router selects.
TOKENS = 512


@dataclass(frozen=True)
class Tally:
    """What is counted of a router's tokens; it adds up.

    Attributes:
        tokens: how many, without padding; k: experts selected.
        loads: tokens that each expert got; dropped: tokens without all of their experts.
        flips: tokens whose experts the rounding of their scores changes, on average.
    """

    tokens: int
    k: int
    loads: Int[Tensor, " M"]
    dropped: int
    flips: float

    def __add__(self, other: "Tally") -> "Tally":
        sums = (getattr(self, n) + getattr(other, n) for n in ("loads", "dropped", "flips"))
        return Tally(self.tokens + other.tokens, max(self.k, other.k), *sums)

    def scalars(self) -> dict[str, float]:
        """What is logged of it; see `RouterState.scalars`."""
        loads = (self.loads / self.loads.sum().clamp(min=1)).tolist()
        return {
            "effective": effective_experts([loads]) if any(loads) else math.nan,
            "violation": max(loads) * len(loads) - 1,
            "idle": float(loads.count(0)),
            "flips": self.flips / self.tokens,
            "dropped": self.dropped / self.tokens,
        }


@dataclass
class RouterState:
    """What the routers of a model did in the steps that were read; the states of several processes add up.

    Where each process trains on a shard of the batch, the state of all is

        states = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(states, state)
        state = sum(states[1:], states[0])

    Attributes:
        routers: by the router's name, what was counted.
        configured: the coefficient of the balancing loss in the configuration; nan where it names none.
        added: its factor in the loss of the last step read; 0 where it is not added, nan where that is not known.
    """

    routers: dict[str, Tally] = field(default_factory=dict)
    configured: float = math.nan
    added: float = math.nan

    def __add__(self, other: "RouterState") -> "RouterState":
        both = RouterState(dict(self.routers), self.configured, self.added)
        for name, tally in other.routers.items():
            both.take(name, tally)
        return both

    def take(self, name: str, tally: Tally) -> None:
        """Adds what was counted of a router."""
        self.routers[name] = self.routers[name] + tally if name in self.routers else tally

    def scalars(self) -> dict[str, float]:
        """A number for each name, such as `moe/effective/layer_0`; what is not known is left out.

        Of each layer: effective experts; violation, the largest load over the uniform one, less 1; idle experts; flips,
        the share of tokens whose experts change by rounding; dropped, that of tokens without all of their experts.
        """
        found = {"moe/coefficient/configured": self.configured, "moe/coefficient/added": self.added}
        for label, tally in zip(_labels([*self.routers]), self.routers.values(), strict=True):
            found |= {f"moe/{name}/{label}": value for name, value in tally.scalars().items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _labels(names: list[str]) -> list[str]:
    """Routers by the number of their layer, where their names have one each, else by their names."""
    found = [re.search(r"\b\d+\b", name) for name in names]
    numbers = {f"layer_{match[0]}": None for match in found if match}
    return [*numbers] if len(numbers) == len(names) else names


class _Reader:
    """Reads the routers of a model in those of its training steps that are due.

    A step is a call of the model in training with gradients; what a checkpoint runs again in the backward pass is no
    part of that call. What goes wrong in here is told in one warning, and nothing is read from then on.

    Args:
        model: as it is called; due: says, once for each step, whether it is read; done: is called after one that was.
    """

    def __init__(self, model: nn.Module, due: Callable[[], bool], done: Callable[["_Reader"], None]):
        self.model = unwrapped(model)
        self.layers = layers_of(self.model)
        self.due, self.done = due, done
        self._rules: dict[str, Rule] = {}
        self._inside: list = []
        enters = model.register_forward_pre_hook(self._enters, with_kwargs=True)
        self._around = [enters, model.register_forward_hook(self._leaves, always_call=True)]
        self.state = self._new()

    def _new(self) -> RouterState:
        return RouterState(configured=configured_coefficient(self.model))

    def take(self) -> RouterState:
        """What was read since it was last taken."""
        taken, self.state = self.state, self._new()
        return taken

    def close(self) -> None:
        """Takes all hooks off."""
        for hook in (*self._around, *self._inside):
            hook.remove()
        self._around, self._inside = [], []

    @contextmanager
    def _quiet(self):
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # whatever it is, the training goes on
            self.close()
            warnings.warn(f"routers are read no more; {type(error).__name__}: {error}", stacklevel=3)

    def _enters(self, module: nn.Module, _, kwargs: dict) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        with self._quiet():
            if self.due():
                for layer in self.layers:
                    self._inside += self._hooks(layer, arguments_of(self.model, layer, kwargs))

    def _leaves(self, _, __, output) -> None:
        if not self._inside:
            return
        while self._inside:
            self._inside.pop().remove()
        with self._quiet(), torch.enable_grad():
            if output is not None:  # it is None where the model raised an error
                self.state.added = added_coefficient(output, self.state.configured)
                self.done(self)

    def _hooks(self, layer: Layer, batch: Mapping) -> list:
        """Those that take what a layer's router reads and returns, and what its experts are handed."""
        u, h = [], []

        def reads(_, args):
            u.append(args[0].detach().flatten(0, -2))

        def returns(_, __, out):
            h.append((out[layer.logits_at] if isinstance(out, tuple) else out).detach().flatten(0, -2))

        def hands(_, args, kwargs):
            with self._quiet():
                if u and h:
                    self._take(layer, u.pop(), h.pop(), _values(args, kwargs), batch)

        return [
            layer.router.register_forward_pre_hook(reads),
            layer.router.register_forward_hook(returns),
            layer.experts.register_forward_pre_hook(hands, with_kwargs=True),
        ]

    def _take(self, layer: Layer, u: Tensor, h: Tensor, given: list, batch: Mapping) -> None:
        """Counts the tokens of a call."""
        _, chosen, _, handed = layer._handed(u, [value.detach() for value in given])
        kept = real_tokens(batch, len(h)).to(h.device)
        h, chosen = _logits(h[kept]), chosen[kept]
        if not len(h):
            return
        sizes = chosen.sum(1)
        k = given[1].shape[-1] if handed == NUMBERS else max(1, int(sizes.max()))
        flips = flipped(h, self._rule(layer, h, chosen), k)
        counted = Tally(len(h), k, chosen.sum(0).cpu(), int((sizes < k).sum()), flips)
        self.state.take(layer.name, counted)

    def _rule(self, layer: Layer, h: Tensor, chosen: Tensor) -> Rule:
        """By which numbers a router selects; the bias among them is another one after each step."""
        bias, groups = layer._of_experts("bias"), layer.groups
        if bias is None and groups is None:
            return Rule()
        rule = self._rules.get(layer.name)
        if rule is None:
            some = h[:TOKENS].double()
            rounding = torch.finfo(h.dtype).eps * some.abs().amax(1)
            rule, _ = rule_of(some, rounding, chosen[:TOKENS], bias=bias, groups=groups)
            if bias is None or bias.any():  # with a bias of zeros all scores may have one order
                self._rules[layer.name] = rule
        return rule._replace(bias=bias)


def _logits(h: Tensor) -> Tensor:
    """What a router returns, or the logarithm of that where it returns probabilities in place of logits."""
    return h.clamp(min=torch.finfo(h.dtype).tiny).log() if _probabilities(h) else h


def flipped(h: Float[Tensor, "n M"], rule: Rule, k: int) -> float:
    """Of how many tokens the experts change by the rounding of their logits, on average over what was rounded off.

    Scores that are no logits are on no common grid: each is taken for off by a normal variable with the variance of a
    uniform one over its width, at the tokens whose gap is less than the widest.

    Args:
        h: logits in the precision in which they were computed; rule: how they select; k: experts selected.

    Returns:
        The sum over tokens; nan if a logit is NaN or infinite.
    """
    if not bool(h.isfinite().all()):
        return math.nan
    if k == h.shape[1]:
        return 0.0
    if rule == Rule():
        return float(_flips(h, h.topk(k + 1, 1).values.cpu(), k, h.dtype))
    scores, _ = rule.of(h.double(), torch.zeros_like(h[:, 0], dtype=torch.float64))
    width, top = widths(rule.score, h, h.dtype), scores.topk(k + 1, 1).values
    near = (top[:, k - 1] - top[:, k] < width.amax(1)).cpu()
    scores, width = scores.cpu()[near].clamp(min=-torch.finfo(torch.float32).max), width.cpu()[near]
    return float((1 - keep_probability(scores, k, scale=width / math.sqrt(12))).sum()) if len(scores) else 0.0


def added_coefficient(output: Any, configured: float) -> float:
    """What a balancing loss is multiplied by in the loss that a model returns, by differentiation.

    Args:
        output: of the model; configured: the coefficient that it should be.

    Returns:
        0 where there is a loss without it, though one is configured; nan where there is no loss, or none is configured.
    """
    given = dict(output) if isinstance(output, Mapping) else {}
    loss = given.get("loss")
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return math.nan
    parts = [value for name, value in given.items() if name.endswith("aux_loss") and isinstance(value, Tensor)]
    if not parts:
        return 0.0 if configured > 0 else math.nan
    part = parts[0]
    if part.grad_fn is None or part.grad_fn is loss.grad_fn:  # as of a compiled model, which is one step of the graph
        return math.nan
    edge = GradientEdge(part.grad_fn, part.output_nr)
    while edge.node.name() == "ToCopyBackward0":  # another precision, after the loss was made
        edge = GradientEdge(*edge.node.next_functions[0])
    slope = torch.autograd.grad(loss, edge, retain_graph=True, allow_unused=True)[0]
    return 0.0 if slope is None else float(slope)


@contextmanager
def watch(model: nn.Module, *, log: Callable[[RouterState], object], every: int = 100):
    """While it is open, routers are read in one of so many training steps; a step is a call of the model.

        with watch(model, log=lambda state: run.log(state.scalars())):
            for batch in batches: ...

    Calls in evaluation, or without gradients, are no steps. An error in here or in `log` becomes a warning.

    Args:
        model: as it is called in the loop; of DistributedDataParallel what it wraps.
        log: is called with what was read, after the forward pass of a step.
        every: steps from one that is read to the next; the first one is read.

    Raises:
        ValueError: for a model without mixture layers, or an `every` that is no integer >= 1.
    """
    every, steps = check.integer("every", every, 1), count()
    reader = _Reader(model, lambda: next(steps) % every == 0, lambda reader: log(reader.take()))
    try:
        yield
    finally:
        reader.close()


def watch_trainer(trainer: Any, *, every: int = 100) -> Any:
    """Adds to what a Trainer of transformers logs what its routers did: the scalars of a `RouterState`.

    They are in the next log after a step that was read, and so in its history, Weights & Biases, TensorBoard, or to
    whatever else it reports. Of several processes each reads its own shard; the first one reports.

    Args:
        trainer: before it trains.
        every: optimizer steps from one that is read to the next; the first one is read.

    Returns:
        The callback, first of the trainer's: after those that report it would come too late.

    Raises:
        ValueError: for an `every` that is no integer >= 1.
        ImportError: without transformers.
    """
    every = check.integer("every", every, 1)

    class RouterCallback(library().TrainerCallback):
        reader, due = None, False

        def on_train_begin(self, args, state, control, model=None, **_):
            try:
                self.reader = _Reader(model, lambda: self.due, lambda reader: None)
            except ValueError as error:
                warnings.warn(f"routers are not read; {error}", stacklevel=2)

        def on_step_begin(self, args, state, control, **_):
            self.due = state.global_step % every == 0

        def on_log(self, args, state, control, logs=None, **_):
            if self.reader and self.reader.state.routers and "loss" in logs:
                with self.reader._quiet():
                    scalars = self.reader.take().scalars()
                    logs |= scalars
                    state.log_history[-1] |= scalars

        def on_train_end(self, args, state, control, **_):
            if self.reader:
                self.reader.close()

    callback = RouterCallback()
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
