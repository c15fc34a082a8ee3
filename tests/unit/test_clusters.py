"""The runs of Figures 2 and 3 of Dikkala et al. (2023), small."""

import pytest

from moe_theory import experiments
from moe_theory.experiments import clusters


def test_dense_networks_have_the_parameters_of_the_experts():
    one = clusters.parameters(24, 96, 96, 10)
    assert one == 24 * 96 + 96 + 96 * 96 + 96 + 96 * 10 + 10
    for experts, width in ((1, 71), (64, 628)):
        assert clusters.dense_width(experts) == width
        assert clusters.parameters(24, width, width, width, 10) == pytest.approx(experts * one, rel=0.02)


def test_a_row_begins_as_live_does_and_every_seed_stands_alone():
    key = dict(n=64, experts=4, start=0.1, steps=203, seeds=[7, 8])
    whole = clusters.row(key)
    assert clusters.live(key)["early"] == whole["early"]
    alone = clusters.row({**key, "seeds": [8]})
    assert alone["routed"] == pytest.approx(whole["routed"][1:], rel=1e-3)
    assert all(len(values) == 2 for values in whole.values())


@pytest.mark.slow
def test_a_frozen_router_stays():
    rows = [clusters.row(dict(n=64, frozen=True, steps=steps, seed=7)) for steps in (21, 22)]
    assert rows[0]["norm_ratio"] == rows[1]["norm_ratio"] and rows[0]["weighted"] != rows[1]["weighted"]


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("clusters_constant", dict(n=256)),
        ("clusters_mixtures", dict(n=4096, frozen=True, seed=3)),
        ("clusters_dense", dict(n=4096, width=71, seed=3)),
    ],
)
def test_stored_rows_begin_as_they_are_computed(name, which):
    stored, now = experiments.recompute(name, **which)["early"]
    assert now == pytest.approx(stored, rel=1e-3)
