"""Argument checks shared by the package: each names the argument, what came and what was expected."""

from numbers import Integral, Real

import torch
from torch import Tensor


def integer(name: str, value: int, least: int) -> int:
    """Return `value` if it is an integer of at least `least`; raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    return int(value)


def positive(name: str, value: float) -> float:
    """Return `value` as a float if it is finite and > 0; raise ValueError otherwise."""
    if not isinstance(value, Real) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    return float(value)


def not_negative(name: str, value: float) -> float:
    """Return `value` as a float if it is finite and >= 0; raise ValueError otherwise."""
    if not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
    return float(value)


def strength_range(name: str, value: tuple[float, float]) -> tuple[float, float]:
    """Return `(low, high)` if 0 < low <= high < inf; raise ValueError otherwise."""
    try:
        low, high = (float(v) for v in value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a pair (low, high), got {value!r}") from None
    if not 0 < low <= high < float("inf"):
        raise ValueError(f"{name}: expected 0 < low <= high < infinity, got {value!r}")
    return low, high


def choice(name: str, value: str, allowed) -> str:
    """Return `value` if it is one of `allowed`; raise ValueError otherwise."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {sorted(allowed)}, got {value!r}")
    return value


def finite(name: str, value: Tensor) -> Tensor:
    """Return `value` if every entry is finite; raise ValueError otherwise."""
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{name}: expected finite numbers, got {bad} NaN or infinite entries")
    return value
