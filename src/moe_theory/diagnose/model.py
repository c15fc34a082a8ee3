"""`diagnose`: a model of the library transformers and some batches in, findings and numbers out."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from moe_theory.diagnose.arrays import RouterStream, checked_label
from moe_theory.diagnose.balance import configured_coefficient, has_loss, probe_balance
from moe_theory.diagnose.batches import Batch, arguments_of, checked, first_of, real_tokens
from moe_theory.diagnose.findings import COLLAPSE, Finding
from moe_theory.diagnose.probes import MIXER, Configured, GateReport, probe_gates
from moe_theory.diagnose.report import Report
from moe_theory.diagnose.selection import SCORES, Rule
from moe_theory.diagnose.traces import Layer, Pair, Trace, layers_of, left_out, unwrapped


def diagnose(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    *,
    labels: Mapping[str, Callable[[Batch], Int[Tensor, "s t"]]] | None = None,
    noise: float = 0.01,
    collapse: float = COLLAPSE,
    seed: int = 0,
) -> Report:
    """Looks into the mixture layers of a model of transformers.

    All batches are seen by the routers; a few tokens of the first are put to every layer one by one, in a copy of that
    layer in float64, and the balancing loss is differentiated at the first batch. The model is left as it was.

    Args:
        model: with mixture layers, in any floating type; of `torch.compile` or the library peft what they wrap is
            taken. Whether its balancing loss is added is asked of a model in training, or of a batch with labels.
        batches: one batch, or several: arguments of the model by name, tensors with a row for each sequence.
        labels: for each name a function that gives the tokens of a batch integers >= 0. In a model of two stacks it is
            called for each of them with its own arguments, those of the decoder as `input_ids` and so on.
        noise: standard deviation of the Gaussian noise on the logits whose effect is computed.
        collapse: share of the experts beyond the K of a token, by effective number, below which a load is a finding.
        seed: draws the permutations of the labels and the directions of the slopes.

    Raises:
        ValueError: for a model without mixture layers, in another wrapper, without weights or of inference tensors;
            for routers that are not linear; for NaN, with the layer in which they appear; for no batch, one that the
            model does not take or all padding; for labels that are no functions, or give no integer >= 0 for each
            token.
    """
    model = unwrapped(model)
    layers = layers_of(model)
    _real_weights(model)
    labels = _functions({} if labels is None else labels)
    first, rest = first_of(batches)
    step = model.training or "labels" in first
    of_model = _of_model(model, layers)
    learns = {layer.name: layer.learns for layer in layers}
    vectors = [p for layer in layers for p in layer.head.parameters()]
    with _exact(next(model.parameters()).device.type), _evaluated(model, vectors):
        seen = _seen(model, layers, first)
        k = {layer.name: int(seen[layer.name].chosen.sum(1).max()) for layer in layers}
        real = {
            m.name: seen[m.name].of(real_tokens(arguments_of(model, m, first), len(seen[m.name].x))) for m in layers
        }
        gates = {}
        for layer in layers:
            asked = dict(configured=_configured(model), learns=learns[layer.name], seed=seed)
            gates[layer.name] = probe_gates(layer, real[layer.name], k[layer.name], **asked)
        streams = {m.name: RouterStream(m.M, k[m.name], noise=noise, collapse=collapse, where=m.name) for m in layers}
        for batch in chain([first], rest):
            of_batch = seen if batch is first else _seen(model, layers, checked(batch))
            for layer in layers:
                rule, given = gates[layer.name].rule, arguments_of(model, layer, batch)
                _take(streams[layer.name], of_batch[layer.name], rule, given, labels)
        balance = probe_balance(model, first, layers, k, asked=step)
    for layer in layers:
        streams[layer.name].weight = layer.W.detach()
    routers = {name: replace(stream.report(seed=seed), slip=gates[name].slip) for name, stream in streams.items()}
    if step and not balance and has_loss(model) and configured_coefficient(model) > 0:
        of_model.append(Finding("unused", "model", 0, configured_coefficient(model), "it has no balancing loss"))
    of_model += [f for layer in layers for f in _capacity(model, layer, seen[layer.name], k[layer.name], first)]
    unasked = _unasked(model, layers, gates.values(), first, step=step, balance=bool(balance))
    return Report(routers, gates, balance, of_model, left_out(model, layers), unasked)


def _real_weights(model: nn.Module) -> None:
    """Refuses a model that cannot run, or cannot be differentiated."""
    for name, p in model.named_parameters():
        if p.is_meta:
            raise ValueError(f"model: expected weights, got none for {name}, which is on the device meta")
        if p.is_inference():
            raise ValueError(
                f"model: expected weights that can be differentiated, got {name} made in inference mode; "
                "load the model outside of it"
            )


def _of_model(model: nn.Module, layers: list[Layer]) -> list[Finding]:
    """What is wrong with all layers together: experts are trained, and no router."""
    experts = sum(any(p.requires_grad for p in layer.experts.parameters()) for layer in layers)
    if experts and not any(layer.learns for layer in layers):
        return [Finding("frozen", "model", 0, experts, "routers that learn, and layers whose experts do")]
    return []


def _capacity(model: Any, layer: Layer, trace: Trace, k: int, batch: Batch) -> list[Finding]:
    """An expert that takes more tokens than the capacity that is configured, of a sequence or of a batch."""
    config, counts = model.config.get_text_config(), trace.chosen
    if bool((counts.sum(1) < k).any()):  # tokens are dropped, so there is one
        return []
    sequences = len(next(value for name, value in batch.items() if isinstance(value, Tensor)))
    each = getattr(config, "expert_capacity", None)
    factor = getattr(config, "capacity_factor", None)
    if isinstance(each, int) and len(counts) % sequences == 0:
        busiest = int(counts.unflatten(0, (sequences, -1)).sum(1).max())
        limit, of = each, "a sequence"
    elif isinstance(factor, int | float) and factor > 0:
        busiest, limit, of = int(counts.sum(0).max()), math.ceil(factor * k * len(counts) / layer.M), "a batch"
    else:
        return []
    return [Finding("capacity", layer.name, busiest, limit, f"tokens of {of}")] if busiest > limit else []


def _unasked(
    model: nn.Module, layers: list[Layer], gates: Iterable[GateReport], batch: Batch, *, step: bool, balance: bool
) -> list[str]:
    """The questions that were not put, each with what it takes to put it."""
    mask = batch.get("attention_mask")
    padded = isinstance(mask, Tensor) and not bool(mask.bool().all())
    found = []
    if not step:
        found.append("whether a training step adds the balancing loss: hand over labels, or the model in training")
    if balance and not padded:
        found.append("whether the balancing loss counts padding: hand over a batch that has some")
    if any(isinstance(layer.block, Pair) for layer in layers):
        found.append("what lies behind the experts: these blocks are part of a decoder's layer")
    if any(gate.gates == (MIXER,) for gate in gates):
        found.append("what gradient the router gets: these gates come from a sampler, with a gradient of its own")
    if any(layer.idle_bias for layer in layers):
        found.append("whether the bias that selects was trained: it is 0 everywhere, as before training or when lost")
    return [
        *found,
        "whether the experts are the right ones: see compare",
        "what happens in training only: dropout, noise, gates that are detached there",
    ]


def _functions(labels: Mapping[str, Callable]) -> Mapping[str, Callable]:
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels: expected functions of a batch by name, got {type(labels).__name__}")
    for name, label in labels.items():
        if not callable(label):
            raise ValueError(f"labels: expected a function of a batch for {name!r}, got {type(label).__name__}")
    return labels


def _called(model: nn.Module, batch: Batch) -> None:
    """Runs a model; ValueError if it does not take a batch."""
    try:
        model(**batch)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        if isinstance(error, ValueError) and str(error).startswith(("model", "batches")):  # said by what watches
            raise
        given = {name: _kind(value) for name, value in batch.items()}
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"model, batches: expected arguments that the model takes, got {given}; {why}") from error


def _kind(value) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def _exact(device: str):
    """Single precision is what it says: no autocast, no TF32; gradients where the caller has switched them off."""
    plain = torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.inference_mode(False), torch.enable_grad(), plain:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


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
        _called(model, batch)
    missing = [name for name, seen in traces.items() if not seen]
    if missing:
        raise ValueError(f"batches: expected arguments with which every layer runs, got none for {missing}")
    for layer in layers:
        layer.linear(traces[layer.name][0])
    return {name: seen[0] for name, seen in traces.items()}


def _take(stream: RouterStream, trace: Trace, rule: Rule, batch: Batch, labels: Mapping[str, Callable]) -> None:
    """Hands a router's tokens of a batch on, without the padding, with the numbers by which it selects."""
    kept = real_tokens(batch, len(trace.x))
    given = {name: checked_label(name, label(batch), len(kept)) for name, label in labels.items()}
    trace = trace.of(kept)
    scores, off = rule.of(trace.exact, trace.rounding)
    stream.add(
        trace.exact,
        scores=scores,
        chosen=trace.chosen,
        rounding=off,
        resolution=rule.resolution(trace.exact, trace.recorded.dtype),
        labels={name: value[kept] for name, value in given.items()},
    )


def _configured(model: Any) -> Configured:
    """What the configuration says: whether kept gates are divided by their sum, a factor on all, and how many."""
    config = model.config.get_text_config()
    normalized = getattr(config, "norm_topk_prob", None)
    named = {name: value for name, value in config.to_dict().items() if "rout" in name and "scal" in name}
    factors = tuple(float(value) for value in named.values() if isinstance(value, int | float))
    if getattr(config, "shared_expert_combination_strategy", None) == "average" and config.num_shared_experts:
        factors = (0.5,)
    counts = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k")
    k = next((value for name in counts if isinstance(value := getattr(config, name, None), int)), None)
    scores = (getattr(config, name, None) for name in ("scoring_func", "expert_selection_fn", "score_function"))
    score = next((value for value in scores if value in SCORES), None)
    return Configured(normalized, score, factors or (1.0,), k)
