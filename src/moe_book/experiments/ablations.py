"""Algorithm 1 as written on 2,000 examples, watched: one start for all, balance, plain descent, many experts.

Beside Tables 9 to 11 of Chen et al. (2022). Curves are columns of lists, an entry for each recorded step; `live`
and `leads_live` compute the first entry of each, and `recompute` sets it beside the stored list.
"""

import torch

from moe_book.experiments.catalogue import rounded
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import SETTINGS, PatchBatch, PatchTask
from moe_theory.theory.exploration import derived_ratio
from moe_theory.theory.smoothing import route_probabilities
from moe_theory.training import train_patch_moe

N, LOOKED_AT, SEEDS, FILTERS = 2_000, 100, range(10), 16
SIZES, FEW, DRAWS = (1_000, 2_000, 4_000, 8_000, 16_000), 50, 200
DIGITS = 5  # of what is stored
ALIKE = dict(experts=8, filters=FILTERS, activation="cubic")  # the layer of `apart`
SMOKE = dict(n=200, steps=20, every=10)


def _key(run: str, seed: int, steps: int, every: int, **options) -> dict:
    defaults = dict(setting="setting 1", activation="cubic", experts=8, balance=0.0)
    defaults |= dict(same_start=False, normalized=True, eta=1e-3)
    return dict(run=run, seed=seed) | defaults | options | dict(n=N, steps=steps, every=every)


def watched() -> list[dict]:
    """One start for all experts; 32 experts; linear experts with and without balance."""
    rows = []
    for seed in SEEDS:
        rows += [_key("same start", seed, 5_000, 50, same_start=True), _key("32 experts", seed, 1_200, 25, experts=32)]
        rows += [_key("linear", seed, 2_000, 100, activation="linear", balance=balance) for balance in (0.0, 1.0)]
    return rows


def leads() -> list[dict]:
    """Eight cubic experts from random weights: normalized descent, plain descent that leaps, and that waits."""
    rows = []
    for seed in SEEDS:
        rows.append(_key("normalized", seed, 2_000, 25))
        rows.append(_key("plain", seed, 1_500, 25, normalized=False, eta=10.0))
        rows.append(_key("waiting", seed, 2_000, 100, normalized=False, eta=0.6))
    return rows


def apart() -> list[dict]:
    """Experts that start alike after 1 and 20 steps: ten seeds at each of five sizes, 200 at the smallest."""
    return [dict(n=n, seed=seed) for n in SIZES for seed in (range(DRAWS) if n == SIZES[0] else SEEDS)]


def _watch(parameters: dict, x: torch.Tensor, signals: torch.Tensor) -> dict:
    """What is followed: x (n, d) are summed patches of training examples, signals (K, d) the label signals.

    `h`: largest logit in size; `off`: largest distance of an exact routing probability from 1/M; `in_use`:
    1 / (sum of squared mean probabilities); `sum`: largest entry of sum_m theta_m over that of theta; `apart`: mean
    distance of the experts' weights from their mean, over its norm; `leads` (M): each expert's largest <w, v_k>.
    """
    theta, W = (parameters[name].cpu().double() for name in ("theta", "W"))
    h, middle = x @ theta, W.mean(0)
    p = route_probabilities(h)
    found = {
        "h": h.abs().max(),
        "off": (p - 1 / p.shape[1]).abs().max(),
        "in_use": 1 / p.mean(0).square().sum(),
        "sum": theta.sum(1).abs().max() / theta.abs().max(),
        "apart": (W - middle).flatten(1).norm(dim=1).mean() / middle.norm(),
        "leads": (W @ signals.T).amax((1, 2)),
    }
    return rounded(found, DIGITS)


def _history(key: dict) -> list[dict]:
    task = PatchTask(seed=key["seed"], **SETTINGS[key["setting"]])
    train, test = task.sample(key["n"], 2 * key["seed"] + 1), task.sample(key["n"], 2 * key["seed"] + 2)
    x, signals = train.x[:LOOKED_AT].double().sum(1), task.v.double()
    options = {k: key[k] for k in ("steps", "activation", "experts", "balance", "same_start", "normalized", "eta")}
    options |= dict(seeds=(key["seed"],), filters=FILTERS, record_every=key["every"])
    (run,) = train_patch_moe(train, test, measure=lambda parameters: _watch(parameters, x, signals), **options)
    return run.history


def _curves(history: list[dict]) -> dict:
    return {
        "steps_at": [e["step"] for e in history],
        "loss": [round(e["loss"], 6) for e in history],
        "test": [round(100 * e["test_accuracy"], 3) for e in history],
        "entropy": [round(e["dispatch_entropy"], 5) for e in history],
        **{name: [e[name] for e in history] for name in ("h", "off", "in_use", "sum", "apart")},
    }


def row(key: dict) -> dict:
    """Curves: loss, test accuracy in percent, dispatch entropy of the test examples in nats, and `_watch`'s."""
    return _curves(_history(key))


def leads_row(key: dict) -> dict:
    """The same, and `leads`, a list of the experts' leads for each recorded step."""
    history = _history(key)
    return _curves(history) | {"leads": [e["leads"] for e in history]}


def live(key: dict) -> dict:
    """The first entry of each curve of a row."""
    return row({**key, "steps": key["every"]})


def leads_live(key: dict) -> dict:
    """The first entry of each curve of a row with leads."""
    return leads_row({**key, "steps": key["every"]})


def _plain_step(train: PatchBatch, few: PatchBatch, start: torch.Tensor, seed: int) -> float:
    """The same ratio as one step of plain descent from start (1, J, d) has it, a root mean square over experts."""
    (end,) = train_patch_moe(train, few, steps=1, seeds=(seed,), normalized=False, eta=1.0, same_start=True, **ALIKE)
    G = (start - end.parameters["W"]).flatten(1)
    along = G.mean(0)
    across = G - (G @ along / along.square().sum())[:, None] * along
    return float(across.square().sum(1).mean().sqrt() / along.norm())


def apart_row(key: dict) -> dict:
    """Eight cubic experts from one start, setting 1: r as derived and as a plain step has it, and distances.

    `after_1` and `after_20` are root mean square distances of the experts from their mean, in units of eta, after
    1 and 20 steps of normalized descent.
    """
    seed, eta = key["seed"], 1e-3
    task = PatchTask(seed=seed)
    train, few = task.sample(key["n"], 2 * seed + 1), task.sample(FEW, 2 * seed + 2)
    start = PatchMoE(task.d, ALIKE["experts"], FILTERS, seed=seed).W.data[:1]

    def spread(parameters: dict) -> dict:
        W = parameters["W"]
        return {"spread": float((W - W.mean(0)).square().sum((1, 2)).mean().sqrt())}

    how = dict(steps=20, seeds=(seed,), eta=eta, record_every=1, same_start=True, measure=spread, **ALIKE)
    (run,) = train_patch_moe(train, few, **how)
    found = {
        "derived": derived_ratio(train, start[0].to(train.x), ALIKE["experts"]),
        "plain_step": _plain_step(train, few, start.to(train.x), seed),
        "after_1": run.history[0]["spread"] / eta,
        "after_20": run.history[19]["spread"] / eta,
    }
    return rounded(found, DIGITS)
