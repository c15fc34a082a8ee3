"""The engine against the algorithm it speeds up, and against automatic differentiation."""

from dataclasses import replace

import pytest
import torch

from moe_theory.models.experts import ACTIVATIONS
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import NOISE, PatchTask
from moe_theory.training import train_patch_moe
from moe_theory.training.algorithm1 import step
from moe_theory.training.engine import gradient_norm, gradients, output_signs
from moe_theory.training.grouped import Experts, dispatch
from moe_theory.training.parts import take_apart
from moe_theory.training.plain import whole_loss
from moe_theory.training.variants import VARIANTS

F64 = torch.float64
M, J, N = 5, 4, 120


def drawn(P, activation, variant, seed=0, dtype=F64):
    """A batch, parameters away from their start, routing noise, and the engine's view of the batch."""
    rng = torch.Generator().manual_seed(seed)
    batch = PatchTask(K=3, P=P, d=9, seed=seed).sample(N, seed, dtype)
    how, sigma = VARIANTS[variant], ACTIVATIONS[activation]
    theta = torch.randn(9, M, generator=rng, dtype=F64).to(dtype)
    W = (torch.randn(M, J, 9 + how.biases, generator=rng, dtype=F64) / 3).to(dtype)
    noise = torch.rand(M, N, generator=rng, dtype=F64).to(dtype)
    experts = Experts(
        take_apart("train", batch, sigma, how.input_scale, how.biases), output_signs(J, how).to(dtype), sigma
    )
    return batch, theta, W, noise, experts, how


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("P", [3, 4, 6])
def test_a_step_equals_the_readable_algorithm(activation, P):
    batch, theta, W, noise, experts, how = drawn(P, activation, "as written")
    model = PatchMoE(9, M, J, activation, dtype=F64)
    model.router.theta.data.copy_(theta)
    model.W.data.copy_(W)
    with torch.no_grad():
        loss = step(model, batch, noise.T, 0.02, 0.3)
        fast, to_theta, to_W = gradients(experts, theta, W, noise, how, 0.0)
        theta, W = theta - 0.3 * to_theta, W - 0.02 * to_W / gradient_norm(to_W, how)
    assert abs(loss - fast.item()) <= 1e-12 * loss
    assert (theta - model.router.theta.data).abs().max() <= 1e-12
    assert (W - model.W.data).abs().max() <= 1e-12


def plain_loss(batch, theta, W, noise, variant, activation, balance):
    """The loss as people write it: every patch through every expert, a one-hot choice, autograd."""
    sigma, released = ACTIVATIONS[activation].value, variant.startswith("released")
    x = 10 * batch.x if released else batch.x
    h = x.sum(1) @ theta
    noisy = h + noise.T
    chosen = torch.nn.functional.one_hot(noisy.argmax(1), M).to(x)
    rho = chosen.mean(0) - ("centered" in variant) / M
    if not released:
        f = (sigma(torch.einsum("npd,mjd->nmpj", x, W)).sum((2, 3)) * chosen).sum(1)
        loss = torch.log1p(torch.exp(-batch.y * (h.softmax(1) * chosen).sum(1) * f)).mean()
        return loss + balance * M * (rho * h.softmax(1).mean(0)).sum()
    z = sigma(torch.einsum("npd,mjd->nmpj", x, W[..., :-1]) + W[:, None, :, -1]).sum(2)
    logits = torch.stack([z[..., : J // 2].sum(2), z[..., J // 2 :].sum(2)], 2)
    out = torch.einsum("nm,nmc->nc", noisy * chosen, logits).softmax(1)
    return torch.nn.functional.cross_entropy(out, (batch.y > 0).long()) + balance * M * (rho * noisy.mean(0)).sum()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ["cubic", "gelu"])
@pytest.mark.parametrize("balance", [0.0, 0.3])
def test_the_whole_loss_is_the_plain_one(variant, activation, balance):
    batch, theta, W, noise, _, _ = drawn(5, activation, variant, seed=2)
    how = dict(variant=variant, activation=activation, balance=balance)
    ours, plain = whole_loss(batch, theta, W / 3, noise, **how), plain_loss(batch, theta, W / 3, noise, *how.values())
    other = whole_loss(batch, theta, W / 3, 1 - noise, **how)
    assert abs(float(ours - plain)) <= 1e-12 * abs(float(plain)) and abs(float(ours - other)) > 1e-6


@pytest.mark.parametrize(("name", "value"), [("variant", "printed"), ("activation", "quintic")])
def test_the_whole_loss_refuses_other_names(name, value):
    batch, theta, W, noise, _, _ = drawn(5, "cubic", "as written")
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        whole_loss(batch, theta, W, noise, **{name: value})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ["cubic", "linear", "gelu"])
@pytest.mark.parametrize("balance", [0.0, 0.3])
def test_gradients_equal_automatic_differentiation_of_the_plain_loss(variant, activation, balance):
    batch, theta, W, noise, experts, how = drawn(5, activation, variant, seed=1)
    theta.div_(3).requires_grad_()
    W.div_(3).requires_grad_()
    loss = plain_loss(batch, theta, W, noise, variant, activation, balance)
    automatic = torch.autograd.grad(loss, (theta, W))
    with torch.no_grad():
        _, *closed = gradients(experts, theta, W, noise, how, balance)
    for ours, auto in zip(closed, automatic, strict=True):
        assert auto.abs().max() > 1e-6
        assert (ours - auto).abs().max() <= 1e-11 * auto.abs().max()


def test_ties_go_to_the_first_expert():
    h = torch.tensor([[1.0, 0, 2, 3], [1, 5, 2, 0], [0, 5, 2, 3]])
    sent = dispatch(h)
    assert sent.order.tolist() == [0, 2, 3, 1] and sent.expert.tolist() == [0, 0, 0, 1] and sent.sizes == [3, 1, 0]


def test_a_logit_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"^h: expected numbers, got NaN for 1 of 3 examples"):
        dispatch(torch.tensor([[1.0, torch.nan, 0], [1, 2, 3]]))


