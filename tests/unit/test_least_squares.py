"""The least squares estimator against autograd, scipy and statistics; stochastic descent against its definition."""

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares as scipy_least_squares

from moe_theory.models.mixture import EXPERTS, MixingMeasure, draw_measure, jacobian, regression_function
from moe_theory.models.routers import ROUTERS
from moe_theory.tasks.regression import sample_regression
from moe_theory.training import least_squares as module
from moe_theory.training.least_squares import (
    Domain,
    State,
    evaluate,
    gradient,
    least_squares,
    normal_matrix,
    problems,
    unknowns,
)
from moe_theory.training.sgd import stochastic_descent, stochastic_descents

K, D, N = 3, 4, 1_500


def data(kind, expert, seed=0, n=N):
    router, G = ROUTERS[kind](), draw_measure(K, D, 1, router_scale=0.5, expert_scale=2.0)
    x, y = sample_regression(lambda x: regression_function(G, x, router, expert), n, D, seed)
    return router, G, x, y


def unpacked(p):
    p = torch.as_tensor(p)
    return MixingMeasure(p[:K], p[K : K + K * D].view(K, D), p[K + K * D :].view(K, D + 1))


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("expert", EXPERTS)
def test_what_the_fits_evaluate_is_the_regression_function_and_its_jacobian(kind, expert):
    router, G, x, y = data(kind, expert, n=50)
    problem = problems(x[None], y[None], router, expert)
    r, w, v = evaluate(unknowns(G, router)[None], problem)
    assert torch.allclose(r[0], y - regression_function(G, x, router, expert), atol=1e-13)
    J = torch.cat([(a[0, :, :, None] * b[0, :, None]) for a, b in ((w, problem.U), (v, problem.X))], 2)
    by_beta0, by_s, by_eta = J.split([1, D, D + 1], 2)
    laid_out = torch.cat([part.flatten(1) for part in (by_beta0, by_s, by_eta)], 1)
    assert torch.allclose(laid_out, jacobian(G, x, router, expert, in_s=True), atol=1e-13)


@pytest.mark.parametrize("expert", EXPERTS)
def test_gradient_and_normal_matrix_are_those_of_autograd(expert):
    router, G, x, y = data("linear", expert, n=200)
    problem, at = problems(x[None], y[None], router, expert), unknowns(G, router)[None]

    def residual(t):
        return evaluate(t.view_as(at), problem)[0][0]

    J = torch.autograd.functional.jacobian(residual, at.flatten())
    r, w, v = evaluate(at, problem)
    assert torch.allclose(gradient(r, w, v, problem).flatten(), -J.T @ r[0], atol=1e-11)
    H = normal_matrix(w, v, problem)[0]
    assert float((H - J.T @ J).norm() / H.norm()) < 1e-6, "single precision"


