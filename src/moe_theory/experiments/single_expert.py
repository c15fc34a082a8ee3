"""Tables 7 and 8 of Chen et al. (2022): how well one patch CNN does, at the paper's size."""

from moe_theory.models.experts import ACTIVATIONS
from moe_theory.tasks.patches import SETTINGS, PatchTask
from moe_theory.training.single import train_single_expert

N, FILTERS, EPOCHS, PREFIX = 16_000, 128, 800, 40


def grid() -> list[dict]:
    """Every activation on the data of Table 7 and of settings 1 and 2 (Table 8), three seeds.

    Setting 3 is there for linear and cubic, whose rows of Table 7 reappear in Table 3 under setting 3.
    `input_scale` 1 is the task as written, 10 what the released notebooks feed their networks.
    """
    return [
        dict(setting=setting, activation=activation, input_scale=scale, seed=seed, n=N, filters=FILTERS, epochs=EPOCHS)
        for seed in range(3)
        for scale in (10, 1)
        for setting in ("table 7", "setting 1", "setting 2", "setting 3")
        for activation in ACTIVATIONS
        if setting != "setting 3" or activation in ("linear", "cubic")
    ]


def wide() -> list[dict]:
    """The single models of Table 3 that `grid` lacks: 512 filters, and 128 in setting 4; inputs as released."""
    missing = [("setting 4", 128), *((f"setting {i}", 512) for i in (1, 2, 3, 4))]
    return [
        dict(setting=setting, activation=activation, input_scale=10, seed=seed, n=N, filters=filters, epochs=EPOCHS)
        for seed in range(3)
        for setting, filters in missing
        for activation in ("linear", "cubic")
    ]


def smoke(grid: list[dict]) -> list[dict]:
    """The first rows of a grid with few examples and epochs."""
    return [{**key, "n": 200, "epochs": PREFIX} for key in grid[:3]]


def _train(key: dict, epochs: int) -> list[dict]:
    task = PatchTask(**SETTINGS[key["setting"]], seed=key["seed"])
    train, test = task.sample(key["n"], 2 * key["seed"] + 1), task.sample(key["n"], 2 * key["seed"] + 2)
    return train_single_expert(
        train,
        test,
        activation=key["activation"],
        filters=key["filters"],
        epochs=epochs,
        input_scale=key["input_scale"],
        seed=key["seed"],
    )[1]


def _prefix(history: list[dict]) -> dict:
    (at,) = (h for h in history if h["epoch"] == PREFIX)
    return dict(prefix_epoch=PREFIX, prefix_loss=round(at["loss"], 6), prefix_test=round(100 * at["test"], 4))


def row(key: dict) -> dict:
    """Accuracies in percent: the best on test over training, its epoch, the last on test and train."""
    history = _train(key, key["epochs"])
    best = max(history, key=lambda h: h["test"])
    last = history[-1]
    return dict(
        best_test=round(100 * best["test"], 4),
        best_epoch=best["epoch"],
        final_test=round(100 * last["test"], 4),
        final_train=round(100 * last["train"], 4),
        final_loss=round(last["loss"], 6),
        **_prefix(history),
    )


def live(key: dict) -> dict:
    """The first PREFIX epochs of a row, at its full size: loss and test accuracy there."""
    return _prefix(_train(key, PREFIX))
