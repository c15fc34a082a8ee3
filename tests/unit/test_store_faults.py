"""What can go wrong with a store, done to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import distributed
import pytest

from moe_theory import experiments
from moe_theory.experiments import store
from moe_theory.experiments.__main__ import main
from moe_theory.experiments.registry import EXPERIMENTS, Experiment

TINY = """
import os, pathlib, signal, sys, time
from moe_theory.experiments import EXPERIMENTS, Experiment, run

def row(key):
    with open(pathlib.Path(key["folder"]) / "calls", "a") as calls:
        calls.write(f"{key['x']}\\n")
    time.sleep(0.25)
    return {"square": key["x"] ** 2}

grid = [{"x": x, "folder": sys.argv[1]} for x in range(8)]
EXPERIMENTS["tiny"] = Experiment("tiny", "squares", grid, grid[:1], row, row)
run("tiny", jobs=int(sys.argv[2]), folder=pathlib.Path(sys.argv[1]))
"""


def _row(key):
    return {"square": key["x"] ** 2}


def _grid(*xs):
    return [{"x": x, "n": 10} for x in xs]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of five rows; `tiny(field=value)` registers it with fields changed."""

    def register(**changes):
        monkeypatch.setitem(EXPERIMENTS, "tiny", replace(whole, **changes))

    whole = Experiment("tiny", "squares", _grid(0, 1, 2, 3, 4), _grid(0), _row, _row)
    register()
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    return register


@pytest.fixture
def path(tiny, tmp_path):
    """The complete store of that experiment."""
    experiments.run("tiny")
    return tmp_path / "tiny.csv"


def _heads(path):
    return [json.loads(line[2:]) for line in path.read_text().splitlines() if line.startswith("# ")]


def _squares():
    return experiments.load("tiny")["square"].tolist()


def test_a_killed_run_loses_and_doubles_nothing(tmp_path):
    def start(folder, jobs):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", TINY, str(folder), str(jobs)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def rows(folder):  # without seconds and checksum
        text = (folder / "tiny.csv").read_text().replace(str(folder), "")
        return [line if line.startswith("#") else line.rsplit(",", 2)[0] for line in text.splitlines()]

    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run = start(killed, jobs=2)
    stored = killed / "tiny.csv"
    while not stored.exists() or stored.read_bytes().count(b"\n") < 2 + 3:
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = stored.read_bytes()
    assert 3 <= before.count(b"\n") - 2 < 8
    assert [r.wait() for r in (start(killed, jobs=1), start(undisturbed, jobs=1))] == [0, 0]
    os.killpg(run.pid, signal.SIGKILL)  # its workers, which would wait for rows for a while
    configurations = [f.read_text().split('"configuration": "')[1][:16] for f in (stored, undisturbed / "tiny.csv")]
    ours, theirs = (rows(f) for f in (killed, undisturbed))
    assert ours[1:] == theirs[1:] and len(ours) == 2 + 8
    assert ours[0].replace(*configurations) == theirs[0]
    assert set(before.splitlines()) <= set(stored.read_bytes().splitlines())
    calls = Counter((killed / "calls").read_text().split())
    assert all(calls[line.split(b",")[0].decode()] == 1 for line in before.splitlines()[2:])


@pytest.mark.parametrize("cut", [1, 5, 25])
def test_an_unfinished_last_row_is_dropped_and_computed_again(tiny, path, caplog, cut):
    whole = path.read_text()
    path.write_text(whole[:-cut])
    with pytest.raises(ValueError, match="tiny.csv: expected a line break after the last row; the file is truncated"):
        experiments.load("tiny")
    computed = []
    tiny(row=lambda key: computed.append(key["x"]) or _row(key))
    experiments.run("tiny")
    assert computed == [4] and "the last row is unfinished" in caplog.text
    assert path.read_text().splitlines()[:-1] == whole.splitlines()[:-1] and _squares() == [0, 1, 4, 9, 16]