@pytest.mark.parametrize("kind", ROUTERS)
def test_smooth_problems_end_where_scipy_ends(kind):
    found, theirs = [], []
    for seed in range(3):
        router, G, x, y = data(kind, "tanh", seed)
        found.append(least_squares(x[None], y[None], [G], router, "tanh", radius=50.0, tolerance=1e-9, steps=200))

        def fun(p, x=x, y=y, router=router):
            return (regression_function(unpacked(p), x, router, "tanh") - y).numpy()

        def jac(p, x=x, router=router):
            return jacobian(unpacked(p), x, router, "tanh").numpy()

        p0 = torch.cat([G.beta0, G.beta1.flatten(), G.eta.flatten()]).numpy()
        theirs.append(2 * scipy_least_squares(fun, p0, jac, x_scale="jac", xtol=1e-15, ftol=1e-15, gtol=1e-12).cost)
    assert all(bool(f.converged[0]) for f in found)
    np.testing.assert_allclose([float(f.sse[0]) for f in found], theirs, rtol=1e-10)


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_descent_that_stagnates_has_not_converged(kind, monkeypatch):
    router, G, x, y = data(kind, "tanh")
    right = least_squares(x[None], y[None], [G], router, "tanh", radius=50.0)
    monkeypatch.setattr(module, "gradient", lambda *a: -gradient(*a))
    wrong = least_squares(x[None], y[None], [G], router, "tanh", radius=50.0)
    assert bool(right.converged[0]) and int(right.steps[0]) > 0
    assert int(wrong.steps[0]) == 0 and float(wrong.gain[0]) == 0, "no step against the gradient is accepted"
    assert float(wrong.promise[0]) > 1 and not bool(wrong.converged[0])


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_start_at_the_minimum_has_converged(kind):
    router, G, x, y = data(kind, "tanh")
    first = least_squares(x[None], y[None], [G], router, "tanh", radius=50.0, tolerance=1e-9, steps=200)
    again = least_squares(x[None], y[None], first.G, router, "tanh", radius=50.0)
    assert bool(again.converged[0]) and float(again.promise[0]) < 1e-6
    np.testing.assert_allclose(again.sse, first.sse, rtol=1e-9)


def test_an_embedding_held_at_the_bound_is_no_obstacle_to_convergence():
    router, G, x, y = data("perturbed", "tanh")
    fit = dict(router=router, expert="tanh", radius=0.2)
    first = least_squares(x[None], y[None], [G.with_(beta1=0.1 * G.beta1)], tolerance=1e-9, steps=200, **fit)
    assert torch.allclose(first.G[0].beta1.norm(dim=1), torch.full((K,), 0.2, dtype=torch.float64))
    assert bool(least_squares(x[None], y[None], first.G, **fit).converged[0])


def test_the_promise_is_n_times_the_squared_cosine_between_residuals_and_tangent_space():
    router, G, x, y = data("linear", "tanh")
    problem = problems(x[None], y[None], router, "tanh")
    state = State.start(unknowns(G, router)[None], problem)
    r = y - regression_function(G, x, router, "tanh")
    along = torch.linalg.svd(jacobian(G, x, router, "tanh"), full_matrices=False)
    U = along.U[:, along.S / along.S[0] > 1e-8]
    expected = N * float((U.T @ r).square().sum() / r.square().sum())
    found = module._promise(state, problem, Domain(router, 50.0))
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_a_batch_of_problems_is_solved_as_one_by_one():
    problems = [data("perturbed", "tanh", seed) for seed in range(4)]
    router, G = problems[0][:2]
    x, y = (torch.stack([p[i] for p in problems]) for i in (2, 3))
    together = least_squares(x, y, [G] * 4, router, "tanh")
    alone = [least_squares(x[i : i + 1], y[i : i + 1], [G], router, "tanh") for i in range(4)]
    np.testing.assert_allclose(together.sse, [float(a.sse[0]) for a in alone], rtol=1e-9)


