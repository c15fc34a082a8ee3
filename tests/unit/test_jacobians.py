"""Closed forms of the Jacobians against automatic differentiation, the bounds against exact L and beta."""

import math

import pytest
import torch
from torch.func import grad, hessian, jacrev

from moe_book import experiments
from moe_book.experiments import exponents as ex
from moe_theory.models.rules import topk_softmax
from moe_theory.streams import torch_stream
from moe_theory.theory import jacobians as jac
from moe_theory.theory import tanh_blocks as blocks

K, D, OUT = 4, 3, 2


@pytest.fixture
def normal():
    rng = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("shared", [False, True])
def test_router_jacobian_is_that_of_autograd(normal, shared):
    f, x, theta, u = normal(K, OUT), normal(D), normal(K, D), normal(K)

    def logits(p):
        return u * (p @ x) if shared else p @ x

    p = theta[0] if shared else theta
    expected = jacrev(lambda p: logits(p).softmax(0) @ f)(p).reshape(OUT, -1)
    dh = jacrev(logits)(p).reshape(K, -1)
    pi = logits(p).softmax(0)
    assert torch.allclose(jac.router_jacobian(pi, f, dh), expected, atol=1e-13)
    if not shared:
        assert float(jac.router_norm(pi, f, x.expand(K, D))) == pytest.approx(float(expected.norm()), rel=1e-12)


def test_the_router_learns_nothing_from_experts_that_agree(normal):
    pi = normal(K).softmax(0)
    assert float(jac.router_norm(pi, normal(1, OUT).expand(K, OUT), normal(K, D))) < 1e-15


def test_input_terms_sum_to_the_jacobian_in_the_input(normal):
    theta, W, V, z = normal(K, D), normal(K, 5, D), normal(K, OUT, 5), normal(D)

    def experts(z):
        return torch.einsum("koh,kh->ko", V, torch.tanh(W @ z))

    expected = jacrev(lambda z: (theta @ z).softmax(0) @ experts(z))(z)
    c = jac.input_terms((theta @ z).softmax(0), experts(z), theta, jacrev(experts)(z))
    assert torch.allclose(c.sum(0), expected, atol=1e-13)
    pairs = sum(float((c[p] * c[q]).sum()) for p in range(K) for q in range(K) if p != q)
    assert float(jac.pair_sum(c)) == pytest.approx(pairs, rel=1e-10)
    norms = [float(v.norm()) for v in c]
    weight = sum(norms[p] * norms[q] for p in range(K) for q in range(K) if p != q)
    assert float(jac.pair_cosine(c)) == pytest.approx(pairs / weight, rel=1e-10)


def test_the_equicorrelated_formula_is_exact(normal):
    rho, a, pi = 0.3, 2.0, normal(6).softmax(0)
    gram = a**2 * (rho + (1 - rho) * torch.eye(6, dtype=torch.float64))
    exact = float((pi @ torch.linalg.cholesky(gram)).norm())
    k_eff = float(1 / pi.square().sum())
    assert jac.equicorrelated(a, rho, k_eff) == pytest.approx(exact, rel=1e-12)
    assert jac.equicorrelated(a, 1.0, k_eff) == a and jac.equicorrelated(a, 0.0, 9.0) == pytest.approx(a / 3)


