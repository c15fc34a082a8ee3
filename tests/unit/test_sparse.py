"""Select rules, routers, layers and the three sparse networks."""

import math

import pytest
import torch
import torch.nn.functional as F

from moe_theory.models.layers import Fan, Linear, Stack, Words
from moe_theory.models.routers import MLPRouter, MultiHeadRouter, random_router
from moe_theory.models.rules import gumbel, sampled_topk, softmax_topk, topk_set, topk_softmax
from moe_theory.models.sparse import SparseBlock, SparseCNN, SparseMLP, SparseTransformer, windows
from moe_theory.tasks.gaussians import GaussianClasses


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


H = torch.randn(50, 6, generator=rng(1), dtype=torch.float64)


@pytest.mark.parametrize("k", range(1, 7))
def test_the_two_orders_differ_by_the_kept_mass(k):
    before, after = topk_softmax(H, k), softmax_topk(H, k)
    kept = after.sum(-1, keepdim=True)
    torch.testing.assert_close(before.sum(-1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(after, kept * before)
    assert ((before > 0).sum(-1) == k).all()
    assert (kept >= k / 6 - 1e-12).all() and (kept <= 1 + 1e-12).all()
    assert (kept < 1 - 1e-6).all() == (k < 6)


def test_the_largest_logits_are_kept_and_gates_are_softmax_values():
    h = torch.tensor([[math.log(1.0), math.log(4.0), math.log(3.0), math.log(2.0)]], dtype=torch.float64)
    torch.testing.assert_close(softmax_topk(h, 2), torch.tensor([[0, 0.4, 0.3, 0]], dtype=torch.float64))
    torch.testing.assert_close(topk_softmax(h, 2), torch.tensor([[0, 4 / 7, 3 / 7, 0]], dtype=torch.float64))
    noise = torch.tensor([[10.0, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(sampled_topk(h, 2, noise), torch.tensor([[0.1, 0.4, 0, 0]], dtype=torch.float64))


def test_gumbel_noise_has_the_gumbel_law():
    sample = gumbel((200_000,), rng(2), torch.float64)
    for t in (-1.0, 0.0, 1.0, 3.0):
        p = math.exp(-math.exp(-t))
        assert abs(float((sample <= t).double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / 200_000)


@pytest.mark.parametrize("rule", [softmax_topk, topk_softmax, lambda h, k: sampled_topk(h, k, torch.zeros_like(h))])
@pytest.mark.parametrize(("h", "k", "named"), [(H, 0, "k"), (H, 7, "k"), (H * math.nan, 2, "h")])
def test_bad_input_to_a_rule_is_named(rule, h, k, named):
    with pytest.raises(ValueError, match=f"^{named}: "):
        rule(h, k)


def test_bad_rule_or_missing_noise_is_named():
    with pytest.raises(ValueError, match="^rule: .*'topk_softmax'"):
        SparseBlock(7, 5, 3, rule="topk_softmax", k=2, heads="single", activation="relu", seed=1)
    with pytest.raises(ValueError, match="^noise: "):
        sampled_topk.gates(H, 2)


def test_heads_share_nothing_and_a_single_head_shares_its_hidden_layer():
    x = torch.randn(5, 7, generator=rng(3))
    for router, shared in ((MultiHeadRouter(7, 4, 3, 0), False), (MLPRouter(7, 4, 3, 0), True)):
        g = torch.autograd.grad(router(x)[:, 1].sum(), list(router.parameters()))
        for name, part in zip(dict(router.named_parameters()), g, strict=True):
            rows = part.flatten(1).abs().sum(1) > 0 if part.ndim > 1 else part.abs() > 0
            expected = torch.arange(len(rows)) == 1
            assert (rows == expected).all() != (shared and name.startswith("hidden")), name
    assert MultiHeadRouter(7, 4, 3, 0)(x).shape == (5, 4)


@pytest.mark.parametrize("kind", ["linear", "one trunk", "heads", "cosine"])
def test_random_routers_map_inputs_to_logits(kind):
    x = torch.randn(4, 5, generator=rng(3))
    h = random_router(kind, 5, 3, 1)(x)
    assert h.shape == (4, 3) and (h.std(0) > 0).all()
    torch.testing.assert_close(h, random_router(kind, 5, 3, 1)(x))
    assert not torch.equal(h, random_router(kind, 5, 3, 2)(x))
    with pytest.raises(ValueError, match="kind: expected one of .*got 'none'"):
        random_router("none", 5, 3, 1)


def test_layers_side_by_side_are_the_layers_one_by_one():
    a = torch.randn(9, 3, 5, generator=rng(4))
    stack, fan = Stack(5, 2, 3, rng(5)), Fan(5, 2, 3, rng(5))
    for m in range(3):
        torch.testing.assert_close(stack(a)[:, m], F.linear(a[:, m], stack.W[m], stack.b[m]))
        torch.testing.assert_close(fan(a[:, 0])[:, m], F.linear(a[:, 0], fan.W[m], fan.b[m]))
    tokens = torch.tensor([[0, 2], [2, 1]])
    words = Words(3, 4, rng())
    assert (words(tokens)[1, 0] == words.W[2]).all()


@pytest.mark.parametrize(
    "layer", [lambda: Linear(0, 1, rng()), lambda: Stack(1, 0, 1, rng()), lambda: Words(0, 1, rng())]
)
def test_bad_sizes_of_layers_are_named(layer):
    with pytest.raises(ValueError, match="^(d|out|words): expected an integer >= 1, got 0"):
        layer()


@pytest.mark.parametrize("rule", [softmax_topk, topk_softmax, sampled_topk])
def test_the_block_is_the_weighted_sum_of_its_chosen_experts(rule):
    block = SparseBlock(7, 5, 3, rule=rule, k=2, heads="single", activation="relu", seed=1)
    x, noise = torch.randn(4, 7, generator=rng(6)), gumbel((4, 5), rng(7))
    out, pi = block(x, noise)
    chosen = topk_set(block.router(x) + (noise if rule == sampled_topk else 0), 2)
    for i in range(4):
        total = 0
        for m in chosen[i].nonzero()[:, 0]:
            first, second = block.experts.hidden, block.experts.out
            total = total + pi[i, m] * (second.W[m] @ torch.relu(first.W[m] @ x[i] + first.b[m]) + second.b[m])
        torch.testing.assert_close(out[i], total)
    assert ((pi > 0) == chosen).all()
    block.scale = 3.0
    torch.testing.assert_close(block(x, noise)[0], 3 * out)


def test_bad_k_or_heads_of_a_block_are_named():
    for k, heads, named in ((0, "single", "k"), (6, "single", "k"), (2, "many", "heads")):
        with pytest.raises(ValueError, match=f"^{named}: "):
            SparseBlock(7, 5, 3, rule=topk_softmax, k=k, heads=heads, activation="relu", seed=1)


def test_products_with_windows_are_convolutions():
    network = SparseCNN(12, 10, 5, rule=topk_softmax, k=2, heads="single", seed=0)
    x = torch.randn(3, 1, 12, 12, generator=rng(8))
    z = F.relu(F.conv2d(x, network.first.W.view(8, 1, 5, 5), network.first.b, stride=2, padding=2))
    direct = F.relu(F.conv2d(z, network.second.W.view(8, 8, 2, 2), network.second.b, stride=2))
    read = {}
    network.block.register_forward_hook(lambda _, inputs, __: read.update(z=inputs[0]))
    network(x, torch.zeros(3, 5))
    # the block reads positions first, channels last
    torch.testing.assert_close(read["z"].view(3, 3, 3, 8).permute(0, 3, 1, 2), direct)
    assert windows(x, 5).shape == (3, 36, 25)


def test_a_network_is_the_same_in_training_and_in_evaluation_mode():
    network = SparseCNN(28, 10, 5, rule=topk_softmax, k=5, heads="single", seed=3).double()
    x = torch.randn(4, 1, 28, 28, generator=rng(2), dtype=torch.float64)
    one, two = (network.train(mode)(x, torch.zeros(4, 5))[0] for mode in (True, False))
    torch.testing.assert_close(one, two)


def test_bad_side_of_an_image_is_named():
    with pytest.raises(ValueError, match="^side: expected a multiple of 4, got 14"):
        SparseCNN(14, 10, 5, rule=topk_softmax, k=2, heads="single", seed=0)


def test_networks_give_logits_and_gates_and_read_the_noise_only_when_they_sample():
    cases = [
        (lambda rule: SparseMLP(8, 3, 5, rule, 2, "multi", seed=2), torch.randn(4, 8, generator=rng(9))),
        (
            lambda rule: SparseCNN(8, 3, 5, rule=rule, k=2, heads="multi", seed=2),
            torch.randn(4, 1, 8, 8, generator=rng(9)),
        ),
        (
            lambda rule: SparseTransformer(20, 6, 8, 3, 5, rule=rule, k=2, heads="multi", seed=2),
            torch.randint(20, (4, 6), generator=rng(9)),
        ),
    ]
    for make, x in cases:
        for rule in (topk_softmax, sampled_topk):
            network = make(rule)
            one, two = (gumbel(network.noise_shape(4), rng(seed)) for seed in (10, 11))
            (F1, pi), (F2, _) = network(x, one), network(x, two)
            assert F1.shape == (4, 3) and pi.shape == one.shape
            assert torch.equal(F1, F2) == (rule == topk_softmax)


def test_gaussian_classes_have_their_means_and_scales():
    task = GaussianClasses(classes=3, d=50, spread=1.0, seed=4)
    data = task.sample(4_000, seed=5)
    assert (torch.bincount(data.y) == 4_000).all()
    for c in range(3):
        own = data.x[data.y == c]
        assert (own.mean(0) - task.mean[c]).abs().max() < 5 * float(task.scale[c]) / math.sqrt(4_000)
        assert abs(float(own.std()) ** 2 - float(task.scale[c] ** 2 + task.mean[c].var())) < 0.2
    assert torch.equal(data.x, task.sample(4_000, seed=5).x)
    assert not torch.equal(data.x, task.sample(4_000, seed=6).x)


def test_bad_gaussian_classes_are_named():
    for bad in ({"classes": 1}, {"d": 0}, {"spread": 0.0}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
            GaussianClasses(**bad)
