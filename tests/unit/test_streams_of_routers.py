"""Streams of logits and of choices: counts that no cut changes, and numbers that are those of other routes."""

import math
from functools import reduce
from operator import add

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from moe_theory.diagnose import RouterStream, diagnose_choices, diagnose_router
from moe_theory.diagnose import arrays as module
from moe_theory.diagnose.arrays import linear_logits, spacing
from moe_theory.diagnose.tallies import ASKED, EDGES, Pairs, expected_within, in_bins, table_dispatch, table_entropy
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.models.rules import topk_set
from moe_theory.theory import kept_sets
from moe_theory.theory.kept_sets import keep_probability, kept_gap

DOUBLE = torch.float64


def randn(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def read(h, k, **options):
    return diagnose_router(h, k=k, **options).routers["router"]


def fed(h, k, cut, label=None):
    stream = RouterStream(h.shape[1], k)
    for at in range(0, len(h), cut):
        labels = {} if label is None else {"class": label[at : at + cut]}
        stream.add(h[at : at + cut], labels=labels)
    return stream


def same(one, other):
    for name in ("tokens", "loads", "gaps", "undecided", "flips", "dropped", "misled", "dispatch", "asked"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.expected == pytest.approx(other.expected, rel=1e-12)


# Cuts and shards


@pytest.mark.parametrize("cut", [70, 999, 7_000])
def test_a_stream_does_not_depend_on_its_cuts(monkeypatch, cut):
    monkeypatch.setattr(module, "ROWS", 512)
    h, label = randn(7_000, 6, dtype=torch.float32).bfloat16(), torch.arange(7_000) % 5
    whole, parts = (fed(h, 2, c, label).report(seed=3) for c in (10_000, cut))
    same(whole, parts)
    assert whole.changed == parts.changed and whole.asked == ASKED and whole.undecided > 0 and whole.flips > 0


def test_shards_add_up_in_any_order():
    h, label = randn(9_000, 6).float(), torch.arange(9_000) % 5
    a, b, c = (fed(own, 2, 1_000, mark) for own, mark in zip(h.split(3_000), label.split(3_000), strict=True))
    one, other = reduce(add, [a, b, c]).report(), (a + (c + b)).report()
    same(one, fed(h, 2, 9_000, label).report())
    same(one, other)
    assert one.changed == pytest.approx(other.changed, rel=1e-12)
    assert (RouterStream(6, 2) + a).report().gaps == a.report().gaps
    for wrong in (RouterStream(6, 3), RouterStream(6, 2, noise=0.1)):
        wrong.add(h[:10], labels={"class": label[:10]})
        with pytest.raises(ValueError, match="other: expected experts, k, noise"):
            a + wrong
    with pytest.raises(ValueError, match="other: expected RouterStream"):
        a + 1


def test_the_sample_is_uniform_over_the_tokens_and_over_shards():
    """Places of the tokens, which the logits carry, against the uniform law; two shards have half each."""
    n = 60_000
    h = torch.stack([torch.arange(n) / n + 1, torch.zeros(n)], 1).double()
    whole = fed(h, 1, 5_000)
    places = whole._sample.rows["scores"][:, 0].numpy() - 1
    assert len(set(places)) == ASKED and stats.kstest(places, "uniform").pvalue > 1e-4
    both = fed(h[: n // 2], 1, 5_000) + fed(h[n // 2 :], 1, 5_000)
    places = both._sample.rows["scores"][:, 0].numpy() - 1
    assert len(set(places)) == ASKED and stats.kstest(places, "uniform").pvalue > 1e-4


def test_noise_asked_of_a_sample_is_that_of_all():
    h = randn(30_000, 8)
    all_of_them = 1 - keep_probability(h, 2, scale=0.01)
    report = read(h, 2)
    assert report.asked == ASKED
    assert abs(report.changed - all_of_them.mean()) < 4 * all_of_them.std() / ASKED**0.5


def test_what_a_stream_keeps_does_not_grow():
    def kept(stream):
        sizes = [t.numel() for t in (*stream._sums.values(), *stream._sample.rows.values())]
        return sum(sizes) + len(stream._sample.keys) + sum(p.table().size for p in stream._labels.values())

    stream, sizes = RouterStream(6, 2), []
    for i in range(4):
        stream.add(randn(ASKED, 6, seed=i), labels={"class": torch.arange(ASKED) % 5})
        sizes.append(kept(stream))
    assert len(set(sizes)) == 1


def test_it_runs_on_one_thread_and_leaves_the_setting_as_it_was(monkeypatch):
    seen, before, gap_of = [], torch.get_num_threads(), module.gap_of
    monkeypatch.setattr(module, "gap_of", lambda *a: seen.append(torch.get_num_threads()) or gap_of(*a))
    try:
        torch.set_num_threads(2)
        read(randn(10, 3), 1)
        assert seen == [1] and torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="h: expected finite"):
            read(randn(10, 3) * math.inf, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_probability_to_be_kept_is_computed_on_one_thread(monkeypatch):
    seen, before, keeps = [], torch.get_num_threads(), kept_sets._keeps
    monkeypatch.setattr(kept_sets, "_keeps", lambda *a: seen.append(torch.get_num_threads()) or keeps(*a))
    try:
        torch.set_num_threads(2)
        keep_probability(randn(10, 3), 1, scale=1.0)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_batch_that_is_refused_leaves_no_trace():
    h, stream = randn(50, 4), RouterStream(4, 2)
    below = -torch.ones(50)
    for wrong in (dict(chosen=torch.full((50, 2), 3)), dict(labels={"a": below.long()}), dict(rounding=below)):
        with pytest.raises(ValueError, match="expected"):
            stream.add(h, **wrong)
    stream.add_choices(h.topk(2).indices)
    assert stream.report().tokens == 50


# Gaps, rounding and chance


def test_the_histogram_of_gaps_is_that_of_numpy():
    h = randn(3_000, 5).float().bfloat16()
    edges, counts = read(h, 2).gaps
    gaps = kept_gap(h.double(), 2).numpy()
    assert np.array_equal(np.histogram(gaps, np.array(edges)[:-1])[0], counts[:-1]) and sum(counts) == 3_000
    assert counts[0] == (gaps == 0).sum() > 0
    assert read(h, 5).gaps.counts[-1] == 3_000


@pytest.mark.parametrize("mean", [1e-12, 0.01, 1.0, 300.0])
def test_chance_from_a_histogram_is_that_of_single_tokens(mean):
    r = torch.exp(3 * randn(5_000)) / 10
    bins = in_bins(r)
    counts, sums = (torch.bincount(bins, w, minlength=len(EDGES) - 1) for w in (None, r))
    exact, found = float(-torch.expm1(-2 * r / mean).sum()), expected_within(counts, sums, mean)
    assert -1e-12 < found / exact - 1 < 7e-4


@pytest.mark.parametrize("c", [0.01, 0.3, 2.0])
def test_undecided_tokens_are_as_many_as_an_exponential_law_of_gaps_gives(c):
    """Drawn from that law of mean 1; the count's standard deviation is below its root."""
    gap = -torch.log(torch.rand(40_000, generator=torch.Generator().manual_seed(0), dtype=DOUBLE))
    h, stream = torch.stack([gap, 0 * gap], 1), RouterStream(2, 1)
    stream.add(h, rounding=torch.full_like(gap, c / 2))
    report = stream.report()
    assert report.undecided == int((gap <= c).sum())
    assert abs(report.expected - report.undecided) < 5 * (40_000 * c) ** 0.5
    assert not {f.name for f in report.findings} & {"ties"}


def test_where_nothing_is_decided_all_are_expected_unless_all_tie():
    for h, expected in ((randn(40, 3), 40), (torch.zeros(40, 3, dtype=DOUBLE), 0)):
        stream = RouterStream(3, 1)
        stream.add(h, rounding=torch.full((40,), 100.0))
        assert stream.report().expected == expected and stream.report().undecided == 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_rounded_once_are_within_the_limit_of_that(dtype):
    """And reach a good part of it; those added up in half precision, as numpy does, need the wider one."""
    x, W = randn(300, 512).to(dtype), (randn(16, 512, seed=1) / 20).to(dtype)
    h = (x.float() @ W.float().T).to(dtype)
    exact, once = linear_logits(x, W, dtype=dtype)
    share = (h.double() - exact).abs().amax(1) / once
    assert 0.3 < share.max() <= 1 and (once < linear_logits(x, W)[1] / 2).all()
    report = read(h, 2, x=x, W=W)
    gap = kept_gap(h.double(), 2)
    assert report.undecided == int((gap <= 2 * once).sum()) < int((gap <= 2 * linear_logits(x, W)[1]).sum())


def test_logits_added_up_in_half_precision_have_the_wider_limit():
    x, W = randn(300, 64).half(), randn(4, 64, seed=1).half()
    total = np.zeros((300, 4), np.float16)
    for i in range(64):
        total += x[:, i : i + 1].numpy() * W[:, i].numpy()
    exact, loose = linear_logits(x, W)
    h = torch.from_numpy(total)
    assert ((h.double() - exact).abs().amax(1) > linear_logits(x, W, dtype=torch.float16)[1]).any()
    assert read(h, 1, x=x, W=W).undecided == int((kept_gap(h.double(), 1) <= 2 * loose).sum())


def test_the_spacing_of_a_format_is_that_of_numpy():
    h = torch.cat([randn(200), torch.tensor([1.0, 2.0, 1e-6, 0.0])]).double()[:, None]
    expected = np.spacing(h.half().float().numpy().astype(np.float16)[:, 0])
    h = h.half().double()
    assert np.array_equal(spacing(h, torch.float16)[:, 0].numpy(), np.abs(expected).astype(float))


def test_a_tie_over_the_cut_is_kept_as_often_as_its_sets_are_drawn():
    """Three equal ones of which one is selected, four of which two are, and a tie on one side of the cut."""
    rows = [[3, 2, 2, 2, 0], [1, 1, 1, 1, 0], [2, 2, 1, 1, 1], [5, 4, 3, 2, 1]]
    expected = [2 / 3, 5 / 6, 0, 0]
    for row, flips in zip(rows, expected, strict=True):
        assert read(torch.tensor([row], dtype=DOUBLE) - 7, 2).flips == pytest.approx(flips, abs=1e-14)
    assert read(torch.tensor([[1.0, 1.001, 0.0]]), 1, resolution=torch.bfloat16).flips == pytest.approx(0.5)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_flips_are_those_of_logits_before_they_were_rounded(k, exact):
    """Binomial bounds at five deviations; from logits as recorded, and from exact ones with the format named."""
    n = 30_000
    h = randn(n, 16).float()
    recorded = h.bfloat16()
    truth = float((topk_set(h, k) != topk_set(recorded, k)).any(1).double().mean())
    found = read(h, k, resolution=torch.bfloat16).flips if exact else read(recorded, k).flips
    assert truth > 0.002 and abs(found - truth) < 5 * (2 * truth / n) ** 0.5


def test_flips_of_scores_that_are_no_numbers_of_a_format():
    """Sigmoids of rounded logits with a bias: errors on no common grid, with a width for each score."""
    n, k = 40_000, 4
    h, bias = randn(n, 16).float(), randn(16, seed=1) / 5
    recorded = h.bfloat16()
    p = recorded.double().sigmoid()
    truth = (topk_set(h.double().sigmoid() + bias, k) != topk_set(p + bias, k)).any(1).double().mean()
    width = spacing(recorded, torch.bfloat16) * p * (1 - p)
    found = read(recorded, k, scores=p + bias, resolution=width).flips
    assert abs(found - truth) < 5 * (truth / ASKED) ** 0.5 and found > truth / 2


@pytest.mark.parametrize("ratio", [2.0, 30.0])
def test_a_deviation_for_each_logit_is_that_of_draws(ratio):
    h, draws = randn(3, 9), 100_000
    scale = 0.5 * ratio ** -torch.rand(3, 9, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    noisy = h[:, None] + scale[:, None] * randn(3, draws, 9, seed=1)
    share = (topk_set(noisy, 3) == topk_set(h, 3)[:, None]).all(-1).double().mean(1)
    found = keep_probability(h, 3, scale=scale)
    assert ((share - found).abs() < 5 * (found * (1 - found) / draws).sqrt()).all()


def test_a_number_is_a_deviation_for_all():
    h = randn(40, 9)
    found = keep_probability(h, 3, scale=0.25)
    for same_for_all in (torch.tensor(0.25), torch.full((9,), 0.25), torch.full((40, 1), 0.25)):
        assert torch.equal(keep_probability(h, 3, scale=same_for_all), found)


@pytest.mark.parametrize("scale", [torch.ones(3), -torch.ones(4), torch.zeros(2, 4), torch.full((4,), torch.inf), 0.0])
def test_bad_deviations_are_named(scale):
    with pytest.raises(ValueError, match="scale: expected"):
        keep_probability(randn(2, 4), 1, scale=scale)


# Scores, choices


def test_scores_select_and_logits_come_first():
    """A bias and a group left out; tokens are wanted where the scores are largest."""
    h, bias = randn(500, 8), randn(8, seed=1)
    scores = (h.sigmoid() + bias).index_fill(1, torch.arange(4, 6), -math.inf)
    chosen = topk_set(scores, 2)
    numbers = scores.topk(2).indices.flip(1)
    for way in (chosen, numbers, numbers.int(), None):
        report = read(h, 2, scores=scores, chosen=way, labels={"first": h.masked_fill(~chosen, -9).argmax(1)})
        assert {4, 5} <= set(report.dead) and not report.misled and not report.dropped
        assert report.dispatch["first"].entropy == 0
    assert read(h, 2, scores=scores, chosen=topk_set(h, 2)).misled > 0.5
    assert 0 < read(h, 2, scores=scores).changed < 0.2
    with pytest.raises(ValueError, match="scores: expected finite ones at 3 experts of each token"):
        read(h, 3, scores=torch.full_like(h, -math.inf).index_fill(1, torch.arange(2), 0))


def test_choices_alone_have_the_loads_of_their_logits():
    h, label = randn(700, 12), torch.arange(700) % 3
    numbers = h.topk(3).indices
    known = read(h, 3, labels={"class": label})
    for way in (numbers, numbers.int(), numbers.to(torch.uint8), numbers.numpy().astype(np.uint16), numbers.tolist()):
        found = diagnose_choices(way, 12, labels={"class": label}).routers["router"]
        assert (found.loads, found.busiest, found.dispatch) == (known.loads, known.busiest, known.dispatch)
        assert all(math.isnan(getattr(found, name)) for name in ("undecided", "expected", "flips", "changed", "misled"))
        assert not found.findings and not sum(found.gaps.counts)
    layers = diagnose_choices(numbers[:, None].expand(-1, 2, -1), 12).routers
    assert list(layers) == ["layer 0", "layer 1"] and layers["layer 1"].loads == known.loads


def test_choices_of_no_expert_are_dropped_and_the_next_one_is_the_first():
    numbers = torch.tensor([[-1, 2], [1, -1], [-1, -1], [0, 1]]).repeat(500, 1)
    report = diagnose_choices(numbers, 4, labels={"own": torch.tensor([2, 1, 7, 0]).repeat(500)}).routers["router"]
    assert report.dropped == 0.75 and report.loads == (0.25, 0.5, 0.25, 0)
    assert report.dispatch["own"].entropy == 0 and {f.name for f in report.findings} == {"dead", "dropped"}
    h = 5 * torch.eye(4, dtype=DOUBLE)[[2, 1, 0, 0]].repeat(500, 1)
    assert read(h, 2, chosen=numbers).dropped == 0.75


def test_shards_of_choices_add_up():
    numbers = randn(900, 6).topk(2).indices
    parts = []
    for own in numbers.split(300):
        parts.append(RouterStream(6, 2))
        parts[-1].add_choices(own)
    found = reduce(add, parts).report()
    assert found.loads == diagnose_choices(numbers, 6).routers["router"].loads and found.tokens == 900
    with pytest.raises(ValueError, match="stream: expected choices as in the batches before, got logits"):
        parts[0].add(randn(3, 6))
    with pytest.raises(ValueError, match="other: expected experts, k, noise, kind"):
        parts[0] + fed(randn(9, 6), 2, 9)


# Collapse


@pytest.mark.parametrize(("lead", "busiest", "effective"), [(2, 0.38, 6.6), (3, 0.73, 1.9), (4, 0.93, 1.15)])
def test_one_logit_ahead_is_a_collapse(lead, busiest, effective):
    h = randn(100_000, 64, dtype=torch.float32)
    h[:, 5] += lead
    report = read(h, 1)
    assert {f.name for f in report.findings} == {"collapse"}
    assert report.busiest == pytest.approx(busiest, abs=0.01) and report.effective == pytest.approx(effective, rel=0.02)
    for part in ("100,000 tokens", "1 of 64 experts", f"busiest {report.busiest:.3g}", "found: collapse"):
        assert part in repr(report)


def test_all_in_one_expert_is_a_collapse_and_idle_experts():
    h = torch.eye(64, dtype=DOUBLE)[[3]].expand(2_000, -1) * 5
    assert [f.name for f in read(h, 1).findings] == ["dead", "collapse"]
    both = diagnose_choices(torch.tensor([[3, 7]]).expand(2_000, -1), 64, collapse=0.001)
    assert both.named == {"dead", "collapse"} and both.routers["router"].used == 0


def test_the_limit_of_a_collapse_can_be_set_and_chance_is_no_collapse():
    h = randn(5_000, 16)
    h[:, 0] += 1
    used = read(h, 2).used
    for limit, named in ((used - 0.01, set()), (used + 0.01, {"collapse"})):
        assert diagnose_router(h, k=2, collapse=limit).named == named
    assert not diagnose_router(randn(5_000, 16), k=2, collapse=1.0)
    assert not diagnose_choices(torch.arange(6)[:, None] % 2, 64)
    assert math.isnan(read(randn(10, 3), 3).used) and math.isnan(read(h, 2, chosen=torch.full((5_000, 2), -1)).used)


@pytest.mark.parametrize(("M", "k"), [(6, 1), (6, 2), (8, 5)])
def test_busy_experts_by_chance_are_no_more_frequent_than_their_bound(M, k):
    """40,000 draws of 20 tokens; for rare ones the bound is the probability, but for two experts as busy at once."""
    sets = torch.rand(40_000, 20, M, generator=torch.Generator().manual_seed(0)).topk(k).indices
    loads = torch.nn.functional.one_hot(sets.flatten(1), M).sum(1)
    numbers = loads.amax(1)
    for busy in range(int(numbers.min()), int(numbers.max()) + 1):
        share = float((numbers >= busy).double().mean())
        bound = M * stats.binom.sf(busy - 1, 20, k / M)
        assert share <= bound + 4 * (share / 40_000) ** 0.5
        assert bound > 0.05 or share > bound / 2 - 4 * (bound / 40_000) ** 0.5


def test_the_bound_of_a_report_is_that_of_its_busiest_expert():
    report = diagnose_choices(torch.arange(60)[:, None] // 20 % 4, 4).routers["router"]
    assert report._busy_by_chance == pytest.approx(4 * stats.binom.sf(19, 60, 1 / 4))


# Labels


def dispatch_of(label, expert, **drawn):
    pairs = Pairs(int(expert.max()) + 1)
    for own, of in zip(label.split(50), expert.split(50), strict=True):
        pairs.count(own, of)
    return table_dispatch(pairs.table(), **drawn)


def test_a_dispatch_by_class_is_told_from_a_blind_one():
    label = torch.arange(400) % 4
    known, blind = dispatch_of(label, label, seed=0), dispatch_of(label, torch.arange(400) // 100, seed=0)
    assert known.entropy == 0 and known.p == 1 / 200
    assert blind.entropy == pytest.approx(math.log(4), rel=1e-6) and blind.p == 1


def test_the_null_of_a_blind_dispatch_is_uniform():
    """Of 120 blind dispatches 6 are expected below 5 %; 18 or more would happen once in 10,000 times."""
    label = torch.arange(120) % 3
    rng = torch.Generator().manual_seed(0)
    p = [dispatch_of(label, torch.randint(4, (120,), generator=rng), seed=s).p for s in range(120)]
    assert sum(value <= 0.05 for value in p) < 18 and sum(value > 0.5 for value in p) > 38


def test_random_tables_have_the_law_of_permuted_labels():
    """Mean and deviation of the entropy, each within five errors of 199 and of 1,000 draws."""
    label, expert = torch.arange(90) ** 2 % 7, torch.arange(90) % 4
    found, rng = dispatch_of(label, expert, seed=0), torch.Generator().manual_seed(0)
    entropies = np.array([dispatch_entropy(label[torch.randperm(90, generator=rng)], expert) for _ in range(1_000)])
    assert found.entropy == pytest.approx(dispatch_entropy(label, expert), rel=1e-12)
    assert abs(found.blind - entropies.mean()) < 5 * entropies.std() * (1 / 199 + 1 / 1_000) ** 0.5
    assert abs(found.spread / entropies.std() - 1) < 5 * (1 / 398 + 1 / 2_000) ** 0.5


def test_pairs_are_counted_whatever_the_labels_are():
    label, expert = torch.tensor([10**12, 5, 10**12, 7, 5]), torch.tensor([2, 0, 2, -1, 2])
    pairs = Pairs(3)
    for _ in range(2_000):
        pairs.count(label, expert)
    assert len(pairs._parts) < 1_000 and (pairs + pairs).table().tolist() == [[4_000, 4_000], [0, 8_000]]
    assert table_entropy(pairs.table()) == pytest.approx(0.75 * (math.log(3) - 2 / 3 * math.log(2)))
    with pytest.raises(ValueError, match="labels: expected numbers below"):
        pairs.count(torch.tensor([2**62]), torch.tensor([0]))


# What is refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_bad_logits_that_are_probabilities_are_named(dtype):
    for M in (2, 64):
        p = (3 * randn(200, M)).float().softmax(1).to(dtype)
        with pytest.raises(ValueError, match=r"h: expected logits, got rows that are not negative and sum to 1"):
            diagnose_router(p, k=1)
        assert diagnose_router(p.log().clamp(min=-100), k=1).routers
    assert diagnose_router(torch.ones(5, 1), k=1).routers and diagnose_router(randn(100, 4).abs(), k=1).routers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(h=randn(6, 40), x=randn(40, 3), W=randn(6, 3)), r"which by x and W is \(M, n\); hand over h.T"),
        (dict(h=randn(6, 40), chosen=torch.zeros(40, 6).bool()), r"which by chosen is \(M, n\)"),
        (dict(h=randn(6, 2), k=4), r"k: expected at most M = 2 experts, got 4; if h is \(M, n\), hand over h.T"),
        (dict(h=[[1.0, 2.0], [3.0]]), "h: expected rows of one length"),
        (dict(h=pd.DataFrame({"a": ["x", "y"], "b": [1.0, 2.0]})), "h: expected a tensor or what makes one"),
        (dict(chosen=torch.ones(40, 1)), "chosen: expected a mask of shape .* or integers of shape"),
        (dict(chosen=torch.full((40, 1), 6)), "chosen: expected experts from 0 to 5, or -1 for none"),
        (dict(k=2, chosen=torch.full((40, 2), 3)), "chosen: expected different experts for a token, got one twice for"),
        (dict(scores=randn(40, 5)), r"scores: expected floating point numbers of the shape of h, \(40, 6\)"),
        (dict(scores=torch.full((40, 6), math.inf)), "scores: expected finite numbers, or -inf at experts left out"),
        (dict(scores=torch.full((40, 6), math.nan)), "scores: expected finite numbers, or -inf at experts left out"),
        (dict(resolution=torch.int32), "resolution: expected a floating type"),
        (dict(resolution=0.0), r"resolution: expected a dtype or numbers > 0 that broadcast to \(40, 6\)"),
        (dict(resolution=torch.ones(5)), r"resolution: expected a dtype or numbers > 0 that broadcast to \(40, 6\)"),
        (dict(collapse=1.5), r"collapse: expected a share in \[0, 1\], got 1.5"),
        (dict(collapse=-1), "collapse: expected a finite number >= 0, got -1"),
    ],
)
def test_bad_arrays_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        diagnose_router(**{"h": randn(40, 6), "k": 1, **change})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (torch.zeros(3, 2), "numbers: expected a mask of shape .* or integers of shape"),
        (torch.ones(3, 4).bool(), "numbers: expected integers, got a mask of shape"),
        (torch.tensor([[0, 4]]), "numbers: expected experts from 0 to 3, or -1 for none"),
        (torch.tensor([[-2, 0]]), "numbers: expected experts from 0 to 3, or -1 for none"),
        (torch.tensor([[1, 1]]), "numbers: expected different experts for a token, got one twice for 1"),
        (torch.zeros(0, 2, dtype=torch.long), "numbers: expected some of shape"),
        (torch.zeros(4, dtype=torch.long), "numbers: expected some of shape"),
        (torch.zeros(4, 5, dtype=torch.long), "k: expected at most M = 4 experts, got 5"),
        ([["a"]], "numbers: expected a tensor or what makes one"),
    ],
)
def test_bad_choices_are_named(numbers, message):
    with pytest.raises(ValueError, match=message):
        diagnose_choices(numbers, 4)


def test_bad_mixtures_of_resolutions_are_named():
    h, stream = randn(9, 4), RouterStream(4, 1)
    stream.add(h, resolution=0.1)
    with pytest.raises(ValueError, match="resolution: expected widths as in the batches before, got a dtype"):
        stream.add(h)
    with pytest.raises(ValueError, match="other: expected experts, k, noise, kind, labels and numbers"):
        stream + fed(h, 1, 9)


def test_frames_and_lists_are_taken():
    h = randn(50, 6)
    known = read(h, 2)
    for way in (pd.DataFrame(h.numpy()), h.tolist(), h.numpy()):
        same(read(way, 2), known)
