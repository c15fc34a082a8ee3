"""The stages of the proof of Theorem 4.2 (Chen et al. 2022), measured: exploration, router learning, after.

The learning rates follow the theorem: eta = RATE sigma_0 and eta_r = M^2 eta. Strengths are those of
setting 3, where alpha and gamma have one law, as the theory takes them.
"""

import numpy as np
import pandas as pd
import torch

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.inner import expert_errors, professions
from moe_theory.measure.patch_layer import spread
from moe_theory.measure.scaling import Exponent, fit_exponent
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import stream
from moe_theory.tasks.patches import NOISE, SETTINGS, PatchBatch, PatchTask
from moe_theory.theory.exploration import growth_rates
from moe_theory.theory.smoothing import route_probabilities
from moe_theory.training import train_patch_moe

RATE, SEEDS, FILTERS, N_TEST = 0.02, range(10), 16, 4_000
SIGMAS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
DIMENSIONS = (16, 32, 64, 128, 256)
SMOKE = dict(n=200, steps=50)


def exploration() -> list[dict]:
    """Up to T1: sigma_0 at d = 50, and d with sigma_0 = d^(-1/3), the smallest the theorem allows; M = 8."""
    by_sigma = [dict(scan="sigma_0", sigma_0=s, d=50) for s in SIGMAS]
    by_d = [dict(scan="d", sigma_0=round(d ** (-1 / 3), 6), d=d) for d in (*DIMENSIONS, 512)]
    return [dict(**key, n=16_000, experts=8, seed=seed) for seed in SEEDS for key in (*by_sigma, *by_d)]


def outcome() -> list[dict]:
    """Theorem 4.2 up to eta T = 3, M = 16: d at n = 32 d, for two laws of sigma_0, and n at d = 64."""
    by_d = [dict(scan="d, sigma_0 = d^-1/3", sigma_0=round(d ** (-1 / 3), 6), d=d, n=32 * d) for d in DIMENSIONS]
    by_d += [dict(scan="d, sigma_0 = 0.1", sigma_0=0.1, d=d, n=32 * d) for d in DIMENSIONS]
    by_n = [dict(scan="n", sigma_0=0.1, d=64, n=n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384)]
    return [dict(**key, experts=16, seed=seed) for seed in SEEDS for key in (*by_d, *by_n)]


def _run(key: dict, steps: int) -> tuple[PatchBatch, PatchBatch, PatchMoE, PatchMoE, list[dict]]:
    """Training and test examples, the layer at the start and after `steps`, the history."""
    task = PatchTask(d=key["d"], seed=key["seed"], **SETTINGS["setting 3"])
    train, test = task.sample(key["n"], 2 * key["seed"] + 1), task.sample(N_TEST, 2 * key["seed"] + 2)
    M, sigma_0, eta = key["experts"], key["sigma_0"], RATE * key["sigma_0"]
    start, end = (PatchMoE(key["d"], M, FILTERS, sigma_0=sigma_0, seed=key["seed"]) for _ in range(2))
    rates = dict(sigma_0=sigma_0, eta=eta, eta_r=M * M * eta)
    (run,) = train_patch_moe(
        train, test, experts=M, filters=FILTERS, steps=steps, seeds=(key["seed"],), record_every=steps, **rates
    )
    end.W.data, end.router.theta.data = run.parameters["W"], run.parameters["theta"]
    return train, test, start, end, run.history


