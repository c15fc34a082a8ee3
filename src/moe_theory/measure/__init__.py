"""What is read off a trained model."""

from importlib import import_module

from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy

#: Imported when it is asked for: who counts dispatches needs no mixing measures.
EXPORTS = {"voronoi_loss": "voronoi"}
__all__ = ["dispatch_counts", "dispatch_entropy", *EXPORTS]


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
