"""Batches of a model: arguments by name, checked, those of a stack of it, and their tokens that are no padding."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from moe_theory.diagnose.traces import Layer

#: What a model is called with, by the names of its arguments: tensors, and flags.
Batch = Mapping[str, Tensor | bool | None]


def checked(batch: Batch) -> Batch:
    """A batch as it is; ValueError if it is no mapping, or has a mask of another shape than its symbols."""
    if not isinstance(batch, Mapping) or not batch:
        raise ValueError(f"batches: expected arguments of the model by name, got {type(batch).__name__}")
    for stack in ("", "decoder_"):
        ids, mask = batch.get(f"{stack}input_ids"), batch.get(f"{stack}attention_mask")
        if isinstance(ids, Tensor) and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape != ids.shape:
            expected = f"{stack}attention_mask of shape {tuple(ids.shape)}"
            raise ValueError(f"batches: expected {expected}, as {stack}input_ids, got {tuple(mask.shape)}")
    return batch


def first_of(batches: Batch | Iterable[Batch]) -> tuple[Batch, Iterable[Batch]]:
    """The first batch and the others; ValueError if there is none."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | str | bytes) or hasattr(batches, "columns"):
        raise ValueError(f"batches: expected arguments of the model by name, got {type(batches).__name__}")
    others = iter([batches] if isinstance(batches, Mapping) else batches)
    for first in others:
        return checked(first), others
    raise ValueError("batches: expected at least one, got none")


def arguments_of(model: Any, layer: Layer, batch: Batch) -> Batch:
    """Those of the stack to which a layer belongs; `decoder_` is taken off their names."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return batch
    if "decoder" in layer.name.split("."):
        return {n.removeprefix("decoder_"): value for n, value in batch.items() if n.startswith("decoder_")}
    return {name: value for name, value in batch.items() if not name.startswith("decoder_")}


def real_tokens(batch: Batch, tokens: int) -> Bool[Tensor, " n"]:
    """Which tokens are no padding, where the attention mask is one of these tokens."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.numel() != tokens:
        return torch.ones(tokens, dtype=torch.bool)
    if not mask.any():
        raise ValueError("batches: expected tokens other than padding, got none")
    return mask.flatten().bool().cpu()