@pytest.mark.parametrize("mu", [0.0, 0.25, 1.0])
def test_the_relative_jacobian_is_that_of_autograd(normal, mu):
    """Linear experts whose outputs at z are unit vectors with pairwise cosine mu."""
    pi, z = normal(5).softmax(0), normal(D)
    gram = mu + (1 - mu) * torch.eye(5, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(gram)
    f = vectors * values.clamp(min=0).sqrt() @ vectors.T  # one row an expert
    W = f[:, :, None] * z / z.square().sum()
    size = float(jacrev(lambda W: pi @ (W @ z))(W).norm() / (pi @ f).norm())
    one = float(jacrev(lambda W: W @ z)(W[0]).norm())
    k_eff = float(1 / pi.square().sum())
    assert jac.relative_jacobian(mu, k_eff) == pytest.approx(size / one, rel=1e-6)
    if mu == 0.25:  # neither of the two extremes
        assert k_eff**-0.5 + 0.1 < size / one < 0.9


@pytest.mark.parametrize("k", [1, 2, 5])
def test_bounds_hold_and_the_forms_of_tanh_experts_are_exact(k):
    """Against full Hessians of the experiment's block, made small."""
    rng = torch.Generator().manual_seed(k)
    block = blocks.Block(*(torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((6, 3), (6, 4, 3), (6, 2, 4))))
    x, y = (torch.randn(2, n, generator=rng, dtype=torch.float64) for n in (3, 2))
    s, residual = blocks.terms(block, x, k), blocks.output(block, x, k) - y
    bounds, gradients = blocks.constants(s, x, residual), blocks.gradient_squares(s, x, residual)
    for i in range(2):
        loss, w = blocks.example_loss(block, x[i], y[i], k)
        assert float(loss(w)) == pytest.approx(float(residual[i].square().sum() / 2), rel=1e-12)
        gradient, rows = grad(loss)(w), k * 3
        assert float(gradients[0][i]) == pytest.approx(float(gradient[rows:].square().sum()), rel=1e-10)
        assert float(gradients[1][i]) == pytest.approx(float(gradient[:rows].square().sum()), rel=1e-10, abs=1e-25)
        beta = float(torch.linalg.eigvalsh(hessian(loss)(w)).abs().max())
        L_bound, beta_bound = float(jac.lipschitz_bound(bounds)[i]), float(jac.smoothness_bound(bounds)[i])
        assert gradient.norm() <= L_bound and 0.05 * beta_bound < beta <= beta_bound
        _check_expert_constants(s, x, residual, bounds, i)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_parts_of_the_hessian_are_those_of_autograd(k):
    """The first term, and the blocks of the second that belong to one expert and its row."""
    rng = torch.Generator().manual_seed(k)
    block = blocks.Block(*(torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((6, 3), (6, 4, 3), (6, 2, 4))))
    x, y = (torch.randn(2, n, generator=rng, dtype=torch.float64) for n in (3, 2))
    s, F = blocks.terms(block, x, k), blocks.output(block, x, k)
    first, own = blocks.first_term(s, x), blocks.own_curvatures(s, x, F - y)
    for i in range(2):
        loss, w = blocks.example_loss(block, x[i], y[i], k)
        fitted = hessian(blocks.example_loss(block, x[i], F[i], k)[0])(w)
        assert float(first[i]) == pytest.approx(float(torch.linalg.matrix_norm(fitted, 2)), rel=1e-10)
        second = hessian(loss)(w) - fitted
        expert = torch.cat([torch.arange(k).repeat_interleave(n) for n in (3, 12, 8)])  # theta, W, V
        for j in range(k):
            exact = torch.linalg.matrix_norm(second[expert == j][:, expert == j], 2)
            assert float(own[i, j]) == pytest.approx(float(exact), rel=1e-9)


def test_an_aligned_trunk_is_as_sensitive_with_64_experts_as_with_2(normal):
    u, x, c, signs = normal(4), normal(4), 2.0, torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)
    u *= 0.3 / (u @ x)
    for k in (2, 8, 64):
        offset = torch.where(torch.arange(64) < k, 0.0, -4.0)

        def F(u, k=k, offset=offset):
            return topk_softmax.gates((c * signs * (u @ x) + offset)[None], k)[0] @ signs

        assert float(F(u)) == pytest.approx(math.tanh(0.3 * c), rel=1e-12)
        size = c * (1 - math.tanh(0.3 * c) ** 2) * x.norm()
        assert float(grad(F)(u).norm()) == pytest.approx(float(size), rel=1e-12)


def _check_expert_constants(s, x, residual, bounds, i):
    """G and Hf of input i against automatic differentiation through one expert at a time."""
    u, G, Hf = residual[i] / residual[i].norm(), 0.0, 0.0
    for t, V in zip(s.t[i], s.V[i], strict=True):
        W = torch.outer(torch.atanh(t), x[i]) / x[i].square().sum()
        n = W.numel()

        def expert(w, n=n, W=W, V=V):
            return w[n:].reshape(V.shape) @ torch.tanh(w[:n].reshape(W.shape) @ x[i])

        w = torch.cat([W.flatten(), V.flatten()])
        G = max(G, float(torch.linalg.matrix_norm(jacrev(expert)(w), 2)))
        curved = hessian(lambda w, expert=expert: u @ expert(w))(w)
        Hf = max(Hf, float(torch.linalg.eigvalsh(curved).abs().max()))
    assert float(bounds.G[i]) == pytest.approx(G, rel=1e-9) and float(bounds.Hf[i]) == pytest.approx(Hf, rel=1e-9)


def test_both_bounds_fall_like_one_over_k():
    """At equal gates and fixed constants: L like K^(-1/2), beta like 1/K from K = 2 on."""
    one = torch.ones(3, dtype=torch.float64)
    k = torch.tensor([2.0, 8.0, 32.0], dtype=torch.float64)
    c = jac.Constants(one, one, one, one, one, one, one, 1 / k, 1 / k)
    assert torch.allclose(jac.lipschitz_bound(c) * k.sqrt(), math.sqrt(2) * one)
    assert torch.allclose(jac.smoothness_bound(c) * k, 7 * one)


