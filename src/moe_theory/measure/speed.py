"""What `benchmarks/` measured, as the page on speed reads it."""

import numpy as np

from moe_theory import manifest


def stored(name: str) -> dict:
    """The measurement of that name under `results`: `speed`, or `speed_` and what else was measured."""
    return manifest.read_json(f"{name}.json")


def exponent(sizes, times) -> float:
    """Slope of a line through the logarithms: 1 is proportional growth, 0 none."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
