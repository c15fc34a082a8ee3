"""`compare`: two models that should be one, before and after a conversion, layer by layer and cause before consequence.

Every layer of the second model is put to what the layer of the first one read, so that a difference in one layer is not
the echo of another; what lies outside of the mixture layers is asked in the same way, with their outputs replaced by
those of the first model.

Every limit is one of rounding, and measured: inputs are moved by half a unit in the last place of the coarser of the
two formats, in random directions, and a part of the layer may be off by `STAGES` times what that moves in it, as if so
many roundings followed on each other, all in one direction. Sums in single precision add the root of their length.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.diagnose.alike import (
    KEPT,
    TINY,
    Compared,
    Limit,
    Part,
    Site,
    layers_alike,
    named_as,
    resolution,
    rounded,
    terms,
)
from moe_theory.diagnose.model import Batch, _arguments, _checked, _evaluated, _exact, _first, _real
from moe_theory.diagnose.traces import Layer, _tokens, layers_of, unwrapped


@dataclass(frozen=True, repr=False)
class ModelComparison:
    """Where two models differ; true if they do, beyond rounding.

    Attributes:
        parts: what was compared, in the order in which a token passes it.
        orders: by layer, numbers that the first model's experts have in the second one's router, and among its
            experts, where these are others; if both are the same, that is no difference.
        shifts: by layer, by how much all logits are shifted together, relative to their size, where no gate sees it.
        formats: by layer, unit in the last place, relative, of the coarser of the two formats.
    """

    parts: list[Part]
    orders: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    shifts: dict[str, float] = field(default_factory=dict)
    formats: dict[str, float] = field(default_factory=dict)

    @property
    def differs(self) -> list[Part]:
        """What differs, and is not the consequence of something else."""
        return [part for part in self.parts if part.differs]

    @property
    def first(self) -> Part | None:
        """The first difference on a token's way."""
        return next(iter(self.differs), None)

    @property
    def named(self) -> set[str]:
        return {part.name for part in self.differs}

    def __bool__(self) -> bool:
        return bool(self.differs)

    def __repr__(self) -> str:
        if self.first is None:
            renumbered = f", experts renumbered in {len(self.orders)}" if self.orders else ""
            return f"compare: equal to rounding in {len(self.formats)} layers{renumbered}"
        says = self.first.says if self.first.says.startswith("experts [") else f"{self.first.name}: {self.first.says}"
        return f"compare: first difference in {self.first.where}: {says}"

    def table(self) -> pd.DataFrame:
        """A row for each layer and part."""
        return pd.DataFrame([part._asdict() | {"differs": part.differs} for part in self.parts])

    def to_dict(self) -> dict:
        """The same as numbers and words, for JSON: no NaN."""

        def plain(part: Part) -> dict:
            values = part._asdict() | {"differs": part.differs}
            return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}

        first = None if self.first is None else plain(self.first)
        orders = {name: [list(order) for order in both] for name, both in self.orders.items()}
        rest = {"orders": orders, "shifts": self.shifts, "formats": self.formats}
        return {"equal": not self, "first": first, "parts": [plain(part) for part in self.parts], **rest}