def test_gradient_norm_of_the_two_variants():
    to_W = torch.randn(3, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    to_W[1] = 0
    written, released = (gradient_norm(to_W, VARIANTS[v]).flatten() for v in ("as written", "released"))
    assert torch.isclose(written[0], to_W[0].norm()) and written[1] == torch.inf
    assert torch.isclose(released[2], to_W[2, :, :-1].norm() + to_W[2, :, -1].norm())


@pytest.mark.slow
def test_single_and_double_precision_reach_the_same_verdict():
    """A whole run in float32 and one in float64 end with the same experts on the same clusters."""
    task = PatchTask(K=2, d=20, gamma=(0.5, 2))
    runs = []
    for dtype in (torch.float32, F64):
        train, test = task.sample(1000, 1, dtype), task.sample(1000, 2, dtype)
        runs += train_patch_moe(train, test, experts=4, filters=8, steps=1500)
    single, double = runs
    assert single.test_accuracy == pytest.approx(double.test_accuracy, abs=0.01)
    assert single.dispatch_entropy == pytest.approx(double.dispatch_entropy, abs=0.05)


def test_experts_of_one_start_stay_equal_only_under_equal_data():
    task = PatchTask(K=2, d=10)
    train, test = task.sample(200, 1), task.sample(200, 2)
    (run,) = train_patch_moe(train, test, experts=3, filters=4, steps=1, eta=1e-9, same_start=True)
    W = run.parameters["W"]
    assert torch.allclose(W[0], W[1], atol=1e-8) and torch.allclose(W[0], W[2], atol=1e-8)


def test_plain_descent_steps_by_the_gradient():
    task = PatchTask(K=2, d=10)
    train, test = task.sample(200, 1, F64), task.sample(200, 2, F64)
    short, long = (
        train_patch_moe(train, test, experts=3, filters=4, steps=1, eta=eta, normalized=False)[0].parameters["W"]
        for eta in (1.0, 2.0)
    )
    start = PatchMoE(10, 3, 4, sigma_0=0.01, seed=0, dtype=F64).W.data
    assert torch.allclose(long - start, 2 * (short - start), atol=1e-15) and (short - start).abs().max() > 0


def test_history_holds_what_measure_returns():
    task = PatchTask(K=2, d=10)
    train, test = task.sample(50, 1), task.sample(50, 2)
    (run,) = train_patch_moe(train, test, steps=4, record_every=2, measure=lambda p: {"size": float(p["theta"].norm())})
    assert [h["step"] for h in run.history] == [2, 4] and all(h["size"] > 0 for h in run.history)


def test_bad_batches_are_refused():
    """The engine trusts the coefficients only after it has compared them with the patches."""
    batch = PatchTask(K=2, d=8).sample(20, 0)
    x = batch.x.clone()
    x[3, int((batch.role[3] < NOISE).nonzero()[0])] *= 1.01
    for other in (replace(batch, x=x), replace(batch, y=-batch.y)):
        with pytest.raises(ValueError, match=r"^train: expected the patches that its coefficients describe"):
            take_apart("train", other, ACTIVATIONS["cubic"])
