"""The plain path of `train_patch_moe`: the engine's steps on what is the paper's, and anything else."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_theory.tasks.patches import PatchTask
from moe_theory.training import train_patch_moe, train_single_expert
from moe_theory.training.plain import LAWS, linear_router, softmax_gate

TASK = PatchTask(K=2, d=8)
TRAIN, TEST = TASK.sample(150, 0, torch.float64), TASK.sample(150, 1, torch.float64)
SMALL = dict(experts=3, filters=4, steps=5, eta=0.05, record_every=1)


def trained(train=TRAIN, test=TEST, **other):
    (run,) = train_patch_moe(train, test, **{**SMALL, **other})
    return run


def copies(**other):
    """The paper's parts under other names, so that the plain path takes them."""
    return {"gate": lambda h, m: softmax_gate(h, m), "router": lambda x, theta: linear_router(x, theta), **other}


@pytest.mark.parametrize("how", [{}, {"balance": 0.1}, {"activation": "celu"}, {"normalized": False}])
def test_on_the_papers_layer_both_paths_take_the_same_steps(how):
    fast, plain = trained(**how), trained(**how, **copies())
    assert plain.history[0]["loss"] == pytest.approx(fast.history[0]["loss"], rel=1e-9)
    for name, value in fast.parameters.items():
        torch.testing.assert_close(plain.parameters[name], value, rtol=1e-7, atol=1e-9)
    assert plain.history[-1]["dispatch"].tolist() == fast.history[-1]["dispatch"].tolist()


def test_an_activation_of_ones_own_is_the_one_of_its_formula():
    for how in ({}, copies()):
        own, named = trained(activation=lambda z: z**3, **how), trained(activation="cubic", **how)
        torch.testing.assert_close(own.parameters["W"], named.parameters["W"], rtol=1e-7, atol=1e-9)


def test_noise_has_a_law_a_scale_or_a_function():
    by_scale, by_function = (
        trained(noise=("uniform", 0.3)),
        trained(noise=lambda rng, shape: 0.3 * LAWS["uniform"](rng, shape)),
    )
    torch.testing.assert_close(by_scale.parameters["W"], by_function.parameters["W"])
    assert (by_scale.parameters["W"] != trained().parameters["W"]).any()
    silent = trained(noise=lambda rng, shape: np.zeros(shape))
    assert silent.history[0]["dispatch"].shape == (2, 3)
    assert LAWS["gaussian"](np.random.default_rng(0), (2, 3)).min() < 0
    assert trained(noise="gaussian").history[-1]["step"] == 5


def test_patches_and_labels_may_be_others():
    ten = replace(TRAIN, x=10 * TRAIN.x)
    flipped = replace(TRAIN, y=TRAIN.y * torch.where(torch.arange(150) % 10 == 0, -1.0, 1.0))
    for train in (ten, flipped):
        assert len(trained(train).history) == 5
    scaled = trained(ten, replace(TEST, x=10 * TEST.x), activation="linear", eta_r=0.001)
    assert scaled.history[0]["loss"] > trained(activation="linear", eta_r=0.001).history[0]["loss"] / 10


def test_a_gate_and_a_router_may_be_others():
    ungated = trained(gate=lambda h, m: torch.ones(len(h), dtype=h.dtype))
    assert not ungated.parameters["theta"].any(), "without a gate value no gradient reaches the router"
    squared = trained(router=lambda x, theta: (x.sum(1) @ theta) ** 2)
    assert not squared.parameters["theta"].any(), "a router that is flat at its start stays there"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"noise": "laplace"}, "noise: expected one of"),
        ({"noise": ("uniform", 0)}, "noise: expected"),
        ({"noise": lambda shape: np.ones(shape)}, "noise: expected a function of a NumPy generator and"),
        ({"noise": lambda rng, shape: rng.random(3)}, r"noise: expected draws of shape \(3, 150\), got \(3,\)"),
        ({"router": lambda x, theta: x.sum((1, 2))}, r"router: expected .* \(150, 3\), got torch.float64 \(150,\)"),
        ({"gate": 2}, "gate: expected Callable"),
        ({"gate": lambda h, m: h}, r"gate: expected .* \(150\), got torch.float64 \(150, 3\)"),
        ({"gate": lambda h, m: np.ones(150)}, "gate: expected Tensor, got array"),
        ({"gate": lambda h: h}, "gate: expected a function of 2 tensors, got one that fails"),
        ({"activation": 3}, "activation: expected one of"),
        ({"activation": lambda z: z.sum()}, r"activation: expected .* \(2, 3\), got torch.float64 \(\)"),
        ({"activation": lambda z: z > 0}, "activation: expected floating numbers .*got torch.bool"),
        ({"activation": lambda z: z.numpy()}, "activation: expected a function of a tensor, got one that fails"),
        ({"activation": lambda z: z.sign().detach()}, "activation: expected a function that autograd"),
        ({"noise": "gaussian", "variant": "released"}, "variant: expected 'as written' with data, noise"),
    ],
)
def test_bad_parts_are_named(how, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        trained(**how)


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("train", {"y": (TRAIN.y + 1) / 2}, r"y: expected labels \+1 and -1, got \[0.0, 1.0\]"),
        ("train", {"y": TRAIN.y[:9]}, r"y: expected torch.float64 \(150,\), got torch.float64 \(9,\)"),
        ("train", {"cluster": TRAIN.cluster.double()}, "cluster: expected torch.int64"),
        ("test", {"x": TEST.x.float()}, "y: expected torch.float32"),
        ("test", {"role": TEST.role[:, :2]}, r"role: expected torch.int64 \(150, 4\)"),
        ("test", {"alpha": 1.0}, "alpha: expected Tensor, got 1.0"),
    ],
)
def test_bad_batches_are_named(name, field, message):
    whole = {"train": TRAIN, "test": TEST}
    whole[name] = replace(whole[name], **field)
    for how in ({}, copies()):
        with pytest.raises(ValueError, match=f"^{name}.{message}"):
            trained(**whole, **how)
    with pytest.raises(ValueError, match=f"^{name}.{message}"):
        train_single_expert(**whole, activation="relu")


@pytest.mark.slow
def test_the_page_on_parts_of_ones_own_runs(capsys):
    page = (Path(__file__).parents[2] / "book" / "your_own.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code) == 7
    scope = {}
    for block in code:
        exec(compile(block, "your_own.md", "exec"), scope)
    assert "[your check: holds] try" in capsys.readouterr().out
    assert set(re.findall(r"^\*\*(\w+ ?\w*)\*\*", page, re.MULTILINE)) >= {
        "An activation",
        "A gate",
        "A router",
        "Data",
    }