def test_a_first_write_may_be_cut_anywhere(tiny, path):
    whole = path.read_bytes()
    for end in range(0, whole.index(b"\n", whole.index(b"\nx,n") + 1) + 1, 40):
        path.write_bytes(whole[:end])
        experiments.run("tiny")
        assert _squares() == [0, 1, 4, 9, 16] and len(_heads(path)) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.replace(",16,", ",17,"), "row 5 does not match its checksum"),
        (lambda s: s.replace(",4,cpu", ",5,cpu")[:-3], "the file is truncated|row 3 does not match"),
        (lambda s: "\n".join(line[:-14] if line.startswith("2,") else line for line in s.split("\n")), "row 3"),
        (lambda s: s.replace("\n2,", "\n\n2,"), "row 3 does not match"),
        (lambda s: s + s.splitlines()[-1] + "\n", r"row 6 is there twice, \('4', '10'\)"),
        (lambda s: s.replace('"configuration": "', '"configuration": "0'), "made for configuration 0.*another order"),
        (lambda s: s.replace('"experiment": "tiny"', '"experiment": "huge"'), "got paper rows of 'huge'"),
        (lambda s: s.replace("{", "", 1), "expected provenance with an experiment"),
        (lambda s: s.split("\n", 1)[1], "expected a line with the provenance first"),
        (lambda s: s.replace(",device,seconds", ",seconds,device"), "expected columns that end with device, seconds"),
    ],
)
def test_damaged_stores_are_refused(tiny, path, damage, message):
    damaged = damage(path.read_text())
    path.write_text(damaged)
    for use in (experiments.load, experiments.run):
        with pytest.raises(ValueError, match=message):
            use("tiny")
        assert path.read_text() == damaged


def test_two_runs_at_once_are_refused(tiny, tmp_path):
    refused = []

    def row(key):
        with pytest.raises(ValueError, match=f"{tmp_path}/tiny.csv: another run is writing this store"):
            experiments.run("tiny")
        refused.append(key)
        return _row(key)

    tiny(row=row)
    experiments.run("tiny")
    assert len(refused) == 5 and _squares() == [0, 1, 4, 9, 16]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (_grid(0, 1), r"stored rows not in the grid: 3, the first \{'x': '2', 'n': '10'\}; x stored \['2', '3', '4'\]"),
        (
            [{**k, "n": 20} for k in _grid(0, 1, 2, 3, 4)],
            r"not in the grid: 5.*; n stored \['10'\], in the grid \['20'\]",
        ),
        ([{**k, "sigma_0": 1} for k in _grid(0, 1, 2, 3, 4)], r"grid columns added: \['sigma_0'\], removed: \[\]"),
        ([{"x": x} for x in range(9)], r"grid columns added: \[\], removed: \['n'\]"),
        (_grid(4, 3, 2, 1, 0), "the same rows in another order"),
    ],
)
def test_a_changed_grid_is_refused_by_its_difference(tiny, path, grid, message):
    stored = path.read_bytes()
    tiny(grid=grid, smoke=grid[:1])
    for use in (experiments.load, experiments.run):
        with pytest.raises(ValueError, match=f"tiny.csv: made for .*{message}"):
            use("tiny")
    with pytest.raises(ValueError, match=message):
        experiments.status()
    assert path.read_bytes() == stored


def test_a_grown_grid_is_computed_to_its_end(tiny, path):
    computed = []
    tiny(grid=_grid(-1, 0, 1, 2, 3, 4, 5), row=lambda key: computed.append(key["x"]) or _row(key))
    with pytest.raises(ValueError, match=r"tiny.csv: 2 of 7 rows missing, the first \{'x': -1"):
        experiments.load("tiny")
    experiments.run("tiny")
    assert computed == [-1, 5] and _squares() == [1, 0, 1, 4, 9, 16, 25]
    first, second = _heads(path)
    assert first["configuration"] != second["configuration"] == EXPERIMENTS["tiny"].configuration()


