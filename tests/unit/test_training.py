import pytest
import torch

from moe_theory.models.experts import ACTIVATIONS, PatchCNN
from moe_theory.models.moe import PatchMoE
from moe_theory.models.routers import LinearRouter
from moe_theory.models.rules import top1_noisy
from moe_theory.tasks.patches import PatchTask
from moe_theory.training import expert_gradient, router_gradient, train_patch_moe, train_single_expert
from moe_theory.training.algorithm1 import step
from moe_theory.training.variants import logistic_loss, loss_slope

F64 = torch.float64


def setup(name, seed=0):
    rng = torch.Generator().manual_seed(seed)
    batch = PatchTask(K=3, P=5, d=9, seed=seed).sample(80, seed, F64)
    model = PatchMoE(9, 4, 3, name, sigma_0=0.5, seed=seed, dtype=F64)
    model.router.theta.data.normal_(generator=rng)
    return batch, model, torch.rand(80, 4, generator=rng, dtype=F64)


def closed_forms(batch, model, noise):
    with torch.no_grad():
        h = model.router(batch.x)
        m, pi = (h + noise).argmax(1), h.softmax(1)
        state = batch.x, batch.y, m, pi, model.dispatched(batch.x, m)
        return router_gradient(*state), expert_gradient(*state, model.W, model.sigma)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_automatic_differentiation(name, seed):
    batch, model, noise = setup(name, seed)
    loss = logistic_loss(batch.y * model(batch.x, noise)[0]).mean()
    automatic = torch.autograd.grad(loss, (model.router.theta, model.W))
    for closed, auto in zip(closed_forms(batch, model, noise), automatic, strict=True):
        assert (closed - auto).abs().max() <= 1e-12 * auto.abs().max()
    assert closed_forms(batch, model, noise)[0].sum(1).abs().max() <= 1e-14


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_of_the_activations(name):
    z = torch.linspace(-3, 3, 61, dtype=F64, requires_grad=True)
    sigma = ACTIVATIONS[name]
    (auto,) = torch.autograd.grad(sigma.value(z).sum(), z)
    smooth = z.detach().abs() > 1e-9
    assert torch.allclose(sigma.slope(z.detach())[smooth], auto[smooth], atol=1e-13)


def test_loss_slope_is_negative_and_minus_one_half_at_zero():
    z = torch.linspace(-40, 40, 81, dtype=F64, requires_grad=True)
    (auto,) = torch.autograd.grad(logistic_loss(z).sum(), z)
    assert torch.allclose(loss_slope(z.detach()), auto, atol=1e-15)
    assert (auto < 0).all() and loss_slope(torch.zeros(1)) == -0.5


def test_a_step_has_length_eta_for_every_expert_that_moves():
    batch, model, noise = setup("cubic")
    before_W, before_theta = model.W.data.clone(), model.router.theta.data.clone()
    to_router, _ = closed_forms(batch, model, noise)
    with torch.no_grad():
        loss = step(model, batch, noise, 0.02, 0.3)
    moved = (model.W.data - before_W).flatten(1).norm(dim=1)
    assert torch.allclose(moved, torch.full_like(moved, 0.02), atol=1e-13)
    assert torch.allclose(model.router.theta.data, before_theta - 0.3 * to_router, atol=1e-15)
    assert loss > 0


def test_an_expert_without_examples_stays():
    batch, model, noise = setup("cubic")
    noise[:, 2] = -100
    before = model.W.data[2].clone()
    with torch.no_grad():
        step(model, batch, noise, 0.02, 0.3)
    assert torch.equal(model.W.data[2], before)


def test_the_layer_evaluates_only_the_chosen_expert():
    batch, model, noise = setup("tanh")
    F, m = model(batch.x, noise)
    pi = model.router(batch.x).softmax(1)
    for i in range(5):
        f = torch.tanh(batch.x[i] @ model.W[m[i]].T).sum()
        assert torch.isclose(F[i], pi[i, m[i]] * f)
    assert torch.equal(m, top1_noisy(model.router(batch.x), noise))


@pytest.mark.slow
def test_algorithm_1_learns_what_a_single_expert_cannot():
    task = PatchTask(K=2, d=20, gamma=(0.5, 2))
    train, test = task.sample(1500, 1), task.sample(1500, 2)
    (run,) = train_patch_moe(train, test, experts=4, filters=8, steps=1200, record_every=400)
    assert run.test_accuracy > 0.95  # a single expert stays below 0.875 (Theorem 4.1)
    assert run.dispatch_entropy < 0.1
    assert [h["step"] for h in run.history] == [400, 800, 1200]
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert run.parameters["theta"].shape == (20, 4) and run.parameters["W"].shape == (4, 8, 20)
    assert run.parameters["theta"].sum(1).abs().max() < 1e-4  # Lemma E.1


