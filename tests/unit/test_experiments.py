import functools
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from moe_book import experiments, manifest, speed
from moe_book.devices import ROW
from moe_book.experiments import backends, store
from moe_book.experiments import catalogue as registry
from moe_book.experiments import sparse_runs as sparse
from moe_book.experiments.__main__ import main
from moe_book.experiments.catalogue import EXPERIMENTS, Experiment, experiment, rounded
from moe_theory.measure.stability import estimate
from moe_theory.models.sparse import SparseMLP
from moe_theory.streams import EARLIER
from moe_theory.tasks.languages import load_languages

CALLS = []
STORED = json.loads(Path(__file__).with_name("stored_rows.json").read_text())


def _row(key):
    CALLS.append(key["x"])
    return {"square": key["x"] ** 2}


@pytest.fixture
def in_process(monkeypatch):
    """Rows are computed here, not in workers, so that shapes are checked and calls can be counted."""
    of = backends._attempt
    monkeypatch.setitem(store.BACKENDS, "loky", lambda row, todo, jobs, device: (of(row, k, device) for k in todo))


@pytest.fixture
def tiny(tmp_path, monkeypatch, in_process):
    """An experiment of five rows, its store in a folder of its own."""
    grid = [{"x": x, "tag": "a,b"} for x in range(5)]
    e = Experiment("tiny", "squares", grid, grid[1:3], _row, _row)
    monkeypatch.setitem(EXPERIMENTS, "tiny", e)
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    CALLS.clear()
    return tmp_path


def test_run_load_and_provenance(tiny):
    experiments.run("tiny")
    rows = experiments.load("tiny")
    assert rows["square"].tolist() == [0, 1, 4, 9, 16] and rows["tag"].tolist() == ["a,b"] * 5
    assert {"device", "seconds"} <= set(rows)
    (head,) = manifest.entries(tiny)["tiny.csv"]["provenance"]
    assert {"configuration", "moe_theory", "commit", "torch", "numpy"} <= set(head)
    assert pd.read_csv(tiny / "tiny.csv").drop(columns="provenance").equals(rows), "a plain CSV"
    assert sorted(p.name for p in tiny.iterdir()) == ["manifest.json", "tiny.csv"]
    assert head["experiment"] == "tiny" and head["profile"] == "paper" and head["key"] == ["x", "tag"]


def test_a_stopped_run_goes_on_where_it_was(tiny, monkeypatch):
    def stop_at_three(key):
        if key["x"] == 3:
            raise KeyboardInterrupt
        return _row(key)

    whole = EXPERIMENTS["tiny"]
    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(whole, row=stop_at_three))
    with pytest.raises(KeyboardInterrupt):
        experiments.run("tiny")
    with pytest.raises(ValueError, match="tiny.csv: not all rows are stored yet; run `python"):
        experiments.load("tiny")
    monkeypatch.setitem(EXPERIMENTS, "tiny", whole)
    experiments.run("tiny")
    assert CALLS == [0, 1, 2, 3, 4]
    assert experiments.load("tiny")["square"].tolist() == [0, 1, 4, 9, 16]


def test_smoke_rows_are_never_paper_rows(tiny, monkeypatch):
    monkeypatch.chdir(tiny)
    experiments.run("tiny", profile="smoke")
    assert CALLS == [1, 2] and not (tiny / "tiny.csv").exists()
    for name in ("tiny.csv", "manifest.json"):
        (tiny / name).write_bytes((tiny / "_build" / "smoke" / name).read_bytes())
    for use in (experiments.load, experiments.run):
        with pytest.raises(ValueError, match="tiny.csv: expected paper rows of 'tiny', got smoke rows of 'tiny'"):
            use("tiny")
    with pytest.raises(ValueError, match="profile: expected one of"):
        experiments.run("tiny", profile="toy")


