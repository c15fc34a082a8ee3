"""`diagnose` on every family of mixtures in transformers and all that their configurations offer for the routing.

A table of what is to be said: nothing; a fault that is the library's, with what is wrong; or a refusal with its reason.
"""

import pytest

pytest.importorskip("transformers")

import torch

from moe_theory.diagnose import diagnose, families

#: Faults of the library, or entries of a configuration that it does not heed, by family and variant.
FAULTS: dict[tuple[str, str], tuple[set[str], str]] = {
    ("cohere2_moe", "not normalized"): ({"config"}, "norm_topk_prob is read for sigmoids only"),
    ("deepseek_v2", "normalized"): ({"config"}, "norm_topk_prob is never read"),
    ("deepseek_v4", "not normalized"): ({"config"}, "norm_topk_prob is never read"),
    ("longcat_flash", "router bias"): ({"bias lost"}, "the biases of the router's matrix are never added"),
    ("phimoe", "K = 1"): ({"config", "balance"}, "two experts are selected whatever K is, and the loss counts K"),
    ("switch_transformers", "capacity"): ({"dropped"}, "tokens pass a full expert by, as is meant"),
    **{
        (name, "bias"): ({"loads"}, "the balancing loss selects again by the logits, without the bias")
        for name in ("deepseek_v4", "ernie4_5_moe", "laguna", "minimax_m2", "minimax_m3_vl")
    },
}

#: In NLLB-MoE the loop over experts takes the router's mask of zeros and ones for numbers of experts.
MASK_FOR_NUMBERS = {"dead", "collapse", "gate", "selection", "loads"}

#: What a family is refused for.
REFUSED = {
    "doge": "expected router and experts side by side",  # product keys: experts are embeddings
    "ernie4_5_vl_moe": "expected router and experts side by side",  # two mixtures in one block
    "inkling": "expected a linear router of .* experts, got 8 logits",  # logits of shared experts are in the gates
    "jetmoe": "expected router and experts side by side",  # experts' matrices beside the router's
    "zaya": "expected blocks that read hidden states, got one that reads",  # routers read what routers before say
}


def allowed(name: str, variant: str, report) -> set[str]:
    """What may be found in a whole model; random weights and biases may starve an expert."""
    if name == "nllb_moe":
        return MASK_FOR_NUMBERS | {"dropped"}
    found = FAULTS.get((name, variant), (set(), ""))[0] | {"dead"} | ({"collapse"} if variant == "bias" else set())
    alone = all(gate.k == 1 and "divided" in gate.gate for gate in report.gates.values())
    return found | {"gradient"} if alone else found


@pytest.mark.slow
@pytest.mark.parametrize("name", families.SIZES)
def test_no_sound_family_is_accused_and_true_faults_are_named(name):
    for variant in families.variants(name):
        model, batch = families.build(name, variant), families.batch(name)
        if name in REFUSED or (name, variant) in {("longcat_flash", "K = 1"), ("nllb_moe", "second sampled")}:
            with pytest.raises(ValueError, match=REFUSED.get(name, "expected arguments that|expected a linear router")):
                diagnose(model, batch)
            continue
        report = diagnose(model, batch)
        named = report.named - {"dead", "dropped"} if name == "nllb_moe" else report.named
        assert named <= allowed(name, variant, report), (variant, report.table())
        must = {"gate"} if name == "nllb_moe" else FAULTS.get((name, variant), (set(), ""))[0]
        assert must <= report.named, (variant, report.named)
        if variant == "K = 1" and all(gate.gate == "divided by itself" for gate in report.gates.values()):
            assert "gradient" in report.named, variant


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families.SIZES if name not in REFUSED])
def test_in_bfloat16_only_what_is_rounded_is_named(name):
    """A bias that selects is converted with the model; some routers round their scores before they select."""
    for variant in {"as it is", "bias"} & {*families.variants(name)}:
        model, batch = families.build(name, variant).bfloat16(), families.batch(name)
        if name == "inkling2":
            with pytest.raises(ValueError, match="expected m1 and m2 to have the same dtype"):
                diagnose(model, batch)
            continue
        named = diagnose(model, batch).named - {"dead", "collapse"}  # by the biases drawn
        rounded = {"scores rounded"} if name in ("deepseek_v4", "lfm2_moe", "switch_transformers") else set()
        if variant == "bias":
            assert "bias rounded" in named
            assert named <= {"bias rounded", "loads"} | rounded
        elif name != "nllb_moe":
            assert named <= rounded | ({"loads"} if rounded else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch_transformers", "mixtral", "minimax_m2", "gpt_oss", "granitemoe", "phimoe"])
def test_whether_padding_counts_in_the_balancing_loss_is_asked(name):
    model, batch = families.build(name), families.batch(name)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, 20:] = 0
    masks = {key.replace("input_ids", "attention_mask"): mask for key in batch if key.endswith("input_ids")}
    assert ("padding" in diagnose(model, batch | masks).named) is (name == "switch_transformers")


@pytest.mark.slow
def test_a_loss_that_is_configured_and_not_added_is_found_where_a_model_trains():
    model, batch = families.build("mixtral"), families.batch("mixtral")
    assert not diagnose(model, batch) and diagnose(model.train(), batch).named == {"unused"}
    assert diagnose(model.eval(), batch | {"labels": batch["input_ids"]}).named == {"unused"}
    model.config.output_router_logits = True
    assert not diagnose(model.train(), batch)
