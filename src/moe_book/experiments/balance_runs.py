"""What chapter 07 and its appendix pages read of stored runs, and what they make again beside them."""

import numpy as np
import pandas as pd
import torch

from moe_book.experiments import store
from moe_theory.measure.tables import counts, curves, effective_experts, entropies
from moe_theory.models.experts import ACTIVATIONS
from moe_theory.streams import stream, torch_stream
from moe_theory.tasks.patches import PatchTask
from moe_theory.training import engine, train_patch_moe
from moe_theory.training.grouped import Experts
from moe_theory.training.parts import take_apart
from moe_theory.training.plain import whole_loss
from moe_theory.training.variants import VARIANTS


def loaded(name: str) -> pd.DataFrame:
    """Stored runs with the experts in use at the end, `used`."""
    rows = store.load(name)
    return rows.assign(used=rows.dispatch.map(counts).map(effective_experts))


def runs(rows: pd.DataFrame, run: str) -> dict[str, np.ndarray]:
    """Curves of the stored runs of one kind, by name: a line for each seed."""
    own = rows.loc[rows.run == run]
    lists = [name for name, value in own.iloc[0].items() if isinstance(value, list)]
    return {name: curves(own[name]) for name in lists}


def missing(**frames: pd.DataFrame) -> int:
    """How many rows of the grids of some experiments, by name, are not among the stored ones."""
    return sum(abs(len(store.experiment(name).grid) - len(rows)) for name, rows in frames.items())


def apart(**frames: pd.DataFrame) -> dict[str, float]:
    """How far stored columns that tell the same are apart: the ends of a run's curves and the values stored beside
    them, and the entropy of its dispatch table.

    Returns:
        The largest distances of accuracies (points), entropies and numbers of steps, and the number of missing runs.
    """
    rows = pd.concat(frames.values(), ignore_index=True)
    pairs = {
        "accuracy": [(rows.test_curve.str[-1], rows.final_test), (rows.test_curve.str[0], rows.prefix_test)],
        "entropy": [
            (rows.entropy_curve.str[-1], rows.final_entropy),
            (rows.entropy_curve.str[0], rows.prefix_entropy),
            (entropies(rows.dispatch), rows.final_entropy),
        ],
        "steps": [
            (rows.steps_at.str[-1], rows.final_step),
            (rows.steps_at.str[0], rows.prefix_step),
            (rows.steps_at.str.len(), rows.test_curve.str.len()),
        ],
    }
    far = {name: max(float(np.abs(a - b).max()) for a, b in found) for name, found in pairs.items()}
    return {f"stored, {name}": value for name, value in {**far, "missing runs": missing(**frames)}.items()}


def again(experiment: str, **which) -> list[float]:
    """Distances of loss, accuracy and entropy after 50 steps of a recomputed run from the stored one."""
    now = store.recompute(experiment, **which)
    return now.iloc[:, 1:].astype(float).diff().iloc[1].abs().tolist()


def restart(experiment: str, **which) -> tuple[float, float, float]:
    """A stored run started again, against the first entries of its curves.

    Returns:
        Distances of accuracy (points) and entropy, and the largest relative one of the others.
    """
    stored, now = store.recompute(experiment, **which).to_dict("records")
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


def three_steps(variant: str, balance: float, seed: int) -> float:
    """Three steps of training by the engine and by automatic differentiation of the whole loss.

    Returns:
        The largest difference of a parameter over the largest one, of router and experts, on 200 examples.
    """
    how, task = VARIANTS[variant], PatchTask(seed=seed)
    batch, held_out = (task.sample(200, k, torch.float64) for k in (3, 4))
    (run,) = train_patch_moe(batch, held_out, variant=variant, balance=balance, seeds=(seed,), steps=3)
    rng, theta = stream(seed, "routing noise"), torch.zeros(task.d, 8, dtype=torch.float64)
    W = how.initial(task.d, 8, 16, 0.01, seed).double()
    for _ in range(3):
        noise = torch.from_numpy(rng.random((8, 200), dtype=np.float32)).double()
        theta, W = (t.detach().requires_grad_() for t in (theta, W))
        loss = whole_loss(batch, theta, W, noise, variant=variant, balance=balance)
        to_theta, to_W = torch.autograd.grad(loss, (theta, W))
        parts = to_W.split([task.d, W.shape[2] - task.d], 2)  # the released code's biases have a norm of their own
        theta, W = theta - 0.1 * to_theta, W - 1e-3 * to_W / sum(part.norm(dim=(1, 2), keepdim=True) for part in parts)
    ends = (run.parameters["theta"], theta), (run.parameters["W"], W)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in ends)
