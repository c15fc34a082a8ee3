import numpy as np
import pytest
import torch

from moe_book import experiments
from moe_book.experiments import ablations
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchTask
from moe_theory.theory.exploration import derived_ratio
from moe_theory.theory.smoothing import route_probabilities


def test_derived_ratio_is_that_of_random_shares():
    """Each example's gradient by automatic differentiation, and 20,000 draws of who is sent where."""
    n, M = 40, 4
    batch, w = PatchTask(d=10).sample(n, 1, torch.float64), PatchMoE(10, 1, 3, dtype=torch.float64).W.data[0]
    w.requires_grad_()
    answers = (batch.x @ w.T).pow(3).sum((1, 2)) * batch.y
    g = torch.stack([torch.autograd.grad(a, w, retain_graph=True)[0].flatten() for a in answers]).numpy()
    mean = g.mean(0)
    chosen = np.random.default_rng(0).integers(M, size=(20_000, n)) == 0
    G = chosen @ g / n
    across = G - np.outer(G @ mean / (mean @ mean), mean)
    r = np.sqrt((across**2).sum(1).mean()) / np.linalg.norm(mean / M)
    assert derived_ratio(batch, w.detach(), M) == pytest.approx(r, rel=0.02)


def test_what_is_watched():
    rng = torch.Generator().manual_seed(0)
    theta, W = torch.randn(6, 3, generator=rng), torch.randn(3, 2, 6, generator=rng)
    x, signals = torch.randn(5, 6, generator=rng, dtype=torch.float64), torch.eye(6, dtype=torch.float64)[:2]
    found = ablations._watch({"theta": theta, "W": W}, x, signals)
    h = x @ theta.double()
    p = route_probabilities(h)
    middle = sum(W) / 3
    assert found["h"] == pytest.approx(max(abs(v) for v in h.flatten().tolist()), rel=1e-4)
    assert found["off"] == pytest.approx(max(abs(v - 1 / 3) for v in p.flatten().tolist()), rel=1e-4)
    assert found["in_use"] == pytest.approx(1 / sum((p[:, m].mean() ** 2).item() for m in range(3)), rel=1e-4)
    assert found["apart"] == pytest.approx(float(sum((w - middle).norm() for w in W) / 3 / middle.norm()), rel=1e-4)
    assert found["leads"] == pytest.approx([float(w[:, :2].max()) for w in W], rel=1e-4)
    assert found["sum"] == pytest.approx(float(sum(theta.T).abs().max() / theta.abs().max()), rel=1e-4)


def test_experts_that_start_alike():
    key = dict(n=300, seed=2)
    row = ablations.apart_row(key)
    assert 0 < row["after_1"] < 1 and row["after_20"] > row["after_1"]
    assert row["plain_step"] == pytest.approx(row["derived"], rel=0.5)


@pytest.mark.parametrize("name", ["moe_watched", "moe_leads"])
def test_live_is_the_first_entry_of_the_curves(name):
    e = experiments.catalogue.EXPERIMENTS[name]
    row, live = e.row(e.smoke[0]), e.live(e.smoke[0])
    assert list(row) == list(live)
    for curve, first in live.items():
        assert len(row[curve]) == 2 and row[curve][:1] == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("moe_watched", dict(run="same start", seed=4)),
        ("moe_watched", dict(run="32 experts", seed=6)),
        ("moe_watched", dict(run="linear", balance=1.0, seed=7)),
        ("moe_leads", dict(run="plain", seed=5)),
        ("moe_leads", dict(run="waiting", seed=8)),
    ],
)
def test_stored_curves_begin_as_computed(name, which):
    stored, now = experiments.recompute(name, **which).to_dict("records")
    for column in ("loss", "test", "entropy", "h", "off", "in_use", "apart"):
        assert now[column][0] == pytest.approx(stored[column][0], rel=0.02)


@pytest.mark.slow
def test_stored_distances_tell_the_truth():
    stored, now = experiments.recompute("moe_apart", n=2000, seed=7).to_dict("records")
    assert now == pytest.approx(stored, rel=0.02)