def test_measures_are_those_of_autograd():
    f_star, block, x = ex.target(0), ex.draw_block(0, 0.1, 0.0), ex.inputs(3, 1)
    values = ex.measure(block, f_star, x, 4)
    s = blocks.terms(block, x, 4)
    J = torch.stack([jacrev(lambda z: blocks.output(block, z[None], 4)[0])(z) for z in x])
    assert values["input"] == pytest.approx(float(J.square().sum((1, 2)).mean().sqrt()), rel=1e-5)
    by_parts = [jacrev(lambda *p, z=z: blocks.output(blocks.Block(*p), z[None], 4)[0], (0, 1, 2))(*block) for z in x]
    router = sum(float(p[0].square().sum()) for p in by_parts) / 3
    experts = sum(float(p[1].square().sum() + p[2].square().sum()) for p in by_parts) / 3
    assert values["router"] == pytest.approx(math.sqrt(router), rel=1e-5)
    assert values["expert"] == pytest.approx(math.sqrt(experts), rel=1e-5)
    assert values["diagonal"] + values["pairs"] == pytest.approx(values["input"] ** 2, rel=1e-4)
    assert values["k_eff"] == pytest.approx(float(1 / s.pi.square().sum(1).mean()), rel=1e-5)
    assert values["L"] <= values["L_bound"] and values["beta"] <= values["beta_bound"]


def test_training_takes_gradient_steps_at_rate_times_k(monkeypatch):
    monkeypatch.setattr(ex, "STEPS", 1)
    f_star, block, k = ex.target(0), ex.draw_block(0, 0.1, 0.0), 8
    x = torch.randn(ex.BATCH, ex.D, generator=torch_stream(5, "training"), dtype=torch.float64)
    loss = grad(lambda b: (blocks.output(b, x, k) - f_star(x)).square().sum() / (2 * ex.BATCH))(block)
    moved = ex.train(block, f_star, k, 5)
    assert all(torch.allclose(m, p - ex.RATE * k * g) for m, p, g in zip(moved, block, loss, strict=True))
    assert float((moved.V - block.V).abs().max()) > 1e-3


def test_two_blocks_of_identical_experts_are_the_same_function_for_every_k():
    pairs = {rho: [blocks.behind_two_blocks(k, rho, False, 3) for k in (1, 8)] for rho in (1.0, 0.0)}
    same, other = ([float(f(w)) for f, w in pair] for pair in pairs.values())
    assert same[0] == pytest.approx(same[1], rel=1e-12) and abs(other[0] - other[1]) > 1e-2
    (loss, w), (normalized, _) = (blocks.behind_two_blocks(4, 0.0, n, 3) for n in (False, True))
    last = w[-4 * 64 :]  # the output layers of the second block
    louder = torch.cat([w[: -4 * 64], 5 * last])
    assert float(normalized(louder)) == pytest.approx(float(normalized(w)), rel=1e-12)
    assert abs(float(loss(louder)) - float(loss(w))) > 1e-2


@pytest.mark.parametrize(
    ("stage", "tolerance"), [("start", 1e-4), pytest.param("trained", 1e-2, marks=pytest.mark.slow)]
)
def test_stored_rows_are_what_the_code_computes(stage, tolerance):
    rows = experiments.recompute("exponents", k=4, spread=0.1, rho=0.5, stage=stage, rep=7)
    assert ((rows.loc["recomputed"] / rows.loc["stored"] - 1).abs() < tolerance).all()


@pytest.mark.parametrize("which", [dict(rho=0.0, normalized=1, k=8, rep=5), dict(rho=0.5, normalized=0, k=32, rep=99)])
def test_stored_rows_of_two_blocks_are_what_the_code_computes(which):
    rows = experiments.recompute("two_blocks", **which)
    assert ((rows.loc["recomputed"] / rows.loc["stored"] - 1).abs() < 1e-4).all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="c: expected at least two terms, got 1"):
        jac.pair_cosine(torch.ones(1, 2, 2))
    with pytest.raises(ValueError, match="mu: expected a cosine"):
        jac.equicorrelated(1.0, -0.5, 9.0)
    with pytest.raises(ValueError, match="k_eff: expected a finite number > 0"):
        jac.relative_jacobian(0.5, 0.0)
    with pytest.raises(ValueError, match="mu: expected a cosine"):
        jac.equicorrelated(1.0, math.nan, 9.0)
    with pytest.raises(ValueError, match="a: expected a finite number > 0"):
        jac.equicorrelated(0.0, 0.5, 9.0)
