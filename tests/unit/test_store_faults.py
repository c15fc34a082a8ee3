"""What can go wrong with a store, done to it."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import distributed
import pytest

from moe_book import experiments, manifest, provenance
from moe_book.experiments import backends, store
from moe_book.experiments.__main__ import main
from moe_book.experiments.catalogue import EXPERIMENTS, Experiment

TINY = """
import os, pathlib, sys, time
from moe_book.experiments import EXPERIMENTS, Experiment, run, store

def row(key):
    with open(pathlib.Path(key["folder"]) / "calls", "a") as calls:
        calls.write(f"{key['x']}\\n")
    time.sleep(0.1)
    return {"square": key["x"] ** 2, "word": "NA", "curve": [key["x"], 0.1]}

grid = [{"x": x, "folder": sys.argv[1]} for x in range(12)]
EXPERIMENTS["tiny"] = Experiment("tiny", "squares", grid, grid[:1], row, row)
store.RESULTS = pathlib.Path(sys.argv[1])
run("tiny", jobs=int(sys.argv[2]))
"""


def _row(key):
    return {"square": key["x"] ** 2, "half": key["x"] / 2, "third": key["x"] / 3, "curve": [key["x"], 0.5]}


def _none_is_computed(key):
    raise AssertionError(key)


def _grid(*xs):
    return [{"x": x, "n": 10} for x in xs]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of five rows; `tiny(field=value)` registers it with fields changed. Rows are computed here."""

    def register(**changes):
        monkeypatch.setitem(EXPERIMENTS, "tiny", replace(whole, **changes))

    whole = Experiment("tiny", "squares", _grid(0, 1, 2, 3, 4), _grid(0), _row, _row)
    register()
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    of = backends._attempt
    monkeypatch.setitem(store.BACKENDS, "here", lambda row, todo, jobs, device: (of(row, k, device) for k in todo))
    return register


@pytest.fixture
def path(tiny, tmp_path):
    """The complete store of that experiment."""
    experiments.run("tiny", backend="here")
    return tmp_path / "tiny.csv"


def _stop_at(x):
    def row(key):
        if key["x"] == x:
            raise KeyboardInterrupt
        return _row(key)

    return row


@pytest.fixture
def under_way(tiny, tmp_path):
    """The database of that experiment with three of its rows."""
    tiny(row=_stop_at(3))
    with pytest.raises(KeyboardInterrupt):
        experiments.run("tiny", backend="here")
    tiny()
    return tmp_path / "tiny.sqlite"


def _squares():
    return experiments.load("tiny")["square"].tolist()


def _refused(path, *uses):
    for use in uses:
        with pytest.raises(ValueError, match=path.name):
            use()


def _load():
    return experiments.load("tiny")


def _run():
    return experiments.run("tiny", backend="here")


# A complete store.


def test_one_flipped_byte_is_refused(tiny, path, tmp_path):
    random.seed(0)
    manifest.write("speed.json", b'{"ms": [1, 2]}', tmp_path)
    for file, read in (
        (path, _load),
        (tmp_path / "speed.json", lambda: manifest.read_json("speed.json", tmp_path)),
        (tmp_path / "manifest.json", _load),
    ):
        whole = file.read_bytes()
        for _ in range(70):
            damaged = bytearray(whole)
            damaged[random.randrange(len(whole))] ^= random.randrange(1, 256)
            file.write_bytes(damaged)
            _refused(file, read)
        for length in range(0, len(whole), 10):
            file.write_bytes(whole[:length])
            _refused(file, read)
        file.write_bytes(whole)
        read()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("tiny.csv", ",16,", ",17,"),
        ("tiny.csv", "half,third", "third,half"),
        ("tiny.csv", "\n", "\r\n"),
        ("manifest.json", '"commit": "', '"commit": "0'),
        ("manifest.json", '"number"', '"word"'),
        ("manifest.json", '"tiny.csv"', '"size.csv"'),
        ("manifest.json", ": ", ":"),
    ],
)
def test_edits_are_refused(tiny, path, tmp_path, file, old, new):
    file = tmp_path / file
    edited = file.read_bytes().replace(old.encode(), new.encode())
    assert edited != file.read_bytes()
    file.write_bytes(edited)
    _refused(file, _load, _run)
    assert file.read_bytes() == edited
    assert experiments.status().set_index("experiment").loc["tiny", "stored"] == "refused"


