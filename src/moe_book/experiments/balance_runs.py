"""What chapter 07 and its appendix pages read of stored runs, and what they make again beside them."""

import numpy as np
import pandas as pd
import torch

from moe_book.experiments.store import load, recompute
from moe_theory.measure.tables import counts, curves, effective_experts
from moe_theory.models.experts import ACTIVATIONS
from moe_theory.streams import torch_stream
from moe_theory.tasks.patches import PatchTask
from moe_theory.training import engine
from moe_theory.training.grouped import Experts
from moe_theory.training.parts import take_apart
from moe_theory.training.plain import whole_loss
from moe_theory.training.variants import VARIANTS


def loaded(name: str) -> pd.DataFrame:
    """Stored runs with the experts in use at the end, `used`."""
    rows = load(name)
    return rows.assign(used=rows.dispatch.map(counts).map(effective_experts))


def runs(rows: pd.DataFrame, run: str) -> dict[str, np.ndarray]:
    """Curves of the stored runs of one kind, by name: a line for each seed."""
    own = rows.loc[rows.run == run]
    lists = [name for name, value in own.iloc[0].items() if isinstance(value, list)]
    return {name: curves(own[name]) for name in lists}


def again(experiment: str, **which) -> list[float]:
    """Distances of loss, accuracy and entropy after 50 steps of a recomputed run from the stored one."""
    now = recompute(experiment, **which)
    return now.iloc[:, 1:].astype(float).diff().iloc[1].abs().tolist()


def restart(experiment: str, **which) -> tuple[float, float, float]:
    """A stored run started again, against the first entries of its curves.

    Returns:
        Distances of accuracy (points) and entropy, and the largest relative one of the others.
    """
    stored, now = recompute(experiment, **which).to_dict("records")
    del now["sum"]  # rounding
    gap = {name: np.abs(np.subtract(now[name][0], stored[name][0])).max() for name in now}
    relative = max(gap[name] / np.max(stored[name][0]) for name in gap.keys() - {"test", "entropy"})
    return gap["test"], gap["entropy"], relative


def two_routes(variant: str, seed: int) -> float:
    """The router's gradient at lambda = 1 by the engine and by automatic differentiation of the whole loss.

    Returns:
        Their largest difference over the largest entry, on 200 examples drawn by the seed.
    """
    how, cubic, rng = VARIANTS[variant], ACTIVATIONS["cubic"], torch_stream(seed, "chapter", 7, 1)
    batch = PatchTask(K=3, P=5, d=12).sample(200, seed, torch.float64)
    parts = take_apart("batch", batch, cubic, how.input_scale, how.biases)
    layer = Experts(parts, engine.output_signs(4, how).double(), cubic)
    noise = torch.rand(6, 200, generator=rng, dtype=torch.float64)
    theta = 0.1 * torch.randn(12, 6, generator=rng, dtype=torch.float64)
    W = how.initial(12, 6, 4, 0.1, seed)
    closed = engine.gradients(layer, theta, W, noise, how, 1.0)[1]
    loss = whole_loss(batch, theta.requires_grad_(), W, noise, variant=variant, balance=1.0)
    (automatic,) = torch.autograd.grad(loss, theta)
    return float((closed - automatic).abs().max() / automatic.abs().max())