def compare(a: nn.Module, b: nn.Module, batches: Batch | Iterable[Batch], *, tolerance: float = 0.0) -> ModelComparison:
    """Says where two models of transformers differ that should be one, and in what.

    For a converter, a quantization, a sharding, a merge of adapters, or experts copied from a dense model. Parts of a
    layer: `order` (router and experts are numbered differently), `bias` (that only selects), `logits`, `choices`,
    `dropped`, `gates`, `experts`, `transposed` (experts with a square matrix the other way round), `shared` and
    `shared gate` (what the block adds to its experts' output), `block` (the rest of it); and `model`, all outside.
    Experts that are renumbered together with their router, and a shift of all logits that no gate sees, are no
    difference. A bias that selects is held to single precision, whatever the rest is in.

    Args:
        a: the model before, with mixture layers or, where b has copies of its MLPs as experts, without.
        b: the model after; both are left as they were.
        batches: one batch, or several: arguments of both models by name.
        tolerance: relative difference that is allowed beyond rounding, for quantized weights.

    Raises:
        ValueError: for models without mixture layers, or of different depth, width, number of experts or vocabulary;
            for NaN, with the layer in which they appear; for no batch, or one that does not fit the models.
    """
    check.not_negative("tolerance", tolerance)
    a, b = named_as("a", unwrapped, a), named_as("b", unwrapped, b)
    sites = _sites(a, b)
    first, rest = _first(batches)
    eps = resolution(a, b)
    with ExitStack() as stack:
        for model in (a, b):
            stack.enter_context(_exact(next(model.parameters()).device.type))
            stack.enter_context(_evaluated(model, []))
        stack.enter_context(torch.no_grad())
        met = [_met(a, b, sites, _checked(batch), eps) for batch in chain([first], rest)]
        layers = [_layer(site, [m[i] for m, _ in met], tolerance, sites) for i, site in enumerate(sites)]
    deep, limit = _deep(a, sites), Limit(eps, max(map(terms, sites)), tolerance)
    outside = _outside(sites, [[m[i].reaches for m, _ in met] for i in range(len(sites))], deep, limit)
    ends = [ends for _, ends in met]
    behind = _around(sites[-1], ends, "what is made of what it says", len(sites) * deep, limit)
    parts = list(chain.from_iterable([part, *layer.parts] for part, layer in zip(outside, layers, strict=True)))
    return ModelComparison(
        _causes([*parts, behind]),
        {s.where: layer.orders for s, layer in zip(sites, layers, strict=True) if layer.orders},
        {s.where: layer.shift for s, layer in zip(sites, layers, strict=True) if layer.shift},
        {s.where: layer.eps for s, layer in zip(sites, layers, strict=True)},
    )


def _causes(parts: list[Part]) -> list[Part]:
    """What differs outside of the layers once, differs behind that, too."""
    seen, marked = False, []
    for part in parts:
        outside = part.name == "model"
        marked.append(part._replace(follows=True) if outside and seen else part)
        seen |= outside and part.value > part.limit
    return marked


# The two models.


def _sites(a: nn.Module, b: nn.Module) -> list[Site]:
    for name, model in (("a", a), ("b", b)):
        if not hasattr(model, "config"):
            raise ValueError(f"{name}: expected a model of transformers, got {type(model).__name__}")
    words = [getattr(m.config.get_text_config(), "vocab_size", None) for m in (a, b)]  # pyright: ignore
    if words[0] != words[1]:
        raise ValueError(f"b: expected a vocabulary of {words[0]} symbols as in a, got {words[1]}")
    after = named_as("b", layers_of, b)
    named = [layer.name.rpartition(".")[0] for layer in after]
    try:
        before: list[Layer | nn.Module] = [*layers_of(a)]
    except ValueError as error:
        inside = dict(a.named_modules())
        if missing := [name for name in named if name not in inside]:
            raise ValueError(f"a: expected mixture layers, or MLPs where b has them, got none at {missing}") from error
        before = [inside[name] for name in named]
    if len(before) != len(after):
        raise ValueError(f"b: expected {len(before)} mixture layers as in a, got {len(after)}")
    return [Site(*each) for each in zip(named, before, after, strict=True)]


# As they run.


class Sums(NamedTuple):
    """Squared: how far two models are apart, their sizes, and how far each is moved by rounding."""

    apart: float
    sizes: tuple[float, float]
    moved: tuple[float, float]


class Met(NamedTuple):
    """What a layer meets in a batch.

    Attributes:
        u: what it reads in the first model, at some tokens; chosen: experts selected in both models as they run.
        reaches: what it reads, the layers before it answering alike; None where the second model does not run it.
        ran: what it says as both run.
        like: a number in the format and on the device of each.
    """

    u: Float[Tensor, "n d"]
    chosen: tuple[Bool[Tensor, "n M"], Bool[Tensor, "n M"]] | None
    reaches: tuple[Sums, Sums] | None
    ran: Sums | None
    like: tuple[Tensor, Tensor]