def test_a_file_of_another_experiment_is_refused(tiny, path, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "huge", replace(EXPERIMENTS["tiny"], name="huge"))
    experiments.run("huge", backend="here")
    path.write_bytes((tmp_path / "huge.csv").read_bytes())
    _load()  # the same rows, bit for bit
    entry = manifest.entries(tmp_path)["huge.csv"]
    manifest.write("tiny.csv", path.read_bytes(), tmp_path, columns=entry["columns"], provenance=entry["provenance"])
    with pytest.raises(ValueError, match="tiny.csv: expected paper rows of 'tiny', got paper rows of 'huge'"):
        _load()


def test_a_file_that_is_not_in_the_manifest_is_refused(tiny, path, tmp_path):
    (tmp_path / "manifest.json").unlink()
    _refused(path, _load, _run)
    path.unlink()
    with pytest.raises(ValueError, match="nothing.json: expected a file"):
        manifest.read("nothing.json", tmp_path)


def test_status_survives_a_damaged_file_and_says_which(tiny, path, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EXPERIMENTS, "huge", replace(EXPERIMENTS["tiny"], name="huge", about="as large"))
    monkeypatch.setattr(store, "EXPERIMENTS", {name: EXPERIMENTS[name] for name in ("huge", "tiny")})
    experiments.run("huge", backend="here")
    assert main(["status"]) == 0 and "as large" in capsys.readouterr().out
    path.write_text(path.read_text().replace(",16,", ",17,"))
    assert main(["status"]) == 1
    one, other = capsys.readouterr().out.splitlines()[1:]
    assert "as large" in one and "refused" in other and f"{path}: expected the file that was written" in other


def test_words_stay_words_and_numbers_numbers(tiny, tmp_path):
    words = ["None", "NA", "null", "nan", "", "1", "True", 'a, "b"', "two\nlines", "[1]"]
    values = [0.1, 1e-300, 3, -0.0, 1.7976931348623157e308, 2.5, 1 / 3, float("inf"), 5.0, 1e22]
    tiny(
        grid=[{"x": x, "word": word} for x, word in enumerate(words)],
        smoke=[{"x": 0, "word": ""}],
        row=lambda key: {"again": key["word"], "value": values[key["x"]], "even": key["x"] % 2 == 0, "list": [words]},
    )
    _run()
    rows = _load()
    assert rows["word"].tolist() == rows["again"].tolist() == words and rows["list"].tolist() == [[words]] * 10
    assert rows["value"].dtype == float and [repr(v) for v in rows["value"]] == [repr(float(v)) for v in values]
    assert rows["even"].dtype == bool and rows["x"].dtype == int
    whole = (tmp_path / "tiny.csv").read_bytes()
    _run()
    assert (tmp_path / "tiny.csv").read_bytes() == whole, "a complete store does not change"


# A run under way.