@torch.no_grad()
def exploration_row(key: dict) -> dict:
    """What Lemmas E.3 to E.8 and 5.2 bound, at T1 = floor(sigma_0^0.5 / eta); maxima over everything they range over.

    `predicted` is the share of experts whose leading signal at T1 is the one that leads at the start,
    `predicted_weighted` the one that leads after weighting by `growth_rates`.
    """
    eta = RATE * key["sigma_0"]
    steps = int(key["sigma_0"] ** 0.5 / eta)
    train, test, start, end, history = _run(key, steps)
    m = torch.arange(key["experts"])
    k, j = professions(start.W, train.v)
    products = (train.v @ end.W.mT).clone()
    winner = products[m, k, j].clone()
    products[m, k, j] = 0
    xi = torch.cat([train.patch(role) for role in range(NOISE, train.x.shape[1])])
    f = end.sigma.value(train.x @ end.W.flatten(0, 1).T).sum(1).view(len(train), len(m), -1).sum(2)
    h = end.router(train.x)
    p = route_probabilities(h.double())
    errors = expert_errors(end, test)
    own = errors[m, k]
    later, _ = professions(end.W, train.v)
    weighted, _ = professions(start.W, growth_rates(train)[:, None] * train.v)
    lead = (train.v @ start.W.mT).flatten(1).topk(2).values
    values = {
        "winner": winner.mean(),
        "slowest_winner": winner.min(),
        "winner_per_path": winner.min() / (eta * steps),
        "other_features": products.abs().max(),
        "centers": (train.c @ end.W.mT).abs().max(),
        "noise": (xi @ end.W.flatten(0, 1).T).abs().max(),
        "answers": f.abs().max(),
        "slope": (torch.sigmoid(-train.y[:, None] * h.softmax(1) * f) - 0.5).abs().max(),
        "theta": end.router.theta.norm(dim=0).max(),
        "logits": h.abs().max(),
        "routing": (p - 1 / len(m)).abs().max(),
        "own_error": own.mean(),
        "other_error": (errors.sum() - own.sum()) / (errors.numel() - len(m)),
        "least_other_error": errors.scatter(1, k[:, None], 1.0).min(),
        "predicted": (later == k).double().mean(),
        "predicted_weighted": (later == weighted).double().mean(),
        "least_margin": (1 - lead[:, 1] / lead[:, 0]).min(),
    }
    return rounded(values, 6) | {"steps": steps, "loss": round(history[-1]["loss"], 6)}


def outcome_row(key: dict) -> dict:
    """Theorem 4.2's conclusions at eta T = 3: errors in percent, shares, and how many M_k are empty.

    `to_own` is the share of test examples sent to an expert of M_k for their cluster k, with M_k from
    the start; `to_master` that with each expert's leading signal at the end; `own_error` the mean over
    experts of their error on the cluster whose signal leads in them at the end.
    """
    train, test, start, end, history = _run(key, round(3 / (RATE * key["sigma_0"])))
    with torch.no_grad():
        (F_train, _), (F_test, m) = end(train.x), end(test.x)
        k, _ = professions(start.W, train.v)
        later, _ = professions(end.W, train.v)
        own = expert_errors(end, test)[torch.arange(len(k)), later]
    share = {
        "train_error": (train.y * F_train <= 0),
        "test_error": (test.y * F_test <= 0),
        "to_own": k[m] == test.cluster,
        "to_master": later[m] == test.cluster,
        "own_error": own,
        "predicted": k == later,
    }
    percent = {name: round(100 * value.double().mean().item(), 4) for name, value in share.items()}
    counts = {"empty": len(train.v) - len(k.unique()), "used": len(m.unique())}
    return percent | counts | {"entropy": round(history[-1]["dispatch_entropy"], 5)}


#: The scans of `outcome`, each with the size that it varies, and the errors that Theorem 4.2 is about.
SCANS = {"d, sigma_0 = d^-1/3": "d", "d, sigma_0 = 0.1": "d", "n": "n"}
ERRORS = ("test_error", "train_error", "own_error", "past_own", "past_master")


def outcome_errors(rows: pd.DataFrame) -> pd.DataFrame:
    """The five errors of rows of `outcome` in percent, `ERRORS`, with scan, sizes and seed.

    `past_own` and `past_master` are the shares of test examples that are not sent to M_k, and not to a master of k.
    """
    rows = rows.assign(past_own=100 - rows.to_own, past_master=100 - rows.to_master)
    return rows[["scan", "d", "n", "seed", *ERRORS]]


