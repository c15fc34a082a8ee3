"""What is broken on purpose is found, what is whole is not accused, and numbers are those of other routes."""

import copy
import warnings

import numpy as np
import pytest
import torch

from moe_theory.diagnose import FINDINGS, RouterStream, compare_routers, diagnose, diagnose_router
from moe_theory.diagnose.arrays import linear_logits, roundings
from moe_theory.diagnose.balance import POOLS, BalanceReport, _reads, balance_loss
from moe_theory.diagnose.probes import nearest_experts
from moe_theory.models.rules import topk_set
from moe_theory.theory.kept_sets import keep_probability
from moe_theory.theory.smoothing import route_probabilities

DOUBLE = torch.float64
pytestmark = pytest.mark.usefixtures("what_an_older_library_does_not_serve_is_skipped")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_at_one_expert_the_set_is_kept_with_the_largest_routing_probability(scale):
    h = randn(50, 8)
    largest = route_probabilities(h, "gaussian", scale).gather(1, h.argmax(1, keepdim=True))[:, 0]
    assert torch.allclose(keep_probability(h, 1, scale=scale), largest, atol=1e-14)


@pytest.mark.parametrize("k", [2, 3, 7])
def test_the_set_of_several_is_kept_as_often_as_in_random_draws(k):
    h, draws = randn(3, 8), 200_000
    noisy = h[:, None] + 0.7 * randn(3, draws, 8, seed=1)
    share = (topk_set(noisy, k) == topk_set(h, k)[:, None]).all(-1).double().mean(1)
    exact = keep_probability(h, k, scale=0.7)
    assert ((share - exact).abs() < 5 * (exact * (1 - exact) / draws).sqrt()).all()


def test_all_selected_is_kept():
    assert (keep_probability(randn(5, 4), 4, scale=1.0) == 1).all()


