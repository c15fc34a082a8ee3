"""Exact stability by enumeration, the bound of Hardt et al., and the problem that attains it."""

from itertools import combinations, product

import pytest
import torch

from moe_theory.theory.uniform_stability import (
    LOGISTIC,
    SIGMOID,
    SQUARES,
    averaged_experts,
    exact_stability,
    hardt_bound,
    hill,
    hill_witness,
    huber,
    huber_witness,
    neighbours,
    nonconvex_bound,
    random_problems,
    routed_experts,
    smoothness_of,
)


def problems(loss, number=2, points=3, d=2, T=2, share=None, seed=0):
    """Random problems with steps of `share` times 2 / beta (random shares by default)."""
    source = torch.Generator().manual_seed(seed)
    x, y, start = (
        torch.randn(number, *s, generator=source, dtype=torch.float64) for s in ((points, d), (points,), (d,))
    )
    steps = torch.rand(number, T, generator=source, dtype=torch.float64) if share is None else share
    return x, (y if loss is SQUARES else y.sign()), start, steps * 2 / smoothness_of(loss, x)[:, None].expand(-1, T)


def by_loops(loss, x, y, start, alphas, n, batch):
    """Eq. 1 for one problem, data set by data set, gradients by autograd; all positions and orders, no symmetry."""

    def gradient(w, i):
        w = w.clone().requires_grad_()
        return torch.autograd.grad(loss.value(w @ x[i], y[i]), w)[0]

    L, batches, trained = 0.0, list(combinations(range(n), batch)), {}
    for data in product(range(len(x)), repeat=n):
        for sequence in product(batches, repeat=len(alphas)):
            w, path = start, [start]
            for alpha, chosen in zip(alphas, sequence, strict=True):
                w = w - alpha * sum(gradient(w, data[i]) for i in chosen) / batch
                path.append(w)
            L = max([L, *(float(gradient(v, i).norm()) for v in path for i in range(len(x)))])
            trained[data, sequence] = loss.value(x @ w, y)
    eps = 0.0
    sequences = list(product(batches, repeat=len(alphas)))
    for data, other in product(product(range(len(x)), repeat=n), repeat=2):
        if sum(a != b for a, b in zip(data, other, strict=True)) == 1:
            gaps = torch.stack([(trained[data, s] - trained[other, s]).abs() for s in sequences])
            eps = max(eps, float(gaps.mean(0).max()))
    return eps, L


@pytest.mark.parametrize("loss", [SQUARES, LOGISTIC, huber(1.0, 2.0)], ids=["squares", "logistic", "huber"])
def test_losses_have_the_slope_and_curvature_they_state(loss):
    z = torch.linspace(-4, 4, 1601, dtype=torch.float64).requires_grad_()
    y = torch.ones_like(z)
    slope = torch.autograd.grad(loss.value(z, y).sum(), z)[0]
    assert torch.allclose(slope, loss.slope(z.detach(), y), atol=1e-12)
    curvature = (slope.diff() / z.detach().diff()).max()
    assert float(curvature) == pytest.approx(loss.curvature, rel=1e-4)


