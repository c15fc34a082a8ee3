"""`diagnose`: a model of the library transformers and some batches in, findings and numbers out."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from moe_theory.diagnose.arrays import RouterReport, RouterStream
from moe_theory.diagnose.balance import BalanceReport, probe_balance
from moe_theory.diagnose.findings import FINDINGS, Finding
from moe_theory.diagnose.layers import Layer, Trace, layers_of
from moe_theory.diagnose.probes import DENIED, DIVIDED, GateReport, probe_gates

#: What a model is called with, by the names of its arguments.
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, repr=False)
class Report:
    """What was found in a model.

    Attributes:
        routers: by the router's name, what it does with the tokens.
        gates: by the router's name, what its layer computes.
        balance: what each balancing loss reads; empty if the model returns none.
    """

    routers: dict[str, RouterReport]
    gates: dict[str, GateReport]
    balance: list[BalanceReport]

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, layer by layer."""
        parts = chain(self.routers.values(), self.gates.values(), self.balance)
        return list(chain.from_iterable(part.findings for part in parts))

    @property
    def named(self) -> set[str]:
        """The names of the findings."""
        return {finding.name for finding in self.findings}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.routers)} layers, found: {', '.join(sorted(self.named)) or 'nothing'})"

    def layers(self) -> pd.DataFrame:
        """What was measured, a row for each layer; in use: effective experts, shares are those of the tokens."""
        rows = {}
        for name, router in self.routers.items():
            gate = self.gates[name]
            rows[name] = {
                "gate": ", ".join(gate.gates) or "none known",
                "selected": router.k,
                "in use": router.effective,
                "idle": len(router.dead),
                "undecided": router.undecided / router.tokens,
                f"changed by noise {router.noise:g}": router.changed,
                "slope": gate.gradient,
                "jump": gate.jump,
                "common shift": router.gauge,
            }
        return pd.DataFrame.from_dict(rows, "index")

    def table(self) -> pd.DataFrame:
        """The findings with what they mean and what can be done."""
        rows = [
            {**finding._asdict(), "claim": finding.claim, **FINDINGS[finding.name]._asdict()}
            for finding in self.findings
        ]
        return pd.DataFrame(rows, columns=["where", "name", "value", "limit", "detail", "claim", "says", "act"])


def diagnose(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    *,
    labels: Mapping[str, Callable[[Batch], Int[Tensor, "s t"]]] | None = None,
    noise: float = 0.01,
    seed: int = 0,
) -> Report:
    """Looks into the mixture layers of a model of transformers.

    All batches are seen by the routers; a few tokens of the first are put to every layer one by one, in a copy of that
    layer in float64, and the balancing loss is differentiated at the first batch. The model is left as it was.

    Args:
        model: with mixture layers in single precision, such as Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE or Switch
            Transformers.
        batches: one batch, or several: arguments of the model by name, tensors with a row for each sequence.
        labels: for each name a function that gives the tokens of a batch integers >= 0.
        noise: standard deviation of the Gaussian noise on the logits whose effect is computed.
        seed: draws the permutations of the labels and the directions of the slopes.

    Raises:
        ValueError: for a model without mixture layers, in a wrapper, or in half precision; for no batch, a batch that
            is no mapping, NaN logits, or labels for another number of tokens.
    """
    layers = layers_of(model)
    _readable(model, layers)
    first, rest = _first(batches)
    with torch.inference_mode(False), torch.enable_grad(), _evaluated(model, [layer.W for layer in layers]):
        traces = _seen(model, layers, first)
        k = {layer.name: int(traces[layer.name].chosen.sum(1).max()) for layer in layers}
        streams = {m.name: RouterStream(len(m.W), k[m.name], noise=noise, where=m.name) for m in layers}
        for batch in chain([first], rest):
            of_batch = traces if batch is first else _seen(model, layers, batch)
            for name, trace in of_batch.items():
                _take(streams[name], trace, batch, labels or {})
        asked = dict(expected=_configured(model), factor=_factor(model), seed=seed)
        gates = {m.name: probe_gates(m, traces[m.name].x, k[m.name], **asked) for m in layers}
        balance = probe_balance(model, first, layers, max(k.values()))
    for layer in layers:
        streams[layer.name].weight = layer.W.detach()
    return Report({name: stream.report(seed=seed) for name, stream in streams.items()}, gates, balance)