@pytest.mark.parametrize(
    ("grid", "smoke", "message"),
    [
        ([], [], "expected rows in the paper grid"),
        ([{"x": 1}, {"x": 1}], [{"x": 1}], r"paper rows that read differently, got \{'x': 1\} and \{'x': 1\}"),
        ([{"x": 1}, {"x": "1"}], [{"x": 1}], r"paper rows that read differently, got \{'x': 1\} and \{'x': '1'\}"),
        ([{"x": 1}, {"y": 1}], [{"x": 1}], r"expected the columns \['x'\] in paper row"),
        ([{"x": 1}], [{"x": 1, "n": 5}], r"expected the columns \['x'\] in smoke row"),
        ([{"x": 1}], [], "expected rows in the smoke grid"),
    ],
)
def test_bad_grids_are_refused(grid, smoke, message):
    with pytest.raises(ValueError, match=message):
        Experiment("tiny", "squares", grid, smoke, _row, _row)


def test_bad_names_and_selections(tiny):
    with pytest.raises(ValueError, match="experiment: expected one of"):
        experiments.load("nothing")
    with pytest.raises(ValueError, match="no stored rows"):
        experiments.load("tiny")
    with pytest.raises(ValueError, match="which: expected to pick one row"):
        experiments.recompute("tiny", tag="a,b")


def test_command_line(tiny, capsys, monkeypatch):
    monkeypatch.setattr(store, "EXPERIMENTS", {"tiny": EXPERIMENTS["tiny"]})
    assert main(["list"]) == 0 and "tiny: squares" in capsys.readouterr().out
    assert main(["run", "tiny", "--jobs", "1"]) == 0
    assert f"tiny -> {tiny / 'tiny.csv'}" in capsys.readouterr().err
    assert main(["status"]) == 0
    assert re.search(r"tiny +5 +5 +\d+\.\d +0 squares", capsys.readouterr().out)
    assert main(["run", "nothing"]) == 2
    assert "error: experiment: expected one of" in capsys.readouterr().err
    assert main(["run", "tiny", "--jobs", "0"]) == 2
    assert "error: jobs: expected an integer >= 1, got 0" in capsys.readouterr().err


SLOW = {  # smoke profiles of more than about a second
    "baselines",
    "contact",
    "cosine_language",
    "domains",
    "exploration",
    "exponents",
    "image_functions",
    "image_functions_baselines",
    "images_baselines",
    "images_cnn",
    "images_larger",
    "images_latent",
    "images_longer",
    "images_pilot",
    "language_plain",
    "language_routers",
    "language_widths",
    "languages",
    "many_draws",
    "moe_balanced",
    "moe_control",
    "moe_descent",
    "moe_longer",
    "moe_same_start",
    "moe_tables",
    "outcome",
    "sparse_at_length",
    "sparse_more_seeds",
    "sparse_training",
    "voronoi_batches",
    "voronoi_bounds",
    "voronoi_lse",
    "voronoi_starts",
}


