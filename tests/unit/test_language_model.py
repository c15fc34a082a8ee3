"""The language model: what it may see, what it computes, and what is trained."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from moe_book.experiments import language_runs as language
from moe_theory.measure.ngrams import ngram_bits
from moe_theory.models.language import Dense, LanguageModel, Mixture, TokenRouter, dense_width
from moe_theory.models.rules import topk_softmax
from moe_theory.training import passages as training
from moe_theory.training.passages import evaluated, passages, train_language

SYMBOLS, LENGTH, D, H = 11, 12, 8, 6
KINDS = ["linear", "cosine", "perturbed"]


def model(**how):
    return LanguageModel(SYMBOLS, LENGTH, D, H, **how)


def tokens(seed=0, n=5):
    return torch.randint(SYMBOLS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def mixture(M=6, k=2, kind="linear"):
    rng = torch.Generator().manual_seed(1)
    return Mixture(D, H, M, k, TokenRouter(kind, D, M, 4, rng), rng)


@pytest.mark.parametrize("how", [{}, *({"experts": 6, "kind": kind} for kind in KINDS)])
def test_no_logit_sees_a_later_character(how):
    """A changed character changes the logits at its place and after it, and none before, bit for bit nearly."""
    net, x = model(**how), tokens()
    for at in (0, 5, LENGTH - 1):
        changed = x.clone()
        changed[:, at] = (changed[:, at] + 1) % SYMBOLS
        moved = (net(changed) - net(x)).abs().amax((0, 2))
        assert moved[:at].numel() == 0 or moved[:at].max() < 1e-5
        assert moved[at] > 1e-2


@pytest.mark.parametrize("how", [{}, {"experts": 6}])
def test_a_shorter_text_is_read_alike(how):
    """What a text's first half gets does not depend on whether there is a second."""
    net, x = model(**how), tokens()
    assert torch.allclose(net(x)[:, :7], net(x[:, :7]), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 6])
def test_grouped_experts_are_the_formula(kind, k):
    """Sorted by expert or all computed and weighted with gates of the rule: one output, one gradient."""
    layer = mixture(k=k, kind=kind)
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(2), requires_grad=True)
    pi = topk_softmax(layer.router(x), k)
    hidden = torch.relu(torch.einsum("nd,mhd->nmh", x, layer.hidden.W) + layer.hidden.b)
    every = torch.einsum("nmh,mdh->nmd", hidden, layer.out.W) + layer.out.b
    formula, weight = (pi[..., None] * every).sum(1), torch.randn(40, D)
    assert torch.allclose(layer(x), formula, atol=1e-5)
    grads = [
        torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()], allow_unused=True)
        for y in (layer(x), formula)
    ]
    for one, other in zip(*grads, strict=True):
        zero = torch.zeros(())
        assert torch.allclose(zero if one is None else one, zero if other is None else other, atol=1e-4)


def test_an_expert_without_tokens():
    """It answers nobody and gets the gradient 0."""
    layer = mixture()
    with torch.no_grad():
        layer.router.beta1[3:] = 0
        layer.router.beta1[:3, 0], layer.router.beta1[:3, 1:] = 9.0, 0
    x = torch.randn(20, D).abs() + 0.1
    layer(x).sum().backward()
    assert layer.hidden.W.grad[3:].abs().max() == 0 and layer.out.b.grad[:3].abs().max() > 0


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_router_gets_no_gradient(kind, frozen):
    """And a trainable one does, in each block; all else is trained under both."""
    net = model(experts=6, kind=kind, frozen=frozen)
    F.cross_entropy(net(tokens()).flatten(0, 1), tokens(1).flatten()).backward()
    for name, p in net.named_parameters():
        routing = ".router." in name
        assert (p.grad is None) == (frozen and routing), name
        if not (frozen and routing):
            assert p.grad.abs().max() > 0, name