@pytest.mark.slow
def test_killed_runs_lose_and_double_nothing(tmp_path):
    """Killed at random points, with one worker and with two."""

    def start(jobs):
        command = [sys.executable, "-c", TINY, str(tmp_path), str(jobs)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)

    def stored():
        if not (tmp_path / "tiny.sqlite").exists():
            return {}
        with sqlite3.connect(tmp_path / "tiny.sqlite") as db:
            tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            return dict(db.execute("SELECT key, cells FROM stored")) if tables else {}

    random.seed(0)
    before, calls = {}, tmp_path / "calls"
    for kill in range(4):
        run, called = start(1 + kill % 2), calls.stat().st_size if calls.exists() else 0
        while run.poll() is None and (not calls.exists() or calls.stat().st_size == called):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        now = stored()
        assert before.items() <= now.items(), "a row that was stored is lost or changed"
        before = now
    assert start(2).wait() == 0
    lines = (tmp_path / "tiny.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == [str(x) for x in range(12)]
    assert [line.split(",")[2] for line in lines] == [str(x**2) for x in range(12)]
    computed = Counter(calls.read_text().split())
    assert all(json.loads(cells)["seconds"] >= 0.1 for cells in before.values())
    assert sum(computed.values()) <= 12 + 4 * 2, "only rows that were being computed are computed again"


@pytest.mark.parametrize("last", ["csv", "manifest"])
def test_a_kill_while_the_rows_are_written_is_made_good(tiny, path, tmp_path, monkeypatch, last):
    """The grid has grown; the kill comes after the CSV is replaced, or after the manifest is."""
    tiny(grid=_grid(*range(7)))
    replace, unlink = os.replace, store.Path.unlink

    def killed(*arguments, **options):
        if last == "manifest" or arguments[1].name == "manifest.json":
            raise KeyboardInterrupt
        return replace(*arguments)

    if last == "csv":
        monkeypatch.setattr(manifest.os, "replace", killed)
    else:
        monkeypatch.setattr(store.Path, "unlink", lambda p, **o: killed() if p.suffix == ".sqlite" else unlink(p, **o))
    with pytest.raises(KeyboardInterrupt):
        _run()
    monkeypatch.undo()
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    monkeypatch.setitem(store.BACKENDS, "here", lambda row, todo, jobs: [])
    tiny(grid=_grid(*range(7)))
    if last == "csv":
        with pytest.raises(ValueError, match="tiny.csv: .*a run was stopped while writing it"):
            _load()
    assert experiments.status().set_index("experiment").loc["tiny", "stored"] == 7
    _run()
    assert _squares() == [x**2 for x in range(7)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["manifest.json", "tiny.csv"]


def test_a_damaged_database_is_refused(tiny, under_way):
    whole = under_way.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"words" * 1000):
        under_way.write_bytes(damaged)
        _refused(under_way, _run)
        assert experiments.status().set_index("experiment").loc["tiny", "stored"] == "refused"


def test_a_run_that_was_killed_before_its_first_row_keeps_those_of_the_file(tiny, path):
    tiny(grid=_grid(*range(7)))
    path.with_suffix(".sqlite").touch()
    _run()
    assert _squares() == [x**2 for x in range(7)]


def test_two_runs_at_once_are_refused(tiny, tmp_path):
    refused = []

    def row(key):
        with pytest.raises(ValueError, match=f"{tmp_path}/tiny.csv: another run is writing this store"):
            _run()
        assert experiments.status().set_index("experiment").loc["tiny", "stored"] == key["x"]
        refused.append(key)
        return _row(key)

    tiny(row=row)
    _run()
    assert len(refused) == 5 and _squares() == [0, 1, 4, 9, 16]


# Grids and code that change.


@pytest.mark.parametrize(
    "grid", [_grid(0, 1), [{**k, "n": 20} for k in _grid(*range(5))], [{"x": x} for x in range(9)]]
)
def test_a_grid_that_lacks_stored_rows_is_refused(tiny, path, grid):
    stored = path.read_bytes()
    tiny(grid=grid, smoke=grid[:1])
    for use in (_load, _run):
        with pytest.raises(
            ValueError, match=r"tiny.csv: made for another grid than that of \['x'.*such as \{'n': '10'"
        ):
            use()
    assert experiments.status().set_index("experiment").loc["tiny", "stored"] == "refused"
    assert path.read_bytes() == stored


def test_rows_come_in_the_order_of_the_grid(tiny, path):
    tiny(grid=_grid(4, 3, 2, 1, 0), row=_none_is_computed)
    assert _squares() == [16, 9, 4, 1, 0]


def test_a_grown_grid_is_computed_to_its_end(tiny, path, tmp_path):
    computed = []
    tiny(grid=_grid(-1, 0, 1, 2, 3, 4, 5), row=lambda key: computed.append(key["x"]) or _row(key))
    with pytest.raises(ValueError, match=r"tiny.csv: 2 of 7 rows missing, the first \{'x': -1"):
        _load()
    _run()
    assert computed == [-1, 5] and _squares() == [1, 0, 1, 4, 9, 16, 25]
    first, second = manifest.entries(tmp_path)["tiny.csv"]["provenance"]
    assert first["configuration"] != second["configuration"] == EXPERIMENTS["tiny"].configuration()


def test_every_row_tells_which_code_computed_it(tiny, monkeypatch, tmp_path):
    for commit, grid in (("aaa", _grid(2, 3)), ("bbb", _grid(2, 3, 1)), ("ccc", _grid(0, 1, 2, 3, 4))):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        tiny(grid=grid)
        _run()
    monkeypatch.setattr(provenance, "commit", lambda: "ddd")
    _run()
    records = manifest.entries(tmp_path)["tiny.csv"]["provenance"]
    blocks = [int(line.split(",")[-1]) for line in (tmp_path / "tiny.csv").read_text().splitlines()[1:]]
    assert [records[block]["commit"] for block in blocks] == ["ccc", "bbb", "aaa", "aaa", "ccc"]
    assert len(records) == 3 and "provenance" not in _load()


def test_stored_rows_do_not_make_the_commit_dirty(tmp_path, monkeypatch):
    def git(*command):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *command], cwd=tmp_path, check=True)

    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/tiny.csv"):
        (tmp_path / name).write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "c")
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    clean = provenance.commit()
    (tmp_path / "results" / "tiny.csv").write_text("2")
    assert provenance.commit() == clean != "unknown"
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit() == f"{clean}-dirty"