def test_equal_logits_are_ties_and_random_ones_are_not():
    assert [f.name for f in diagnose_router(torch.zeros(200, 4), k=1).findings] == ["dead", "collapse", "ties"]
    assert not diagnose_router(randn(100, 4).float(), k=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_coarse_logits_tie_by_chance(dtype):
    """In a router of a usual size, too: width 1,024, 64 experts, eight selected."""
    report = diagnose_router(randn(4000, 8).to(dtype), k=2).routers["router"]
    assert report.undecided > 10 and not report.findings
    x, W = randn(2000, 1024).to(dtype), (randn(64, 1024, seed=1) / 32).to(dtype)
    report = diagnose_router(x @ W.T, k=8, x=x, W=W).routers["router"]
    assert report.undecided > 20 and not report.findings
    equal = diagnose_router(torch.zeros(200, 4, dtype=dtype), k=1)
    assert [f.name for f in equal.findings] == ["dead", "collapse", "ties"]


def test_dead_experts_need_enough_tokens():
    h = randn(400, 8)
    h[:, 3] = -100
    assert [f.name for f in diagnose_router(h, k=1).findings] == ["dead"]
    assert diagnose_router(h[:20], k=1).routers["router"].dead and not diagnose_router(h[:20], k=1).findings


def test_dropped_and_misled_tokens_are_counted():
    h = randn(100, 5)
    chosen = topk_set(h, 2)
    chosen[:10] = False
    chosen[10:30] = chosen[10:30].roll(1, -1)
    wrong = int((chosen[10:30] != topk_set(h[10:30], 2)).any(1).sum())
    report = diagnose_router(h, k=2, chosen=chosen).routers["router"]
    assert (report.dropped, report.misled) == pytest.approx((0.1, wrong / 100))


def test_routers_compare_up_to_shift_and_numbers():
    W = randn(6, 10)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    found = compare_routers(W, (W + randn(10, seed=1))[order])
    assert found.raw > 1 and found.centred > 0.5 and found.matched < 1e-14
    assert torch.equal(torch.tensor(found.order), order.argsort())
    assert compare_routers(W, 1.1 * W).raw == pytest.approx(0.1 / (1.105) ** 0.5)


def test_the_gauge_share_is_that_of_the_mean():
    x, W = randn(20, 4), randn(3, 4)
    moved = W - W.mean(0)
    assert diagnose_router(x @ moved.T, k=1, x=x, W=moved).routers["router"].gauge < 1e-30
    one = torch.ones(3, 4, dtype=DOUBLE)
    assert diagnose_router(x @ one.T, k=1, x=x, W=one).routers["router"].gauge == pytest.approx(1)


@pytest.mark.parametrize("d", [1, 32, 1_024, 4_096])
@pytest.mark.parametrize("lean", [lambda t: t, torch.abs])
def test_logits_round_within_their_limit(d, lean):
    x, W = lean(randn(500, d)).float(), lean(randn(8, d)).float()
    exact, rounding = linear_logits(x, W)
    off = ((x @ W.T).double() - exact).abs().amax(1)
    assert (off <= rounding).all() and off.max() > 0


def test_the_limit_on_a_logit_is_the_worst_case_for_short_sums_and_a_root_for_long_ones():
    assert [roundings(n) for n in (1, 33, 64)] == [1, 33, 64]
    assert roundings(4_096) == pytest.approx(2 * roundings(1_024)) == pytest.approx(512)


@pytest.mark.parametrize("d", [2, 16])
def test_a_product_added_term_by_term_rounds_within_its_limit(d):
    """In numpy's half precision, one rounding after the other, where a processor cannot add in blocks."""
    x, w = randn(300, d).half().numpy(), randn(1, d, seed=1).half().numpy()
    total = x[:, 0] * w[0, 0]
    for i in range(1, d):
        total = total + x[:, i] * w[0, i]
    exact, rounding = linear_logits(torch.from_numpy(x), torch.from_numpy(w))
    share = np.abs(total - exact[:, 0].numpy()) / rounding.numpy()
    assert 0.05 < share.max() <= 1


def test_pools_of_a_loss_agree_where_there_is_one():
    h = randn(1, 1, 50, 4)
    losses = {float(balance_loss(h, topk_set(h, 2), dims)) for dims in POOLS.values()}
    assert max(losses) - min(losses) < 1e-12
    h = torch.cat([h, randn(1, 1, 50, 4, seed=1)])
    pooled, each = (balance_loss(h, topk_set(h, 2), POOLS[name]) for name in ("all layers pooled", "each layer"))
    assert abs(pooled - each) > 1e-3


def test_a_pooled_loss_does_not_see_layers_that_cancel():
    """Each of two layers sends all to one expert; their mean load is even."""
    h = torch.tensor([[[9.0, 0.0]], [[0.0, 9.0]]], dtype=DOUBLE)[:, None].requires_grad_()
    sent = topk_set(h.detach(), 1)
    for name, value, alive in (("all layers pooled", 1.0, False), ("each layer", 2.0, True)):
        loss = balance_loss(h, sent, POOLS[name])
        assert float(loss.detach()) == pytest.approx(value, rel=1e-3)
        assert bool(torch.autograd.grad(loss, h)[0].abs().max() > 1e-6) is alive


def test_the_nearest_experts_are_found():
    f = randn(7, 5, 3)
    f[:, 4] = f[:, 1] + 1e-3 * f[:, 1].flip(0)
    one, other, distance = nearest_experts(f)
    assert (one, other) == (1, 4) and distance < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(h=torch.full((3, 2), torch.nan)), "h: expected finite numbers, got 6"),
        (dict(h=torch.zeros(3)), r"h: expected a matrix of floating point logits, got \(3,\)"),
        (dict(h=torch.zeros(3, 2, dtype=torch.long)), "h: expected a matrix of floating point logits, got"),
        (dict(k=3), "k: expected at most M = 2 experts, got 3"),
        (dict(k=0), "k: expected an integer >= 1, got 0"),
        (dict(noise=0.0), "noise: expected a finite number > 0, got 0.0"),
        (
            dict(labels={"word": torch.zeros(2, dtype=torch.long)}),
            "labels: expected 3 of 'word', one for each token, got 2",
        ),
        (dict(labels={"a": torch.rand(3)}), "labels: expected integers >= 0 for 'a', got torch.float32"),
        (dict(labels={"a": -torch.arange(3)}), "labels: expected integers >= 0 for 'a', got torch.int64, the least of"),
        (dict(labels={"a": list("xyz")}), "labels of 'a': expected a tensor"),
        (dict(h=torch.zeros(0, 2)), r"h: expected a matrix of floating point logits, got \(0, 2\)"),
        (dict(chosen=torch.ones(3, 2).bool()), "chosen: expected at most k = 1 experts for a token, got 2"),
        (dict(x=torch.zeros(3, 5)), "x, W: expected both or neither, b with them, got only x"),
        (dict(b=torch.zeros(2)), "x, W: expected both or neither, b with them, got only b"),
        (
            dict(x=torch.ones(3, 4), W=torch.ones(5, 4)),
            r"x, W: expected those of \(3, 2\) logits, got them for \(3, 5\)",
        ),
        (
            dict(x=torch.ones(4, 4), W=torch.ones(2, 4)),
            r"x, W: expected those of \(3, 2\) logits, got them for \(4, 2\)",
        ),
        (dict(x=torch.ones(3, 4), W=torch.ones(2, 4), b=torch.ones(3)), "b: expected 2 biases, one for each row of W"),
        (
            dict(chosen=torch.ones(2, 2).bool()),
            r"chosen: expected a mask of shape \(3, 2\) or integers of shape \(3, 1\), got",
        ),
        (dict(x=torch.zeros(3, 5), W=torch.zeros(2, 4)), r"x: .*hidden states of the width of W, \(2, 4\), got"),
        (dict(x=torch.ones(3, 4), W=torch.ones(2, 4)), r"h: expected the logits x W\^T \+ b to rounding, got"),
    ],
)
def test_bad_arrays_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        diagnose_router(**{"h": torch.eye(3, 2), "k": 1, **change})


def test_bad_routers_are_named():
    with pytest.raises(ValueError, match=r"V: expected a matrix of the shape of W, \(2, 3\), got \(3, 2\)"):
        compare_routers(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match="W: expected finite numbers, got 6"):
        compare_routers(torch.full((2, 3), torch.nan), torch.ones(2, 3))
    with pytest.raises(ValueError, match="expected router vectors other than zero"):
        compare_routers(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="batches: expected at least one token, got none"):
        RouterStream(3, 1).report()
    stream = RouterStream(3, 1)
    stream.add(randn(4, 3))
    with pytest.raises(ValueError, match=r"labels: expected those of the batches before, \[\], got \['a'\]"):
        stream.add(randn(4, 3), labels={"a": torch.arange(4)})


