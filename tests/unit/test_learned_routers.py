"""The trainings of Figures 3, 4 and 6 of Dikkala et al. (2023), small."""

import pytest
import torch

from moe_book import experiments
from moe_book.experiments import learned_frozen as routers
from moe_theory.models.soft import SoftMoE


def test_dense_networks_have_the_parameters_of_the_experts():
    one = routers.parameters(24, 96, 96, 10)
    assert one == 24 * 96 + 96 + 96 * 96 + 96 + 96 * 10 + 10
    for experts, width in ((1, 71), (64, 628)):
        assert routers.dense_width(experts, 10) == width
        assert routers.parameters(24, width, width, width, 10) == pytest.approx(experts * one, rel=0.02)


@pytest.mark.parametrize("figure", routers.FIGURES)
def test_mixtures_of_a_seed_start_alike_and_see_the_same_examples(figure):
    keys = [dict(figure=figure, model=m, n=64, start=2.0, steps=20, seed=7) for m in ("learned", "frozen", "sharp")]
    nets, parts = map(routers.network, keys), map(routers.data, keys)
    learned, frozen, sharp = (net.state_dict() for net in nets)
    last = max(name for name in learned if name.startswith("router.W"))
    assert all(torch.equal(learned[name], frozen[name]) for name in learned)
    assert torch.allclose(sharp[last], routers.SHARP * learned[last])
    assert all(torch.equal(learned[name], sharp[name]) for name in learned if name != last)
    first, *rest = parts
    assert all(torch.equal(a.x, b.x) for other in rest for a, b in zip(first, other, strict=True))


def test_a_row_begins_as_live_does(monkeypatch):
    key = dict(figure="subspaces", model="learned", n=64, start=16.0, steps=22, seed=7)
    monkeypatch.setattr(routers, "AT", (21, 22))
    whole = routers.row(key)
    assert routers.live(key)["first"] == whole["first"]
    assert len(whole["routed"]) == len(whole["weighted"]) == 2


def test_shuffling_leaves_the_network_as_it_was():
    moe = SoftMoE(24, 1, 8, seeds=[0])
    before = moe.router.W[0].clone()
    _, test = routers.data(dict(figure="linear", n=8, seed=0))
    assert routers.routing(moe, test, 0)["shuffled"] != routers.routing(moe, test, 0)["sparsity"]
    assert torch.equal(moe.router.W[0], before)


@pytest.mark.slow
def test_a_frozen_router_stays():
    rows = [
        routers.row(dict(figure="constant", model="frozen", n=64, start=1.0, steps=steps, seed=7)) for steps in (20, 25)
    ]
    assert rows[0]["norm_ratio"] == rows[1]["norm_ratio"] and rows[0]["weighted_train"] != rows[1]["weighted_train"]


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("routers_constant", dict(model="frozen", n=256, seed=0)),
        ("routers_constant", dict(model="learned", n=256, seed=0, steps=2_000)),
        ("routers_linear", dict(model="learned", n=256, seed=0)),
        ("routers_subspaces", dict(model="learned", n=1_024, seed=0)),
        ("routers_dense", dict(figure="linear", n=256, seed=0)),
    ],
)
def test_stored_rows_begin_as_they_are_computed(name, which):
    stored, now = experiments.recompute(name, **which)["first"]
    assert now == pytest.approx(stored, rel=1e-3)


def test_the_short_row_is_the_beginning_of_a_long_one():
    rows = experiments.load("routers_constant")
    (short,), (long,) = (
        rows.query(f"model == 'learned' and n == 256 and seed == 0 and steps == {steps}").to_dict("records")
        for steps in (routers.short()["steps"], routers.STEPS)
    )
    assert short["first"] == long["first"]
    assert all(short[name] == long[name][:1] for name in ("routed", "weighted"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["learned", "frozen"])
def test_a_stored_row_ends_as_it_is_computed(model):
    key = dict(figure="constant", model=model, n=256, start=1.0, steps=2_000, seed=0)
    rows = experiments.load("routers_constant").to_dict("records")
    (stored,) = (row for row in rows if all(row[name] == value for name, value in key.items()))
    for name, value in routers.row(key).items():
        assert value == pytest.approx(stored[name], rel=1e-2), name
