"""Logistic regression on the data of the three sparse networks: what a network should be held against."""

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.sparse_runs import DIGITS, TASKS, VOCABULARY

ITERATIONS = 100  # of L-BFGS
SMOKE = dict(task="gaussians", examples=200)


def grid() -> list[dict]:
    """The tasks of `sparse`, with at most so many training examples, which is all."""
    return [dict(task=name, examples=60_000) for name in TASKS]


def features(x: Tensor) -> Tensor:
    """Inputs as vectors (n, d); texts as counts of their words."""
    if x.is_floating_point():
        return x.flatten(1)
    return torch.zeros(len(x), VOCABULARY).scatter_add_(1, x, torch.ones(x.shape))


def row(key: dict) -> dict:
    """Test accuracy in percent; `iterations` of at most ITERATIONS. To the sum of losses |W|^2 / 2 is added."""
    train, test = TASKS[key["task"]].data()
    x, y = (part[: key["examples"]] for part in train)
    model = LogisticRegression(max_iter=ITERATIONS).fit(features(x).numpy(), y.numpy())
    accuracy = 100 * model.score(features(test.x).numpy(), test.y.numpy())
    return {"test_accuracy": rounded(accuracy, DIGITS), "iterations": int(model.n_iter_.max())}
