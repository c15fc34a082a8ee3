"""The estimators of smooth2025, 5.3, against their definition computed one example at a time."""

import pytest
import torch

from moe_theory.measure.stability import draw_batches, estimate, estimate_loop, squared_difference
from moe_theory.models.layers import Linear, Words
from moe_theory.models.rules import RULES, Rule, sampled_topk, topk_softmax
from moe_theory.models.sparse import SparseCNN, SparseMLP, SparseTransformer


def network(kind: str, rule: Rule, heads: str = "single"):
    """A small network in float64, and 40 examples of three classes."""
    rng = torch.Generator().manual_seed(5)
    y = torch.randint(3, (40,), generator=rng)
    if kind == "mlp":
        return SparseMLP(6, 3, 4, rule, 2, heads, seed=1).double(), torch.randn(40, 6, generator=rng).double(), y
    if kind == "cnn":
        x = torch.randn(40, 1, 8, 8, generator=rng).double()
        return SparseCNN(8, 3, 4, rule=rule, k=2, heads=heads, seed=1).double(), x, y
    tokens = torch.randint(9, (40, 5), generator=rng)  # few words: some occur twice in a text
    return SparseTransformer(9, 5, 6, 3, 4, rule=rule, k=2, heads=heads, seed=1).double(), tokens, y


@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize(("rule", "heads"), [(r, "single") for r in RULES.values()] + [(sampled_topk, "multi")])
def test_stacked_estimates_are_the_definition(kind, rule, heads):
    model, x, y = network(kind, rule, heads)
    x, y = x[:12], y[:12]  # the definition is slow, and counts every example and pair of batches of 8
    fast, slow = (f(model, x, y, rate=0.5, draws=3, batch=8, seed=2) for f in (estimate, estimate_loop))
    for name, a, b in zip(fast._fields, fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14, msg=name)
    torch.testing.assert_close(fast.eps, fast.L * fast.distance)
    assert (fast.beta > 0).all()
    differs = (fast.eps_independent - fast.eps).abs().max() > 1e-6
    assert differs == (rule == sampled_topk)


def test_selected_sets_flip_for_long_steps_and_only_with_a_router_that_moves():
    for k, moves in ((1, False), (2, True), (4, False)):
        model = SparseMLP(6, 3, 4, topk_softmax, k, "single", seed=1)
        _, x, y = network("mlp", topk_softmax)
        flips = estimate(model, x.float(), y, rate=5.0, draws=10, batch=8).flips
        assert bool((flips > 0).any()) == moves


def test_a_layer_left_out_would_be_noticed(monkeypatch):
    import moe_theory.measure.stability as module

    model, x, y = network("mlp", topk_softmax)
    whole = estimate(model, x, y, rate=0.5, draws=2, batch=8).beta
    monkeypatch.setattr(
        module, "squared_difference", lambda layer, *a: squared_difference(layer, *a) * (not isinstance(layer, Linear))
    )
    assert (estimate(model, x, y, rate=0.5, draws=2, batch=8).beta < whole).all()


def test_batches_hold_no_example_twice():
    model, _, _ = network("mlp", topk_softmax)
    plan = draw_batches(model, 40, 5, 40, seed=0)
    assert plan.index.shape == (5, 3, 40) and plan.noise.shape == (5, 4, 40, 4)
    assert (plan.index.sort(-1).values == torch.arange(40)).all()


def test_noise_is_drawn_where_it_is_read_after_the_same_batches():
    plain, noisy = (draw_batches(network("mlp", rule)[0], 40, 2, 8, seed=0) for rule in (topk_softmax, sampled_topk))
    assert (plain.noise == 0).all() and plain.noise.shape == noisy.noise.shape
    assert noisy.noise.unique().numel() == noisy.noise.numel()
    assert (plain.index == noisy.index).all()


def test_bad_input_to_the_estimators_is_named():
    model, x, y = network("mlp", topk_softmax)
    for bad in ({"rate": 0.0}, {"draws": 0}, {"batch": 41}, {"batch": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}: "):
            estimate(model, x, y, **{"rate": 0.1, "draws": 2, "batch": 8, **bad})
    model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"^model: .*\['extra'\]"):
        estimate(model, x, y, rate=0.1, draws=2, batch=8)


def test_bad_model_that_does_not_move_is_named():
    model, x, y = network("mlp", topk_softmax)
    with pytest.raises(ValueError, match="^model: expected two steps"):
        estimate(model, x[:1].expand(40, -1), y[:1].expand(40), rate=0.1, draws=2, batch=8)


class Twice(torch.nn.Module):
    """A module of one's own, with a layer that is called three times: twice on vectors, once on words."""

    noisy = False

    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        self.words, self.same, self.out = Words(9, 4, rng), Linear(4, 4, rng), Linear(4, 3, rng)

    def noise_shape(self, n):
        return n, 3

    def forward(self, tokens, noise):
        z = torch.tanh(self.same(self.words(tokens))).mean(1)
        h = self.out(torch.tanh(self.same(torch.tanh(self.same(z + self.words(tokens[:, 0]))))))
        return h, h.softmax(-1)


def test_a_layer_called_several_times_is_counted_every_time():
    model, (_, tokens, y) = Twice().double(), network("transformer", topk_softmax)
    fast, slow = (f(model, tokens, y, rate=0.5, draws=3, batch=8, seed=2) for f in (estimate, estimate_loop))
    for name, a, b in zip(fast._fields, fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14, msg=name)


def test_bad_models_are_named():
    def refused(model, match):
        with pytest.raises(ValueError, match=match):
            estimate(model, x, y, rate=0.1, draws=2, batch=8)

    model, x, y = network("mlp", topk_softmax)
    refused(torch.nn.Linear(6, 3), r"^model: .*Routed.*got Linear without \['noisy', 'noise_shape'\]")
    model.forward = lambda x, noise: model.block(x, noise)[0]
    refused(model, "^model: expected logits and gates")
    model, x, y = network("mlp", topk_softmax)
    model.block.experts.out.W = model.block.experts.hidden.W
    refused(model, "^model: expected every parameter in one layer")
    model, x, y = Twice().double(), *network("transformer", topk_softmax)[1:]
    model.forward = lambda tokens, noise: (model.out(model.words(tokens.T).mean(0)), noise)
    refused(model, "^model: expected words to read")