@pytest.mark.parametrize("name", [pytest.param(e, marks=[pytest.mark.slow] * (e in SLOW)) for e in EXPERIMENTS])
def test_smoke_profiles_run(name, tmp_path, monkeypatch, in_process, request):
    if name == "domains":
        request.getfixturevalue("garments")
    if name == "languages":
        try:
            load_languages(10, 10)
        except ValueError as missing:
            pytest.skip(str(missing))
    monkeypatch.setattr(store, "SMOKE", tmp_path)
    experiments.run(name, profile="smoke")
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 1 + len(EXPERIMENTS[name].smoke)
    smoke = manifest.entries(tmp_path)[f"{name}.csv"]
    stored = manifest.entries()[f"{name}.csv"]
    assert list(stored["columns"]) == list(smoke["columns"]), "what is stored is what the code computes"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_are_computed_where_they_say(device, tmp_path, monkeypatch, in_process):
    """And nothing of it is left for what is computed next."""

    def row(key):
        return {"there": ROW.get()}

    e = Experiment("there", "where rows are computed", [{"n": 1}], [{"n": 1}], row, row, gpu=True)
    monkeypatch.setitem(EXPERIMENTS.data, "there", e)
    monkeypatch.setattr(store, "SMOKE", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    experiments.run("there", profile="smoke", device=device)
    (found,) = pd.read_csv(tmp_path / "there.csv").to_dict("records")
    assert (found["there"], found["device"], ROW.get()) == (device, device, "cpu")


def test_rounding_keeps_shape_and_digits():
    x = torch.tensor([[1.234567, -0.000123456], [0, 100.0]])
    assert rounded(x, 3) == rounded(x.numpy(), 3) == rounded(x.tolist(), 3) == [[1.23, -0.000123], [0.0, 100.0]]
    found = rounded({"a": x.double().mean(), "b": [2, True, x[0, 0].item()]}, 8)
    assert repr(found) == "{'a': 25.308611, 'b': [2, True, 1.234567]}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_stored_rows_are_whole(name):
    rows = experiments.load(name)
    assert len(rows) == len(EXPERIMENTS[name].grid) and not rows.isna().any().any()


@pytest.mark.parametrize("name", STORED)
def test_stored_rows_are_those_of_the_first_format(name):
    """`stored_rows.json` was made by the loader of the text format that these rows were first stored in.

    It holds what has not been computed anew since.
    """

    def bare(value):
        return [bare(v) for v in value] if isinstance(value, list) else repr(float(value))

    rows, found = experiments.load(name), {}
    for column, cells in rows.items():
        first = type(cells.iloc[0])
        kind = first.__name__ if first in (list, str) else str(cells.dtype)
        values = [bare(v) if kind == "list" else repr(v) for v in cells.tolist()]
        found[column] = f"{kind} {hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]}"
    assert {"rows": len(rows), **found} == STORED[name] and list(rows) == list(STORED[name])[1:]


@pytest.mark.parametrize(
    ("folder", "names"),
    [(store.RESULTS, {f"{name}.csv" for name in EXPERIMENTS}), (speed.RESULTS, {"speed.json"})],
)
def test_the_manifests_have_every_result(folder, names):
    files = {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert files == set(manifest.entries(folder)) >= names
    for name in files:
        manifest.read(name, folder)


def test_speed_is_read_from_where_it_is_written():
    assert Path(__file__).parents[2] / "benchmarks" / "results" == speed.RESULTS
    assert set(speed.stored("speed")) >= {"machine", "steps", "growth"}
    with pytest.raises(ValueError, match="speed_of_light.json: expected a file that is there"):
        speed.stored("speed_of_light")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which", "columns"),
    [
        ("single_expert", dict(setting="setting 2", activation="linear", input_scale=10, seed=1), ["prefix_test"]),
        ("single_expert_released", dict(setting="table 7", activation="tanh", seed=8), ["prefix_test", "prefix_loss"]),
        ("single_expert_wide", dict(setting="setting 2", activation="cubic", filters=512, seed=0), ["prefix_test"]),
        (
            "moe_tables",
            dict(setting="setting 4", variant="as written", activation="linear", seed=2),
            ["prefix_test", "prefix_loss"],
        ),
        ("moe_longer", dict(setting="setting 3", seed=7), ["prefix_test", "prefix_loss"]),
        (
            "linear_cubic_course",
            dict(activation="linear", input_scale=1, seed=2),
            ["first_differ", "first_reads", "first_vote", "first_by_labels"],
        ),
        ("linear_cubic_picture", dict(activation="cubic", seed=6), ["first_loss", "first_router"]),
        (
            "moe_balanced",
            dict(setting="setting 2", variant="released", balance=0.01, seed=3),
            ["prefix_test", "prefix_loss"],
        ),
        (
            "moe_same_start",
            dict(variant="as written", experts=8, balance=0.03, seed=1),
            ["prefix_test", "prefix_loss"],
        ),
        (
            "moe_descent",
            dict(variant="released", normalized=True, balance=0.01, seed=4),
            ["prefix_test", "prefix_loss"],
        ),
        ("exploration", dict(scan="sigma_0", sigma_0=0.1, seed=5), ["winner", "other_features", "routing"]),
        ("outcome", dict(scan="d, sigma_0 = d^-1/3", d=64, seed=2), ["predicted", "empty"]),
        ("beyond_stopping", dict(balance=0.01, seed=1), ["first_test", "first_loss"]),
        ("voronoi_lse", dict(truth="regular", router="perturbed", n=1000, rep=3), ["sse_truth", "steps"]),
        ("voronoi_starts", dict(router="cosine", rep=0), ["near", "far"]),
        (
            "voronoi_sgd",
            dict(figure="2b", router="perturbed", near=1e-4, n=1000, rep=5),
            ["L3_start", "L3", "expert", "regression"],
        ),
        ("voronoi_batches", dict(figure="1b", router="perturbed", near=1e-4, n=1000), ["L2_start", "L2", "L3"]),
        ("baselines", dict(task="gaussians"), ["test_accuracy"]),
        ("one_too_many", dict(router="cosine", phi="tanh", k=3, n=1000, rep=1), ["sse", "expert", "direction"]),
        ("contact", dict(router="perturbed", expert="tanh", split="across", gap=0.1), ["distance"]),
        (
            "sparse_training",
            dict(task="gaussians", rule="softmax_topk", heads="single", output="matched", k=2, seed=3),
            ["kept"],
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


def test_the_beginning_of_a_training_is_that_of_its_row(monkeypatch):
    """Ten examples of two dimensions, a network of two experts, 150 steps."""
    inputs = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    data = sparse.Labelled(inputs, torch.arange(10) % 2)
    task = sparse.Task(lambda: (data, data), functools.partial(SparseMLP, 2, 2, 2), lambda *_: None, 0.1, 150, 4)
    monkeypatch.setitem(sparse.TASKS, "tiny", task)
    monkeypatch.setattr(sparse, "estimate", functools.partial(estimate, draws=3, batch=4))
    key = dict(task="tiny", rule="sampled_topk", heads="single", output="as is")
    key |= dict(measured="all", k=1, seed=0, rate=0.1, steps=150)
    whole = sparse.row(key)
    for until, records, stages in ((0, 0, 1), (60, 0, 3), (120, 16, 3), (150, 40, 4)):
        part = sparse.beginning(key, until)
        assert (len(part["loss"]), len(part["eps_max"])) == (records, stages)
        assert part.pop("kept") == whole["kept"]
        assert all(values == whole[name][: len(values)] for name, values in part.items())
        assert all(step <= until for name in ("steps_at", "gradient_at") for step in part[name])
    assert set(whole) - set(part) == {"kept", "test_loss", "test_accuracy"}
    with pytest.raises(ValueError, match="^until:"):
        sparse.beginning(key, 151)


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 5])
def test_stored_estimates_before_training_tell_the_truth(k):
    """The estimators of a stored row at its first stage, computed again at full size."""
    which = dict(task="gaussians", rule="topk_softmax", measured="all", k=k, seed=2, rate=0.05)
    (key,) = (row for row in sparse.grid() if which.items() <= row.items())
    rows = experiments.load("sparse_training")
    (stored,) = rows[(rows[list(key)] == pd.Series(key)).all(axis=1)].to_dict("records")
    (train, _), (network, _) = sparse.gaussians(), sparse.start(key)
    found = sparse.summary(estimate(network, *train, rate=key["rate"], seed=sparse.stream(key["seed"], 4)))
    for name, value in found.items():
        assert value == pytest.approx(stored[name][0], rel=0.02, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "k", "seed"),
    [
        *[("topk_softmax", 2, 0), ("topk_softmax", 5, 0), ("softmax_topk", 2, 0), ("sampled_topk", 2, 0)],
        *[("topk_softmax", 1, 3), ("topk_softmax", 5, 4)],
    ],
)
def test_the_first_window_of_a_long_training_tells_the_truth(rule, k, seed, garments):
    """The first 101 of the CNN's 23,500 steps. Rounding is amplified by training, hence the tolerance."""
    which = dict(task="fashion-mnist", rule=rule, k=k, seed=seed)
    (key,) = (row for row in sparse.long_grid() + sparse.more_seeds_grid() if which.items() <= row.items())
    rows = pd.concat([experiments.load("sparse_at_length"), experiments.load("sparse_more_seeds")])
    (stored,) = rows[(rows[list(key)] == pd.Series(key)).all(axis=1)].to_dict("records")
    found = sparse.beginning({**key, "measured": "none"}, 101, training=True)
    assert found["kept"] == pytest.approx(stored["kept"], rel=1e-4)
    for name in ("loss", "variance", "router_gradient", "expert_gradient"):
        assert found[name] == pytest.approx(stored[name][:1], rel=0.002), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("images_cnn", dict(model="moe", task="rotated", seed=2)),
        ("images_latent", dict(model="single", task="rotated", seed=1)),
        ("images_longer", dict(model="wide", task="rotated", seed=1)),
        ("images_larger", dict(network="MobileNetV2", model="moe", task="rotated", seed=1)),
        ("images_larger", dict(network="ResNet18", model="single", task="rotated", seed=2)),
        ("images_pilot", dict(network="ResNet18", model="moe", task="plain")),
        ("image_functions", dict(reads="v and z", frozen="head", seed=1)),
    ],
)
def test_first_losses_on_images_tell_the_truth(name, which, garments):
    """The first of a stored row's training and the mean of 20, computed again at full size."""
    stored, again = experiments.recompute(name, **which)["first"]
    assert again == pytest.approx(stored, rel=5e-3)


