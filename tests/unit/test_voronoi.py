"""Voronoi cells, losses and the errors taken apart."""

import math

import pytest
import torch

from moe_theory.measure.voronoi import error_parts, voronoi_cells, voronoi_loss
from moe_theory.models.mixture import MixingMeasure, draw_measure
from moe_theory.models.routers import ROUTERS, Linear


def measure(beta0, beta1, eta):
    return MixingMeasure(*(torch.tensor(t, dtype=torch.float64) for t in (beta0, beta1, eta)))


TRUTH = measure([0.0, math.log(2)], [[0.0], [10.0]], [[0.0, 0.0], [0.0, 0.0]])


def test_losses_of_a_split_atom_by_hand():
    # two atoms in the first cell, at distances 1 and 2 in the router and 3 in one expert; one in the second
    G = measure([0.0, 0.0, math.log(3)], [[1.0], [-2.0], [10.5]], [[0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
    assert voronoi_cells(G, TRUTH).tolist() == [0, 0, 1]
    weights = abs(2 - 1) + abs(3 - 2)
    assert voronoi_loss(G, TRUTH, "L1r", r=1) == pytest.approx(weights + 1 + 2 + 3 + 3 * 0.5)
    assert voronoi_loss(G, TRUTH, "L1r", r=3) == pytest.approx(weights + 1 + 8 + 27 + 3 * 0.125)
    assert voronoi_loss(G, TRUTH, "L2") == pytest.approx(weights + 1 + 4 + 9 + 3 * 0.5)
    assert voronoi_loss(G, TRUTH, "L3") == pytest.approx(voronoi_loss(G, TRUTH, "L1r", r=1))


def test_losses_vanish_at_the_truth_and_in_any_order_of_its_atoms():
    G = draw_measure(4, 3, 0)
    order = torch.tensor([2, 0, 3, 1])
    H = MixingMeasure(G.beta0[order], G.beta1[order], G.eta[order])
    assert all(voronoi_loss(H, G, kind) == 0 for kind in ("L1r", "L2", "L3"))


def test_an_empty_cell_adds_its_weight():
    G = measure([0.0], [[0.0]], [[0.0, 0.0]])
    assert voronoi_loss(G, TRUTH, "L3") == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["linear", "perturbed"])
def test_a_common_shift_is_seen_as_shift_and_nothing_else(kind):
    router, G = ROUTERS[kind](), draw_measure(4, 3, 1, router_scale=0.3)
    c = torch.tensor([0.05, -0.02, 0.1], dtype=torch.float64)
    H = G.with_(beta1=router.preimage(router.embedding(G.beta1) + c), beta0=G.beta0 + 0.7)
    parts = error_parts(H, G, router, torch.arange(4))
    assert parts["shift"] == pytest.approx(2 * float(c.norm()))
    assert max(parts[name] for name in ("expert", "weight", "direction")) < 1e-14


def test_spreads_of_a_split_atom():
    G = draw_measure(2, 3, 2)
    eta, unit = G.eta[:1], G.eta[:1] / G.eta[:1].norm()
    beta0 = torch.cat([G.beta0[:1] - math.log(2)] * 2 + [G.beta0[1:]])
    split = torch.cat([eta + 0.3 * unit, eta - 0.3 * unit, G.eta[1:]])
    H = MixingMeasure(beta0, torch.cat([G.beta1[:1], G.beta1]), split)
    parts = error_parts(H, G, Linear(), torch.tensor([0, 0, 1]))
    assert parts["spread_along"] == pytest.approx(0.3)
    assert max(value for name, value in parts.items() if name != "spread_along") < 1e-14


def test_bad_losses_are_refused():
    G = draw_measure(3, 2, 0)
    with pytest.raises(ValueError, match="kind: expected one of"):
        voronoi_loss(G, G, "L4")
    with pytest.raises(ValueError, match="r: expected a finite number >= 1"):
        voronoi_loss(G, G, "L1r", r=0.5)
    with pytest.raises(ValueError, match="G: expected inputs of dimension 3"):
        voronoi_loss(G, draw_measure(3, 3, 0))
    with pytest.raises(ValueError, match="cell: expected 3 indices that name all 3 atoms"):
        error_parts(G, G, Linear(), torch.tensor([0, 0, 1]))
