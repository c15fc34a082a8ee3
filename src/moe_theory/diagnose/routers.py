"""A router from arrays: its logits, or the experts that it chose."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Integer
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.diagnose.arrays import RouterStream, linear_logits
from moe_theory.diagnose.findings import COLLAPSE
from moe_theory.diagnose.report import Report

#: What is taken beside tensors, if its entries are numbers.
Rows = np.ndarray | pd.DataFrame | Sequence


def diagnose_router(
    h: Float[Tensor, "n M"] | Rows,
    *,
    k: int,
    scores: Float[Tensor, "n M"] | Rows | None = None,
    chosen: Tensor | Rows | None = None,
    labels: Mapping[str, Tensor] | None = None,
    x: Float[Tensor, "n d"] | Rows | None = None,
    W: Float[Tensor, "M d"] | Rows | None = None,
    b: Float[Tensor, " M"] | Rows | None = None,
    resolution: torch.dtype | float | Tensor | None = None,
    noise: float = 0.01,
    collapse: float = COLLAPSE,
    seed: int = 0,
) -> Report:
    """What a router does, from its logits alone; for several batches see `RouterStream`.

    Args:
        h: logits of n tokens: a tensor, an array, a numeric frame of pandas, or lists.
        k: experts selected.
        scores: the numbers by which experts are selected where these are not the logits, see `RouterStream.add`.
        chosen: true at the experts that the tokens were sent to, (n, M), or their numbers, (n, k) with -1 for none; by
            default those of the k largest scores.
        labels: for each name a non-negative integer for each token.
        x, W: what the router read and its vectors, both or neither: the rounding of the logits and the share of the
            gauge are taken from them. Scores other than the logits have a rounding of their own.
        b: its biases, if it has any.
        resolution: of the scores, see `RouterStream.add`; by default their dtype.
        noise: standard deviation of the Gaussian noise whose effect is computed.
        collapse: share of the experts beyond k in use, in [0, 1], below which the router has collapsed.
        seed: draws the permutations of the labels.

    Returns:
        A report of one router, `report.routers["router"]`.

    Raises:
        ValueError: for no token, NaN logits, probabilities or (M, n) in their place, a k outside 1..M, hidden states or
            vectors that are for other tokens, experts or another width, logits that are not `x W^T + b`, or what
            `RouterStream.add` refuses.
    """
    h = _array("h", h)
    if h.ndim != 2 or not h.is_floating_point() or not len(h):
        raise ValueError(f"h: expected a matrix of floating point logits, got {tuple(h.shape)} {h.dtype}")
    x, W, b, scores, chosen = (
        None if value is None else _array(name, value)
        for name, value in (("x", x), ("W", W), ("b", b), ("scores", scores), ("chosen", chosen))
    )
    _oriented(h, k, x, W, chosen)
    router = RouterStream(h.shape[1], k, noise=noise, collapse=collapse)
    if (x is None) != (W is None) or (b is not None and W is None):
        given = [name for name, value in (("x", x), ("W", W), ("b", b)) if value is not None]
        raise ValueError(f"x, W: expected both or neither, b with them, got only {' and '.join(given)}")
    rounding = None
    if x is not None and W is not None:
        router.weight = W
        format = resolution if isinstance(resolution, torch.dtype) else h.dtype
        rounding = _rounding(h, x, W, b, format)
    rounding = rounding if scores is None else None
    router.add(h, scores=scores, chosen=chosen, rounding=rounding, resolution=resolution, labels=labels)
    return Report({"router": router.report(seed=seed)})


def diagnose_choices(
    numbers: Integer[Tensor, "n *layers K"] | Rows,
    experts: int,
    *,
    labels: Mapping[str, Tensor] | None = None,
    collapse: float = COLLAPSE,
    seed: int = 0,
) -> Report:
    """What routers do, from the experts chosen alone, as servers write them; for several batches see `RouterStream`.

    Loads, experts in use and idle ones, tokens dropped, and what the first expert tells of labels need no logits.

    Args:
        numbers: (n, K) or (n, layers, K) integers of any type, the experts of each token, the first of them first, and
            -1 for none.
        experts: number M.
        labels: for each name a non-negative integer for each token.
        collapse: share of the experts beyond K in use, in [0, 1], below which a router has collapsed.
        seed: draws the permutations of the labels.

    Returns:
        A report of one router, "router", or of "layer 0", "layer 1" and so on.

    Raises:
        ValueError: for no token, numbers of another shape, no integers, no experts, or one twice for a token; or for
            labels as in `RouterStream.add`.
    """
    numbers = _array("numbers", numbers)
    if numbers.ndim not in (2, 3) or not numbers.numel():
        raise ValueError(f"numbers: expected some of shape (n, K) or (n, layers, K), got {tuple(numbers.shape)}")
    layers = {"router": numbers} if numbers.ndim == 2 else {f"layer {i}": t for i, t in enumerate(numbers.unbind(1))}
    found = {}
    for name, own in layers.items():
        router = RouterStream(experts, own.shape[1], collapse=collapse, where=name)
        router.add_choices(own, labels=labels)
        found[name] = router.report(seed=seed)
    return Report(found)


def _array(name: str, value) -> Tensor:
    """A tensor as it is; of a frame, an array or lists what numpy makes of them, if they are numbers."""
    if isinstance(value, Tensor):
        return value
    try:
        value = np.require(value, requirements="W")  # a copy where torch could not have it as it is
    except ValueError as error:
        raise ValueError(f"{name}: expected rows of one length, got {error}") from None
    return check.array(name, value)


def _oriented(h: Float[Tensor, "n M"], k: int, x: Tensor | None, W: Tensor | None, chosen: Tensor | None) -> None:
    """Refuses (M, n) in place of (n, M), where another argument tells."""
    turned = tuple(h.shape[::-1])
    by = {
        "x and W": x is not None and W is not None and (len(x), len(W)) == turned,
        "chosen": chosen is not None and chosen.dtype == torch.bool and tuple(chosen.shape) == turned,
    }
    told = [name for name, tells in by.items() if tells]
    if told and tuple(h.shape) != turned:
        raise ValueError(
            f"h: expected a row for each token, (n, M), got {tuple(h.shape)}, which by {told[0]} is (M, n); "
            "hand over h.T"
        )
    if h.shape[1] < check.integer("k", k, 1) <= len(h):
        raise ValueError(f"k: expected at most M = {h.shape[1]} experts, got {k}; if h is (M, n), hand over h.T")


def _rounding(
    h: Float[Tensor, "n M"], x: Tensor, W: Tensor, b: Tensor | None, format: torch.dtype
) -> Float[Tensor, " n"]:
    """How far the logits may be from `x W^T + b`: added up in float32 and rounded once if they are so near, or not."""
    exact, once = linear_logits(x, W, b, dtype=format)
    if exact.shape != h.shape:
        raise ValueError(f"x, W: expected those of {tuple(h.shape)} logits, got them for {tuple(exact.shape)}")
    off = (check.finite("h", h).double() - exact).abs().amax(1)
    rounding = once if bool((off <= once).all()) else linear_logits(x, W, b)[1]
    if bool((off > 2 * rounding).any()):
        raise ValueError(f"h: expected the logits x W^T + b to rounding, got some that are {float(off.max()):.2g} off")
    return rounding