def test_bad_models_are_named():
    with pytest.raises(ValueError, match="model: expected a model of transformers with mixture layers.*got Linear"):
        diagnose(torch.nn.Linear(2, 2), [])
    with pytest.raises(ValueError, match="model: expected a model of transformers, got NoneType"):
        diagnose(None, [])


def test_arrays_of_numpy_and_biases_are_taken():
    x, W, b = randn(50, 6).numpy(), randn(4, 6, seed=1).numpy(), randn(4, seed=2).numpy()
    report = diagnose_router(x @ W.T + b, k=2, x=x, W=W, b=b)
    assert not report
    gauges = [r.routers["router"].gauge for r in (report, diagnose_router(x @ W.T, k=2, x=x, W=W))]
    assert gauges[0] == gauges[1] > 0


@pytest.mark.parametrize(("M", "k"), [(8, 1), (8, 2), (12, 3), (5, 4), (40, 8)])
@pytest.mark.parametrize("scale", [0.003, 0.1, 3.0])
def test_logits_far_from_the_gap_may_be_left_out(M, k, scale, monkeypatch):
    """With ties, too: the same probability as with all of them."""
    from moe_theory.theory import kept_sets

    h = randn(60, M)
    h[:20] = h[:20].round(decimals=1)
    h[:2] = 0
    near = keep_probability(h, k, scale=scale)
    monkeypatch.setattr(kept_sets, "FAR", torch.inf)
    assert (near - keep_probability(h, k, scale=scale)).abs().max() < 1e-12


# Models of transformers. The library is an extra.


@pytest.fixture(scope="module")
def tiny():
    pytest.importorskip("transformers")
    from moe_theory.diagnose import tiny

    return tiny


@pytest.mark.parametrize(
    ("version", "served"), [("5.5.4", None), ("5.6.0rc1", None), ("5.6.0", 4), ("5.17.9", 4), ("5.18.0", 5), ("6.0", 5)]
)
def test_which_versions_of_the_library_are_served(tiny, monkeypatch, version, served):
    import transformers

    monkeypatch.undo()
    monkeypatch.setattr(transformers, "__version__", version)
    if served is None:
        with pytest.raises(ImportError, match=f"expected 5.6 or later, got {version}"):
            tiny.families()
    else:
        with warnings.catch_warnings(action="ignore"):
            assert len(tiny.families()) == served


def test_a_family_that_the_library_does_not_serve_is_named(tiny, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(tiny.FAMILIES, "Switch", tiny.FAMILIES["Switch"]._replace(least="99.1"))
    with pytest.warns(UserWarning, match="Switch is left out: it needs transformers 99.1, here is "):
        served = tiny.families()
    assert served == [name for name in tiny.FAMILIES if name != "Switch"]
    with pytest.raises(
        ImportError, match='transformers: expected 99.1 or later, got .*pip install "transformers>=99.1"'
    ):
        tiny.tiny("Switch")


NAMES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "Switch")
FIRST = {"Qwen2-MoE", "OLMoE", "Switch"}


