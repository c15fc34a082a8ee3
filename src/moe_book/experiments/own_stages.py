"""Theorem 4.2 in the order of stages of its proof (Chen et al. 2022): two clusters, two experts, stopped at T_2.

`T_1 = floor(sigma_0^0.5 / eta) < T_2 = floor(1 / (eta M^2))` needs `sigma_0^0.5 < M^-2`. The theorem allows no sigma_0
below d^(-1/3), so it needs d > M^12, which is 4,096 for two experts. Cluster, strengths and rates are as in `stages`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.stages import RATE, SEEDS
from moe_theory.measure.inner import professions
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import torch_stream
from moe_theory.tasks.patches import CENTER, NOISE, SETTINGS, Coefficients, PatchBatch, PatchTask
from moe_theory.theory.smoothing import route_probabilities
from moe_theory.training import train_patch_moe

M, FILTERS, BLOCK, DRAWS = 2, 8, 2048, 2**20
DIMENSIONS = (1024, 2048, 4096, 5793, 8192, 11585, 16384)
SMOKE = dict(d=64, n=64)


def grid() -> list[dict]:
    """Ten runs for each d, with as many examples; the last four d are above M^12."""
    return [dict(d=d, n=d, seed=seed) for d in DIMENSIONS for seed in SEEDS]


def stages(d: int) -> tuple[float, float, int, int]:
    """`sigma_0 = d^(-1/3)`, `eta = RATE sigma_0`, T_1 and T_2."""
    sigma_0 = d ** (-1 / 3)
    eta = RATE * sigma_0
    return sigma_0, eta, int(sigma_0**0.5 / eta), int(1 / (eta * M**2))


def joined(draw: Callable[[int, int], Coefficients], n: int, seed: int) -> dict[str, Tensor]:
    """The fields of n examples, drawn in blocks so that no more than one is held twice."""
    sizes = [min(BLOCK, n - start) for start in range(0, n, BLOCK)]
    blocks = [draw(size, 1000 * seed + b) for b, size in enumerate(sizes)]
    return {name: torch.cat([getattr(b, name) for b in blocks]) for name in blocks[0].__dict__ if name not in "vc"}


def sampled(task: PatchTask, n: int, seed: int) -> PatchBatch:
    """n examples of a run."""
    return PatchBatch(**joined(task.sample, n, seed), v=task.v.float(), c=task.c.float())


def training_coefficients(run) -> Coefficients:
    """Those of the training examples of a stored run."""
    task = PatchTask(K=2, d=run.d, seed=run.seed, **SETTINGS["setting 3"])
    return Coefficients(**joined(task.coefficients, run.n, 2 * run.seed + 1))


def first_start(d: int, sigma_0: float, v: Float[Tensor, "K d"], seed: int) -> int:
    """The first of seed, seed + 10, ... whose layer has an expert of each profession, as the theorem's event asks."""
    while len(professions(PatchMoE(d, M, FILTERS, sigma_0=sigma_0, seed=seed).W.data, v)[0].unique()) < len(v):
        seed += len(SEEDS)
    return seed


def products(batch: PatchBatch, A: Float[Tensor, "R d"]) -> Float[Tensor, "n P R"]:
    """Of every patch with the rows of A, the patches in the order of their roles."""
    blocks = zip(batch.x.split(BLOCK), batch.role.split(BLOCK), strict=True)
    return torch.cat([(x @ A.T).take_along_dim(role.argsort(1)[:, :, None], 1) for x, role in blocks])


def drawn_products(task: PatchTask, A: Float[Tensor, "R d"], n: int, seed: int):
    """The same of n examples that are never made: `A xi` is normal with covariance `sigma_p^2 / d A A^T`.

    Returns labels (n,), clusters (n,) and products (n, P, R) in double precision.
    """
    a, A = task.coefficients(n, seed), A.double()
    v, c = task.v @ A.T, task.c @ A.T
    strengths = (a.y * a.alpha, a.beta, a.epsilon * a.gamma)
    known = [s[:, None] * u for s, u in zip(strengths, (v[a.cluster], c[a.cluster], v[a.other]), strict=True)]
    root = torch.linalg.cholesky(task.sigma_p**2 / task.d * A @ A.T)
    g = torch.randn(n, task.P - NOISE, len(A), dtype=torch.float64, generator=torch_stream(seed, "race"))
    return a.y, a.cluster, torch.cat([torch.stack(known, 1), g @ root.T], 1)


def parts(z: Float[Tensor, "n P R"]) -> tuple[Float[Tensor, "n P M"], Float[Tensor, "n P M"]]:
    """What each patch adds to the experts' answers and to the router's logits."""
    answers = (z[..., :-M] ** 3).unflatten(2, (M, FILTERS)).sum(3)
    return answers, z[..., -M:]


