"""`make gpu`, without a GPU: what is run where, and what the record says."""

import os

import pytest
import torch

from moe_book import gpu, pages
from moe_book.devices import VARIABLE
from moe_book.notebooks import notebooks, page


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Where each chapter was run; chapter 4 loses a box on the GPU."""
    found = []

    def fallen(path, seed):
        found.append((page(path), os.environ[VARIABLE]))
        return ["chen-fig-2: fell"] * (found[-1] == ("04_exploration", "cuda"))

    monkeypatch.setenv(VARIABLE, "cpu")
    monkeypatch.setenv("MOE_BOOK_STRICT", "1")
    monkeypatch.setattr(gpu, "fallen", fallen)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    return found


def test_every_chapter_runs_and_those_that_pick_a_device_on_both(run, tmp_path):
    assert gpu.main() == 1
    both = {"01_patch_task", "04_exploration"}
    expected = [(page(p), name) for p in notebooks() for name in ("cpu", "cuda") if name == "cpu" or page(p) in both]
    assert run == expected
    table = pages.gpu_table(tmp_path)
    assert "A card, torch " in table and f"All {len(notebooks())} chapters ran there." in table
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| 0")]
    assert {row[0]: row[3] for row in rows} == dict.fromkeys(both, "0") | {"04_exploration": "1"}


def test_without_a_gpu_nothing_is_recorded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2 and "expected a GPU" in capsys.readouterr().err
    assert pages.gpu_table(tmp_path) == "No times on a GPU are stored yet.\n"