def found_in(tiny, family, fault, seed):
    model, batches = tiny.tiny(family, k=fault.k, seed=seed), tiny.batches(family, 2, seed=seed)
    fault.breaks(model)
    return diagnose(model, batches, seed=seed), tiny.expected(fault, model, batches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", NAMES)
def test_whole_models_are_not_accused(tiny, family, seed):
    for control in tiny.CONTROLS.values():
        report, expected = found_in(tiny, family, control, seed)
        assert report.named == expected <= {"dead"}
        for gates in report.gates.values():
            assert gates.gates == (("softmax_topk",) if family in FIRST else ("topk_softmax",))
            assert gates.as_first > 0.01 and gates.learns and gates.handed < 1
            assert gates.factor == pytest.approx(1, abs=1e-5) and gates.passed == pytest.approx((1, 1), abs=1e-5)
            assert gates.lowered == pytest.approx(gates.as_first if family in FIRST else 0, abs=1e-5)
        pool = "each layer and sequence" if family == "Switch" else "all layers pooled"
        assert {loss.reads for loss in report.balance} == {pool}
        assert all(loss.scale == pytest.approx(1, abs=1e-4) for loss in report.balance)


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_every_fault_is_found_and_no_other(tiny, family):
    for name, fault in tiny.FAULTS.items():
        if family in fault.families:
            report, expected = found_in(tiny, family, fault, 0)
            assert report.named == expected, name
            assert set(report.table()["claim"]) == {FINDINGS[kind].claim for kind in expected}


def test_every_finding_has_a_fault_and_a_claim(tiny):
    from moe_book import claims

    assert set().union(*(fault.found for fault in tiny.FAULTS.values())) <= set(FINDINGS)
    assert {kind.claim for kind in FINDINGS.values()} <= claims.registry().keys()


@pytest.mark.parametrize(
    ("family", "config", "lost"),
    [
        ("Mixtral", {}, True),
        ("Qwen3-MoE", {}, True),
        ("Qwen3-MoE", {"norm_topk_prob": False}, False),
        ("OLMoE", {}, False),
    ],
)
def test_with_one_expert_a_normalized_gate_loses_the_gradient(tiny, family, config, lost):
    """As it is computed, not only by the formula: the largest entry of the language loss's gradient in a router."""
    model = tiny.tiny(family, k=1, **config)
    (batch,) = tiny.batches(family, 1)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    routers = [p for name, p in model.named_parameters() if name.endswith("gate.weight") and p.ndim == 2]
    largest = max(float(p.grad.abs().max()) for p in routers)
    assert (largest < 1e-8) is lost
    assert (diagnose(model, batch).named == {"gradient"}) is lost


def test_a_switch_without_dense_layers_has_no_balancing_loss(tiny):
    """Version 5.23.0 leaves it out where every layer is sparse."""
    model = tiny.tiny("Switch", num_sparse_encoder_layers=2, num_sparse_decoder_layers=2)
    report = diagnose(model, tiny.batches("Switch", 1))
    assert {loss.reads for loss in report.balance} == {"nothing"} and report.named == {"balance"}


@pytest.mark.parametrize("layers", [4, 6])
def test_switch_pools_the_layers_of_a_stack(tiny, layers):
    """Seen only with several sparse layers in a stack."""
    sizes = {name: number * layers // 4 for name, number in tiny.STACKS.items()}
    report = diagnose(tiny.tiny("Switch", **sizes), tiny.batches("Switch", 1))
    assert [loss.reads for loss in report.balance] == ["each sequence, all layers pooled"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", NAMES)
def test_half_precision_is_read(tiny, family, dtype):
    """A whole model is not accused; what is broken is found, but for small slips of the balancing loss.

    One percent of a gate is within the rounding of bfloat16, in which Switch rounds probabilities before it selects.
    """
    own = {"scores rounded", "loads"} if family == "Switch" and dtype == torch.bfloat16 else set()
    for name, fault in (tiny.CONTROLS | tiny.FAULTS).items():
        if family in fault.families:
            model, (batch,) = tiny.tiny(family, k=fault.k), tiny.batches(family, 1)
            fault.breaks(model)
            single = diagnose(model, batch).named
            half = tiny.tiny(family, k=fault.k).to(dtype)
            fault.breaks(half)
            found = diagnose(half, batch).named
            within = {"balance"} | ({"gate"} if name == "one token" and dtype == torch.bfloat16 else set())
            assert found <= single | own and single - found <= within, name


def test_what_the_library_does_not_run_is_refused(tiny):
    with pytest.raises(ValueError, match="model, batches: expected arguments that the model takes, got .*Double"):
        diagnose(tiny.tiny("Mixtral").double(), tiny.batches("Mixtral", 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", NAMES)
def test_what_was_in_half_precision_is_read_in_single(tiny, family, dtype):
    model = tiny.tiny(family).to(dtype).float()
    batch = tiny.batches(family, 1)
    report, whole = diagnose(model, batch), tiny.CONTROLS["as it is"]
    assert report.named == tiny.expected(whole, model, batch)


@pytest.mark.parametrize("learns", [("none",), ("router", "gate.weight"), ("q_proj", "SelfAttention.q")])
@pytest.mark.parametrize("family", ["OLMoE", "Switch"])
def test_frozen_models_are_not_accused_and_stay_frozen(tiny, family, learns):
    model = tiny.tiny(family)
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in learns))
    flags = [p.requires_grad for p in model.parameters()]
    assert not diagnose(model, tiny.batches(family, 2)).findings
    assert flags == [p.requires_grad for p in model.parameters()]


def test_a_report_says_what_was_found_and_measured(tiny):
    report = diagnose(tiny.tiny("Mixtral"), tiny.batches("Mixtral", 2))
    assert repr(report).startswith("Report(2 layers, 512 tokens, found: nothing") and not len(report.table())
    rows = report.layers()
    assert list(rows.index) == list(report.routers) and (rows["gate"] == "topk_softmax").all()
    assert (rows["selected"] == 2).all() and rows["in use"].between(1, 8).all()
    broken, _ = found_in(tiny, "Mixtral", tiny.FAULTS["copied expert"], 0)
    assert "found: twins" in repr(broken)


def sigmoid_layers(**config):
    """A model of the family of DeepSeek-V3 with random weights, its own; before 5.19 it records no router logits."""
    from moe_theory.diagnose import tiny

    transformers = tiny.library("5.19")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16)
    parts = dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1)
    made = transformers.DeepseekV3Config(**sizes, **heads, **parts, **experts, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(made)
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


def test_gates_of_sigmoids_with_a_factor_are_read(tiny):
    model = sigmoid_layers()
    report = diagnose(model, tiny.batches("Mixtral", 2))
    assert {gate.gates for gate in report.gates.values()} == {("sigmoid_divided",)} and not report.findings
    model.config.routed_scaling_factor = 2.0
    (config, *_) = [f for f in diagnose(model, tiny.batches("Mixtral", 2)).findings if f.name == "factor"]
    assert config.value == pytest.approx(2.5, rel=1e-5) and config.limit == 2
    assert config.detail.endswith("times 2.5, configured times 2")


def test_a_loss_within_rounding_of_right_and_wrong_is_undecided():
    far = dict.fromkeys(POOLS, 5.0) | {f"softmax twice, {name}": 5.0 for name in POOLS}
    assert _reads(far) == "unknown" and _reads(far | {"each layer": 0.5, "all layers pooled": 0.4}) in POOLS
    close = far | {"each layer": 0.8, "softmax twice, each layer": 0.7}
    assert _reads(close) == "undecided" and _reads(far | {"softmax twice, each layer": 0.7}).startswith("softmax")
    assert not BalanceReport("loss", "undecided", close, 1.0, 0.0, 0.0).findings
    assert [f.value for f in BalanceReport("loss", "unknown", far, 1.0, 0.0, 0.0).findings] == [5]


def test_a_second_softmax_is_named(tiny):
    report, _ = found_in(tiny, "OLMoE", tiny.FAULTS["second softmax"], 4)
    assert [loss.reads for loss in report.balance] == ["softmax twice, all layers pooled"]


def test_a_model_is_left_as_it_was(tiny):
    model = tiny.tiny("Switch").train()

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    model(**tiny.batches("Switch", 1)[0], output_router_logits=True)  # the library leaves hooks of its own
    own = hooks()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    diagnose(model, tiny.batches("Switch", 1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(m.training for m in model.modules()) and hooks() == own
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())


def test_padding_and_labels(tiny):
    model = tiny.tiny("Mixtral")
    (batch,) = tiny.batches("Mixtral", 1)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 20:] = 0
    labels = {"symbol": lambda b: b["input_ids"], "sequence": lambda b: torch.arange(8)[:, None].expand(8, 32)}
    report = diagnose(model, {**batch, "attention_mask": mask}, labels=labels)
    for router in report.routers.values():
        assert router.tokens == 8 * 20 and router.dispatch.keys() == labels.keys()
    with pytest.raises(ValueError, match="labels: expected 256 of 'word', one for each token, got 8"):
        diagnose(model, batch, labels={"word": lambda b: torch.arange(8)})


def test_bad_batches_are_named(tiny):
    with pytest.raises(ValueError, match="batches: expected at least one, got none"):
        diagnose(tiny.tiny("OLMoE"), [])
    (batch,) = tiny.batches("OLMoE", 1)
    for wrong in (None, batch["input_ids"], [batch["input_ids"]], [batch, batch["input_ids"]], {}):
        with pytest.raises(ValueError, match="batches: expected arguments of the model by name, got (None|Tens|dict)"):
            diagnose(tiny.tiny("OLMoE"), wrong)
    with pytest.raises(ValueError, match="labels: expected a function of a batch for 'a', got Tensor"):
        diagnose(tiny.tiny("OLMoE"), batch, labels={"a": torch.arange(256)})
    with pytest.raises(ValueError, match="batches: expected tokens other than padding, got none"):
        diagnose(tiny.tiny("OLMoE"), {**batch, "attention_mask": torch.zeros(8, 32)})
    dense = tiny.tiny("Qwen3-MoE", mlp_only_layers=[0, 1])
    with pytest.raises(ValueError, match="with a Qwen3MoeTopKRouter in Qwen3MoeForCausalLM, got none"):
        diagnose(dense, batch)
    with pytest.raises(ValueError, match="family: expected one of .*, got 'GPT'"):
        tiny.tiny("GPT")
    with pytest.raises(ValueError, match=r"config: expected arguments of MixtralConfig, got \['num_expert'\]"):
        tiny.tiny("Mixtral", num_expert=16)
    wrapped = torch.nn.Sequential(tiny.tiny("OLMoE"))
    with pytest.raises(ValueError, match="model: expected a model of transformers, got Sequential around one"):
        diagnose(wrapped, tiny.batches("OLMoE", 1))
    model = tiny.tiny("OLMoE")
    block = model.model.layers[0].mlp
    call = block.experts.forward
    block.experts.forward = lambda x, index, gates, more: call(x, index, gates)
    block.forward = lambda x: block.experts(x.flatten(0, 1), *block.gate(x.flatten(0, 1))[:0:-1], 1).view_as(x)
    with pytest.raises(ValueError, match="model: expected experts that are called with tokens, numbers and gates, got"):
        diagnose(model, tiny.batches("OLMoE", 1))
    apart = tiny.tiny("OLMoE")
    del apart.model.layers[1].mlp.experts
    with pytest.raises(ValueError, match="model: expected router and experts side by side, got OlmoeSparseMoeBlock"):
        diagnose(apart, tiny.batches("OLMoE", 1))
    with pytest.raises(ValueError, match="model: expected a model of transformers"):
        diagnose(tiny.tiny("OLMoE").model.layers[0].self_attn, [])


@pytest.mark.parametrize("detached", [False, True])
def test_a_fault_of_the_kernel_that_runs_is_found(tiny, detached, monkeypatch):
    """The copy asks the library's loop over experts: what runs is held against it."""
    from transformers.integrations import moe

    kernel = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def broken(self, hidden, experts, gates):
        return kernel(self, hidden, experts, gates.detach() if detached else gates.flip(-1))

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", broken)
    model, batches = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    assert {f.name for f in diagnose(model, batches).findings} == {"gradient" if detached else "gate"}


@pytest.mark.parametrize(
    "chosen", [torch.zeros(5, 3, dtype=torch.int64), torch.ones(5, 6), torch.ones(5, 4, dtype=torch.bool)]
)
def test_what_is_no_mask_of_experts_is_refused(chosen):
    with pytest.raises(ValueError, match="chosen: expected (a mask of shape|integers of shape)"):
        diagnose_router(randn(5, 6), k=2, chosen=chosen)


def test_a_model_is_diagnosed_where_nothing_is_differentiated(tiny):
    model, batches = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    expected = diagnose(model, batches).layers()
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert diagnose(model, batches).layers().equals(expected)


@pytest.mark.parametrize("seed", [0, 15, 31])
def test_a_direction_along_which_the_output_has_nearly_no_part_accuses_nobody(tiny, seed):
    model, batches = tiny.tiny("Switch", k=1, seed=0), tiny.batches("Switch", 1, seed=0)
    tiny.FAULTS["router at zero"].breaks(model)
    assert {f.name for f in diagnose(model, batches, seed=seed).findings} == {"dead", "ties", "collapse"}


def padded(tiny, family="Mixtral"):
    """A batch with six symbols of padding before each text, and a model that reads nothing there."""
    model, (batch,) = tiny.tiny(family), tiny.batches(family, 1)
    ids = batch["input_ids"].clone()
    ids[:, :6] = 0
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    return model, {**batch, "input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.parametrize("family", NAMES)
def test_padding_is_not_probed(tiny, family):
    """A router at zero decides for no token; the first ones are padding, at which x is 0."""
    model, batch = padded(tiny, family)
    counted = {"padding"} if family == "Switch" else set()  # its loss takes no mask
    assert diagnose(model, batch).named - {"dead"} == counted
    tiny.FAULTS["router at zero"].breaks(model)
    assert diagnose(model, batch).named == {"ties", "dead", "collapse"} | counted
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    with pytest.raises(ValueError, match="batches: expected tokens at which .* reads something other than 0, got none"):
        diagnose(model, batch)


@pytest.mark.parametrize(
    ("between", "found", "passed"),
    [
        (lambda out: out.detach(), {"gradient"}, (1, 0)),
        (lambda out: 0 * out, {"gradient"}, (0, 0)),
        (lambda out: (out + out.detach()) / 2, {"gradient"}, (1, 0.5)),
        (lambda out: 1.5 * out, {"factor"}, (1.5, 1.5)),
        (lambda out: out + 1, set(), (1, 1)),
    ],
)
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2-MoE", "Switch"])
def test_what_lies_behind_the_experts_is_looked_at(tiny, family, between, found, passed):
    model, batches = tiny.tiny(family), tiny.batches(family, 1)
    for layer in tiny.layers_of(model):
        layer.block.register_forward_hook(lambda _, __, out: between(out))
    report = diagnose(model, batches)
    assert report.named - {"dead"} == found
    for gates in report.gates.values():
        assert gates.passed == pytest.approx(passed, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("Afmoe", dict(num_experts=8, num_dense_layers=0, route_scale=2.448)),
        ("HYV3", dict(num_experts=8, first_k_dense_replace=1, num_shared_experts=1)),
    ],
)
def test_a_factor_is_read_off_the_layer(tiny, name, own):
    """Whatever its name in the configuration, with which it is compared."""
    transformers = tiny.library()
    sizes = tiny.COMMON | dict(intermediate_size=48, moe_intermediate_size=48, head_dim=16, num_experts_per_tok=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **own))
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    report = diagnose(model.eval(), tiny.batches("Mixtral", 2))
    configured = getattr(model.config, "route_scale", None) or model.config.router_scaling_factor
    assert not report.findings and configured != 1
    assert report.layers()["times"].to_list() == pytest.approx([configured] * len(report.gates), rel=1e-5)


def test_a_norm_behind_the_experts_is_no_factor(tiny):
    model, batches = tiny.tiny("Qwen2-MoE"), tiny.batches("Qwen2-MoE", 1)
    for layer in tiny.layers_of(model):
        layer.block.register_forward_hook(lambda _, __, out: out / out.square().mean(-1, keepdim=True).sqrt())
    report = diagnose(model, batches)
    assert not report.findings
    assert [gates.factor for gates in report.gates.values()] == pytest.approx([1, 1], abs=1e-5)


def test_layers_that_share_a_router_are_told_together(tiny):
    model = tiny.tiny("OLMoE", num_hidden_layers=3)
    tiny.CONTROLS["tied"].breaks(model)
    (loss,) = diagnose(model, tiny.batches("OLMoE", 1)).balance
    assert loss.reads == "all layers pooled" and loss.scale == pytest.approx(1, abs=1e-4)


def test_neither_autocast_nor_coarse_products_reach_the_layers(tiny):
    model, batches, seen = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1), []
    expected = diagnose(model, batches).layers()
    tiny.layers_of(model)[0].router.register_forward_hook(
        lambda *_: seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
    )
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert diagnose(model, batches).layers().equals(expected) and torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium" and set(seen) == {("highest", False)}
    finally:
        torch.set_float32_matmul_precision("highest")


