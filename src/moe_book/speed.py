"""What `benchmarks/` measured, as the page on speed reads it."""

from pathlib import Path

from moe_book import manifest
from moe_theory.measure.scaling import log_slope

PACKAGE = Path(__file__).parent
#: The wheel carries the measurements with the package; in a checkout `benchmarks/` writes them next to itself.
RESULTS = next((p for p in [PACKAGE / "benchmarks"] if p.is_dir()), PACKAGE.parents[1] / "benchmarks" / "results")


def stored(name: str) -> dict:
    """The measurement of that name: `speed`, or `speed_` and what else was measured.

    Raises:
        ValueError: for a file that is missing or not, bit for bit, the one that was written.
    """
    return manifest.read_json(f"{name}.json", RESULTS)


def exponent(sizes, times) -> float:
    """Slope of a line through the logarithms: 1 is proportional growth, 0 none."""
    return float(log_slope(sizes, times))
