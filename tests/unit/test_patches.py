import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_theory.tasks.patches import CENTER, FEATURE_NOISE, NOISE, SETTINGS, SIGNAL, PatchTask


@given(K=st.integers(2, 6), P=st.integers(3, 7), extra=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_patches_are_what_the_coefficients_say(K, P, extra, seed):
    task = PatchTask(K=K, P=P, d=2 * K + extra, seed=seed)
    signals = torch.cat([task.v, task.c])
    assert torch.allclose(signals @ signals.T, torch.eye(2 * K, dtype=torch.float64), atol=1e-12)
    b = task.sample(50, seed, torch.float64)
    assert b.x.shape == (50, P, 2 * K + extra) and len(b) == 50
    assert torch.equal(b.patch(SIGNAL), (b.y * b.alpha)[:, None] * task.v[b.cluster])
    assert torch.equal(b.patch(CENTER), b.beta[:, None] * task.c[b.cluster])
    assert torch.equal(b.patch(FEATURE_NOISE), (b.epsilon * b.gamma)[:, None] * task.v[b.other])
    assert (b.cluster != b.other).all()
    assert set(b.y.tolist()) | set(b.epsilon.tolist()) <= {-1.0, 1.0}
    assert torch.equal(b.role.sort(1).values, torch.arange(P).expand(50, P))


def test_strengths_stay_in_their_ranges_and_fill_them():
    task = PatchTask(**SETTINGS["setting 1"])
    a = task.coefficients(20_000, 0)
    for name in ("alpha", "beta", "gamma"):
        low, high = getattr(task, name)
        s = getattr(a, name)
        assert low <= s.min() < low + 0.01 * (high - low) and high - 0.01 * (high - low) < s.max() <= high


def test_noise_patches_have_the_stated_scale():
    task = PatchTask(P=6, d=400, sigma_p=2.0)
    xi = task.sample(500, 0, torch.float64).patch(NOISE + 2)
    assert abs(float(xi.square().sum(1).mean()) - 4) < 0.1


def test_seeds():
    task = PatchTask()
    assert torch.equal(task.sample(10, 3).x, task.sample(10, 3).x)
    assert not torch.equal(task.sample(10, 3).x, task.sample(10, 4).x)
    assert torch.equal(task.coefficients(10, 3).alpha, task.sample(10, 3, torch.float64).alpha)
    assert not torch.equal(PatchTask(seed=1).v, task.v)


def test_moving_a_batch_casts_floats_only():
    b = PatchTask().sample(4, 0).to(torch.float64)
    assert b.x.dtype == b.y.dtype == torch.float64
    assert b.cluster.dtype == b.role.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (dict(K=1), "K"),
        (dict(K=2.5), "K"),
        (dict(P=2), "P"),
        (dict(K=4, d=7), "d"),
        (dict(alpha=(2, 0.5)), "alpha"),
        (dict(beta=(0, 1)), "beta"),
        (dict(gamma=(1, float("nan"))), "gamma"),
        (dict(gamma=3), "gamma"),
        (dict(sigma_p=0), "sigma_p"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        PatchTask(**arguments)


def test_bad_sample_size_is_named():
    with pytest.raises(ValueError, match="^n: expected"):
        PatchTask().sample(0, 0)
