"""The layer of chapter 25, in which the router is a choice, its training side by side, and what is measured of it."""

import math
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_book import claims
from moe_book.experiments import which_router as which
from moe_book.experiments.router_tasks import N_TEST, TRIALS, Part, sampled
from moe_theory.measure.pairs import holm
from moe_theory.measure.selection import effective_experts, paired_steps, together
from moe_theory.models import choices
from moe_theory.models.choices import Choice, ChosenMoE, Form, PlainNet, hashed
from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.streams import torch_stream
from moe_theory.theory import coselection
from moe_theory.training.paired import Adam, descend

FORM, RNG = Form(6, hidden=3), partial(torch_stream, 0, "routing noise")


def inputs(R=2, n=40, s=1, d=6):
    return torch.randn(R, n, s, d, generator=torch_stream(3, "inputs"))


@pytest.mark.parametrize("name", which.ROUTERS)
def test_layer_is_the_sum_over_experts_and_parts(name):
    choice, x = which.ROUTERS[name], inputs(s=3)
    for whole in (False, True):
        moe = ChosenMoE(Form(6, hidden=3, whole=whole), choice, which.M, [0, 1]).eval()
        out, pi, h = moe(x, RNG())
        assert ((pi > 0).sum(-1) == choice.k).all() and pi.shape == h.shape
        pi = pi.view(2, 40, -1, which.M).expand(-1, -1, 3, -1)
        W, b = ([p[1] for p in part] for part in (moe.experts.W, moe.experts.b))
        said = [[W[1][m] @ (W[0][m] @ part + b[0][m]).relu() + b[1][m] for m in range(which.M)] for part in x[1, 7]]
        by_hand = sum(pi[1, 7, p, m] * said[p][m] for p in range(3) for m in range(which.M))
        torch.testing.assert_close(out[1, 7], by_hand, rtol=1e-4, atol=1e-5)


def test_networks_of_one_seed_start_with_the_same_experts_and_router_vectors():
    nets = [ChosenMoE(FORM, which.ROUTERS[name], 8, [5]) for name in ("linear, top 2", "cosine", "heads", "hash")]
    for net in nets[1:]:
        assert torch.equal(net.experts.W[0], nets[0].experts.W[0])
    assert torch.equal(nets[1].router.W[0], nets[0].router.W[0])


def test_hash_reads_every_bit_and_spreads_evenly():
    x = inputs(1, 4_000)[0, :, 0]
    h = hashed(x, 8)
    assert torch.equal(h, hashed(x.clone(), 8)) and float(h.min()) >= 0 and float(h.max()) < 1
    counts = torch.bincount(h.argmax(1), minlength=8)
    assert ((counts - 500).abs() < 5 * (500 * 7 / 8) ** 0.5).all()
    moved = x.clone()
    moved[:, 2] = torch.nextafter(moved[:, 2], torch.tensor(9.0))
    same = (hashed(moved, 8).argmax(1) == h.argmax(1)).float().mean()
    assert abs(float(same) - 1 / 8) < 0.03


def test_start_samples_selects_the_nearest_and_zero_is_zero():
    x = inputs(2, 50)[:, :, 0]
    moe = ChosenMoE(FORM, Choice(start="samples"), 8, [0, 1], samples=x[:, :8])
    assert torch.equal(moe.scores(x).argmax(-1), torch.cdist(x, x[:, :8]).argmin(-1))
    assert not ChosenMoE(FORM, Choice(start="zero"), 8, [0]).scores(x[:1]).any()


def test_one_expert_after_the_softmax_has_no_gradient_of_the_task():
    x = inputs()
    for rule, zero in ((Choice().rule, True), (softmax_topk, False)):
        moe = ChosenMoE(FORM, Choice(rule=rule, k=1), 8, [0, 1])
        (g,) = torch.autograd.grad(moe(x, RNG())[0].square().sum(), [moe.router.W[0]])
        assert (float(g.abs().max()) == 0) is zero


@pytest.mark.parametrize(("name", "parts"), [("linear, top 2", 1), ("heads", 3), ("top 1, then softmax", 3)])
def test_flops_are_those_a_counter_finds(name, parts):
    choice, x = which.ROUTERS[name], inputs(1, 1, parts)
    moe = ChosenMoE(FORM, choice, 8, [0])
    with FlopCounterMode(display=False) as counter:
        moe.scores(moe.routed(x))
        for part in x[0, 0]:
            for m in range(choice.k):
                (part[None] @ moe.experts.W[0][0, m].T).relu() @ moe.experts.W[1][0, m].T
    assert choices.flops(FORM, choice, 8, parts) == counter.get_total_flops()


