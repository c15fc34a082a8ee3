import json

import pandas as pd
import pytest

from moe_theory import experiments
from moe_theory.experiments import store
from moe_theory.experiments.__main__ import main
from moe_theory.experiments.registry import EXPERIMENTS, Experiment

CALLS = []


def _row(key):
    CALLS.append(key["x"])
    return {"square": key["x"] ** 2}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of five rows, its store in a folder of its own."""
    e = Experiment("tiny", "squares", [{"x": x, "tag": "a,b"} for x in range(5)], _row, _row)
    monkeypatch.setitem(EXPERIMENTS, "tiny", e)
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    CALLS.clear()
    return tmp_path


def test_run_load_and_provenance(tiny):
    experiments.run("tiny", folder=tiny)
    rows = experiments.load("tiny", folder=tiny)
    assert rows["square"].tolist() == [0, 1, 4, 9, 16] and rows["tag"].tolist() == ["a,b"] * 5
    assert {"device", "seconds"} <= set(rows)
    head = json.loads((tiny / "tiny.csv").read_text().split("\n")[0].removeprefix("# "))
    assert {"configuration", "moe_theory", "commit", "torch", "numpy"} <= set(head)


def test_a_stopped_run_goes_on_where_it_was(tiny, monkeypatch):
    def stop_at_three(key):
        if key["x"] == 3:
            raise KeyboardInterrupt
        return _row(key)

    whole = EXPERIMENTS["tiny"]
    monkeypatch.setitem(EXPERIMENTS, "tiny", Experiment("tiny", "squares", whole.grid, stop_at_three, _row))
    with pytest.raises(KeyboardInterrupt):
        experiments.run("tiny", folder=tiny)
    with pytest.raises(ValueError, match=r"tiny.csv: 2 of 5 rows missing, the first \{'x': 3"):
        experiments.load("tiny", folder=tiny)
    monkeypatch.setitem(EXPERIMENTS, "tiny", whole)
    experiments.run("tiny", folder=tiny)
    assert CALLS == [0, 1, 2, 3, 4]
    assert experiments.load("tiny", folder=tiny)["square"].tolist() == [0, 1, 4, 9, 16]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.replace(",16,", ",17,"), "row 5 does not match its checksum"),
        (lambda s: s[:-20], "truncated"),
        (lambda s: s.replace('"configuration": "', '"configuration": "0'), "made for configuration"),
        (lambda s: "\n".join(line[:-14] if line.startswith("2,") else line for line in s.split("\n")), "row 3"),
    ],
)
def test_bad_stores_are_refused(tiny, damage, message):
    experiments.run("tiny", folder=tiny)
    path = tiny / "tiny.csv"
    path.write_text(damage(path.read_text()))
    for use in (experiments.load, experiments.run):
        with pytest.raises(ValueError, match=message):
            use("tiny", folder=tiny)


def test_bad_names_and_selections(tiny):
    with pytest.raises(ValueError, match="experiment: expected one of"):
        experiments.load("nothing")
    with pytest.raises(ValueError, match="no stored rows"):
        experiments.load("tiny", folder=tiny)
    with pytest.raises(ValueError, match="which: expected to pick one row"):
        experiments.recompute("tiny", tag="a,b")


def test_command_line(tiny, capsys):
    assert main(["list"]) == 0 and "tiny: squares" in capsys.readouterr().out
    assert main(["status"]) == 0 and "tiny" in capsys.readouterr().out
    assert main(["run", "nothing"]) == 2
    assert "experiment: expected one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["single_expert", "algorithm1_variants"])
def test_stored_rows_are_whole(name):
    rows = experiments.load(name)
    assert len(rows) == len(EXPERIMENTS[name].grid) and not rows.isna().any().any()


@pytest.mark.parametrize(
    ("name", "which", "columns"),
    [
        ("single_expert", dict(setting="setting 2", activation="linear", input_scale=10, seed=1), ["prefix_test"]),
        (
            "algorithm1_variants",
            dict(variant="as written", activation="linear", seed=2),
            ["prefix_test", "prefix_loss"],
        ),
    ],
)
def test_stored_rows_tell_the_truth(name, which, columns):
    """The first steps of a stored row, computed again at full size."""
    again = experiments.recompute(name, **which)
    assert isinstance(again, pd.DataFrame) and list(again.index) == ["stored", "recomputed"]
    for column in columns:
        stored, now = again[column]
        assert now == pytest.approx(stored, rel=0.02)