def test_every_code_version_is_recorded_above_its_rows(tiny, monkeypatch, tmp_path):
    for commit, grid in (("aaa", _grid(2, 3)), ("bbb", _grid(2, 3, 1)), ("ccc", _grid(0, 1, 2, 3, 4))):
        monkeypatch.setattr(store, "_commit", lambda commit=commit: commit)
        tiny(grid=grid)
        experiments.run("tiny")
    lines = (tmp_path / "tiny.csv").read_text().splitlines()
    short = [json.loads(x[2:])["commit"] if x.startswith("# ") else x.split(",")[0] for x in lines]
    assert short == ["aaa", "x", "2", "3", "bbb", "1", "ccc", "0", "4"] and _squares() == [0, 1, 4, 9, 16]


def test_failed_rows_are_reported_when_the_others_are_stored(tiny, monkeypatch, caplog, capsys):
    def row(key):
        return {"square": key["x"] ** 2, "inverse": 6 // (key["x"] - 2)}

    tiny(row=row)
    with pytest.raises(RuntimeError, match=r"tiny.csv: 1 rows failed.*\n.*\{'x': 2, 'n': 10\}: ZeroDivisionError"):
        experiments.run("tiny")
    assert "in row\n" in caplog.text and "Traceback" in caplog.text
    with pytest.raises(ValueError, match=r"1 of 5 rows missing, the first \{'x': 2"):
        experiments.load("tiny")
    assert main(["run", "tiny", "--jobs", "1"]) == 1 and "ZeroDivisionError" in capsys.readouterr().err


def test_bad_results_named_like_keys_are_refused(tiny, caplog):
    tiny(row=lambda key: {"x": 3, "square": key["x"] ** 2})
    with pytest.raises(RuntimeError, match=r"expected no result under the name of a key, got \['x'\]"):
        experiments.run("tiny")


def test_rows_of_another_shape_are_refused(tiny, path):
    tiny(grid=_grid(0, 1, 2, 3, 4, 5), row=lambda key: {"cube": 1})
    with pytest.raises(ValueError, match=r"expected the columns \['x', 'n', 'square', .*, got \['x', 'n', 'cube'"):
        experiments.run("tiny")
    tiny(grid=_grid(0, 1, 2, 3, 4, 5), row=lambda key: {"square": "a\nb"})
    with pytest.raises(ValueError, match="expected values without line breaks"):
        experiments.run("tiny")


def test_a_backend_that_is_missing_is_named(tiny, monkeypatch, tmp_path):
    for backend, package in (("dask", "distributed"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=f"backend: {backend} needs the package {package}; pip install"):
            experiments.run("tiny", backend=backend)
    with pytest.raises(ValueError, match="backend: expected one of"):
        experiments.run("tiny", backend="threads")
    assert list(tmp_path.iterdir()) == [], "a run that stored nothing leaves nothing"


def test_a_scheduler_out_of_reach_is_named(tiny, monkeypatch):
    monkeypatch.setenv("MOE_THEORY_SCHEDULER", "tcp://127.0.0.1:1")
    monkeypatch.setitem(distributed.config["distributed"]["comm"]["timeouts"], "connect", "0.2s")
    with pytest.raises(ValueError, match="MOE_THEORY_SCHEDULER: no Dask scheduler can be reached at 'tcp://127.0.0.1"):
        experiments.run("tiny", backend="dask")


def test_a_dask_cluster_survives_the_death_of_a_worker(tiny, tmp_path):
    """Row 1 kills the first worker that computes it."""
    mark, parent = tmp_path / "killed", os.getpid()

    def row(key):
        assert os.getpid() != parent
        if key["x"] == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"square": key["x"] ** 2}

    tiny(row=row)
    experiments.run("tiny", jobs=2, backend="dask")
    assert mark.exists() and _squares() == [0, 1, 4, 9, 16]


def test_a_row_that_keeps_killing_its_workers_has_failed(tiny, monkeypatch):
    monkeypatch.setitem(distributed.config["distributed"]["scheduler"], "allowed-failures", 0)
    tiny(grid=_grid(7), row=lambda key: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"1 rows failed.*\n.*\{'x': 7, 'n': 10\}: .*KilledWorker"):
        experiments.run("tiny", backend="dask")
