"""The synthetic study of Chen et al. (2022) at its own size: 16,000 + 16,000 examples, ten seeds.

One function computes a row of every table; the tables are grids of it. The paper does not name T,
sigma_0, or the coefficients of Tables 9 and 11. "as written" runs 2,000 steps from sigma_0 = 0.01;
"released" runs the notebooks' 601 steps with their stopping rule.
"""

from moe_book.devices import row_device
from moe_theory.tasks.patches import SETTINGS, PatchTask
from moe_theory.training import Run, train_patch_moe

N, PREFIX = 16_000, 50
COEFFICIENTS = (0.01, 0.1, 1.0, 10.0)  # of the load-balancing loss in Table 9, which names none
STEPS = {"as written": 2_000, "released": 601}
SEEDS, FRESH = range(10), range(10, 20)
PLAIN_RATES = (1.0, 10.0, 100.0)  # of plain descent, beside Table 11
SMOKE = dict(n=200, steps=PREFIX)


def _key(setting: str, variant: str, activation: str, seed: int, **options) -> dict:
    defaults = dict(experts=8, eta=1e-3, normalized=True, balance=0.0, same_start=False, n=N, steps=STEPS.get(variant))
    return dict(setting=setting, variant=variant, activation=activation, seed=seed) | defaults | options


def main_tables() -> list[dict]:
    """Tables 1, 3 and 4 to 6, Figure 3: four settings, linear and cubic experts, both variants."""
    return [
        _key(setting, variant, activation, seed)
        for seed in SEEDS
        for setting in list(SETTINGS)[:4]
        for activation in ("cubic", "linear")
        for variant in STEPS
    ]


def longer() -> list[dict]:
    """Past the end of the main tables, as written: linear experts in setting 1, cubic ones in setting 3."""
    linear = [_key("setting 1", "as written", "linear", seed, steps=8_000) for seed in range(5)]
    return linear + [_key("setting 3", "as written", "cubic", seed, steps=4_000) for seed in SEEDS]


def balanced_linear() -> list[dict]:
    """Table 9: linear experts with the load-balancing loss, over its coefficient."""
    return [
        _key(setting, variant, "linear", seed, balance=balance)
        for seed in SEEDS
        for setting in list(SETTINGS)[:4]
        for variant in STEPS
        for balance in COEFFICIENTS
    ]


def same_start(seeds: range = SEEDS) -> list[dict]:
    """Table 10: cubic experts that start from the same weights, with the load-balancing loss.

    Both variants at M = 8, the released one at M = 32.
    """
    return [
        _key("setting 1", variant, "cubic", seed, experts=experts, balance=balance, same_start=True)
        for seed in seeds
        for experts, variant in ((8, "as written"), (8, "released"), (32, "released"))
        for balance in (0.1, 0.03, 0.01)
    ]


def control() -> list[dict]:
    """Beside Table 10: random starts at its coefficients, both starts at smaller ones; released, M = 8."""
    cells = [(False, b) for b in (1e-4, 1e-3, 0.01, 0.03, 0.1)] + [(True, b) for b in (0.0, 1e-4, 1e-3)]
    return [
        _key("setting 1", "released", "cubic", seed, balance=balance, same_start=same)
        for seed in SEEDS
        for same, balance in cells
    ]


def load_or_speed(seeds: range = SEEDS) -> list[dict]:
    """Table 11: 32 cubic experts, normalized or plain descent, with and without the load-balancing loss.

    The paper names no learning rate for plain descent; rates are those at which it learns at all.
    """
    rates = {"as written": (100.0,), "released": (1.0, 10.0)}
    return [
        _key("setting 1", variant, "cubic", seed, experts=32, balance=balance, normalized=normalized, eta=eta)
        for seed in seeds
        for variant in STEPS
        for balance in (0.0, 0.01)
        for normalized, eta in ((True, 1e-3), *((False, eta) for eta in rates[variant]))
    ]


def same_start_fresh() -> list[dict]:
    """Table 10 again at ten fresh seeds, under the criterion that the first ten led to."""
    return same_start(FRESH)


def load_or_speed_fresh() -> list[dict]:
    """Table 11 again at ten fresh seeds, under the criterion that the first ten led to."""
    return load_or_speed(FRESH)


def rescue() -> list[dict]:
    """Whether the load-balancing loss rescues plain descent, with 32 cubic experts: three rates, three coefficients."""
    cells = [(rate, balance) for rate in PLAIN_RATES for balance in (0.0, 0.001, 0.1, 1.0)]
    return [
        _key("setting 1", variant, "cubic", seed, experts=32, balance=balance, normalized=False, eta=rate)
        for seed in FRESH
        for variant in STEPS
        for rate, balance in cells
        if balance or rate not in {"as written": (100.0,), "released": (1.0, 10.0)}[variant]
    ]


def _train(key: dict, steps: int) -> Run:
    task = PatchTask(**SETTINGS[key["setting"]], seed=key["seed"])
    train, test = (task.sample(key["n"], s).to(row_device()) for s in (2 * key["seed"] + 1, 2 * key["seed"] + 2))
    options = {k: key[k] for k in ("variant", "activation", "experts", "eta", "normalized", "balance", "same_start")}
    return train_patch_moe(train, test, steps=steps, seeds=(key["seed"],), record_every=PREFIX, **options)[0]


def _measured(prefix: str, h: dict) -> dict:
    return {
        f"{prefix}_step": h["step"],
        f"{prefix}_loss": round(h["loss"], 6),
        f"{prefix}_test": round(100 * h["test_accuracy"], 4),
        f"{prefix}_entropy": round(h["dispatch_entropy"], 5),
    }


def row(key: dict) -> dict:
    """Loss, test accuracy in percent and dispatch entropy in nats, after PREFIX steps and at the end.

    `steps_at`, `test_curve` and `entropy_curve` hold the history; `dispatch` the final counts n_km of
    the test examples, a list for each cluster.
    """
    history = _train(key, key["steps"]).history
    return {
        **_measured("prefix", history[0]),
        **_measured("final", history[-1]),
        "steps_at": [h["step"] for h in history],
        "test_curve": [round(100 * h["test_accuracy"], 2) for h in history],
        "entropy_curve": [round(h["dispatch_entropy"], 4) for h in history],
        "dispatch": history[-1]["dispatch"].tolist(),
    }


def live(key: dict) -> dict:
    """The first PREFIX steps of a row, at its full size."""
    return _measured("prefix", _train(key, PREFIX).history[0])