def shares(z: Float[Tensor, "n P R"], y: Tensor, cluster: Tensor, k: Int[Tensor, " M"]) -> dict[str, float]:
    """Percent of examples: wrong, not sent to M_k; and mean error of the experts on the cluster of their profession."""
    f, h = (part.sum(1) for part in parts(z))
    m = h.argmax(1)
    wrong = y[:, None] * f <= 0
    values = {"error": wrong.gather(1, m[:, None]).double().mean(), "misrouted": (k[m] != cluster).double().mean()}
    return {name: 100 * float(value) for name, value in values.items()} | {"own": own_error(f, y, cluster, k)}


def own_error(f: Float[Tensor, "n M"], y: Tensor, cluster: Tensor, k: Int[Tensor, " M"]) -> float:
    """Percent of the examples of its profession's cluster that an expert answers wrongly, mean over experts."""
    own = [(y * f[:, m] <= 0)[cluster == k[m]].double().mean() for m in range(M)]
    return 100 * float(torch.stack(own).mean())


def row(key: dict) -> dict:
    """Theorem 4.2 and what Proposition E.9, Lemmas E.12, E.14, E.17 and E.18 bound, at T_2.

    Errors are in percent, `train_` on the training examples, `test_` on `DRAWS` examples drawn by their products.
    `answers_off` is the largest `|f_m(x) - f_m(x^)|`, `logits_off` the largest `|h_m(x) - h_m(x-)|` (E.8, E.9);
    `least_routing`, `least_gate` the least `M P(m_i = m)`, `M pi_m` of an expert on its cluster (E.10). `leader` is
    the least leading inner product over `eta T_2`, `others`, `centers`, `noise` the largest of all others (E.12), and
    `theta_v`, `theta_noise` the router's (E.14). `weights` and `path` hold, (M, K) each, `<theta_m, c_k>` and the
    integral over steps of `sum_j <w_mj, v_k>^3` (E.17).
    """
    d, seed = key["d"], key["seed"]
    sigma_0, eta, T_1, T_2 = stages(d)
    task = PatchTask(K=2, d=d, seed=seed, **SETTINGS["setting 3"])
    train, test = sampled(task, key["n"], 2 * seed + 1), task.sample(200, 1000 * (2 * seed + 2))
    start = first_start(d, sigma_0, train.v, seed)
    k, j = professions(PatchMoE(d, M, FILTERS, sigma_0=sigma_0, seed=start).W.data, train.v)

    def measure(now):
        return {"cubes": ((now["W"] @ train.v.T) ** 3).sum(1).double()}

    options = dict(sigma_0=sigma_0, eta=eta, eta_r=M**2 * eta, experts=M, filters=FILTERS, seeds=(start,))
    (run,) = train_patch_moe(train, test, steps=T_2, record_every=1, measure=measure, **options)
    W, theta = run.parameters["W"], run.parameters["theta"]
    A = torch.cat([W.flatten(0, 1), theta.T])
    z, (y, cluster, drawn) = products(train, A).double(), drawn_products(task, A, DRAWS, 1000 * (2 * seed + 2) + 1)
    answers, logits = parts(z)
    h, x = logits.sum(1), W @ train.v.T
    own = (torch.arange(M), j, k)
    leaders, others = x[own].clone(), x.index_put(tuple(t for t in own), torch.tensor(0.0))
    routing, gates = route_probabilities(h), h.softmax(1)
    least = {name: min(float(p[train.cluster == k[e], e].min()) for e in range(M)) for name, p in
             {"least_routing": routing, "least_gate": gates}.items()}  # fmt: skip
    at = torch.tensor([e["step"] for e in run.history], dtype=torch.float64)
    values = {
        **{f"test_{name}": value for name, value in shares(drawn, y, cluster, k).items()},
        **{f"train_{name}": value for name, value in shares(z, train.y.double(), train.cluster, k).items()},
        "answers_off": answers[:, [CENTER, *range(NOISE, z.shape[1])]].sum(1).abs().max(),
        "logits_off": (h - logits[:, CENTER]).abs().max(),
        **{name: M * value for name, value in least.items()},
        "leader": leaders.min() / (eta * T_2),
        "others": others.abs().max(),
        "centers": (W @ train.c.T).abs().max(),
        "noise": z[:, NOISE:, :-M].abs().max(),
        "theta_v": (train.v @ theta).abs().max(),
        "theta_noise": z[:, NOISE:, -M:].abs().max(),
        "weights": theta.T @ train.c.T,
        "path": torch.trapezoid(torch.stack([e["cubes"] for e in run.history]), at, dim=0),
        "loss": run.history[-1]["loss"],
    }
    return rounded(values, 6) | {"profession": k.tolist(), "start": start, "T_1": T_1, "T_2": T_2}