@pytest.mark.slow
def test_stored_draws_are_those_of_the_estimator():
    """The first 200 of 4,000, by the route that also gives L and beta."""
    key = dict(task="gaussians", rule="topk_softmax", heads="single", output="as is", k=5, seed=0)
    (train, _), (network, _) = sparse.gaussians(), sparse.start(key)
    stored, again = experiments.recompute("many_draws", k=5)["eps"]
    assert (len(stored), len(again)) == (4_000, 200)
    found = estimate(network, *train, rate=sparse.TASKS["gaussians"].rate, seed=0).eps.tolist()
    assert again == pytest.approx(stored[:200], rel=1e-3) and found == pytest.approx(stored[:200], rel=1e-3)


def test_the_list_imports_no_experiment(capsys, monkeypatch):
    monkeypatch.setattr(registry, "import_module", None)
    monkeypatch.setattr("moe_book.experiments.__main__.EXPERIMENTS", registry._Experiments())
    assert main(["list"]) == 0
    assert f"contact: {registry.entries()['contact']['about']}\n" in capsys.readouterr().out


def test_status_counts_the_rows_that_were_drawn_the_earlier_way():
    stores = experiments.status().set_index("experiment")
    module = stores.index.map(lambda name: experiment(name).row.__module__)
    assert (stores.earlier <= stores.stored).all()
    assert (stores.earlier == stores.stored)[module.isin(EARLIER)].all()
    assert stores.earlier[["moe_tables", "lengths"]].sum() == 0


def test_the_distance_of_rows_computed_again(monkeypatch):
    pairs = iter([[[1.0, 2.0], [1.1, 2.0]], [[4.0, 5.0], [4.0, 4.0]]])
    monkeypatch.setattr(store, "recompute", lambda name, **which: pd.DataFrame(next(pairs), columns=["a", "b"]))
    assert store.recomputed_off("any", ["a", "b"], [{}, {}]) == pytest.approx(0.2)
