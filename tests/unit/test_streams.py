"""Random streams: one for each seed and purpose, unrelated, and the same whatever else is done."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_theory
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import EARLIER, PURPOSES, stream
from moe_theory.tasks.patches import PatchTask
from moe_theory.training import train_patch_moe
from moe_theory.training.variants import VARIANTS

N = 20_000
BOUND = 5 / math.sqrt(N)  # five standard errors of a correlation


def _draws(purpose: str, *at: int) -> np.ndarray:
    return stream(3, purpose, *at).standard_normal(N)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(PURPOSES, 2)))
def test_streams_of_two_purposes_are_unrelated(one, other):
    a, b = _draws(one), _draws(other)
    assert abs(np.corrcoef(a, b)[0, 1]) < BOUND
    assert abs(np.corrcoef(a**2, b**2)[0, 1]) < BOUND
    assert len(np.intersect1d(a, b)) == 0


def test_streams_of_two_seeds_or_steps_are_unrelated():
    a, b = stream(3, "weights").standard_normal(N), stream(4, "weights").standard_normal(N)
    assert abs(np.corrcoef(a, b)[0, 1]) < BOUND
    assert abs(np.corrcoef(_draws("test noise", 1), _draws("test noise", 2))[0, 1]) < BOUND


def test_a_stream_is_the_same_whenever_it_is_asked_for():
    first = _draws("examples")
    _draws("weights")
    assert np.array_equal(first, _draws("examples"))


def test_weights_are_no_transform_of_the_first_routing_noise_or_of_the_signals():
    """They once were the Box-Muller transform of the noise, drawn from one generator after the other."""
    d, M, J = 50, 8, 16
    W = PatchMoE(d, M, J, sigma_0=1.0, seed=0, dtype=torch.float64).W.detach().flatten().numpy()
    noise = stream(0, "routing noise").random(len(W))
    radius = np.sqrt(-2 * np.log(1 - noise))
    assert abs(np.corrcoef(W**2, radius**2)[0, 1]) < 5 / math.sqrt(len(W))
    signals = torch.cat([PatchTask(seed=0).v, PatchTask(seed=0).c]).flatten().numpy()
    assert abs(np.corrcoef(W[: len(signals)], signals)[0, 1]) < 5 / math.sqrt(len(signals))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_recording_never_touches_training(variant):
    task = PatchTask(seed=1)
    train, test = task.sample(200, 1), task.sample(200, 2)
    often, seldom = (
        train_patch_moe(train, test, steps=20, variant=variant, record_every=every)[0] for every in (5, 20)
    )
    for name, value in often.parameters.items():
        assert torch.equal(value, seldom.parameters[name]), name
    for name, value in often.history[-1].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(seldom.history[-1][name])), name


def test_nothing_else_of_the_packages_makes_a_generator():
    """A module that does is on the list of those whose rows are yet to be computed anew."""
    source = Path(moe_theory.__file__).parents[1]
    files = [*source.glob("moe_theory/**/*.py"), *source.glob("moe_book/**/*.py")]
    makers = {p for p in files if re.search(r"manual_seed\(|default_rng\(", p.read_text())}
    names = {".".join(p.relative_to(source).with_suffix("").parts) for p in makers}
    assert names == EARLIER | {"moe_theory.streams"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, "weights"), "seed: expected an integer >= 0, got -1"),
        ((0.5, "weights"), "seed: expected an integer >= 0, got 0.5"),
        ((0, "noise"), "purpose: expected one of"),
        ((0, "weights", -1), "at: expected an integer >= 0, got -1"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        stream(*arguments)