def test_runs_depend_on_their_seed_only():
    task = PatchTask(K=2, d=10)
    train, test = task.sample(100, 1), task.sample(100, 2)
    both = train_patch_moe(train, test, steps=5, seeds=(3, 4))
    (alone,) = train_patch_moe(train, test, steps=5, seeds=(4,))
    assert torch.equal(both[1].parameters["W"], alone.parameters["W"])
    assert not torch.equal(both[0].parameters["W"], alone.parameters["W"])


@pytest.mark.slow
def test_released_variant_runs_and_stops_at_its_target():
    task = PatchTask(K=2, d=20)
    train, test = task.sample(1000, 1), task.sample(1000, 2)
    (run,) = train_patch_moe(train, test, experts=4, filters=8, steps=601, variant="released")
    assert run.history[-1]["step"] <= 601
    assert 0.3132 < run.history[-1]["loss"] < 0.7  # log(1 + 1/e) bounds a doubled softmax from below
    assert run.test_accuracy > 0.8


def test_two_logits_under_a_softmax_are_one_signed_output():
    """The released networks' cross-entropy equals the logistic loss of `PatchCNN`."""
    cnn = PatchCNN(6, 8, "celu", 0).double()
    x = torch.randn(30, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30).remainder(2)
    z = torch.nn.functional.celu(x @ cnn.w.T + cnn.b).sum(1)
    logits = torch.stack([z[:, 4:].sum(1), z[:, :4].sum(1)], 1)
    assert torch.isclose(torch.nn.functional.cross_entropy(logits, y), logistic_loss((2.0 * y - 1) * cnn(x)).mean())


@pytest.mark.slow
def test_single_expert_improves_and_reports_its_history():
    task = PatchTask(K=2, d=20)
    train, test = task.sample(1000, 1), task.sample(1000, 2)
    model, history = train_single_expert(train, test, activation="gelu", filters=16, epochs=60, record_every=20)
    assert [h["epoch"] for h in history] == [20, 40, 60]
    assert history[-1]["loss"] < history[0]["loss"]
    with torch.no_grad():
        assert history[-1]["test"] == pytest.approx(float((test.y * model(test.x) > 0).double().mean()))


SMALL = PatchTask(K=2, d=8).sample(20, 0)


def test_a_single_expert_by_gradient_descent_steps_along_the_gradient():
    model, _ = train_single_expert(
        SMALL, SMALL, activation="tanh", filters=4, epochs=1, optimizer="sgd", learning_rate=0.5, weight_decay=0.1
    )
    by_hand = PatchCNN(8, 4, "tanh", 0).to(SMALL.x)
    logistic_loss(SMALL.y * by_hand(SMALL.x)).mean().backward()
    for now, then in zip((model.w, model.b), (by_hand.w, by_hand.b), strict=True):
        assert torch.allclose(now, then - 0.5 * (then.grad + 0.1 * then), atol=1e-6)


def test_a_released_training_ends_at_the_first_loss_that_has_risen():
    """Its history up to there is that of a training to the end, whose later losses show that no earlier one ends it."""
    much = dict(activation="celu", filters=16, input_scale=10, learning_rate=0.1, seed=1, record_every=1)
    whole = train_single_expert(SMALL, SMALL, epochs=120, **much)[1]
    losses = [h["loss"] for h in whole]
    risen = [t for t in range(len(losses)) if t > 20 and losses[t] > min(losses[:t]) + 0.02]
    first = risen[0]  # a loss after so many steps
    assert first > 21, "not at once"
    _, history = train_single_expert(SMALL, SMALL, epochs=120, stop_after=20, **much)
    assert [h["epoch"] for h in history] == list(range(1, first + 2)) and history[:-1] == whole[:first]
    assert history[-1]["loss"] == losses[first] and history[-1]["test"] == whole[first - 1]["test"], "no step is taken"
    assert train_single_expert(SMALL, SMALL, epochs=120, stop_after=119, **much)[1] == whole


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: train_patch_moe(SMALL, SMALL, steps=0), "steps"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, eta=-1.0), "eta"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, eta_r=0.0), "eta_r"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, sigma_0=0.0), "sigma_0"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, activation="swish"), "activation"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, experts=0), "experts"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, variant="released", filters=3), "filters"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, variant="paper"), "variant"),
        (lambda: train_patch_moe(SMALL, SMALL, steps=1, balance=-0.1), "balance"),
        (lambda: train_single_expert(SMALL, SMALL, activation="relu", filters=3), "filters"),
        (lambda: train_single_expert(SMALL, SMALL, activation=torch.tanh), "activation"),
        (lambda: train_single_expert(SMALL, SMALL, activation="relu", epochs=0), "epochs"),
        (lambda: train_single_expert(SMALL, SMALL, activation="relu", stop_after=-1), "stop_after"),
        (lambda: train_single_expert(SMALL, SMALL, activation="relu", optimizer="momentum"), "optimizer"),
        (lambda: LinearRouter(0, 3), "d"),
        (lambda: top1_noisy(torch.tensor([[0.0, float("nan")]])), "h"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        call()
