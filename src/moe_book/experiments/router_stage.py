"""The router stage of Theorem 4.2 (Chen et al. 2022), watched: Figures 5 and 6, and the gap of Lemma E.17.

Rows hold curves over training, so a shorter run of the same key gives the start of a row: `live`.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.stages import FILTERS, N_TEST, SEEDS, SMOKE  # noqa: F401
from moe_book.experiments.store import recompute
from moe_theory.measure.inner import feature_ratios, inner_products, professions
from moe_theory.measure.patch_layer import off_the_set
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import SETTINGS, PatchTask
from moe_theory.theory.feedback import center_moments
from moe_theory.training import train_patch_moe

EVERY = 80  # steps between two records of a watched run
DIMENSION = 50


def watched() -> list[dict]:
    """Setting 1, Algorithm 1 as written with the rates of Appendix A.2, cubic and linear experts."""
    return [
        dict(setting="setting 1", activation=activation, n=16_000, experts=8, steps=1200, seed=seed)
        for seed in SEEDS
        for activation in ("cubic", "linear")
    ]


def gaps() -> list[dict]:
    """eta_r = M^2 eta in setting 3: M = 4, 8, 16 for four clusters, and M = 4 for two up to `T_2 = 1 / (eta M^2)`."""
    usual = [dict(K=4, experts=M, sigma_0=0.01, eta=1e-3, steps=1000, every=20, until=300) for M in (4, 8, 16)]
    up_to_T_2 = dict(K=2, experts=4, sigma_0=1e-3, eta=4e-5, steps=1562, every=71, until=1562)
    return [dict(**key, n=4_000, seed=seed) for seed in SEEDS for key in (*usual, up_to_T_2)]


def gaps_at_T_2() -> list[dict]:
    """The same up to `T_2` for four clusters and eight experts, where the gap is below a hundred millionth."""
    key = dict(K=4, experts=8, sigma_0=3e-4, eta=5e-6, steps=3125, every=125, until=3125)
    return [dict(**key, n=4_000, seed=seed) for seed in range(2, 7)]


def watched_row(key: dict) -> dict:
    """Curves every 80 steps: inner products, their ratios, and `off_the_set`; at the last step also the load.

    `load` is each expert's share of the test examples.
    """
    task, seed = PatchTask(seed=key["seed"], **SETTINGS[key["setting"]]), key["seed"]
    train, test = task.sample(key["n"], 2 * seed + 1), task.sample(key["n"], 2 * seed + 2)

    def measure(parameters):
        products = {name: value.clone() for name, value in inner_products(parameters, train).items()}
        return products | feature_ratios(products) | off_the_set(parameters, task, test, key["activation"])

    options = {name: key[name] for name in ("experts", "activation", "steps")}
    options |= dict(filters=FILTERS, seeds=(seed,), record_every=min(EVERY, key["steps"]))
    (run,) = train_patch_moe(train, test, measure=measure, **options)
    load = run.history[-1]["dispatch"].sum(0).double() / len(test)
    names = measure(run.parameters)
    curves = {name: rounded(torch.stack([h[name] for h in run.history]), 5) for name in names}
    return {"load": rounded(load, 5), "steps_at": [h["step"] for h in run.history]} | curves


def watched_live(key: dict) -> dict:
    """The first 80 steps of a row: the first entries of its curves."""
    again = watched_row({**key, "steps": EVERY})
    del again["load"]  # which is of the last step
    return again


def gap(weights: Float[Tensor, "M K"], k: Tensor) -> float:
    """Of (M,) professions k: mean over clusters of the mean weight of M_k on c_k less that of all others.

    nan where all experts have one profession.
    """
    of_cluster = [(k == q, weights[:, q]) for q in k.unique()]
    return sum(float(w[own].mean() - w[~own].mean()) for own, w in of_cluster) / len(of_cluster)


def gap_row(key: dict) -> dict:
    """What Lemma E.17 is about, as curves, and what its rate is integrated from.

    `s` is the mean of the leading inner products, `gap` the gap of the router's weights on centers, `test` the
    accuracy in percent. `weights` and `path` hold, (M, K) each, `<theta_m, c_k>` and the integral over steps of
    `sum_j <w_mj, v_k>^3`, at the fifth record and at step `until`.
    """
    seed, M = key["seed"], key["experts"]
    task = PatchTask(K=key["K"], seed=seed, **SETTINGS["setting 3"])
    train, test = task.sample(key["n"], 2 * seed + 1), task.sample(N_TEST, 2 * seed + 2)
    k, j = professions(PatchMoE(DIMENSION, M, FILTERS, sigma_0=key["sigma_0"], seed=seed).W.data, train.v)

    def measure(parameters):
        x, weights = parameters["W"] @ train.v.T, parameters["theta"].T @ train.c.T
        leading = x[torch.arange(M), j, k]
        return {"s": leading.mean(), "weights": weights, "gap": gap(weights, k), "cubes": (x**3).sum(1).double()}

    options = {name: key[name] for name in ("experts", "steps", "eta", "sigma_0")}
    options |= dict(eta_r=M**2 * key["eta"], filters=FILTERS, seeds=(seed,), record_every=key["every"])
    (run,) = train_patch_moe(train, test, measure=measure, **options)
    history = run.history
    steps = torch.tensor([h["step"] for h in history], dtype=torch.float64)
    cubes = torch.stack([h["cubes"] for h in history])
    at = [int((steps <= mark).sum()) for mark in (5 * key["every"], key["until"]) if mark in steps]
    curves = {name: torch.tensor([float(h[name]) for h in history]) for name in ("s", "gap", "loss")}
    return {
        "profession": k.tolist(),
        "steps_at": [h["step"] for h in history],
        **rounded(curves, 6),
        "test": [round(100 * h["test_accuracy"], 3) for h in history],
        "weights": [rounded(history[i - 1]["weights"], 6) for i in at],
        "path": [rounded(torch.trapezoid(cubes[:i], steps[:i], dim=0), 6) for i in at],
    }


def kept(rows) -> dict[str, float]:
    """What rows of `router_gap` and `router_gap_at_T_2` have in common, whatever they measured.

    How many professions are those of the start, and how many readings lie `every` steps apart; how far `gap` at `until`
    is from that of `weights`, and a test accuracy from a whole number of `N_TEST` examples. `different` is how many
    runs differ in each measured column.
    """

    def told(run):
        task = PatchTask(K=run.K, seed=run.seed, **SETTINGS["setting 3"])
        start = PatchMoE(DIMENSION, run.experts, FILTERS, sigma_0=run.sigma_0, seed=run.seed)
        return professions(start.W.data, task.v.float())[0].numpy()

    def gap_off(run):
        now = gap(torch.tensor(run.weights[-1], dtype=torch.float64), torch.tensor(run.profession))
        return _off(np.array([run.gap[run.until // run.every - 1]]), np.array([now]))

    examples = np.concatenate(rows.test.tolist()) * N_TEST / 100
    return {
        "professions": sum((told(run) == run.profession).sum() for run in rows.itertuples()),
        "steps": sum((np.diff([0, *run.steps_at]) == run.every).sum() for run in rows.itertuples()),
        "gaps": max(map(gap_off, rows.itertuples())),
        "examples": np.abs(examples - examples.round()).max(),
        "different": rows[["s", "gap", "test", "weights", "path"]].astype(str).nunique().min(),
        "runs": len(rows),
    }


def rate_integral(path: Float[Tensor, "M K"], moments: Float[Tensor, "K K"], eta: float) -> Float[Tensor, "M K"]:
    """The router's weights on centers by Lemma E.17: the integral over steps of their rate, with `eta_r = M^2 eta`.

    `eta_r / (2 M^2) sum_t (g_m - mean_m' g_m')`, where g has the filters as they were and the sample as it is.

    Args:
        path: the sum over steps of `sum_j <w_mj, v_k>^3`; moments: `center_moments` of the sample; eta: of the experts.
    """
    g = path @ moments.T
    return eta / 2 * (g - g.mean(0))


def predicted_weights(run) -> Float[Tensor, "M K"]:
    """What `weights` of a stored run should be at step `until`, by `rate_integral` for the run's own sample.

    Args:
        run: a row of the experiments `router_gap` and `router_gap_at_T_2`, with its columns as attributes.
    """
    train = PatchTask(K=run.K, seed=run.seed, **SETTINGS["setting 3"]).coefficients(run.n, 2 * run.seed + 1)
    return rate_integral(torch.tensor(run.path[-1], dtype=torch.float64), center_moments(train, run.K), run.eta)


def spread_on_centers(weights: Float[Tensor, "M K"], k: Tensor) -> float:
    """Of (M,) professions k: the largest difference of the weights on c_q of two experts of one M_q."""
    return max(float(w.max() - w.min()) for w in (weights[k == q, q] for q in k.unique()))


def gap_live(key: dict) -> dict:
    """The first five records of a row: the first entries of its curves."""
    return gap_row({**key, "steps": 5 * key["every"]})


def off_start(name: str, **which) -> float:
    """Largest difference of a row's recomputed start from the stored curves, over the largest entry of its column.

    nan in the same place of both is no difference; elsewhere it makes the result nan, which is below no limit.
    """
    stored, again = recompute(name, **which).to_dict("index").values()
    return float(np.max([_off(np.array(stored[column][: len(now)]), np.array(now)) for column, now in again.items()]))


def _off(then: np.ndarray, now: np.ndarray) -> float:
    missing = np.isnan(then) & np.isnan(now)
    largest = abs(now[~missing]).max(initial=0.0)
    return np.where(missing, 0.0, abs(then - now)).max() / (largest or 1.0)
