"""One thread, and the files for what the suite measures: `results/speed*.json`."""

import json
from pathlib import Path

import machine
import pytest
import torch

from moe_book import manifest

FILES = {  # each is written when a run with timing has filled all its sections
    "speed.json": {"sizes", "steps", "growth", "ceilings", "work", "needed"},
    "speed_cores.json": {"cores"},
    "speed_least_squares.json": {"least_squares"},
    "speed_stability.json": {"stability", "stability_sizes"},
    "speed_router_stream.json": {"router_stream", "router_stream_sizes"},
}
DIGITS = 4
RESULTS = Path(__file__).parent / "results"

torch.set_num_threads(1)


def rounded(value):
    """Nested numbers with four significant digits, so that two files differ where the machine does."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() else short
    return value


def write(name: str, found: dict) -> None:
    """The one place where a measurement is stored."""
    manifest.write(name, (json.dumps(rounded(found), indent=1, sort_keys=True) + "\n").encode(), RESULTS)


@pytest.fixture(scope="session")
def record(request):
    """Nested dicts that the tests fill; a file is written when a run with timing has filled its sections."""
    described = {"machine": machine.describe(), "code": machine.code()}
    sections = {}
    yield sections
    if request.session.testsfailed or not request.config.getoption("benchmark_enable"):
        return
    for name, wanted in FILES.items():
        if wanted <= sections.keys():
            write(name, {**described, **{section: sections[section] for section in wanted}})
