import math

import pytest
import torch

from moe_book.experiments.linear_cubic import figure_1, held_out, picture_row, routed
from moe_theory.measure import dispatch_entropy
from moe_theory.measure.patch_layer import look, sign_pair, with_weights, wrong

KEY = dict(activation="linear", n=300, experts=4, steps=100, seed=3)


@pytest.fixture
def by_hand():
    """Linear experts that own a cluster each: router at the centers, two filters at half the label signal."""
    test = figure_1(0).sample(500, 1)
    return {"theta": test.c.T.clone(), "W": (test.v / 2)[:, None].repeat(1, 2, 1)}, test


def test_sign_pairs_are_four():
    test = figure_1(1).sample(400, 2)
    pair = sign_pair(test)
    assert pair.unique().tolist() == [0, 1, 2, 3]
    assert ((pair >= 2) == (test.y > 0)).all() and ((pair % 2 == 1) == (test.epsilon > 0)).all()


def test_look_at_experts_that_own_a_cluster_each(by_hand):
    now, test = by_hand
    now["theta"] += 0.5 * test.v.sum(0)[:, None]
    found = look(now, test, "linear")
    assert found["differ"] > 1e5 and found["vote"] == pytest.approx(1, abs=1e-5)
    assert found["reads"] == pytest.approx(1, abs=1e-5)  # 4 centers of weight 1; 16 weights of 1/2
    assert found["by_labels"] == pytest.approx(
        100 * (~wrong(with_weights(*now.values(), "linear"), test)).double().mean()
    )
    assert found["by_centers"] < found["by_labels"]
    own = found["accuracies"].diagonal()
    assert (own >= found["accuracies"].amax(0)).all() and found["best"] == pytest.approx(100 * own.mean().item())


def test_signs_given_the_expert(by_hand):
    now, test = by_hand
    m = (test.x.sum(1) @ now["theta"]).argmax(1)
    assert look(now, test, "linear")["signs"] == pytest.approx(dispatch_entropy(sign_pair(test), m))


def test_a_router_at_the_centers_owns_clusters_and_one_of_zeros_none(by_hand):
    now, test = by_hand
    found = routed(now["theta"].T.tolist(), test)
    assert found["purity"] > 0.9 and found["entropy"] < 0.3 and found["signs"] > 1.3
    none = routed(torch.zeros(4, 50).tolist(), test)
    assert none["purity"] == 1 and none["entropy"] == pytest.approx(math.log(4), abs=0.02)


def test_a_row_of_the_picture_holds_its_end():
    row = picture_row(KEY)
    assert row["steps_at"] == [50, 100] and row["first_loss"] == row["loss"][0]
    assert row["test"][-1] == pytest.approx(100 - 100 * len(row["wrong"]) / KEY["n"])
    batch = figure_1(3).sample(300, 8)
    assert routed(row["theta"], batch)["entropy"] == pytest.approx(row["entropy"][-1], abs=1e-4)
    assert torch.tensor(row["theta"]).norm().item() == pytest.approx(row["router"][-1], rel=1e-4)


def test_the_test_examples_of_the_picture():
    test = held_out(3)
    assert len(test) == 1600 and torch.equal(test.x[:5], figure_1(3).sample(1600, 8).x[:5])
