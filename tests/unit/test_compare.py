"""Two models that should be one: what was done to the second is named, where it was done, and sound pairs are equal."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moe_theory.diagnose import compare

pytest.importorskip("transformers")
from moe_theory.diagnose import tiny
from moe_theory.diagnose.traces import layers_of

pytestmark = pytest.mark.usefixtures("what_an_older_library_does_not_serve_is_skipped")

SQUARE = {"Mixtral": dict(intermediate_size=32), "Switch": dict(d_ff=32), "OLMoE": dict(intermediate_size=16)}


def sigmoid_model(seed=0, **config):
    """A model of the family of DeepSeek-V3 with random weights and biases, three layers, two of them with experts."""
    transformers = tiny.library("5.19")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=3)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16)
    parts = dict(qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1)
    groups = dict(n_group=1, topk_group=1) | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**sizes, **heads, **parts, **experts, **groups)
        )
        for p in model.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        for layer in layers_of(model):
            layer.router.e_score_correction_bias.copy_(0.2 * torch.randn(8))
    return model.eval()


def made(family: str, **config) -> nn.Module:
    return sigmoid_model(**config) if family == "DeepSeek-V3" else tiny.tiny(family, **config)


def texts(family: str, number: int = 1, seed: int = 0):
    return tiny.batches("Mixtral" if family == "DeepSeek-V3" else family, number, seed=seed)


def at(number: int, change: Callable) -> Callable:
    """A change of one layer."""
    return lambda model: change(layers_of(model)[number])


def renumbered(part: str, order: Callable) -> Callable:
    """Experts, or the router, in another order."""

    def change(layer):
        if part == "router":
            layer.W.copy_(order(layer.W))
        else:
            for group in tiny._of_experts(layer):
                for p, value in zip(group, order(torch.stack(group)).unbind(), strict=True):
                    p.copy_(value)

    return change


def roll(p):
    return p.roll(1, 0)


def exchange(p):
    return p[[0, 1, 5, 3, 4, 2, 6, 7]]


def randomized(*experts: int) -> Callable:
    def change(layer):
        for group in tiny._of_experts(layer):
            for m in experts or range(len(group)):
                group[m].copy_(torch.randn(group[m].shape, generator=torch.Generator().manual_seed(m)) * 0.2)

    return change


def matrices(name: str, change: Callable, *experts: int) -> Callable:
    """One kind of the experts' matrices, changed."""

    def changes(layer):
        for number, p in layer.experts.named_parameters():
            if name in number:
                for m in experts or range(len(layer.W)):
                    if p.ndim == 3:
                        p[m] = change(p[m].clone())
                    elif f"_{m}." in number:
                        p.copy_(change(p.clone()))

    return changes


def shared_lost(layer):
    for name, p in layer.block.named_parameters():
        if "shared_expert" in name and "down_proj" in name:
            p.zero_()


def shared_gate_ignored(layer):
    layer.block.shared_expert_gate = nn.Linear(32, 1).to(layer.W.dtype)
    layer.block.shared_expert_gate.weight.zero_()
    layer.block.shared_expert_gate.bias.fill_(100.0)


def shared_gate_constant(layer):
    layer.block.shared_expert_gate.weight.zero_()


def shared_other(layer):
    for name, p in layer.block.named_parameters():
        if "shared_expert." in name or "shared_experts." in name:
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))


def gates_changed(change: Callable) -> Callable:
    """What a router returns, changed: logits, gates and numbers."""
    return lambda layer: layer.router.register_forward_hook(lambda _, __, out: change(*out))


def biases(change: Callable) -> Callable:
    def changes(layer):
        bias = layer.router.e_score_correction_bias
        bias.copy_(change(bias.clone()))

    return changes


def set_router(**values) -> Callable:
    return lambda layer: [setattr(layer.router, name, value) for name, value in values.items()]


def router_of_other(model):
    first, second = layers_of(model)
    second.W.copy_(first.W)


def layers_exchanged(model):
    one, other = (list(layer.block.parameters()) for layer in layers_of(model))
    for p, q in zip(one, other, strict=True):
        kept = p.clone()
        p.copy_(q)
        q.copy_(kept)


