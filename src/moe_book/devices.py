"""Where chapters and long computations compute: on a GPU where that is asked for and there is one, else on the CPU."""

import os
from contextvars import ContextVar

import torch

from moe_theory import _validate as check

#: The environment variable that names the device of a chapter, and the names.
VARIABLE, NAMES = "MOE_BOOK_DEVICE", ("cpu", "cuda")

#: What a row of an experiment computes on while it is computed.
ROW: ContextVar[str] = ContextVar("row", default="cpu")


def pick_device() -> torch.device:
    """The device of a chapter that gains from a GPU: what MOE_BOOK_DEVICE names, else a GPU if there is one.

    Raises:
        ValueError: as `named_device`.
    """
    return named_device(VARIABLE, os.environ.get(VARIABLE) or NAMES[torch.cuda.is_available()])


def named_device(argument: str, name: str) -> torch.device:
    """A device by its name; products of single precision are not rounded to ten bits (TF32) on it.

    Raises:
        ValueError: for another name, or a GPU where torch sees none.
    """
    if check.choice(argument, name, NAMES) == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{argument}: expected a GPU that torch can use for 'cuda', found none")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device(name)


def row_device() -> torch.device:
    """The device of the row that is computed: that of `experiments run --device`, in a chapter the CPU."""
    return named_device("device", ROW.get())
