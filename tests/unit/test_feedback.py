import pytest
import torch

from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchTask
from moe_theory.theory.feedback import center_moments, expected_gradients, first_order_share, own_feedback
from moe_theory.theory.smoothing import route_probabilities
from moe_theory.training import expert_gradient, router_gradient

F64 = torch.float64


def layer(M=3, activation="cubic"):
    model = PatchMoE(8, M, 2, activation, sigma_0=0.4, seed=1, dtype=F64)
    model.router.theta.data = 0.3 * torch.randn(8, M, generator=torch.Generator().manual_seed(0), dtype=F64)
    return model


@pytest.mark.parametrize("activation", ["cubic", "linear"])
def test_expected_gradients_add_up_the_choices(activation):
    batch, model = PatchTask(K=3, P=4, d=8, seed=2).sample(6, 3, F64), layer(activation=activation)
    W, h = model.W.data, (batch.x.sum(1) @ model.router.theta.data).detach()
    pi, p = h.softmax(1), route_probabilities(h)
    router, experts = 0, 0
    for i in range(6):
        for m in range(3):
            one = batch.x[i : i + 1], batch.y[i : i + 1], torch.tensor([m]), pi[i : i + 1]
            f = model.dispatched(one[0], one[2]).detach()
            router = router + p[i, m] * router_gradient(*one, f) / 6
            experts = experts + p[i, m] * expert_gradient(*one, f, W, model.sigma) / 6
    found = expected_gradients(batch, model)
    assert (found[0] - router).abs().max() < 1e-13 and (found[1] - experts).abs().max() < 1e-13


@pytest.mark.parametrize("M", [2, 3, 8])
def test_share_of_a_logit_near_a_tie(M):
    def product(t):
        h = torch.full((1, M), -t / (M - 1), dtype=F64)
        h[0, 0] = t
        return float(route_probabilities(h)[0, 0] * h.softmax(1)[0, 0])

    assert (product(1e-4) - product(-1e-4)) / 2e-4 == pytest.approx(first_order_share(M), rel=1e-3)


def test_own_feedback_is_the_slope_of_the_expected_gradient():
    task, M = PatchTask(K=3, P=4, d=8, seed=2), 4
    batch, model = task.sample(300, 3, F64), layer(M)
    model.W.data *= 0.01  # so small that the loss has the slope -1/2
    u = task.v[0].double()

    def pull(t):
        model.router.theta.data = (t * u)[:, None] * torch.tensor([1.0, *[-1 / (M - 1)] * (M - 1)], dtype=F64)
        return float(-expected_gradients(batch, model)[0][:, 0] @ u)

    answers = ((batch.x.sum(1) @ u).square()[:, None] * batch.y[:, None] * model.answers(batch.x).detach()).mean(0)
    assert (pull(1e-6) - pull(-1e-6)) / 2e-6 == pytest.approx(own_feedback(answers), rel=2e-3)


def test_center_moments_are_the_drive_of_the_expected_gradient():
    task, s = PatchTask(K=3, P=4, d=8, sigma_p=1e-9, seed=2), 0.01
    batch, model = task.sample(300, 3, F64), PatchMoE(8, 3, 2, dtype=F64)
    filters = torch.tensor([[[1.0, 0, 0], [0, -0.5, 0]], [[0, 0, 1], [0, 0, 0.5]], [[0, 1, 0], [1, 0, 0]]])
    model.W.data = s * filters.double() @ task.v
    g = s**3 * (filters.double() ** 3).sum(1) @ center_moments(batch, 3).T
    found = -expected_gradients(batch, model)[0].T @ batch.c.T
    torch.testing.assert_close(found, (g - g.mean(0)) / (2 * 3**2), rtol=1e-4, atol=0)
