"""The theory of sparse Mixture-of-Experts routing, as code a reader can run and check.

`import moe_theory as mt` gives what most readers need, `mt.PatchTask` or `mt.nullity`; each is
imported when it is first asked for. Everything else stands in the modules.
"""

from importlib import import_module

__version__ = "0.1.0"

#: The module of each name; `diagnose` is a module itself.
EXPORTS = {
    "PatchTask": "tasks.patches",
    "PatchMoE": "models.moe",
    "train_patch_moe": "training.engine",
    "LinearRouter": "models.routers",
    "CosineRouter": "models.routers",
    "PerturbedCosineRouter": "models.routers",
    "MultiHeadRouter": "models.routers",
    "top1_noisy": "models.rules",
    "softmax_topk": "models.rules",
    "topk_softmax": "models.rules",
    "sampled_topk": "models.rules",
    "route_probabilities": "theory.smoothing",
    "tight_witness": "theory.single_expert",
    "nullity": "theory.identifiability",
    "dispatch_entropy": "measure.dispatch",
    "voronoi_loss": "measure.voronoi",
    "MixingMeasure": "models.mixture",
    "diagnose": "diagnose",
}
__all__ = [*EXPORTS]


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    module = import_module(f"{__name__}.{EXPORTS[name]}")
    return module if name == EXPORTS[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
