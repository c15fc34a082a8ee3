"""`diagnose`: a model of the library transformers and some batches in, findings and numbers out."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from moe_theory.diagnose.arrays import RouterStream, checked_label
from moe_theory.diagnose.balance import probe_balance
from moe_theory.diagnose.probes import DENIED, DIVIDED, Configured, probe_gates
from moe_theory.diagnose.report import Report
from moe_theory.diagnose.traces import Layer, Trace, layers_of, left_out, unwrapped

#: What a model is called with, by the names of its arguments: tensors, and flags.
Batch = Mapping[str, Tensor | bool | None]


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
            Transformers; of `torch.compile` or the library peft what they wrap is taken.
        batches: one batch, or several: arguments of the model by name, tensors with a row for each sequence.
        labels: for each name a function that gives the tokens of a batch integers >= 0. In a model of two stacks it is
            called for each of them with its own arguments, those of the decoder as `input_ids` and so on.
        noise: standard deviation of the Gaussian noise on the logits whose effect is computed.
        seed: draws the permutations of the labels and the directions of the slopes.

    Raises:
        ValueError: for a model without mixture layers, in another wrapper, or not in single precision; for routers
            that are not linear; for NaN, with the layer in which they appear; for no batch, a batch that is no mapping
            or all padding; for labels that are no functions, or give no integer >= 0 for each token.
    """
    model = unwrapped(model)
    layers = layers_of(model)
    _single(layers)
    labels = _functions({} if labels is None else labels)
    first, rest = _first(batches)
    learns = {layer.name: layer.W.requires_grad for layer in layers}
    with _exact(layers[0].W.device.type), _evaluated(model, [layer.W for layer in layers]):
        seen = _seen(model, layers, first)
        k = {layer.name: int(seen[layer.name].chosen.sum(1).max()) for layer in layers}
        streams = {m.name: RouterStream(len(m.W), k[m.name], noise=noise, where=m.name) for m in layers}
        for batch in chain([first], rest):
            of_batch = seen if batch is first else _seen(model, layers, _checked(batch))
            for layer in layers:
                _take(streams[layer.name], of_batch[layer.name], _arguments(model, layer, batch), labels)
        real = {m.name: seen[m.name].of(_real(_arguments(model, m, first), len(seen[m.name].x))) for m in layers}
        gates = {}
        for layer in layers:
            asked = dict(configured=_configured(model), learns=learns[layer.name], seed=seed)
            gates[layer.name] = probe_gates(layer, real[layer.name], k[layer.name], **asked)
        balance = probe_balance(model, first, layers, k)
    for layer in layers:
        streams[layer.name].weight = layer.W.detach()
    routers = {name: stream.report(seed=seed) for name, stream in streams.items()}
    return Report(routers, gates, balance, left_out(model, layers))


def _single(layers: list[Layer]) -> None:
    """Refuses what the limits are not made for: in half precision they are larger than most gaps between logits."""
    dtypes = {p.dtype for layer in layers for p in layer.block.parameters()}
    dtypes |= {
        getattr(layer.router, "dtype", torch.float32) for layer in layers
    }  # Switch: in which its router computes
    if others := dtypes - {torch.float32}:
        names = ", ".join(sorted(map(str, others)))
        raise ValueError(f"model: expected mixture layers in torch.float32, got {names}; hand over a copy in float32")


def _functions(labels: Mapping[str, Callable]) -> Mapping[str, Callable]:
    if not isinstance(labels, Mapping):
        raise ValueError(f"labels: expected functions of a batch by name, got {type(labels).__name__}")
    for name, label in labels.items():
        if not callable(label):
            raise ValueError(f"labels: expected a function of a batch for {name!r}, got {type(label).__name__}")
    return labels


def _checked(batch: Batch) -> Batch:
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(f"batches: expected arguments of the model by name, got {type(batch).__name__}")
    return batch


def _first(batches: Batch | Iterable[Batch]) -> tuple[Batch, Iterable[Batch]]:
    """The first batch and the others; ValueError if there is none."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor):
        raise ValueError(f"batches: expected arguments of the model by name, got {type(batches).__name__}")
    others = iter([batches] if isinstance(batches, Mapping) else batches)
    for first in others:
        return _checked(first), others
    raise ValueError("batches: expected at least one, got none")


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
        model(**batch)
    missing = [name for name, seen in traces.items() if not seen]
    if missing:
        raise ValueError(f"batches: expected arguments with which every layer runs, got none for {missing}")
    for name, (trace, *_) in traces.items():
        _linear(name, trace)
    return {name: seen[0] for name, seen in traces.items()}


def _linear(name: str, trace: Trace) -> None:
    """Refuses a router whose logits are not `x W^T + b`, nor a softmax of that, which some return for them."""
    if trace.recorded.shape != trace.exact.shape:
        one, other = len(trace.exact[0]), len(trace.recorded[0])
        raise ValueError(f"model: expected a linear router of {one} experts, got {other} logits of a token in {name}")
    off = min(
        (float(((trace.recorded - exact).abs().amax(1) / limit).max()), float((trace.recorded - exact).abs().max()))
        for exact, limit in (
            (trace.exact, 2 * trace.rounding),
            (trace.exact.softmax(1), 2 * trace.rounding + (trace.exact.shape[1] + 8) * torch.finfo(torch.float32).eps),
        )
    )
    if off[0] > 1:
        raise ValueError(f"model: expected a linear router, x W^T + b, got logits that are {off[1]:.2g} off in {name}")


def _arguments(model: nn.Module, layer: Layer, batch: Batch) -> Batch:
    """Those of the stack to which a layer belongs; `decoder_` is taken off their names."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return batch
    if "decoder" in layer.name.split("."):
        return {n.removeprefix("decoder_"): value for n, value in batch.items() if n.startswith("decoder_")}
    return {name: value for name, value in batch.items() if not name.startswith("decoder_")}


def _take(stream: RouterStream, trace: Trace, batch: Batch, labels: Mapping[str, Callable]) -> None:
    """Hands a router's tokens of a batch on, without the padding."""
    kept = _real(batch, len(trace.x))
    given = {name: checked_label(name, label(batch), len(kept)) for name, label in labels.items()}
    trace = trace.of(kept)
    stream.add(
        trace.exact,
        chosen=trace.chosen,
        rounding=trace.rounding,
        labels={name: value[kept] for name, value in given.items()},
    )


def _real(batch: Batch, tokens: int) -> Bool[Tensor, " n"]:
    """Which tokens are no padding, where the attention mask is one of these tokens."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.numel() != tokens:
        return torch.ones(tokens, dtype=torch.bool)
    if not mask.any():
        raise ValueError("batches: expected tokens other than padding, got none")
    return mask.flatten().bool().cpu()


def _configured(model: Any) -> Configured:
    """What the configuration says: whether kept gates are divided by their sum, a factor on all, and how many."""
    config = model.config.get_text_config()
    normalized = getattr(config, "norm_topk_prob", None)
    named = {name: value for name, value in config.to_dict().items() if "rout" in name and "scal" in name}
    factors = tuple(float(value) for value in named.values() if isinstance(value, int | float))
    k = getattr(config, "num_experts_per_tok", None)
    allowed = () if normalized is None else DIVIDED if normalized else DENIED
    return Configured(allowed, factors or (1.0,), k if isinstance(k, int) else None)
