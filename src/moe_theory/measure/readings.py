"""Stored rows of models that share their seeds: differences of accuracy, seed by seed, in numbers and in words."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.special import rel_entr

from moe_theory.measure.pairs import seeds_needed
from moe_theory.measure.tables import interval_sign, mean_interval


def differences(
    rows: pd.DataFrame, pairs: Iterable[str], network: str
) -> dict[str, dict[str, Float[np.ndarray, " seeds"]]]:
    """By pair, such as "moe - single", and by task, by how much one model is ahead of another, seed by seed.

    Args:
        rows: with columns `network`, `task`, `seed`, `model` and `accuracy`.
        pairs: names of two models each; seeds and tasks that one of the two lacks are left out.
        network: whose rows are compared.

    Returns:
        Differences by pair and task; of a pair on both tasks also "rotated less plain".

    Raises:
        ValueError: for a network of which there are no rows.
    """
    if (rows["network"] != network).all():
        raise ValueError(f"network: expected one of {sorted(rows['network'].unique())}, got {network!r}")
    of_task = {task: part for task, part in rows[rows["network"] == network].groupby("task")}
    wide = {task: part.pivot(index="seed", columns="model", values="accuracy") for task, part in of_task.items()}
    found = {}
    for pair in pairs:
        one, other = pair.split(" - ")
        ahead = {task: (w[one] - w[other]).dropna() for task, w in wide.items() if {one, other} <= set(w)}
        if {"plain", "rotated"} <= set(ahead):
            ahead["rotated less plain"] = (ahead["rotated"] - ahead["plain"]).dropna()
        found[pair] = {task: values.to_numpy() for task, values in ahead.items()}
    return found


def interval_text(values, digits: int = 1) -> str:
    """Mean and 95 % interval as text; if the sign is open, how many seeds would settle it."""
    mean, low, high = mean_interval(values)
    text = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return text if interval_sign(values) else f"{text}; open, settled by {seeds_needed(values)} seeds"


def outcome(values, predicted: str) -> str:
    """What became of a prediction: "met", "contradicted", or "undecided" if the interval holds 0.

    Args:
        values: differences by seed.
        predicted: "+", "-", or "- or 0", which is met unless the interval lies above 0.
    """
    side = "0+-"[interval_sign(values)]
    if side in predicted:
        return "met"
    return "undecided" if side == "0" else "contradicted"


def nats(counts: ArrayLike) -> float:
    """What the columns of a table of counts tell of its lines: mutual information in nats."""
    p = np.asarray(counts) / np.sum(counts)
    return max(0.0, float(rel_entr(p, p.sum(1, keepdims=True) * p.sum(0)).sum()))


def nats_of_label(counts: ArrayLike) -> tuple[float, float]:
    """Nats of the label that the expert tells: alone, and in the mean over classes if the class is known.

    `counts` are by label, class and expert.
    """
    counts = np.asarray(counts)
    return nats(counts.sum(1)), float(np.mean([nats(of_class) for of_class in counts.swapaxes(0, 1)]))


def drawn_from(classes: list[int], sent_to: list[int], counts: Int[np.ndarray, "K M"]) -> bool:
    """Whether examples of these classes and experts can be among those of a table: no cell has more than it counts."""
    shown = np.zeros_like(counts)
    np.add.at(shown, (classes, sent_to), 1)
    return bool((shown <= counts).all())