def test_models_of_one_seed_start_alike():
    """Learned and frozen routers have one start; a dense model shares what lies outside its layers."""
    learned, frozen, dense = (dict(model(**h, seed=4).named_parameters()) for h in (
        {"experts": 6}, {"experts": 6, "frozen": True}, {}))  # fmt: skip
    assert all(torch.equal(p, frozen[name]) for name, p in learned.items())
    shared = [name for name in dense if not name.startswith("feed")]
    assert len(shared) > 8 and all(torch.equal(dense[name], learned[name]) for name in shared)
    other = dict(model(experts=6, seed=5).named_parameters())
    assert not torch.equal(other["feed.0.router.beta1"], learned["feed.0.router.beta1"])


def counted(layer, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    return counter.get_total_flops() / len(x)


@pytest.mark.parametrize(("M", "k"), [(4, 1), (6, 2), (32, 2), (8, 8)])
def test_equal_operations(M, k):
    """The matrix products of the mixture and of the dense layer of `dense_width`, as torch counts them."""
    x = torch.randn(64, D)
    of_mixture = counted(mixture(M, k), x)
    assert of_mixture == 4 * k * D * H + 2 * D * M
    assert counted(Dense(D, dense_width(H, M, k), torch.Generator()), x) == of_mixture


def test_bad_arguments():
    """They are named."""
    with pytest.raises(ValueError, match="k: expected at most M = 3 experts, got 4"):
        model(experts=3, k=4)
    with pytest.raises(ValueError, match="experts: expected an even number, got 5"):
        dense_width(H, 5, 2)
    with pytest.raises(ValueError, match="router: expected one of"):
        model(experts=4, kind="quadratic")


def test_training_reads_what_its_seed_draws():
    """Passages are pieces of the text; one seed, one training, whatever the model; a trained model knows the text."""
    text = (torch.arange(4000) % SYMBOLS).to(torch.uint8)
    for passage in passages(text, LENGTH, 3, 2, seed=0):
        assert passage.shape == (3, LENGTH + 1) and ((passage.diff() - 1) % SYMBOLS == 0).all()
    net = model(experts=4)
    first, *_, last = train_language(net, text, steps=60, batch=8, rate=0.02, seed=0)
    again = next(train_language(model(experts=4), text, steps=60, batch=8, rate=0.02, seed=0))
    assert first == again and last < first / 2
    other = next(train_language(model(experts=4), text, steps=60, batch=8, rate=0.02, seed=1))
    assert other != first


@pytest.mark.parametrize("frozen", [True, False])
def test_training_leaves_a_frozen_router_alone(frozen):
    """Bit for bit; what surrounds it moves."""
    net = model(experts=4, frozen=frozen)
    router, words = net.feed[1].router.beta1.clone(), net.words.W.clone()
    list(train_language(net, (torch.arange(400) % SYMBOLS).to(torch.uint8), steps=3, batch=4, rate=0.02, seed=0))
    assert torch.equal(net.feed[1].router.beta1, router) == frozen and not torch.equal(net.words.W, words)


def test_evaluation_is_the_mean_over_all_passages(monkeypatch):
    """Against the log-probabilities themselves, with a last chunk that is not full; and the share of hits."""
    net = model()
    text = torch.randint(SYMBOLS, (LENGTH * 7 + 5,), dtype=torch.uint8)
    monkeypatch.setattr(training, "CHUNK", 3)
    bits, hits = evaluated(net, text)
    rows = [text[i * LENGTH : (i + 1) * LENGTH + 1].long() for i in range(7)]
    p = torch.stack([net(r[None, :-1])[0].softmax(-1)[range(LENGTH), r[1:]] for r in rows])
    best = torch.stack([net(r[None, :-1])[0].argmax(-1) == r[1:] for r in rows])
    assert bits == pytest.approx(float(-p.log2().mean()), rel=1e-5)
    assert hits == pytest.approx(float(best.float().mean()))


def test_a_mute_model_needs_the_logarithm_of_the_alphabet():
    """All logits equal: log2 of the number of symbols, for any text."""
    net = model()
    with torch.no_grad():
        net.next.W.zero_()
    assert evaluated(net, torch.zeros(100, dtype=torch.uint8))[0] == pytest.approx(math.log2(SYMBOLS), rel=1e-6)


def test_what_the_routers_read():
    """As many tokens and experts for each block as the text has, the first expert that of the largest logit."""
    net = model(experts=5, k=3)
    found = net.routed(tokens())
    assert len(found) == 2
    for (x, m), feed in zip(found, net.feed, strict=True):
        assert x.shape == (5 * LENGTH, D) and m.shape == (5 * LENGTH, 3)
        assert torch.equal(m[:, 0], feed.router(x).argmax(-1))


def direct(train, test, order):
    """Witten and Bell's interpolation, character by character."""

    def p(context, c):
        shorter = p(context[1:], c) if context else 1 / 64
        if not context:
            counts = Counter(train)
        else:
            n = len(context)
            counts = Counter(train[i + n] for i in range(len(train) - n) if tuple(train[i : i + n]) == context)
        N, kinds = sum(counts.values()), len(counts)
        return (counts[c] + kinds * shorter) / (N + kinds) if N else shorter

    at = range(order - 1, len(test))
    return -sum(math.log2(p(tuple(test[i - order + 1 : i]), test[i])) for i in at) / len(at)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_ngrams(order):
    """Against counting with a dictionary; strings the training text lacks are among them."""
    draw = torch.Generator().manual_seed(3)
    train, test = (torch.randint(4, (n,), generator=draw).to(torch.uint8) for n in (300, 80))
    test[10] = 60
    assert ngram_bits(train, test, order) == pytest.approx(direct(train.tolist(), test.tolist(), order), rel=1e-12)


def test_bad_order():
    with pytest.raises(ValueError, match="order: expected at most 10, got 11"):
        ngram_bits(torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8), 11)