def block_silent(layer):
    layer.block.register_forward_hook(lambda _, __, out: 0 * out)


def block_louder(layer):
    layer.block.register_forward_hook(lambda _, __, out: 1.001 * out)


def experts_shuffled(layer):
    layer.experts.register_forward_hook(lambda _, args, out: out.flip(0) if len(out) > 100 else out)


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))


def embeddings(model):
    model.get_input_embeddings().weight[5] *= 1.01


def attention(number):
    def change(model):
        weight = model.model.layers[number].self_attn.o_proj.weight
        weight.copy_(weight.flip(0))

    return change


def both(*changes):
    return lambda model: [change(model) for change in changes]


def skipped(model):
    del model.model.layers[1].mlp
    model.model.layers[1].mlp = nn.Identity()


DECODERS = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE")
ALL = (*DECODERS, "Switch", "DeepSeek-V3")
V3 = ("DeepSeek-V3",)

#: What is done to the second model: families, the change, parts that are to be named, the layer, what is said.
FAULTS: dict[str, tuple[tuple[str, ...], Callable, set[str], int, str]] = {
    "experts rolled": (ALL, at(1, renumbered("experts", roll)), {"order"}, 1, "experts renumbered against the router"),
    "two experts exchanged": (ALL, at(0, renumbered("experts", exchange)), {"order"}, 0, "[0, 1, 5, 3, 4, 2, 6, 7]"),
    "router rolled": (
        *(ALL[:5], at(1, renumbered("router", roll)), {"order"}, 1),
        "router renumbered against the experts, by 1",
    ),
    "rolled, one random": (
        *(DECODERS, both(at(1, renumbered("experts", roll)), at(1, randomized(3))), {"order", "experts"}, 1),
        "experts renumbered against the router",
    ),
    "one expert random": (ALL, at(1, randomized(3)), {"experts"}, 1, "experts [3]"),
    "all experts random": (ALL, at(0, randomized()), {"experts"}, 0, "experts [0..7]"),
    "one expert zero": (
        ("Mixtral", "DeepSeek-V3"),
        at(1, matrices("down_proj", lambda p: 0 * p, 2)),
        {"experts"},
        1,
        "experts [2] (answer 0)",
    ),
    "one expert another's": (
        ("Mixtral",),
        at(1, lambda layer: [p.__setitem__(3, p[6]) for p in layer.experts.parameters()]),
        {"experts"},
        1,
        "experts [3] (as those of a numbered [6])",
    ),
    "down transposed": (
        ("Mixtral",),
        at(1, matrices("down_proj", lambda p: p.T)),
        {"transposed"},
        1,
        "experts [0..7] (down_proj transposed)",
    ),
    "one down transposed": (
        ("Mixtral",),
        at(1, matrices("down_proj", lambda p: p.T, 3)),
        {"transposed"},
        1,
        "experts [3] (down_proj transposed)",
    ),
    "up transposed": (
        ("OLMoE",),
        at(1, matrices("gate_up_proj", lambda p: p.T)),
        {"transposed"},
        1,
        "experts [0..7] (gate_up_proj transposed)",
    ),
    "halves transposed": (
        ("Mixtral",),
        at(0, matrices("gate_up_proj", lambda p: torch.cat([h.T for h in p.chunk(2)]))),
        {"transposed"},
        0,
        "experts [0..7] (gate_up_proj each half transposed)",
    ),
    "wo transposed": (
        ("Switch",),
        at(0, matrices("wo", lambda p: p.T, 1, 4)),
        {"transposed"},
        0,
        "experts [1, 4] (wo transposed)",
    ),
    "both transposed": (
        ("Switch",),
        at(1, matrices("w", lambda p: p.T)),
        {"transposed"},
        1,
        "experts [0..7] (wi, wo transposed)",
    ),
    "gate and up swapped": (
        DECODERS,
        at(1, matrices("gate_up_proj", lambda p: p.roll(len(p) // 2, 0))),
        {"experts"},
        1,
        "experts [0..7] (gate_up_proj halves exchanged)",
    ),
    "gate and up in turn": (
        DECODERS,
        at(1, matrices("gate_up_proj", lambda p: torch.stack(p.chunk(2), 1).flatten(0, 1))),
        {"experts"},
        1,
        "(gate_up_proj rows of the halves in turn)",
    ),
    "shared lost": (("Qwen2-MoE", "DeepSeek-V3"), at(1, shared_lost), {"shared"}, 1, "lost"),
    "shared other": (("Qwen2-MoE", "DeepSeek-V3"), at(0, shared_other), {"shared"}, 0, "another"),
    "shared gate ignored": (("Qwen2-MoE",), at(0, shared_gate_ignored), {"shared gate"}, 0, "by token"),
    "shared gate constant": (("Qwen2-MoE",), at(1, shared_gate_constant), {"shared gate"}, 1, "by token"),
    "bias lost": (V3, at(1, biases(torch.zeros_like)), {"bias"}, 1, "lost"),
    "bias rolled": (V3, at(0, biases(roll)), {"bias"}, 0, "renumbered"),
    "bias rounded": (V3, at(1, biases(lambda b: b.bfloat16().float())), {"bias"}, 1, "rounded to bfloat16"),
    "bias other": (V3, at(1, biases(lambda b: 1.1 * b)), {"bias"}, 1, "another"),
    "groups ignored": (
        V3,
        at(1, set_router(num_group=1, topk_group=1)),
        {"choices"},
        1,
        "of the tokens go to other experts",
    ),
    "factor lost": (V3, at(1, set_router(routed_scaling_factor=1.0)), {"gates"}, 1, "times 0.4"),
    "factor twice": (V3, at(0, set_router(routed_scaling_factor=6.25)), {"gates"}, 0, "times 2.5"),
    "no longer normalized": (
        V3,
        at(0, set_router(norm_topk_prob=False)),
        {"gates"},
        0,
        "no longer divided by their sum",
    ),
    "normalized": (
        ("Qwen2-MoE", "OLMoE"),
        at(1, gates_changed(tiny._normalized)),
        {"gates"},
        1,
        "now divided by their sum",
    ),
    "gates of biased scores": (
        V3,
        at(
            1,
            lambda layer: layer.router.register_forward_hook(
                lambda _, __, out: (
                    out[0],
                    2.5
                    * (g := (out[0].sigmoid() + layer.router.e_score_correction_bias).gather(1, out[2]))
                    / g.sum(1, keepdim=True),
                    out[2],
                )
            ),
        ),
        {"gates"},
        1,
        "others on the same logits",
    ),
    "gates exchanged": (DECODERS, at(1, gates_changed(lambda h, g, m: (h, g.flip(-1), m))), {"gates"}, 1, "others"),
    "experts after those selected": (
        DECODERS,
        at(1, gates_changed(tiny._next_experts)),
        {"choices"},
        1,
        "1 of the tokens",
    ),
    "one router row": (ALL, at(1, lambda layer: layer.W[2].mul_(1.01)), {"logits"}, 1, "of experts [2]"),
    "router shifted": (V3, at(0, lambda layer: layer.W.add_(torch.linspace(-1, 1, 32))), {"logits"}, 0, "shifted"),
    "router of another layer": (DECODERS, router_of_other, {"logits"}, 1, "those of model.layers.0.mlp"),
    "layers with shared experts exchanged": (
        ("Qwen2-MoE",),
        layers_exchanged,
        {"logits", "experts", "shared"},
        0,
        "those of model.layers.1.mlp",
    ),
    "layers exchanged": (
        ("Mixtral", "Qwen3-MoE", "OLMoE"),
        layers_exchanged,
        {"logits", "experts"},
        0,
        "those of model.layers.1.mlp",
    ),
    "one expert for two": (DECODERS, at(1, set_router(top_k=1)), {"choices"}, 1, "1 experts for a token, 2 before"),
    "no room": (("Switch",), at(0, set_router(expert_capacity=1)), {"dropped"}, 0, "of the tokens"),
    "block silent": (ALL[:5], at(0, block_silent), {"block"}, 0, "what it makes of its experts"),
    "block louder": (ALL[:5], at(1, block_louder), {"block"}, 1, "what it makes of its experts"),
    "experts together": (ALL, at(1, experts_shuffled), {"experts"}, 1, "together, though each alone agrees"),
    "head": (DECODERS, untied, {"model"}, 1, "what is made of what it says"),
    "embeddings": (ALL, embeddings, {"model"}, 0, "what it reads"),
    "attention": ((*DECODERS, *V3), attention(1), {"model"}, -1, "what it reads"),
    "layer left out": (
        DECODERS,
        lambda m: m.model.layers[1].register_forward_hook(lambda _, args, out: args[0]),
        {"model"},
        1,
        "what is made",
    ),
}

CASES = [(family, name) for name, (families, *_) in FAULTS.items() for family in families]
OTHERS = {
    "groups ignored": dict(n_group=4, topk_group=2),
    "normalized": dict(norm_topk_prob=False),
    "head": dict(tie_word_embeddings=False),
}


def config_of(family: str, name: str) -> dict:
    square = SQUARE.get(family, {}) if "transposed" in name else {}
    return square | OTHERS.get(name, {})


@pytest.mark.parametrize(("family", "name"), CASES)
def test_what_was_done_is_named_where_it_was_done(family, name):
    _, change, named, number, says = FAULTS[name]
    a = made(family, **config_of(family, name))
    b = copy.deepcopy(a)
    with torch.no_grad():
        change(b)
    found = compare(a, b, texts(family))
    where = layers_of(a)[number if number >= 0 or family != "DeepSeek-V3" else 0].name.rpartition(".")[0]
    assert found and found.named == named, found.table().to_string()
    assert {part.where for part in found.differs if part.name != "model"} <= {where} or "exchanged" in name
    assert found.first.where == where and says in found.first.says
    assert says in repr(found) and where in repr(found)


def shifted(model):
    tiny._shifted(model)


def reordered(model):
    """Experts and router together; a bias that selects goes with them."""
    tiny._renumbered(model)
    for layer in layers_of(model):
        if hasattr(layer.router, "e_score_correction_bias"):
            layer.router.e_score_correction_bias.copy_(layer.router.e_score_correction_bias.flip(0))


def in_double(model):
    model.double()


def loops(model):
    """The library's loop over experts in place of a kernel for all of them."""
    model.config._experts_implementation = "eager"


def summed_backwards(layer):
    """Hidden units of every expert in another order: the same function, with other roundings."""
    p = layer.experts
    half = p.gate_up_proj.unflatten(1, (2, -1)).flip(2).flatten(1, 2)
    p.gate_up_proj.copy_(half)
    p.down_proj.copy_(p.down_proj.flip(2))


SOUND = {
    "equal": (ALL, lambda model: None),
    "renumbered": (ALL, reordered),
    "shifted": (ALL[:5], shifted),
    "bfloat16": (ALL[:5], lambda model: model.bfloat16()),
    "weights rounded": (ALL[:5], lambda model: model.bfloat16().float()),
    "float16": (DECODERS, lambda model: model.half()),
    "float64": (("Mixtral", "Qwen2-MoE", "OLMoE"), both(loops, in_double)),
    "other kernel": ((*DECODERS, *V3), loops),
    "sums in another order": ((*DECODERS, *V3), at(1, summed_backwards)),
    "shifted and renumbered in bfloat16": (DECODERS, lambda m: both(tiny._renumbered, shifted)(m.bfloat16())),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("family", "name"), [(f, n) for n, (families, _) in SOUND.items() for f in families])
def test_sound_pairs_are_equal_to_rounding(family, name, seed):
    a = made(family, seed=seed)
    b = copy.deepcopy(a)
    with torch.no_grad():
        SOUND[name][1](b)
    for one, other in ((a, b), (b, a)):
        found = compare(one, other, texts(family, 2, seed=seed))
        assert not found and not found.named and found.first is None, found.table().to_string()
        assert repr(found).startswith("compare: equal to rounding in 2 layers")
        assert bool(found.orders) == ("renumbered" in name) and bool(found.shifts) == ("shifted" in name)
    if "renumbered" in name:
        assert set(found.orders.values()) == {((7, 6, 5, 4, 3, 2, 1, 0),) * 2}


def test_a_bias_that_selects_is_held_to_single_precision():
    a = made("DeepSeek-V3")
    found = compare(a, copy.deepcopy(a).bfloat16(), texts("DeepSeek-V3"))
    assert found.named == {"bias"} and found.first.says == "rounded to bfloat16"
    b = copy.deepcopy(a).bfloat16()
    for one, other in zip(layers_of(a), layers_of(b), strict=True):
        other.router.e_score_correction_bias = one.router.e_score_correction_bias.clone()
    assert not compare(a, b, texts("DeepSeek-V3"))


IN_HALF = ("experts rolled", "one expert random", "one down transposed", "shared lost", "shared gate ignored")
IN_HALF += ("gate and up swapped", "router of another layer", "normalized", "one expert for two", "attention")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", IN_HALF)
def test_a_fault_is_told_from_rounding_to_half_precision(name, kind):
    families, change, named, _, says = FAULTS[name]
    a = made(families[0], **config_of(families[0], name))
    b = copy.deepcopy(a).to(kind)
    with torch.no_grad():
        change(b)
    found = compare(a, b, texts(families[0]))
    assert found.named == named and says in found.first.says, found.table().to_string()


def test_faults_of_two_layers_are_told_apart():
    """The first one's echo in the second layer is none, and what is wrong there is found beside it."""
    a = made("Qwen2-MoE")
    b = copy.deepcopy(a)
    with torch.no_grad():
        both(at(0, shared_lost), at(1, renumbered("experts", roll)))(b)
    found = compare(a, b, texts("Qwen2-MoE"))
    assert [(part.where[-5], part.name) for part in found.differs] == [("0", "shared"), ("1", "order")]
    table = found.table().set_index(["where", "name"])
    assert table.loc["model.layers.1.mlp", "block"]["ran"].item() > 0.1


def test_what_is_wrong_outside_is_told_beside_a_layer():
    a = made("Mixtral")
    b = copy.deepcopy(a)
    with torch.no_grad():
        both(at(0, randomized(3)), attention(1))(b)
    found = compare(a, b, texts("Mixtral"))
    assert [(part.where[-5], part.name) for part in found.differs] == [("0", "experts"), ("1", "model")]


def test_numbers_that_the_answers_cannot_tell_are_taken_from_the_router():
    """All experts are copies of one, as after upcycling: only the router has numbers."""
    a = made("Mixtral")
    with torch.no_grad():
        for layer in layers_of(a):
            for p in layer.experts.parameters():
                p.copy_(p[:1].expand_as(p).clone())
        b = copy.deepcopy(a)
        for layer in layers_of(b):
            layer.W.copy_(layer.W.roll(1, 0))
    found = compare(a, b, texts("Mixtral"))
    assert not found and set(found.orders.values()) == {((1, 2, 3, 4, 5, 6, 7, 0),) * 2}


class LowRank(nn.Module):
    """An adapter on a matrix, or a stack of them."""

    def __init__(self, p):
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.A = nn.Parameter(torch.randn(*p.shape[:-1], 2, generator=rng))
        self.B = nn.Parameter(torch.randn(*p.shape[:-2], 2, p.shape[-1], generator=rng) / p.shape[-1])

    def forward(self, p):
        return p + self.A @ self.B


@pytest.mark.parametrize("family", DECODERS)
def test_adapters_merged_are_those_unmerged(family):
    from torch.nn.utils import parametrize

    def adapted(model):
        for block in model.model.layers:
            parametrize.register_parametrization(
                block.self_attn.q_proj, "weight", LowRank(block.self_attn.q_proj.weight)
            )
            for name in ("gate_up_proj", "down_proj"):
                matrix = getattr(block.mlp.experts, name)
                parametrize.register_parametrization(block.mlp.experts, name, LowRank(matrix))
        return model

    plain = made(family)
    unmerged, merged = adapted(copy.deepcopy(plain)), adapted(copy.deepcopy(plain))
    for block in merged.model.layers:
        parametrize.remove_parametrizations(block.self_attn.q_proj, "weight")
        for name in ("gate_up_proj", "down_proj"):
            parametrize.remove_parametrizations(block.mlp.experts, name)
    assert not compare(unmerged, merged, texts(family)) and not compare(merged, unmerged, texts(family))
    assert compare(plain, merged, texts(family)).named == {"model", "experts"}


@pytest.mark.filterwarnings("ignore")
def test_linear_layers_in_eight_bits_need_a_tolerance():
    """Eight bits over a range of some four standard deviations: an error of one in a hundred or so of a weight."""
    a = made("Qwen2-MoE")
    b = torch.ao.quantization.quantize_dynamic(copy.deepcopy(a), {nn.Linear}, dtype=torch.qint8)
    found = compare(a, b, texts("Qwen2-MoE"))
    assert "shared" in found.named and found.first.value < 0.1
    assert not compare(a, b, texts("Qwen2-MoE"), tolerance=0.1)
    with torch.no_grad():
        at(1, renumbered("experts", roll))(b)
    found = compare(a, b, texts("Qwen2-MoE"), tolerance=0.1)
    assert found.named == {"order"} and found.first.where == "model.layers.1.mlp"


def upcycled(copies: int = 8, **config):
    """A dense model, and a mixture whose experts are copies of its MLPs."""
    transformers = tiny.library()
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, tie_word_embeddings=False)).eval()
        mixture = tiny.tiny("Qwen3-MoE", **config)
    with torch.no_grad():
        rng = torch.Generator().manual_seed(0)
        for p in dense.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=rng) / p.shape[-1] ** 0.5)
        mixture.load_state_dict(dense.state_dict(), strict=False)
        for block, layer in zip(dense.model.layers, layers_of(mixture), strict=True):
            layer.experts.gate_up_proj.copy_(torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]))
            layer.experts.down_proj.copy_(block.mlp.down_proj.weight.clone())
    return dense, mixture