class Seen(NamedTuple):
    """What a layer read, returned and selected in a batch as its model ran; no selection where none was watched."""

    u: Float[Tensor, "n d"]
    out: Float[Tensor, "n d"]
    chosen: Bool[Tensor, "n M"] | None


@contextmanager
def _watched(layer: Layer | nn.Module) -> Iterator[list]:
    """What a layer, or an MLP, reads and says."""
    if isinstance(layer, Layer):
        with layer.watched() as traces:
            yield traces
        return
    seen: list = []
    hook = layer.register_forward_hook(
        lambda _, args, kwargs, out: seen.append(Seen(_tokens([*args, *kwargs.values()]), _tokens(out), None)),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        hook.remove()


def _replaced(model: nn.Module, layer: Layer | nn.Module, said: Tensor):
    """A hook by which a layer's block, or, where that is no module of the model, its experts say something else."""

    def says(_, __, out):
        first = out[0] if isinstance(out, tuple) else out
        first = said.to(first).view_as(first)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    block = layer.block if isinstance(layer, Layer) else layer
    there = any(block is m for m in model.modules())
    return (block if there else layer.experts).register_forward_hook(says)  # pyright: ignore


def _run(
    name: str, model: nn.Module, layers: list, batch: Batch, *, said: list | None = None, eps: float = 0.0
) -> tuple[list, Tensor]:
    """What every layer reads and says, None where it does not run, and what the model returns.

    Args:
        name: of the argument that the model is; model: the model; layers: layers, or MLPs, of it; batch: its arguments.
        said: what the layers are to say; eps: to which the embeddings are rounded.
    """
    device = next(model.parameters()).device
    batch = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
    with ExitStack() as stack:
        seen = [stack.enter_context(_watched(layer)) for layer in layers]
        for layer, out in zip(layers, said or [], strict=bool(said)):
            stack.callback(_replaced(model, layer, out).remove)
        if eps:
            for embeds in (m for m in model.modules() if isinstance(m, nn.Embedding)):
                stack.callback(embeds.register_forward_hook(lambda _, __, out: rounded(out, eps, 0)).remove)
        try:
            final = _final(named_as(name, lambda: model(**batch)))
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            if str(error).startswith((f"{name}:", "batches:")):  # said by what watches
                raise
            raise ValueError(f"batches: expected arguments with which {name} runs, got {error}") from error
    final = check.finite(f"{name}: what it returns", final).flatten(0, -2)
    return [traces[0] if traces else None for traces in seen], final


def _final(out: Any) -> Tensor:
    """Logits of a model's output, or last hidden states."""
    named = (getattr(out, name, None) for name in ("logits", "last_hidden_state"))
    found = next((tensor for tensor in named if tensor is not None), None)
    return next(t for t in out if isinstance(t, Tensor) and t.ndim > 1) if found is None else found


def _met(
    a: nn.Module, b: nn.Module, sites: list[Site], batch: Batch, eps: float
) -> tuple[list[Met], tuple[Sums, Sums]]:
    """What all layers meet in a batch, and what the models return: as they ran, and with layers that say the same."""
    before, after = [s.a for s in sites], [s.b for s in sites]
    ran_a, end_a = _run("a", a, before, batch)
    if missing := [s.where for s, t in zip(sites, ran_a, strict=True) if t is None]:
        raise ValueError(f"batches: expected arguments with which every layer runs, got none for {missing}")
    said = [t.out for t in ran_a]
    ran_b, end_b = _run("b", b, after, batch)
    if end_a.shape != end_b.shape:
        raise ValueError(f"b: expected to return {tuple(end_a.shape)} numbers as a, got {tuple(end_b.shape)}")
    for site, t, other in zip(sites, ran_a, ran_b, strict=True):
        if other is not None and t.u.shape != other.u.shape:
            sizes = tuple(t.u.shape), tuple(other.u.shape)
            raise ValueError(f"b: expected to read {sizes[0]} in {site.where}, as a, got {sizes[1]}")
    same, same_end = _run("b", b, after, batch, said=said)
    moved_a, moved_end_a = _run("a", a, before, batch, said=said, eps=eps)
    moved_b, moved_end_b = _run("b", b, after, batch, said=said, eps=eps)
    met = []
    for site, *t in zip(sites, ran_a, ran_b, same, moved_a, moved_b, strict=True):
        real = _real(_arguments(a, site.b, batch), len(t[0].u))
        met.append(_at(real, *t))
    real = _real(_arguments(a, sites[-1].b, batch), len(end_a))
    ends = _sums(real, end_a, same_end, moved_end_a, moved_end_b), _sums(real, end_a, end_b)
    return met, ends


def _at(real: Bool[Tensor, " n"], a, b, same, moved_a, moved_b) -> Met:
    """What a layer meets at tokens that are no padding; some of them are kept."""
    some = real.nonzero()[:, 0]
    some = some[torch.linspace(0, len(some) - 1, min(KEPT, len(some))).long()]
    like = a.u.new_zeros(())
    if b is None or same is None or moved_b is None:
        return Met(a.u[some.to(a.u.device)].cpu(), None, None, None, (like, like))
    masks = [t.chosen[some.to(t.chosen.device)].cpu() for t in (a, b) if t.chosen is not None]
    return Met(
        a.u[some.to(a.u.device)].cpu(),
        (masks[0], masks[1]) if len(masks) == 2 else None,
        (_sums(real, a.u, same.u, moved_a.u, moved_b.u), _sums(real, a.u, b.u)),
        _sums(real, a.out, b.out),
        (like, b.u.new_zeros(())),
    )


def _sums(real: Bool[Tensor, " n"], a: Tensor, b: Tensor, moved_a=None, moved_b=None) -> Sums:
    a, b = (t.detach().cpu().double()[real] for t in (a, b))
    pairs = ((a, moved_a), (b, moved_b))
    moved = [0.0 if m is None else float((m.detach().cpu().double()[real] - t).square().sum()) for t, m in pairs]
    sizes = float(a.square().sum()), float(b.square().sum())
    return Sums(float((a - b).square().sum()), sizes, (moved[0], moved[1]))


def _relative(sums: list[Sums]) -> tuple[float, float, float]:
    """Distance relative to size, and by how much rounding moves the parts, and that size."""
    size = math.sqrt(sum(sum(s.sizes) / 2 for s in sums))
    apart = math.sqrt(sum(s.apart for s in sums)) / max(size, TINY)
    return apart, max(math.sqrt(sum(s.moved[i] for s in sums)) for i in (0, 1)), size


def _outside(sites: list[Site], reaches: list[list], deep: float, limit: Limit) -> list[Part]:
    """What reaches the layers where those before say the same in both models."""
    parts = []
    for number, (site, met) in enumerate(zip(sites, reaches, strict=True), 1):
        if None in met:
            parts.append(Part(site.where, "model", 1, 0, "b does not run it"))
            continue
        parts.append(_around(site, met, "what it reads", number * deep, limit))
    return parts


def _around(site: Site, met: list[tuple[Sums, Sums]], says: str, layers: float, limit: Limit) -> Part:
    """Roundings of one layer of a model after another add up by the root of their number."""
    alike, ran = zip(*met, strict=True)
    apart, noise, size = _relative(alike)
    return Part(site.where, "model", apart, float(limit(noise, size, math.sqrt(layers))), says, ran=_relative(ran)[0])


def _deep(model: nn.Module, sites: list[Site]) -> float:
    """Layers of a model for each layer of experts, those without experts counted."""
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    stacks = 2 if config.is_encoder_decoder else 1
    return max(1.0, stacks * config.num_hidden_layers / len(sites))


def _layer(site: Site, met: list[Met], tolerance: float, sites: list[Site]) -> Compared:
    """A layer on what it read in the first model; and beside it, what it said as both ran."""
    chosen = [m.chosen for m in met if m.chosen is not None]
    found = layers_alike(site, torch.cat([m.u for m in met]).double(), met[0].like, chosen, tolerance, sites)
    if any(m.ran is None for m in met):
        return found
    ran = _relative([m.ran for m in met])[0]
    return found._replace(parts=[p._replace(ran=ran) if p.name == "block" else p for p in found.parts])