def test_plain_network_computes_as_much():
    for trial in TRIALS.values():
        width = choices.plain_width(trial.form, Choice(), which.M, trial.parts)
        own = trial.parts * choices.layer_flops([trial.form.d, width, 1])
        goal = choices.flops(trial.form, Choice(), which.M, trial.parts)
        assert abs(own - goal) <= trial.parts * choices.layer_flops([trial.form.d, 1, 1]) / 2


def test_adam_is_torchs_with_a_rate_for_each_network():
    start = torch.randn(3, 4, generator=torch_stream(0, "start"))
    rates, target = torch.tensor([0.1, 0.01, 0.03]), torch.arange(4.0)
    ours = torch.nn.Parameter(start.clone())
    adam = Adam([([ours], rates)])
    for _ in descend(lambda b: (ours - b[0]).square().sum(1), [(target,)] * 10, adam, 10):
        pass
    for r in range(3):
        one = torch.nn.Parameter(start[r].clone())
        torchs = torch.optim.Adam([one], float(rates[r]))
        for t in range(10):
            torchs.param_groups[0]["lr"] = float(rates[r]) * (1 - t / 10)
            torchs.zero_grad()
            (one - target).square().sum().backward()
            torchs.step()
        torch.testing.assert_close(ours[r], one, rtol=1e-5, atol=1e-6)


def test_effective_experts_and_components():
    chosen = torch.zeros(6, 4, dtype=torch.bool)
    chosen[:3, [0, 1]] = True
    chosen[3:, 2] = True
    assert together(chosen).tolist() == [0, 0, 1, 2]
    load = torch.tensor([1, 1, 1.0]) / 3
    assert float(effective_experts(chosen)) == pytest.approx(float(torch.special.entr(load).sum().exp()))


def test_shaken_is_zero_for_equal_batches_and_leaves_the_network():
    x, y = inputs(2, 30), torch.randn(2, 30, 1, generator=torch_stream(1, "inputs"))
    net = ChosenMoE(FORM, Choice(), 8, [0, 1])
    before = [p.clone() for p in net.parameters()]
    losses = partial(which._losses_and_sets, net, False)
    found = paired_steps(net, losses, (x, y), 0.1, draws=2, batch=10, seed=0)
    assert (found.ratio > 0).all() and ((found.flips >= 0) & (found.flips <= 1)).all()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    plain = PlainNet(FORM, 2, [0, 1])
    assert not paired_steps(
        plain, partial(which._losses_and_sets, plain, False), (x, y), 0.1, draws=1, batch=5, seed=0
    ).flips.any()


@pytest.mark.parametrize("name", TRIALS)
def test_tasks_have_unit_variance_or_signs_and_clusters_for_what_is_routed(name, request):
    if name == "fashion":
        request.getfixturevalue("garments")
    trial, (train, test) = TRIALS[name], sampled(name, 0)
    assert test.x.shape == (N_TEST, trial.parts, trial.form.d) and test.y.shape == (N_TEST, 1)
    assert len(train.cluster) == len(train.x) * (1 if trial.form.whole else trial.parts)
    if trial.signs:
        assert set(test.y.flatten().tolist()) == {-1.0, 1.0}
    else:
        assert float(test.y.var()) == pytest.approx(1, abs=0.25)


def test_a_training_alone_is_the_same_as_beside_others():
    sets = which.data("one function", [0, 1])
    both, first = which.trained("one function", "linear, top 2", [0, 1], [(0.01, 1.0), (0.03, 3.0)], sets, 15)
    alone = which.data("one function", [1])
    one, own = which.trained("one function", "linear, top 2", [1], [(0.03, 3.0)], alone, 15)
    torch.testing.assert_close(first[:, 1], own[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.experts.W[0][1], one.experts.W[0][0], rtol=1e-3, atol=1e-4)


def test_frozen_and_hash_keep_their_router():
    sets = which.data("one function", [0])
    for name in ("frozen", "hash"):
        start = which.network("one function", name, [0], sets.train).router.W[0]
        net, _ = which.trained("one function", name, [0], [(0.01, 1.0)], sets, 10)
        assert torch.equal(net.router.W[0], start)


def test_bad_choices_are_named():
    for name, value in {"scores": "quadratic", "noise": "white", "start": "kmeans", "k": 0, "scale": -1.0}.items():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            Choice(**{name: value})
    with pytest.raises(ValueError, match="^noise: expected noise if and only if"):
        Choice(noise="gumbel")
    with pytest.raises(ValueError, match="^start: expected a random start"):
        Choice(scores="cosine", start="zero")
    with pytest.raises(ValueError, match="^k: expected at most M = 4"):
        ChosenMoE(FORM, Choice(k=5), 4, [0])
    with pytest.raises(ValueError, match="^samples: expected inputs if and only if"):
        ChosenMoE(FORM, Choice(start="samples"), 4, [0])
    with pytest.raises(ValueError, match="^chosen: expected at least one"):
        effective_experts(torch.zeros(3, 2, dtype=torch.bool))
    net = ChosenMoE(FORM, Choice(), 8, [0])
    with pytest.raises(ValueError, match="^rate: expected"):
        paired_steps(net, None, (inputs(1), inputs(1)), 0.0, draws=1, batch=2, seed=0)


def test_data_of_several_seeds_stand_in_their_places():
    sets = which.data("tokens", [0, 2])
    assert isinstance(sets.test, Part) and torch.equal(sets.test.x[1], sampled("tokens", 2)[1].x)


def test_holm_by_hand_and_bad_input():
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]).tolist() == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="^p: expected numbers from 0 to 1"):
        holm([1.2])


