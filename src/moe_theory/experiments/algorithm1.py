"""Algorithm 1 of Chen et al. (2022) as written, and what the released notebooks run, on the same data."""

from moe_theory.tasks.patches import SETTINGS, PatchTask
from moe_theory.training import train_patch_moe, train_released_moe

N, PREFIX = 16_000, 50
VARIANTS = {"as written": (train_patch_moe, 2_000), "released": (train_released_moe, 601)}


def grid() -> list[dict]:
    """Setting 1, nonlinear and linear experts, both variants, five seeds; M = 8, J = 16."""
    return [
        dict(setting="setting 1", variant=variant, activation=activation, seed=seed, n=N, steps=VARIANTS[variant][1])
        for seed in range(5)
        for activation in ("cubic", "linear")
        for variant in VARIANTS
    ]


def _train(key: dict, steps: int) -> list[dict]:
    task = PatchTask(**SETTINGS[key["setting"]], seed=key["seed"])
    train, test = task.sample(key["n"], 2 * key["seed"] + 1), task.sample(key["n"], 2 * key["seed"] + 2)
    trainer = VARIANTS[key["variant"]][0]
    (run,) = trainer(train, test, activation=key["activation"], steps=steps, seeds=(key["seed"],), record_every=PREFIX)
    return run.history


def _measured(prefix: str, h: dict) -> dict:
    return {
        f"{prefix}_step": h["step"],
        f"{prefix}_loss": round(h["loss"], 6),
        f"{prefix}_test": round(100 * h["test_accuracy"], 4),
        f"{prefix}_entropy": round(h["dispatch_entropy"], 5),
    }


def _curve(values: list[float], digits: int) -> str:
    return " ".join(f"{v:.{digits}f}" for v in values)


def row(key: dict) -> dict:
    """Loss, test accuracy in percent and dispatch entropy in nats, after PREFIX steps and at the end.

    `steps_at`, `test_curve` and `entropy_curve` hold the history as numbers separated by blanks.
    """
    history = _train(key, key["steps"])
    return {
        **_measured("prefix", history[0]),
        **_measured("final", history[-1]),
        "steps_at": _curve([h["step"] for h in history], 0),
        "test_curve": _curve([100 * h["test_accuracy"] for h in history], 2),
        "entropy_curve": _curve([h["dispatch_entropy"] for h in history], 4),
    }


def live(key: dict) -> dict:
    """The first PREFIX steps of a row, at its full size."""
    return _measured("prefix", _train(key, PREFIX)[0])
