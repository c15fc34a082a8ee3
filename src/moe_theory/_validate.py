"""Argument checks shared by the package: each names the argument, what came and what was expected."""

from importlib import import_module
from numbers import Integral, Real
from reprlib import repr as short
from types import ModuleType

import numpy as np
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
    if value not in [*allowed]:
        raise ValueError(f"{name}: expected one of {sorted(allowed)}, got {value!r}")
    return value


def instance(name: str, value, kind):
    """Return `value` if it is an instance of a class or of a union of classes; raise ValueError otherwise."""
    if not isinstance(value, kind):
        names = dict.fromkeys(k.__name__ for k in getattr(kind, "__args__", (kind,)))
        raise ValueError(f"{name}: expected {' or '.join(names)}, got {short(value)}")
    return value


def floating(name: str, value: torch.dtype) -> torch.dtype:
    """Return `value` if it is a floating type of torch; raise ValueError otherwise."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ValueError(f"{name}: expected a floating type such as torch.float32, got {value!r}")
    return value


def array(name: str, value, dtype: torch.dtype | None = None) -> Tensor:
    """What `torch.as_tensor` makes of `value`; a ValueError that names the argument where that makes nothing of it."""
    try:
        return torch.as_tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a tensor or what makes one, got {short(value)} ({error})") from None


def tensor(name: str, value: Tensor, *sizes) -> Tensor:
    """Return `value` if it is a floating tensor of these sizes; raise ValueError otherwise. It does not read a number.

    Args:
        name: of the argument; value: what came.
        sizes: a number for each dimension, or a letter for any; an Ellipsis in front for any dimensions more. The
            last dimension may not be empty.
    """
    given, any_more = instance(name, value, Tensor).shape, sizes[0] is ...
    asked = sizes[1:] if any_more else sizes
    last = given[len(given) - len(asked) :]
    fits = len(given) >= len(asked) if any_more else len(given) == len(asked)
    fits = fits and all(isinstance(a, str) or a == b for a, b in zip(asked, last, strict=True)) and last[-1] > 0
    if not fits or not value.is_floating_point():
        shape = ", ".join("..." if a is ... else str(a) for a in sizes)
        raise ValueError(f"{name}: expected floating numbers of shape ({shape}), got {value.dtype} {tuple(given)}")
    return value


def numbers(name: str, value) -> np.ndarray:
    """Return `value` as an array of floats if every entry is finite; raise ValueError otherwise."""
    value = np.asarray(value, float)
    if bad := int((~np.isfinite(value)).sum()):
        raise ValueError(f"{name}: expected finite numbers, got {bad} NaN or infinite entries")
    return value


def finite(name: str, value: Tensor) -> Tensor:
    """Return `value` if every entry is finite; raise ValueError otherwise."""
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{name}: expected finite numbers, got {bad} NaN or infinite entries")
    return value


def library(name: str, what: str) -> ModuleType:
    """A module of the extra `chapters`, which `what` needs; ImportError names both if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        package = {"sklearn": "scikit-learn"}.get(top := name.split(".")[0], top)
        raise ImportError(f"{what}: needs {package}, which `pip install 'moe-theory[chapters]'` brings") from None
