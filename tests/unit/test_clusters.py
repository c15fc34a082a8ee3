"""The runs of Figure 2 of Dikkala et al. (2023), small."""

import pytest

from moe_book import experiments
from moe_book.experiments import clusters


def test_a_row_begins_as_live_does_and_every_seed_stands_alone():
    key = dict(n=64, experts=4, start=0.1, steps=203, seeds=[7, 8])
    whole = clusters.row(key)
    assert clusters.live(key)["early"] == whole["early"]
    alone = clusters.row({**key, "seeds": [8]})
    assert alone["routed"] == pytest.approx(whole["routed"][1:], rel=1e-3)
    assert all(len(values) == 2 for values in whole.values())


def test_a_stored_row_begins_as_it_is_computed():
    stored, now = experiments.recompute("clusters_constant", n=256, steps=12_000)["early"]
    assert now == pytest.approx(stored, rel=1e-3)


def test_readings_are_those_of_a_row():
    key = dict(n=64, experts=4, start=0.1, steps=201, seeds=[7, 8])
    mixtures, _, test, _ = clusters.trained(key)
    whole, found = clusters.row(key), clusters.readings(mixtures, test)
    for name, values in found.items():
        assert values == pytest.approx(whole[name], rel=1e-4), name


def test_rows_at_data_use_every_expert():
    found = clusters.three_starts(3)
    assert found["used"][0] < 64 == found["used"][1] == found["used"][2]
    assert found["routed"][2] < found["routed"][1] < found["routed"][0]