def _readable(model: nn.Module, layers: list[Layer]) -> None:
    """Refuses what the limits are not made for: in half precision they are larger than most gaps between logits."""
    if not hasattr(model, "config"):
        kind = type(model).__name__
        raise ValueError(f"model: expected a model of transformers, got {kind} around one; hand over what it wraps")
    coarse = {p.dtype for layer in layers for p in layer.block.parameters()} - {torch.float32, torch.float64}
    if coarse:
        names = ", ".join(sorted(map(str, coarse)))
        raise ValueError(f"model: expected mixture layers in torch.float32, got {names}; hand over a copy in float32")


def _first(batches: Batch | Iterable[Batch]) -> tuple[Batch, Iterable[Batch]]:
    """The first batch and the others; ValueError if there is none."""
    others = iter([batches] if isinstance(batches, Mapping) else batches)
    first = next(others, None)
    if not isinstance(first, Mapping) or not first:
        raise ValueError(f"batches: expected arguments of the model by name, got {first!r}")
    return first, others


@contextmanager
def _evaluated(model: nn.Module, vectors: list[nn.Parameter]):
    """The model without dropout and jitter, with gradients in the routers' vectors alone, and afterwards as it was."""
    training = {module: module.training for module in model.modules()}
    learning = {p: p.requires_grad for p in model.parameters()}
    try:
        for p in learning:
            p.requires_grad_(any(p is W for W in vectors))
        yield model.eval()
    finally:
        for p, was in learning.items():
            p.requires_grad_(was)
        for module, was in training.items():
            module.training = was


@torch.no_grad()
def _seen(model: nn.Module, layers: list[Layer], batch: Batch) -> dict[str, Trace]:
    """What every layer does with a batch."""
    with ExitStack() as stack:
        traces = {layer.name: stack.enter_context(layer.watched()) for layer in layers}
        model(**batch)
    missing = [name for name, seen in traces.items() if not seen]
    if missing:
        raise ValueError(f"batches: expected arguments with which every layer runs, got none for {missing}")
    return {name: seen[0] for name, seen in traces.items()}


def _take(stream: RouterStream, trace: Trace, batch: Batch, labels: Mapping[str, Callable]) -> None:
    """Hands a router's tokens of a batch on, without the padding."""
    kept = _real(batch, len(trace.x))
    given = {name: torch.as_tensor(label(batch)).flatten().to(trace.x.device) for name, label in labels.items()}
    for name, value in given.items():
        if len(value) != len(kept):
            raise ValueError(f"labels: expected {len(kept)} of {name!r}, one for each token, got {len(value)}")
    stream.add(
        trace.exact[kept],
        chosen=trace.chosen[kept],
        rounding=trace.rounding[kept],
        labels={name: value[kept] for name, value in given.items()},
    )


def _real(batch: Batch, tokens: int) -> Bool[Tensor, " n"]:
    """Which tokens are no padding, where the attention mask is one of these tokens."""
    mask = batch.get("attention_mask")
    if mask is None or mask.numel() != tokens:
        return torch.ones(tokens, dtype=torch.bool)
    return mask.flatten().bool()


def _configured(model: nn.Module) -> tuple[str, ...]:
    """The gates that the configuration allows, if it says whether kept gates are divided by their sum."""
    normalized = getattr(model.config, "norm_topk_prob", None)
    return () if normalized is None else DIVIDED if normalized else DENIED


def _factor(model: nn.Module) -> float:
    """The constant by which the configuration multiplies every gate, as that of DeepSeek-V3 does."""
    return getattr(model.config, "routed_scaling_factor", None) or 1.0