def test_a_mixture_of_copies_is_the_dense_model():
    dense, mixture = upcycled()
    found = compare(dense, mixture, texts("Mixtral"))
    assert not found and repr(found) == "compare: equal to rounding in 2 layers"
    assert set(found.table()["name"]) == {"model", "experts", "gates", "shared", "block"}
    assert not compare(dense, copy.deepcopy(mixture).bfloat16(), texts("Mixtral"))


@pytest.mark.parametrize(
    ("change", "named", "says"),
    [
        (at(1, randomized(3)), {"experts"}, "experts [3] are no copies"),
        (
            at(0, lambda layer: layer.experts.gate_up_proj.copy_(layer.experts.gate_up_proj.roll(48, 1))),
            {"experts"},
            "[0..7]",
        ),
        (at(0, lambda layer: setattr(layer.router, "norm_topk_prob", False)), {"gates"}, "their sum"),
        (at(1, block_louder), {"block"}, "what it makes"),
        (attention(0), {"model"}, "what it reads"),
    ],
)
def test_what_is_no_copy_of_the_dense_model_is_named(change, named, says):
    dense, mixture = upcycled()
    with torch.no_grad():
        change(mixture)
    found = compare(dense, mixture, texts("Mixtral"))
    assert found.named == named and says in found.first.says, found.table().to_string()