def test_information_is_that_of_the_joint_table():
    """Against the double sum; 0 for independent labels, the entropy for a label with itself; symmetric."""
    draw = torch.Generator().manual_seed(5)
    a = torch.randint(5, (400,), generator=draw)
    b = torch.where(torch.rand(400, generator=draw) < 0.6, a, torch.randint(5, (400,), generator=draw))
    p = Counter(zip(a.tolist(), b.tolist(), strict=True))
    one, other = Counter(a.tolist()), Counter(b.tolist())
    direct = sum(n / 400 * math.log2(n * 400 / (one[i] * other[j])) for (i, j), n in p.items())
    assert language.information(a, b) == pytest.approx(direct, rel=1e-9)
    assert language.information(b, a) == pytest.approx(direct, rel=1e-9)
    own = -sum(n / 400 * math.log2(n / 400) for n in one.values())
    assert language.information(a, a) == pytest.approx(own, rel=1e-9)
    grid = torch.arange(60)
    assert language.information(grid % 4, grid % 5) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("M", [4, 32])
def test_kinds_of_a_row_start_and_read_alike(M):
    """The first batch costs learned and frozen routers of one seed the same bits, and those of another others."""
    key = dict(d=8, experts=M, steps=10, seed=2)
    first = {}
    for kind, seed in (("learned", 2), ("frozen", 2), ("frozen", 3)):
        begun = key | {"kind": kind, "seed": seed}
        first[kind, seed] = next(iter(language.trained(language.build_model(begun), begun)))
    assert first["learned", 2] == first["frozen", 2] != first["frozen", 3]


def test_what_is_seen_of_a_dense_model_is_nothing():
    key = dict(kind="dense", d=8, experts=4, steps=10, seed=0)
    assert language.seen(language.build_model(key)) == dict(of_this=[], of_last=[], of_next=[], spread=[])