def test_more_rows_than_the_normal_matrix_takes_end_at_the_same_point(monkeypatch):
    router, G, x, y = data("perturbed", "tanh")
    ends = []
    for rows in (N, N // 3):
        monkeypatch.setattr(module, "ROWS", rows)
        ends.append(least_squares(x[None], y[None], [G], router, "tanh", tolerance=1e-9, steps=200))
    assert float(ends[0].sse[0]) == pytest.approx(float(ends[1].sse[0]), rel=1e-9)


@pytest.mark.parametrize("kind", ROUTERS)
def test_estimates_stay_in_the_parameter_space_and_keep_the_gauge(kind):
    router, G, x, y = data(kind, "relu", n=150)
    start = G.with_(beta1=G.beta1 / G.beta1.norm(dim=1, keepdim=True) * 0.2)
    (end,) = least_squares(x[None], y[None], [start], router, "relu", radius=0.3).G
    assert float(end.beta1.norm(dim=1).max()) <= 0.3 + 1e-12
    assert float(end.beta0.sum()) == pytest.approx(float(start.beta0.sum()), abs=1e-9)
    if kind == "cosine":
        assert torch.allclose(end.beta1.norm(dim=1), start.beta1.norm(dim=1))


@pytest.mark.slow
def test_the_error_of_the_estimate_is_that_of_the_fisher_information():
    # E |f_hat - f|^2 = sigma^2 p / n for p identified parameters: k (2 d + 2) less the nullity d + 1
    router, G, x, y = data("linear", "tanh", n=4_000)
    errors = []
    for seed in range(60):
        x, y = sample_regression(lambda x: regression_function(G, x, router, "tanh"), 4_000, D, seed)
        (end,) = least_squares(x[None], y[None], [G], router, "tanh", radius=50.0).G
        error = regression_function(end, x, router, "tanh") - regression_function(G, x, router, "tanh")
        errors.append(float(error.square().sum()))
    expected = 0.01 * (K * (2 * D + 2) - (D + 1))
    assert abs(np.mean(errors) / expected - 1) < 4 * np.std(errors) / np.sqrt(60) / expected


@pytest.mark.parametrize("kind", ROUTERS)
def test_one_step_of_stochastic_descent_is_minus_the_rate_times_the_gradient(kind):
    router, G, x, y = data(kind, "tanh", n=50)
    end = stochastic_descent(x, y, G, router, "tanh", epochs=1, rate=0.1, batch=50)
    r = y - regression_function(G, x, router, "tanh")
    step = 2 * jacobian(G, x, router, "tanh").T @ r / 50
    moved = torch.cat([(a - b).flatten() for a, b in ((end.beta0, G.beta0), (end.beta1, G.beta1), (end.eta, G.eta))])
    assert torch.allclose(moved, 0.1 * step, atol=1e-14)


def test_descents_together_are_those_one_by_one():
    router, G, x, y = data("perturbed", "tanh", n=50)
    H = G.with_(eta=G.eta + 0.1)
    both, how = (torch.stack([x, -x]), torch.stack([y, y])), dict(batch=9, seeds=[3, 4])
    pairs = stochastic_descents(*both, [G, H], router, "tanh", **how)
    for together, x_one, start, seed in zip(pairs, (x, -x), (G, H), (3, 4), strict=True):
        alone = stochastic_descent(x_one, y, start, router, "tanh", batch=9, seed=seed)
        torch.testing.assert_close(together.flat(), alone.flat(), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="starts: expected one for each of 1 data sets, got 2"):
        stochastic_descents(x[None], y[None], [G, G], router, batch=9, seeds=[0])
    with pytest.raises(ValueError, match="seeds: expected one for each of 1 data sets, got 0"):
        stochastic_descents(x[None], y[None], [G], router, batch=9, seeds=[])


def test_bad_problems_are_refused():
    router, G, x, y = data("perturbed", "tanh", n=50)
    with pytest.raises(ValueError, match="y, start: expected B = 1 and n = 50"):
        least_squares(x[None], y[None, :-1], [G], router)
    with pytest.raises(ValueError, match="start: expected every"):
        least_squares(x[None], y[None], [G], router, radius=0.01)
    with pytest.raises(ValueError, match="y: expected finite"):
        least_squares(x[None], y[None] * float("nan"), [G], router)
    flat = G.with_(eta=1e4 * G.eta)  # tanh has the slope 0 in double precision
    with pytest.raises(ValueError, match="^y, start, expert: expected data that 'tanh' experts fit"):
        least_squares(x[None], y[None], [flat], router, "tanh", radius=9)
    with pytest.raises(ValueError, match="batch: expected at most n = 50"):
        stochastic_descent(x, y, G, router, batch=51)
    with pytest.raises(ValueError, match="beta0: expected finite"):
        stochastic_descent(x, 1e200 * y, G, router, "cubic", batch=10, rate=1e5)