def test_padding_is_left_out():
    """What the second model does at padding alone is no difference."""
    a, (batch,) = made("Mixtral"), texts("Mixtral")
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 20:] = 0
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.get_input_embeddings().weight[0] += 1
    ids = batch["input_ids"].masked_fill(mask == 0, 0)
    assert not compare(a, b, {"input_ids": ids, "attention_mask": mask})
    assert compare(a, b, {"input_ids": ids}).named == {"model"}


def test_every_batch_is_put():
    """Only a text of the third batch has the symbol whose embedding differs."""
    a = made("OLMoE")
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.get_input_embeddings().weight[2] += 1
    batches = texts("OLMoE", 3)
    assert not compare(a, b, batches)
    batches[2]["input_ids"][4, 7] = 2
    assert compare(a, b, iter(batches)).named == {"model"}


@pytest.mark.parametrize("family", ["Mixtral", "Switch"])
def test_both_models_are_left_as_they_were(family):
    a = made(family, **SQUARE.get(family, {}))
    b = copy.deepcopy(a)
    with torch.no_grad():
        at(1, matrices("down_proj" if family == "Mixtral" else "wo", lambda p: p.T))(b)
    b.train()
    layers_of(b)[0].W.requires_grad_(False)
    kept = [{n: t.clone() for n, t in m.state_dict().items()} for m in (a, b)]
    learns = [[p.requires_grad for p in m.parameters()] for m in (a, b)]
    assert compare(a, b, texts(family)).named == {"transposed"}
    for model, before, flags in zip((a, b), kept, learns, strict=True):
        assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        assert [p.requires_grad for p in model.parameters()] == flags
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert b.training and not a.training and all(m.training for m in b.modules())