def fitted_otherwise(fits: list[tuple]) -> dict[str, float]:
    """Exponents and intervals of `fit_exponent` against numpy's line and 2,000 other resamples.

    Args:
        fits: for each its sizes, values (S, R), power, whether it is paired, and the `Exponent` found.

    Returns:
        `least` and `most`: share of these resamples beyond an end of its interval, which is 2.5 % but for chance;
        `slope`: largest distance of an exponent from numpy's; `fits`: their number.
    """
    beyond, slopes = [], []
    for sizes, values, power, paired, fit in fits:
        powers = np.abs(np.asarray(values, float)) ** power
        S, R = powers.shape
        picks = stream(0, "resampling", 1).integers(R, size=(1 if paired else S, 2000 * R))
        drawn = np.take_along_axis(powers, np.broadcast_to(picks, (S, 2000 * R)), 1)
        means = np.column_stack([powers.mean(1), drawn.reshape(S, 2000, R).mean(2)])
        all_of_them, *again = np.polyfit(np.log(np.asarray(sizes, float)), np.log(means), 1)[0] / power
        slopes.append(abs(fit.slope - all_of_them))
        beyond += [np.mean(np.array(again) < fit.low), np.mean(np.array(again) > fit.high)]
    return {"least": min(beyond), "most": max(beyond), "slope": max(slopes), "fits": len(fits)}


def outcome_values(errors: pd.DataFrame, scan: str, name: str, *, without: int | None = None) -> pd.DataFrame:
    """An error by the size of its scan and the seed, with half a test example added, since some errors are 0.

    Args:
        errors: of `outcome_errors`; scan: a key of `SCANS`; name: one of `ERRORS`; without: a size left out.
    """
    values = errors[errors.scan == scan].pivot(index=SCANS[scan], columns="seed", values=name)
    return values.drop(index=[] if without is None else [without]) + 100 / (2 * N_TEST)


def outcome_exponent(errors: pd.DataFrame, scan: str, name: str, *, without: int | None = None) -> Exponent:
    """Fitted exponent in the size of its scan; arguments as in `outcome_values`.

    Over n a seed has the same initial weights; at two d it has nothing in common.
    """
    values = outcome_values(errors, scan, name, without=without)
    return fit_exponent(values.index, values.to_numpy(), paired=SCANS[scan] == "n")


def beyond() -> list[dict]:
    """Far past the early stopping that Theorem 4.2 asks for: setting 1, 20,000 steps of the main tables' run."""
    return [
        dict(setting="setting 1", balance=balance, n=16_000, experts=8, steps=20_000, seed=seed)
        for seed in range(3)
        for balance in (0.0, 0.01)
    ]


def beyond_row(key: dict) -> dict:
    """Curves over training: Delta_Theta, the largest share of examples one expert gets, the experts in
    use, test accuracy in percent, entropy."""
    task = PatchTask(seed=key["seed"], **SETTINGS[key["setting"]])
    train, test = task.sample(key["n"], 2 * key["seed"] + 1), task.sample(key["n"], 2 * key["seed"] + 2)
    k, _ = professions(PatchMoE(task.d, key["experts"], FILTERS, seed=key["seed"]).W.data, train.v)
    options = {name: key[name] for name in ("experts", "steps", "balance")}
    options |= dict(seeds=(key["seed"],), record_every=min(200, key["steps"]))
    (run,) = train_patch_moe(train, test, measure=lambda now: {"spread": spread(now, train, k)}, **options)
    curves = {
        "steps_at": [h["step"] for h in run.history],
        "loss": [round(h["loss"], 6) for h in run.history],
        "spread": [round(h["spread"], 4) for h in run.history],
        "largest_load": [round(float(h["dispatch"].sum(0).max() / h["dispatch"].sum()), 4) for h in run.history],
        "used": [int((h["dispatch"].sum(0) > 0).sum()) for h in run.history],
        "test": [round(100 * h["test_accuracy"], 3) for h in run.history],
        "entropy": [round(h["dispatch_entropy"], 4) for h in run.history],
    }
    first = {f"first_{name}": float(values[0]) for name, values in curves.items()}
    return first | curves


def beyond_live(key: dict) -> dict:
    """The first 200 steps of a row: the first entries of its curves."""
    return {name: value for name, value in beyond_row({**key, "steps": 200}).items() if name.startswith("first_")}
