"""What `benchmarks/` measured, as the page on speed reads it."""

import json
from importlib.resources import files

import numpy as np


def stored(name: str) -> dict:
    """The measurement of that name under `results`: `speed`, or `speed_` and what else was measured."""
    return json.loads(files("moe_theory").joinpath("results", f"{name}.json").read_text(encoding="utf-8"))


def exponent(sizes, times) -> float:
    """Slope of a line through the logarithms: 1 is proportional growth, 0 none."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