def test_routers_that_are_not_linear_are_refused(tiny):
    model, batches = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    router = tiny.layers_of(model)[1].router
    own = type(router)

    def single(self, x):
        if x.dtype != torch.float32:
            raise RuntimeError("single precision only")
        return own.forward(self, x)

    def made(forward):
        router.__class__ = type("Made", (own,), {"forward": forward})
        return diagnose(model, batches)

    with pytest.raises(ValueError, match=r"model: expected a linear router, x W\^T \+ b, got .* off in model.layers.1"):
        made(lambda self, x: own.forward(self, x / x.norm(dim=-1, keepdim=True)))
    with pytest.raises(ValueError, match="model: expected a linear router of 8 experts, got 3 logits of a token"):
        made(lambda self, x: (torch.ones(len(x), 3), *own.forward(self, x)[1:]))
    with pytest.raises(ValueError, match="model: expected layers that run in torch.float64, too, got .*model.layers.1"):
        made(lambda self, x: single(self, x))
    assert not made(lambda self, x: own.forward(self, x.float())).named

    def slip(self, x):  # with a history: probabilities for logits
        h, *rest = own.forward(self, x)
        return (h.softmax(-1), *rest)

    assert made(slip).named == {"balance"}


class Around(torch.nn.Module):
    """A wrapper that forwards attributes, as those of peft do."""

    def __init__(self, model, known):
        super().__init__()
        self.inner = model
        if known:
            self.get_base_model = lambda: model

    def __getattr__(self, name):
        return self._modules["inner"] if name == "inner" else getattr(self._modules["inner"], name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_wrappers_are_taken_off_or_refused(tiny):
    model, batches = tiny.tiny("Switch"), tiny.batches("Switch", 1)
    compiled = torch.compile(model)
    assert not diagnose(compiled, batches).findings and not diagnose(Around(model, True), batches).findings
    with pytest.raises(ValueError, match="model: expected a model of transformers, got Around around one"):
        diagnose(Around(model, False), batches)


def test_a_wrapper_around_the_experts_is_looked_through(tiny):
    class Lora(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

        def forward(self, *args):
            return self.base_layer(*args)

    model = tiny.tiny("Mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = Lora(layer.mlp.experts)
    assert not diagnose(model, tiny.batches("Mixtral", 1)).findings


def test_nan_is_said_where_it_appears(tiny):
    model, batches = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[3] = torch.nan
    with pytest.raises(
        ValueError, match="model: what the experts beside model.layers.0.mlp.gate return: expected fini"
    ):
        diagnose(model, batches)
    model = tiny.tiny("Mixtral")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.fill_(torch.nan)
    with pytest.raises(
        ValueError, match="model: what model.layers.1.mlp.gate reads: expected finite numbers, got 8192"
    ):
        diagnose(model, batches)


def test_each_stack_has_its_own_mask_and_labels(tiny):
    model, (batch,) = tiny.tiny("Switch"), tiny.batches("Switch", 1)
    batch["decoder_input_ids"] = batch["decoder_input_ids"][:, :16]
    mask = torch.ones(8, 32, dtype=torch.long)
    mask[:, 4:] = 0
    labels = {"symbol": lambda b: b["input_ids"]}
    report = diagnose(model, {**batch, "attention_mask": mask}, labels=labels)
    assert [router.tokens for router in report.routers.values()] == [8 * 4, 8 * 16]
    report = diagnose(model, {**batch, "decoder_attention_mask": mask[:, :16]}, labels=labels)
    assert [router.tokens for router in report.routers.values()] == [8 * 32, 8 * 4]


def test_gates_are_looked_at_where_no_expert_is_asked(tiny):
    """Equal gates at a few tokens: among the eight that are asked there is none."""
    model, (batch,) = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)

    def late(h, gates, experts):
        equal = (torch.arange(len(h)) >= 200)[:, None] & (len(h) > 200)
        return h, torch.where(equal, gates.mean(-1, keepdim=True), gates), experts

    tiny.rewritten(late)(model)
    found = diagnose(model, batch).findings
    assert {f.name for f in found} == {"gate"} and all(f.detail.startswith("handed on") for f in found)


def test_what_the_loss_of_a_training_step_adds_is_reported(tiny):
    """By default nothing: the output of the router's logits is switched off."""
    model, (batch,) = tiny.tiny("OLMoE"), tiny.batches("OLMoE", 1)
    asked = (batch, {**batch, "output_router_logits": True}, dict(use_cache=False, return_dict=False, **batch))
    assert [diagnose(model, b).balance[0].coefficient for b in asked] == pytest.approx([0, 0.01, 0])
    model.config.output_router_logits = True
    assert diagnose(model, batch).balance[0].coefficient == pytest.approx(model.config.router_aux_loss_coef)


def test_what_was_frozen_is_reported(tiny):
    model = tiny.tiny("Mixtral")
    tiny.layers_of(model)[0].W.requires_grad_(False)
    assert diagnose(model, tiny.batches("Mixtral", 1)).layers()["learns"].to_list() == [False, True]


def test_experts_that_answer_zero_are_no_twins(tiny):
    model = tiny.tiny("Mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[[2, 5]] = 0
    (found,) = diagnose(model, tiny.batches("Mixtral", 1)).findings
    assert found.name == "dead" and found.detail == "experts [2, 5] answer 0"


def test_where_all_experts_answer_zero_the_router_is_not_to_blame(tiny):
    """It gets no gradient, which is what experts that answer 0 lead to."""
    model = tiny.tiny("Mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()
    (found,) = diagnose(model, tiny.batches("Mixtral", 1)).findings
    assert found.name == "dead" and found.value == 8


def test_blocks_that_were_not_read_are_counted(tiny):
    model = tiny.tiny("Mixtral")
    model.model.layers[1].mlp.gate = torch.nn.Identity()
    layers = tiny.layers_of(model)
    from moe_theory.diagnose.traces import left_out

    assert [layer.name for layer in layers] == ["model.layers.0.mlp.gate"]
    assert left_out(model, layers) == ["model.layers.1.mlp"]


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2-MoE", "Switch"])
@pytest.mark.parametrize("where", ["block", "experts"])
def test_tokens_that_get_the_output_of_others_are_found(tiny, family, where):
    """Every token alone has its own: only in the batch does it get another's, or none beyond the fortieth."""
    for mixes in (lambda out: out.flip(0).flip(1) if out.ndim == 3 else out.flip(0), lambda out: _to_fortieth(out)):
        model, (batch,) = tiny.tiny(family, k=2), tiny.batches(family, 1)
        layer = tiny.layers_of(model)[0]
        getattr(layer, where).register_forward_hook(lambda _, __, out, mixes=mixes: mixes(out))
        (found,) = diagnose(model, batch).findings
        assert found.name == "gate"
        if where == "block":  # experts are asked several tokens at a time
            assert found.detail == "in a batch tokens get another output than alone"


def _to_fortieth(out):
    flat = out.flatten(0, -2)
    return torch.cat([flat[:40], 0 * flat[40:]]).view_as(out)


def test_a_router_may_read_something_else_than_its_block(tiny):
    """A norm between the two is no fault; nor is one before the experts."""
    for part in ("router", "experts"):
        model, (batch,) = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
        for layer in tiny.layers_of(model):
            scale = torch.linspace(0.5, 2, layer.W.shape[1])
            module = getattr(layer, part)
            module.register_forward_pre_hook(lambda _, args, scale=scale: (args[0] * scale.to(args[0]), *args[1:]))
        assert not diagnose(model, batch).findings


def test_another_number_of_experts_than_configured_is_found(tiny):
    model, (batch,) = tiny.tiny("OLMoE"), tiny.batches("OLMoE", 1)
    tiny.layers_of(model)[1].router.top_k = 1
    (found,) = [f for f in diagnose(model, batch).findings if f.name == "config"]
    assert (found.where, found.value, found.limit) == (tiny.layers_of(model)[1].name, 1, 2)


@pytest.mark.parametrize("family", ["Mixtral", "Switch"])
def test_a_replaced_forward_is_refused(tiny, family):
    model = tiny.tiny(family)
    for layer in tiny.layers_of(model):
        layer.router.forward = lambda *args, old=layer.router.forward: old(*args)
    with pytest.raises(ValueError, match="forward is replaced in|whose copy calls the original"):
        diagnose(model, tiny.batches(family, 1))


def test_an_idle_expert_with_nan_is_named(tiny):
    model, batch = tiny.tiny("Mixtral", num_local_experts=32), {"input_ids": torch.arange(3, 9)[None]}
    layer = tiny.layers_of(model)[0]
    with layer.watched() as traces, torch.no_grad():
        model(**batch)
    idle = int((~traces[0].chosen.any(0)).nonzero()[0])
    with torch.no_grad():
        for p in layer.experts.parameters():
            p[idle] = float("nan")
    with pytest.raises(ValueError, match=f"model: what expert {idle} beside {layer.name} returns"):
        diagnose(model, batch)


def test_a_gradient_that_is_stopped_in_the_running_router_only(tiny):
    """Hooks on a tensor do not go into a copy."""
    model, (batch,) = tiny.tiny("OLMoE"), tiny.batches("OLMoE", 1)
    for layer in tiny.layers_of(model):
        layer.W.register_hook(lambda g: 0 * g)
    found = diagnose(model, batch).findings
    assert {f.name for f in found} >= {"gradient"} and "gate" not in {f.name for f in found}


def test_a_balancing_loss_that_cannot_be_computed_is_a_finding(tiny):
    model, (batch,) = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    model.num_experts = 16
    (found,) = diagnose(model, batch).findings
    assert found.name == "balance" and found.detail.startswith("it cannot be computed")


def test_the_sign_and_the_size_of_a_balancing_loss(tiny, monkeypatch):
    model, (batch,) = (
        tiny.tiny("Mixtral", output_router_logits=True, router_aux_loss_coef=-0.02),
        tiny.batches("Mixtral", 1)[:1],
    )
    (found,) = diagnose(model, batch).findings
    assert found.name == "balance" and found.value == pytest.approx(-0.02) and "drives the load apart" in found.detail
    from transformers.models.mixtral import modeling_mixtral

    own = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *a, **b: 3 * own(*a, **b))
    model = tiny.tiny("Mixtral")
    (report,) = diagnose(model, batch).balance
    assert report.reads == "3 times all layers pooled" and report.scale == pytest.approx(3)
    assert [f.name for f in report.findings] == ["balance"]


def test_what_a_block_makes_of_its_experts_is_told(tiny):
    model, (batch,) = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    half = lambda _, __, out: torch.cat([out[..., :16], 0 * out[..., 16:]], -1)  # noqa: E731
    tiny.layers_of(model)[1].block.register_forward_hook(half)
    assert diagnose(model, batch).layers()["behind"].to_list() == ["a constant", "no constant"]


def test_tokens_less_sure_than_others_are_no_ties():
    """Gaps of tokens of different scale have no exponential law: what chance gives is known to a factor."""
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        h = torch.exp(torch.randn(2000, 1, generator=rng)) * torch.randn(2000, 64, generator=rng)
        assert not diagnose_router(h.bfloat16(), k=8).findings
    assert [f.name for f in diagnose_router((20 * h).round(), k=8).findings] == ["ties"]


def test_a_negative_rounding_is_refused():
    with pytest.raises(ValueError, match="rounding: expected 5 numbers >= 0"):
        RouterStream(4, 1).add(torch.randn(5, 4), rounding=-torch.ones(5))
