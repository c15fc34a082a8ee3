"""What mixtures of linear and of cubic experts do while they train (Chen et al. 2022): two smaller tasks.

Both run Algorithm 1 as written. `course` follows router and experts in setting 1, on the inputs as they are
and times 10; `picture` has the data and sizes of Figure 1 (Appendix A.1), which names no number of steps.
"""

from collections.abc import Callable

import torch

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.measure.patch_layer import look, sign_pair, with_weights, wrong
from moe_theory.tasks.patches import SETTINGS, PatchBatch, PatchTask
from moe_theory.training import Run, train_patch_moe

SEEDS, EVERY, LOOK = range(10), 50, 400
STEPS = {(1, "cubic"): 1_000, (1, "linear"): 1_200, (10, "cubic"): 400, (10, "linear"): 400}
DIGITS = 6  # of what is stored
SMOKE = dict(n=200, steps=EVERY)


def course() -> list[dict]:
    """Setting 1 with 4,000 examples; inputs times 10 are what the released notebooks feed their networks."""
    return [
        dict(activation=activation, input_scale=scale, n=4_000, experts=8, steps=steps, seed=seed)
        for seed in SEEDS
        for (scale, activation), steps in STEPS.items()
    ]


def picture() -> list[dict]:
    """Figure 1: as many experts as clusters, 1,600 examples."""
    return [
        dict(activation=activation, n=1_600, experts=4, steps=3_000, seed=seed)
        for seed in SEEDS
        for activation in ("linear", "cubic")
    ]


def figure_1(seed: int) -> PatchTask:
    """The task of Figure 1, with `gamma` in (1, 2)."""
    return PatchTask(alpha=(0.5, 2.0), beta=(1.0, 2.0), gamma=(1.0, 2.0), sigma_p=1.0, seed=seed)


def _train(task: PatchTask, key: dict, measure: Callable, scale: float = 1.0) -> tuple[Run, PatchBatch]:
    """A run of one row and its test examples; inputs times `scale` by what that means for the step sizes."""
    train, test = task.sample(key["n"], 2 * key["seed"] + 1), task.sample(key["n"], 2 * key["seed"] + 2)
    options = {name: key[name] for name in ("activation", "experts", "steps")}
    options |= dict(sigma_0=0.01 * scale, eta=1e-3 * scale, eta_r=0.1 * scale**2)
    (run,) = train_patch_moe(
        train, test, seeds=(key["seed"],), record_every=EVERY, measure=lambda now: measure(now, test), **options
    )
    return run, test


def _curves(history: list[dict], *names: str) -> dict:
    """Loss, test accuracy in percent, dispatch entropy in nats and `names` at the steps `steps_at`.

    `first_NAME` has the first entry of each, which `course_live` and `picture_live` compute again.
    """
    curves = {
        "loss": [h["loss"] for h in history],
        "test": [100 * h["test_accuracy"] for h in history],
        "entropy": [h["dispatch_entropy"] for h in history],
    } | {name: [h[name] for h in history] for name in names}
    curves = rounded(curves, DIGITS)
    first = {f"first_{name}": values[0] for name, values in curves.items()}
    return first | {"steps_at": [h["step"] for h in history]} | curves


def _first(row: dict) -> dict:
    return {name: value for name, value in row.items() if name.startswith("first_")}


def course_row(key: dict) -> dict:
    """Curves of `look`, and in percent the accuracy of every expert on every cluster after LOOK steps."""
    task = PatchTask(seed=key["seed"], **SETTINGS["setting 1"])
    run, _ = _train(task, key, lambda now, test: look(now, test, key["activation"]), key["input_scale"])
    (at,) = (h for h in run.history if h["step"] == min(LOOK, key["steps"]))
    names = ("differ", "reads", "vote", "signs", "best", "by_centers", "by_labels")
    accuracies = [[100 * a for a in of_expert] for of_expert in at["accuracies"].tolist()]
    return _curves(run.history, *names) | {"accuracies": rounded(accuracies, DIGITS)}


def course_live(key: dict) -> dict:
    """The first entries of a row's curves."""
    return _first(course_row({**key, "steps": EVERY}))


def picture_row(key: dict) -> dict:
    """Curves, with the norm `router` of the router's weights, and what the picture needs of the end.

    That is `theta`, the router's weights, a list for each expert, and `wrong`, the places in the test set of
    the examples that the mixture gets wrong.
    """
    run, test = _train(
        figure_1(key["seed"]), key, lambda now, _: {"router": torch.linalg.matrix_norm(now["theta"]).item()}
    )
    theta, W = run.parameters["theta"], run.parameters["W"]
    return _curves(run.history, "router") | {
        "theta": rounded(theta.T, DIGITS),
        "wrong": wrong(with_weights(theta, W, key["activation"]), test).nonzero().flatten().tolist(),
    }


def held_out(seed: int) -> PatchBatch:
    """The test examples of the rows of `picture` with that seed."""
    return figure_1(seed).sample(picture()[0]["n"], 2 * seed + 2)


def routed(theta: list[list[float]], batch: PatchBatch) -> dict:
    """What the router of a row of `picture` does with its test examples.

    Args:
        theta: the router's weights as they are stored, a list for each expert.
        batch: of `held_out`.

    Returns:
        `m`: (n,) the expert of each example, without noise; `purity`: share of the examples whose expert is the
        one that most of their cluster goes to; `entropy` and `signs`: entropies in nats of the cluster and of
        the pair of signs given the expert.
    """
    m = (batch.x.sum(1) @ torch.tensor(theta).T).argmax(1)
    most = dispatch_counts(batch.cluster, m).amax(1)
    return {
        "m": m,
        "purity": most.sum().item() / len(m),
        "entropy": dispatch_entropy(batch.cluster, m),
        "signs": dispatch_entropy(sign_pair(batch), m),
    }


def picture_live(key: dict) -> dict:
    """The first entries of a row's curves."""
    return _first(picture_row({**key, "steps": EVERY}))