@pytest.mark.parametrize(("n", "batch"), [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("loss", [SQUARES, LOGISTIC], ids=["squares", "logistic"])
def test_enumeration_equals_the_loops(loss, n, batch):
    x, y, start, alphas = problems(loss, number=1, T=2 if n == 2 else 1)
    eps, L = exact_stability(loss, x, y, start, alphas, n, batch)
    assert (float(eps[0]), float(L[0])) == pytest.approx(
        by_loops(loss, x[0], y[0], start[0], alphas[0], n, batch), rel=1e-12
    )


def test_many_problems_at_once_equal_one_by_one():
    parts = problems(LOGISTIC, number=5, T=3)
    together = exact_stability(LOGISTIC, *parts, 3)
    alone = [exact_stability(LOGISTIC, *(v[i : i + 1] for v in parts), 3) for i in range(5)]
    for whole, pieces in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.allclose(whole, torch.cat(pieces), rtol=1e-12)


def test_neighbours_differ_in_one_point():
    data = neighbours(4, 3)
    assert data.shape == (10, 4, 3) and (data[:, 0, 1:] == data[:, 3, 1:]).all()
    assert data[:, :, 0].unique(dim=0).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("loss", [SQUARES, LOGISTIC], ids=["squares", "logistic"])
def test_the_bound_holds(loss, batch):
    parts = problems(loss, number=20, T=3)
    eps, L = exact_stability(loss, *parts, 3, batch)
    assert (eps <= hardt_bound(L, parts[3], 3)).all()


@pytest.mark.parametrize(("n", "T", "batch"), [(2, 1, 1), (5, 4, 1), (4, 3, 2), (3, 5, 3)])
def test_the_witness_attains_the_bound_and_beats_the_printed_one_by_four(n, T, batch):
    loss, *parts = huber_witness(T, L=1.3, a=0.4)
    eps, L = exact_stability(loss, *parts, n, batch)
    bound = hardt_bound(L, parts[3], n)
    assert float(L) == pytest.approx(1.3, rel=1e-14)
    assert float(eps) == pytest.approx(float(bound), rel=1e-13)
    assert float(eps) == pytest.approx(4 * 1.3**2 * T / (loss.curvature * n), rel=1e-13)
    assert not (eps <= 0.999 * bound).all()  # no smaller constant would pass


def test_no_smaller_beta_serves_where_the_witness_runs():
    """The third loss has curvature beta on the whole thin region; the other two are linear wherever a run goes."""
    T = 3
    loss, x, y, start, alphas = huber_witness(T, L=1.3, a=0.4)
    for drawn, off in product(product(range(3), repeat=T), (0.0, 1e-3)):
        w = start[0]
        for i, alpha in zip(drawn, alphas[0], strict=True):
            w = w - alpha * loss.slope(x[0, i] @ w, y[0, i]) * x[0, i]
        assert w[1] == 0 and abs(w[0]) < 0.4 - 1.3 / loss.curvature  # strictly inside
        near = torch.stack([w[0], w[1] + off])
        losses = [lambda v, i=i: loss.value(x[0, i] @ v, y[0, i]) for i in range(3)]
        curved = [torch.autograd.functional.hessian(of_one, near) for of_one in losses]
        assert torch.allclose(curved[2], torch.diag(torch.tensor([0.0, loss.curvature], dtype=torch.float64)))
        assert not curved[0].any() and not curved[1].any()  # without the third example the smallest beta would be 0


@pytest.mark.parametrize("loss", [SQUARES, LOGISTIC], ids=["squares", "logistic"])
def test_averaged_experts_divide_the_step(loss):
    x, y, start, alphas = problems(loss, T=3)
    one, _ = exact_stability(loss, x, y, start, alphas / 8, 2)
    wide = averaged_experts(x, 8)
    eight, _ = exact_stability(loss, wide, y, start.repeat(1, 8), alphas, 2)
    assert torch.allclose(one, eight, rtol=1e-12)
    assert torch.allclose(smoothness_of(loss, wide), smoothness_of(loss, x) / 8)
    assert not torch.allclose(exact_stability(loss, x, y, start, alphas / 8**0.5, 2)[0], eight, rtol=1e-2)


def test_the_sigmoid_loss_has_the_constants_it_states():
    z = torch.linspace(-4, 4, 8001, dtype=torch.float64).requires_grad_()
    for y in (torch.ones_like(z), -torch.ones_like(z)):
        slope = torch.autograd.grad(SIGMOID.value(z, y).sum(), z)[0]
        assert torch.allclose(slope, SIGMOID.slope(z.detach(), y), atol=1e-12)
        assert float(slope.abs().max()) == pytest.approx(1 / 4, rel=1e-12)
        curvature = slope.diff() / z.detach().diff()
        assert float(curvature.max()) == pytest.approx(SIGMOID.curvature, rel=1e-5)
        assert float(curvature.min()) == pytest.approx(-SIGMOID.curvature, rel=1e-5)


def test_the_hill_and_its_ramps_have_the_slopes_they_state():
    loss, z = hill(1.3, 2.0), torch.linspace(-1, 1, 9, dtype=torch.float64).requires_grad_()
    for label, expected in ((1.0, 1.3 + 0 * z), (-1.0, -1.3 + 0 * z), (0.0, -2.0 * z)):
        y = torch.full_like(z, label)
        slope = torch.autograd.grad(loss.value(z, y).sum(), z)[0]
        assert torch.allclose(slope, expected) and torch.allclose(slope, loss.slope(z, y))


@pytest.mark.parametrize(("n", "T", "batch"), [(2, 1, 1), (2, 6, 1), (5, 4, 1), (4, 3, 2), (3, 5, 3)])
def test_the_hill_attains_the_bound_without_convexity(n, T, batch):
    L, beta = 1.3, 0.7
    loss, *parts = hill_witness(T, L, beta)
    eps, largest = exact_stability(loss, *parts, n, batch)
    s = float(parts[3][0, 0]) * beta
    assert (1 + s) ** T == pytest.approx(2, rel=1e-12) and float(largest) == pytest.approx(L, rel=1e-12)
    closed = 2 * L**2 / (beta * (n - 1)) * ((1 + (1 - 1 / n) * s) ** T - 1)
    bound = nonconvex_bound(largest, torch.tensor([beta], dtype=torch.float64), parts[3], n)
    assert float(eps) == pytest.approx(closed, rel=1e-12) and float(bound) == pytest.approx(closed, rel=1e-12)
    assert closed <= 2 * L**2 / (beta * n) * ((1 + s) ** T - 1) * (1 + 1e-12)  # the simpler bound


@pytest.mark.parametrize("batch", [1, 2])
def test_the_bound_without_convexity_holds_and_lies_above_that_of_convex_losses(batch):
    x, y, w, alphas = random_problems(SIGMOID, 20, 3, torch.Generator().manual_seed(0))
    L, beta = x.norm(dim=2).amax(1) / 4, smoothness_of(SIGMOID, x)
    bound = nonconvex_bound(L, beta, alphas, 3)
    assert (exact_stability(SIGMOID, x, y, w, alphas, 3, batch)[0] <= bound).all()
    assert (bound > hardt_bound(L, alphas, 3)).all()
    assert torch.allclose(nonconvex_bound(L, beta, alphas, 1), hardt_bound(L, alphas, 1), rtol=1e-13)


def test_routed_experts_are_the_experts_one_by_one():
    x = problems(SQUARES, T=2)[0]
    theta, pi = torch.randn(2, 4, 2, dtype=torch.float64), torch.rand(2, 3, 4, dtype=torch.float64)
    score = (routed_experts(x, pi) @ theta.flatten(1)[..., None])[..., 0]
    assert torch.allclose(score, torch.einsum("bum,bmd,bud->bu", pi, theta, x))
    same = routed_experts(x, torch.full((2, 3, 4), 1 / 4, dtype=torch.float64))
    assert torch.allclose(same, averaged_experts(x, 4))


def test_random_problems_have_the_steps_they_state():
    x, y, w, alphas = random_problems(LOGISTIC, 40, 3, torch.Generator().manual_seed(1))
    share = alphas * smoothness_of(LOGISTIC, x)[:, None] / 2
    assert torch.allclose(share[::2], torch.ones(20, 3, dtype=torch.float64))
    assert float(share[1::2].min()) > 0.05 and float(share.max()) < 1 + 1e-12
    assert set(y.flatten().tolist()) == {1.0, -1.0} and w.shape == (40, 4)
    assert {int(v) for v in (x[:, 0] != 0).sum(1)} == {1, 2, 3, 4}


def test_bad_arguments_are_named():
    parts = problems(SQUARES, T=2)
    with pytest.raises(ValueError, match=r"^batch: expected at most n = 2, got 3"):
        exact_stability(SQUARES, *parts, 2, 3)
    with pytest.raises(ValueError, match=r"^batch:"):
        exact_stability(SQUARES, *parts, 2, 0)
    with pytest.raises(ValueError, match=r"^n:"):
        exact_stability(SQUARES, *parts, 0)
    with pytest.raises(ValueError, match=r"^alphas:"):
        exact_stability(SQUARES, *parts[:3], torch.ones(2, 30, dtype=torch.float64), 4)
    with pytest.raises(ValueError, match=r"^points:"):
        neighbours(1, 2)
    with pytest.raises(ValueError, match=r"^n:"):
        hardt_bound(torch.ones(1), torch.ones(1, 2), 0)
    with pytest.raises(ValueError, match=r"^K:"):
        averaged_experts(parts[0], 0)
    with pytest.raises(ValueError, match=r"^T:"):
        huber_witness(0)
    with pytest.raises(ValueError, match=r"^T:"):
        hill_witness(0)
    with pytest.raises(ValueError, match=r"^T:"):
        random_problems(SQUARES, 2, 0, torch.Generator())
    with pytest.raises(ValueError, match=r"^L:"):
        hill(0.0, 1.0)
    with pytest.raises(ValueError, match=r"^n:"):
        nonconvex_bound(torch.ones(1), torch.ones(1), torch.ones(1, 2), 0)
    with pytest.raises(ValueError, match=r"^a:"):
        huber_witness(1, a=-1.0)
    with pytest.raises(ValueError, match=r"^beta:"):
        huber(1.0, 0.0)
