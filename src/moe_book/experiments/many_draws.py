"""How much the largest of 200 draws varies (smooth2025, 5.3): the stability of 4,000 draws of one network."""

from moe_book.experiments.sparse_runs import TASKS, start
from moe_theory.theory.estimators import parts_of_eps

DRAWS = 4_000
SMOKE = dict(draws=5)


def grid() -> list[dict]:
    """The MLP before training, with sets that can change and without."""
    return [dict(k=k, draws=DRAWS) for k in (2, 5)]


def row(key: dict) -> dict:
    """`eps` of the draws, at the rate of the MLP's training; fewer draws are the first of these."""
    model, _ = start(dict(task="gaussians", rule="topk_softmax", heads="single", output="as is", k=key["k"], seed=0))
    task = TASKS["gaussians"]
    same, flipped = parts_of_eps(model, *task.data()[0], task.rate, key["draws"], seed=0)
    return {"eps": [float(f"{v:.6g}") for v in same + flipped]}


def live(key: dict) -> dict:
    """The first 200 draws, from which the paper takes one estimate."""
    return row({**key, "draws": 200})