@pytest.mark.parametrize("scores", ["linear", "perturbed", "cosine"])
def test_null_directions_of_islands(scores):
    for rule, k, islands in ((topk_softmax, 2, True), (softmax_topk, 1, False)):
        moe, x = coselection.islands(scores, rule, k, 3, (3, 3), dead=1, seed=4)
        pi, _ = moe.gates(x[None], RNG())
        sizes = together(pi[0] > 0).bincount().tolist() if islands else [7]
        assert coselection.measured_nullity(moe, x) == coselection.router_nullity(scores, 3, sizes)


def test_rows_where_experts_agree_do_not_blur_the_count():
    moe, x = coselection.islands("linear", topk_softmax, 2, 3, (5,), seed=928537)
    size = coselection.router_jacobian(moe, x).norm(dim=1)
    assert size.min() < coselection.SMALL * size.max(), "a row that has to be left out"
    assert coselection.measured_nullity(moe, x) == coselection.router_nullity("linear", 3, [5])


def test_jacobian_of_the_router_is_that_of_finite_differences():
    moe, x = coselection.islands("linear", softmax_topk, 2, 3, (4,), seed=1)
    J, step = coselection.router_jacobian(moe, x[:5]), 1e-6
    with torch.no_grad():
        value = moe(x[None, :5, None], RNG())[0][0, :, 0]
        moe.router.W[0][0, 0, 2, 1] += step
        moved = moe(x[None, :5, None], RNG())[0][0, :, 0]
    torch.testing.assert_close(J[:, 2 * 3 + 1], (moved - value) / step, rtol=1e-4, atol=1e-5)


def test_selected_pairs_are_those_of_a_grid():
    """On a fine grid of the square all pairs are met that are selected on an open set, and no others."""
    rng = torch.Generator().manual_seed(5)
    W, b = torch.randn(5, 2, generator=rng), torch.tensor([0.0, 0.0, 0.0, 0.0, -40.0])
    side = torch.linspace(-10, 10, 600)
    top = (torch.cartesian_prod(side, side) @ W.T + b).topk(2).indices.sort(1).values.unique(dim=0)
    found = coselection.selected_pairs(W, b)
    assert found.nonzero()[:, 1].view(-1, 2).tolist() == top.tolist()
    assert coselection.never_selected(W, b) == 5 - len(top.unique()) == 1
    assert together(found).bincount().tolist() == [4, 1]


def test_vectors_on_a_line_part_the_experts_of_connected_inputs():
    W = torch.tensor([-2.0, -1.0, 1.0, 2.0])[:, None] * torch.tensor([[1.0, 3.0]])
    assert together(coselection.selected_pairs(W, torch.zeros(4))).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("angle", [0.1, 1.0, 3.0])
def test_share_of_a_turned_vector_in_closed_form(angle):
    """Two experts: the angle by which the difference of the vectors turns, over pi; a quarter turn: a new score."""
    assert coselection.turned_share(2, angle) == pytest.approx(math.acos((math.cos(angle) + 1) / 2) / math.pi)
    M = 7  # a quarter turn: old and new score are independent; one is the largest of M + 1, the other not second
    assert coselection.turned_share(M, math.pi / 2) == pytest.approx(2 * (M - 1) / (M * (M + 1)))


def test_bad_islands_and_links_are_named():
    with pytest.raises(ValueError, match="^sizes: expected one or two"):
        coselection.islands("linear", topk_softmax, 2, 3, (1, 3))
    with pytest.raises(ValueError, match="^scores: expected one of"):
        coselection.component_nullity("heads", 3, 2)
    with pytest.raises(ValueError, match="^angle: expected a number from 0"):
        coselection.turned_share(3, math.pi)
    with pytest.raises(ValueError, match="^claim_id: expected an id"):
        claims.link("book-nothing")


def test_links_lead_to_the_chapter_of_the_card():
    assert claims.link("smooth-prop-1").startswith('<a href="14_order_of_operations.html#claim-smooth-prop-1">')


def test_least_squares_solves_one_function_to_the_noise():
    assert all(0 < e < 0.05 for e in which.least_squares("one function"))