def test_a_model_is_itself():
    a = made("Mixtral")
    assert not compare(a, a, texts("Mixtral"))


def test_a_comparison_is_a_table_and_a_dictionary():
    a = made("Mixtral")
    b = copy.deepcopy(a)
    with torch.no_grad():
        at(1, randomized(3))(b)
    found = compare(a, b, texts("Mixtral"))
    assert repr(found) == "compare: first difference in model.layers.1.mlp: experts [3]"
    rows = found.table()
    assert list(rows.columns) == ["where", "name", "value", "limit", "says", "ran", "follows", "differs"]
    assert rows[rows["differs"]]["name"].to_list() == ["experts"]
    assert rows[rows["follows"]]["name"].to_list() == ["block"]
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["first"]["name"] == "experts" and not read["equal"] and len(read["parts"]) == len(rows)


def test_a_layer_that_the_second_model_does_not_run_is_named():
    a = made("Mixtral")
    b = copy.deepcopy(a)
    b.model.layers[1].forward = lambda hidden_states, **_: hidden_states
    found = compare(a, b, texts("Mixtral"))
    assert found.named == {"model"} and "b does not run it" in repr(found)


BAD = {
    "depth": (lambda: made("Mixtral", num_hidden_layers=3), "b: expected 2 mixture layers as in a, got 3"),
    "width": (
        lambda: made("Mixtral", hidden_size=64),
        r"b: expected to read \(256, 32\) in model.layers.0.mlp, as a, got \(256, 64\)",
    ),
    "experts": (
        lambda: made("Mixtral", num_local_experts=12),
        "b: expected 8 experts in model.layers.0.mlp as in a, got 12",
    ),
    "vocabulary": (lambda: made("Mixtral", vocab_size=80), "b: expected a vocabulary of 64 symbols as in a, got 80"),
    "no model": (lambda: 3, "b: expected a model of transformers, got int"),
    "dense": (lambda: upcycled()[0], "b: expected a model of transformers with mixture layers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_named(name):
    other, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        compare(made("Mixtral"), other(), texts("Mixtral"))


def test_bad_batches_and_tolerances_are_named():
    a = made("Mixtral")
    for batches, message in (
        ([], "batches: expected at least one, got none"),
        ([3], "batches: expected arguments of the model by name, got int"),
        ({"input_ids": torch.zeros(1, 2)}, "batches: expected arguments with which a runs, got .*Float"),
        (
            {"input_ids": torch.full((1, 4), 99)},
            "batches: expected arguments with which a runs, got index out of range",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            compare(a, a, batches)
    for tolerance in (-0.1, float("nan"), "much"):
        with pytest.raises(ValueError, match="tolerance: expected a finite number >= 0"):
            compare(a, a, texts("Mixtral"), tolerance=tolerance)
    with pytest.raises(ValueError, match="a: expected a model of transformers, got Module"):
        compare(nn.Module(), a, texts("Mixtral"))
    dense, mixture = upcycled()
    del dense.model.layers[1].mlp
    with pytest.raises(
        ValueError, match=r"a: expected mixture layers, or MLPs .* got none at \['model.layers.1.mlp'\]"
    ):
        compare(dense, mixture, texts("Mixtral"))


def test_what_is_not_a_number_is_said():
    a = made("Mixtral")
    for name in ("gate_up_proj", "down_proj"):
        b = copy.deepcopy(a)
        with torch.no_grad():
            at(1, matrices(name, lambda p: p * float("nan"), 3))(b)
        with pytest.raises(ValueError, match="b: what the experts beside model.layers.1.mlp.gate return"):
            compare(a, b, texts("Mixtral"))


def part_of(found, number: int, name: str):
    (part,) = [p for p in found.parts if p.where == f"model.layers.{number}.mlp" and p.name == name]
    return part


@pytest.mark.parametrize("of_limit", [0.5, 2.0])
def test_an_expert_is_told_from_what_rounding_does_at_the_limit(of_limit):
    """Its answers times 1 + d are apart by d, relative to the root mean square of the two sizes."""
    a = made("OLMoE")
    limit = part_of(compare(a, a, texts("OLMoE")), 1, "experts").limit
    d = of_limit * limit
    b = copy.deepcopy(a)
    with torch.no_grad():
        layers_of(b)[1].experts.down_proj[3] *= 1 + d
    part = part_of(compare(a, b, texts("OLMoE")), 1, "experts")
    assert part.value == pytest.approx(d, rel=0.05) and part.differs == (of_limit > 1)
    assert 0.5 * limit < part.limit < 1.05 * limit < 1e-4  # of this expert, and the largest of all


def test_distances_are_those_of_another_route():
    """Logits, gates and the whole model as it runs, computed from weights and from what the models return."""
    a, (batch,) = made("Mixtral"), texts("Mixtral")
    b = copy.deepcopy(a)
    with torch.no_grad():
        layers_of(b)[1].W[2] *= 1.5
        x = a.model(**batch, output_hidden_states=True).hidden_states[1]
        block = a.model.layers[1]
        cos_sin = a.model.rotary_emb(x, torch.arange(32)[None])
        x = x + block.self_attn(block.input_layernorm(x), position_embeddings=cos_sin, attention_mask=None)[0]
        h = (block.post_attention_layernorm(x).flatten(0, 1) @ layers_of(a)[1].W.T).double()
        other = h.clone()
        other[:, 2] *= 1.5
        spread = sum((t - t.mean(1, keepdim=True)).square().sum() for t in (h, other)) / 2
        value = ((other - h).square().sum() * 8 / spread).sqrt().item()
        one, two = (m(**batch).logits for m in (a, b))
        ran = ((one - two).norm() / ((one.square().sum() + two.square().sum()) / 2).sqrt()).item()
    found = compare(a, b, batch)
    assert part_of(found, 1, "logits").value == pytest.approx(value, rel=1e-4)
    assert found.parts[-1].ran == pytest.approx(ran, rel=1e-4) and not found.parts[-1].differs
    flips = (h.topk(2).indices.sort().values != other.topk(2).indices.sort().values).any(1).double().mean()
    assert part_of(found, 1, "choices").value == pytest.approx(flips.item(), abs=1e-9)
    assert part_of(found, 1, "choices").follows


def test_a_tolerance_is_relative():
    a = made("Qwen2-MoE")
    b = copy.deepcopy(a)
    with torch.no_grad():
        for layer in layers_of(b):
            layer.experts.down_proj.mul_(1.02)
            layer.router.weight.mul_(1.02)
    assert compare(a, b, texts("Qwen2-MoE")).named == {"logits", "experts"}
    assert compare(a, b, texts("Qwen2-MoE"), tolerance=0.01).named == {"logits", "experts"}
    assert not compare(a, b, texts("Qwen2-MoE"), tolerance=0.05)
