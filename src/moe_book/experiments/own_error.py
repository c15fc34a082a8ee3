"""The experts' error on their own cluster at T_2 by the race from the start, for d that no training reaches.

In the proof's order of stages (`own_stages`) an expert's error follows from where its race has come when it stops. A
start enters the race only by its inner products with signals and noise, normal with deviation sigma_0 = d^(-1/3), so a
large d costs no more than a small one.
"""

import torch
from jaxtyping import Float
from scipy.stats import norm
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.own_stages import FILTERS, M, drawn_products, own_error, stages, training_coefficients
from moe_book.experiments.stages import SEEDS
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import torch_stream
from moe_theory.tasks.patches import CENTER, SETTINGS, PatchTask
from moe_theory.theory.exploration import growth_rates, race_in_steps, race_of_layer

STARTS, DRAWS, RUN_DRAWS = 400, 20_000, 2**15
DIMENSIONS = tuple(2**p for p in range(10, 34, 2))
SMOKE = dict(d=64)
LAWS = SETTINGS["setting 3"]


def grid() -> list[dict]:
    """Ten times 400 starts for each d from 2^10 to 2^32."""
    return [dict(d=d, seed=seed) for d in DIMENSIONS for seed in SEEDS]


def least_margin(own: Tensor, other: Tensor, center: Tensor) -> Tensor:
    """The least `y f_m(x)` over examples of the expert's cluster without their noise patches.

    The arguments are `sum_j <w_j, u>^3` along the expert's signal, the other signal, and the centre.
    """
    (alpha, _), (_, beta), (_, gamma) = (LAWS[name] for name in ("alpha", "beta", "gamma"))
    return alpha**3 * own - gamma**3 * other.abs() - beta**3 * center.abs()


def noise_bound(margin: Tensor, sigma_0: float) -> Tensor:
    """`J P(N(0, sigma_0^2) > (margin / J)^(1/3))`, above the chance that noise patches turn such an example.

    Only for a positive margin: a sum of J cubes that exceeds it has a cube that exceeds a J-th of it.
    """
    z = (margin.clamp(min=0) / FILTERS) ** (1 / 3) / sigma_0
    return FILTERS * torch.from_numpy(norm.sf(z.numpy()))


def errors(own: Tensor, other: Tensor, center: Tensor, sigma_0: float, rng: torch.Generator) -> Float[Tensor, " S"]:
    """Share of `DRAWS` examples of its cluster on which the expert of each start errs."""

    def strengths(name):
        low, high = LAWS[name]
        return low + (high - low) * torch.rand(len(own), DRAWS, generator=rng, dtype=own.dtype)

    def sign():
        return 2.0 * torch.randint(2, (len(own), DRAWS), generator=rng) - 1

    noise = torch.zeros(len(own), DRAWS, dtype=own.dtype)
    for _ in range(FILTERS):
        noise += (sigma_0 * torch.randn(noise.shape, generator=rng, dtype=own.dtype)) ** 3
    rest = strengths("beta") ** 3 * center[:, None] + sign() * strengths("gamma") ** 3 * other[:, None] + noise
    return (strengths("alpha") ** 3 * own[:, None] + sign() * rest <= 0).double().mean(1)


def raced_error(run, *, centres: bool = True) -> float:
    """Percent that experts of a stored run of `own_stages` should err on their clusters, by the race from its start.

    The race has the growth rates of the run's sample and moves the filters along the label signals only. Without
    `centres` the examples have no centre patch.
    """
    sigma_0, eta, _, T_2 = stages(run.d)
    task = PatchTask(K=2, d=run.d, seed=run.seed, **LAWS)
    layer = PatchMoE(run.d, M, FILTERS, sigma_0=sigma_0, seed=run.start, dtype=torch.float64)
    raced, _ = race_of_layer(layer, task.v, growth_rates(training_coefficients(run)), eta, T_2)
    W = layer.W.data + (raced - layer.W.data @ task.v.T) @ task.v
    y, cluster, z = drawn_products(task, W.flatten(0, 1), RUN_DRAWS, 1000 * (2 * run.seed + 2) + 1)
    z[:, CENTER] *= centres
    f = (z**3).unflatten(2, (M, FILTERS)).sum((1, 3))
    return own_error(f, y, cluster, torch.tensor(run.profession))


def row(key: dict) -> dict:
    """Over 400 starts: mean and median of the expert's error on its cluster, the share of starts for which an example
    without noise patches is wrong (`exposed`), and the share for which the error is not shown to be below 1/d."""
    d = key["d"]
    sigma_0, eta, _, T_2 = stages(d)
    rng = torch_stream(key["seed"], "race", d)
    start = sigma_0 * torch.randn(STARTS, FILTERS * 2, generator=rng, dtype=torch.float64)
    end, _ = race_in_steps(start, start.new_ones(2 * FILTERS), eta, T_2)
    k = start.argmax(1) % 2
    cubes = (end.view(STARTS, FILTERS, 2) ** 3).sum(1)
    own, other = (cubes.gather(1, i[:, None]).squeeze(1) for i in (k, 1 - k))
    center = ((sigma_0 * torch.randn(STARTS, FILTERS, generator=rng, dtype=torch.float64)) ** 3).sum(1)
    margin = least_margin(own, other, center)
    error = errors(own, other, center, sigma_0, rng)
    values = {
        "mean": error.mean(),
        "median": error.median(),
        "exposed": (margin <= 0).double().mean(),
        "above": (noise_bound(margin, sigma_0) > 1 / d).double().mean(),
    }
    return rounded({name: float(value) for name, value in values.items()}, 6)