# Rows that fail.


def test_failed_rows_are_reported_when_the_others_are_stored(tiny, monkeypatch, caplog, capsys):
    def row(key):
        return {"square": key["x"] ** 2, "inverse": 6 // (key["x"] - 2)}

    tiny(row=row)
    with pytest.raises(RuntimeError, match=r"tiny.csv: 1 rows failed.*\n.*\{'x': 2, 'n': 10\}: ZeroDivisionError"):
        _run()
    assert "in row\n" in caplog.text and "Traceback" in caplog.text
    assert experiments.status().set_index("experiment").loc["tiny", "stored"] == 4
    assert main(["run", "tiny", "--backend", "here"]) == 1 and "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": 3}, r"no result under the name of a key .*, got \['x'\]"),
        ({"seconds": 3}, r"no result under the name of a key .*, got \['seconds'\]"),
        ({"square": None}, r"expected numbers, words .*, got \{'square': None\}"),
        ({"square": "a\rb"}, r"expected numbers, words without"),
        ({"square": [{1}]}, "set is not JSON serializable"),
    ],
)
def test_bad_results_are_refused(tiny, tmp_path, values, message):
    tiny(row=lambda key: values)
    with pytest.raises(RuntimeError, match=message):
        _run()
    assert list(tmp_path.iterdir()) == [], "a run that stored nothing leaves nothing"


def test_rows_of_another_shape_are_refused(tiny, path):
    tiny(grid=_grid(0, 1, 2, 3, 4, 5), row=lambda key: {"cube": 1})
    with pytest.raises(ValueError, match=r"expected the columns \['x', 'n', 'square', .*, got \['x', 'n', 'cube'"):
        _run()


# Where rows are computed.


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "jobs"), [("loky", 1), ("loky", 2), ("dask", 2)])
def test_a_row_that_kills_its_worker_fails_alone(tiny, monkeypatch, backend, jobs):
    monkeypatch.setitem(distributed.config["distributed"]["scheduler"], "allowed-failures", 0)

    def row(key):
        if key["x"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"square": key["x"] ** 2}

    tiny(row=row)
    with pytest.raises(RuntimeError, match=r"1 rows failed.*\n.*\{'x': 1, 'n': 10\}: .*(Terminated|Killed|died)"):
        experiments.run("tiny", jobs=jobs, backend=backend)
    tiny(row=_row)
    assert experiments.status().set_index("experiment").loc["tiny", "stored"] == 4


@pytest.mark.slow
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


def test_a_backend_that_is_missing_is_named(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match="backend: dask needs the package distributed; pip install"):
        experiments.run("tiny", backend="dask")
    with pytest.raises(ValueError, match="backend: expected one of"):
        experiments.run("tiny", backend="threads")
    assert list(tmp_path.iterdir()) == [], "a run that stored nothing leaves nothing"


def test_a_scheduler_out_of_reach_is_named(tiny, monkeypatch):
    monkeypatch.setenv("MOE_THEORY_SCHEDULER", "tcp://127.0.0.1:1")
    monkeypatch.setitem(distributed.config["distributed"]["comm"]["timeouts"], "connect", "0.2s")
    with pytest.raises(ValueError, match="MOE_THEORY_SCHEDULER: no Dask scheduler can be reached at 'tcp://127.0.0.1"):
        experiments.run("tiny", backend="dask")
