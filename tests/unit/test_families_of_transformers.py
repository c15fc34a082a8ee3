"""Every family of mixtures of experts in transformers is built small and runs, or it is said why not."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from moe_theory.diagnose import families
from moe_theory.diagnose.families import CANNOT, COUNTS, PLAIN, SELECTED, SIZES, batch, build, variants

transformers = pytest.importorskip("transformers", minversion=families.LEAST)
MODELS = Path(transformers.__file__).parent / "models"

#: What in a model's code says that it has routers, or experts.
RECORDS = re.compile(r'"router_logits": *\[?\s*OutputRecorder|self\.experts = ')


def names():
    """The folders of the library's models whose code has routers or experts."""
    return {path.parent.name for path in MODELS.glob("*/modeling_*.py") if RECORDS.search(path.read_text())}


def pinned():
    lock = Path(__file__).parents[2] / "requirements.lock"
    return re.search(r"^transformers==(\S+)", lock.read_text(), re.MULTILINE).group(1)


def run(model, of):
    """Its output for a batch, asked for router logits where it takes the question."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(**of, output_router_logits=True)


def values(output):
    return output.logits if "logits" in output else output.last_hidden_state


@pytest.mark.skipif(importlib.metadata.version("transformers") != pinned(), reason="another version has other families")
def test_every_family_of_the_library_is_known():
    assert names() == SIZES.keys() | CANNOT.keys()
    assert not SIZES.keys() & CANNOT.keys()


@pytest.mark.slow
def test_what_is_listed_is_in_the_library():
    if Version(transformers.__version__) == Version(pinned()):
        assert names() >= SIZES.keys()
    for of in SIZES.values():
        assert hasattr(transformers, of.config), of.config
        assert hasattr(transformers, of.model), of.model


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="^name: expected"):
        variants("Mixtral")
    with pytest.raises(ValueError, match="^name: expected"):
        batch("Mixtral")
    with pytest.raises(ValueError, match="^variant: expected"):
        build("mixtral", "bias")


def test_variants_come_from_the_configuration():
    assert variants("mixtral") == [PLAIN, "K = 1"]
    assert "normalized" in variants("olmoe") and "not normalized" not in variants("olmoe")
    assert {"two of four groups", "one of two groups", "factor", "bias"} <= set(variants("deepseek_v3"))


def test_weights_are_those_of_a_seed():
    first, same, other = (build("deepseek_v3", "bias", seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], other["model.layers.0.mlp.gate.weight"])
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert not torch.equal(first[bias], other[bias])
    plain = build("deepseek_v3").state_dict()
    assert [key for key in first if not torch.equal(first[key], plain[key])] == [bias, bias.replace(".0.", ".1.")]


def test_a_hash_sends_a_symbol_to_two_experts():
    model = build("deepseek_v4", "hash")
    (table,) = (value for name, value in model.named_buffers() if name.endswith("tid2eid"))
    assert table.shape == (families.SYMBOLS, 2)
    assert (table[:, 0] != table[:, 1]).all()
    assert table.unique().tolist() == list(range(families.EXPERTS))


#: Families whose experts are more, as their routers take a square number, or fewer selected.
SQUARE, ONE = {"doge": 16}, {"zaya", "switch_transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_family_runs(name):
    model, of = build(name), batch(name)
    config = model.config.ffn_config if name == "dbrx" else model.config
    counts = {getattr(config, key) for key in COUNTS if hasattr(config, key)}
    assert counts == {SQUARE.get(name, families.EXPERTS)}
    if name not in {"dbrx", "nllb_moe", "switch_transformers"}:
        assert {getattr(config, key) for key in SELECTED if hasattr(config, key)} == {1 if name in ONE else 2}
    assert torch.isfinite(values(run(model, of))).all()
    assert sum(p.numel() for p in model.parameters()) < 200_000


#: Variants that a sound model of these weights does not tell apart: gates of a softmax over those kept are normalized
#: already, two groups of the largest maxima have the two largest numbers, nothing is dropped before the gates are
#: normalized, and no bias is as good as one of zero.
ALIKE = {
    ("cohere2_moe", "not normalized"),
    ("deepseek_ocr2", "two of four groups"),
    ("deepseek_v2", "two of four groups"),
    ("unlimited_ocr", "two of four groups"),
    ("nllb_moe", "normalized before"),
    ("lfm2_moe", "no bias"),
}
#: Variants that change nothing, though they should: faults of the library.
UNREAD = {
    ("deepseek_v2", "normalized"),
    ("deepseek_v4", "not normalized"),
    ("longcat_flash", "router bias"),
    ("phimoe", "K = 1"),
}
#: Variants with which the library fails.
FAILS = {("longcat_flash", "K = 1"): "not enough values to unpack"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_variant_is_another_function(name):
    of = batch(name)
    plain = values(run(build(name), of))
    for variant in variants(name)[1:]:
        model = build(name, variant)
        if (name, variant) in FAILS:
            with pytest.raises(ValueError, match=FAILS[name, variant]):
                run(model, of)
            continue
        out = values(run(model, of))
        assert torch.isfinite(out).all()
        assert torch.equal(out, plain) == ((name, variant) in ALIKE | UNREAD), variant
