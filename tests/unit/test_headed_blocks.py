"""Blocks with a head for each logit, sets that are drawn, and the averaged loss, by second routes."""

import math

import pytest
import torch
from torch.func import grad, hessian

from moe_theory.models.rules import gumbel, sampled_topk, topk_set
from moe_theory.theory import drawn_sets
from moe_theory.theory import headed_blocks as hb
from moe_theory.theory import plackett_luce as pl

F64 = torch.float64


def block(M=5, seed=0):
    return hb.draw_blocks(2, M, 3, 4, 3, 1.0, seed=seed), hb.draw_data(2, 2, M, 3, 3, seed=seed)


def first(blocks):
    return hb.Block(*(p[0] for p in blocks))


def test_sizes_by_two_routes():
    blocks, data = block()
    closed = hb.sizes(blocks, data.x)
    for a, b in zip(closed, hb.sizes_by_jacobians(first(blocks), data.x[0, 1]), strict=True):
        assert float(a[0, 1]) == pytest.approx(float(b), rel=1e-10)


@pytest.mark.parametrize("gate", [hb.appendix_c, hb.section_42, hb.times_constant, hb.times_mass])
def test_gradients_of_one_example(gate):
    blocks, data = block()
    experts, heads = hb.gradient_squares(blocks, data, gate, 2)
    g = grad(hb.loss)(first(blocks), data.x[0, 1], data.y[0, 1], data.noise[0, 1], gate, 2)
    assert float(experts[0, 1]) == pytest.approx(float(g.A.square().sum() + g.B.square().sum()), rel=1e-12)
    assert float(heads[0, 1]) == pytest.approx(sum(float(p.square().sum()) for p in g[2:]), rel=1e-12)


def test_second_derivative_in_the_logits():
    rng = torch.Generator().manual_seed(0)
    h, f = torch.randn(2, 7, generator=rng, dtype=F64)
    for k in range(1, 8):
        noise = gumbel((7,), rng, F64)
        T = (sampled_topk(h, k, noise) > 0).double()
        pi = h.softmax(0)
        psi = T * f - (T * pi) @ f
        ours = torch.diag(pi * psi) - pi[:, None] * pi * (psi[:, None] + psi)
        assert (ours - hessian(lambda t, n=noise, k=k: sampled_topk.gates(t, k, n) @ f)(h)).abs().max() < 1e-12


def test_the_averaged_loss_is_the_mean_over_draws():
    blocks, data = block()
    one, x, y = first(blocks), data.x[0, 0], data.y[0, 0]
    noise = gumbel((20_000, 5), torch.Generator().manual_seed(1), F64)
    drawn = torch.vmap(lambda n: hb.loss(one, x, y, n, hb.section_42, 2))(noise)
    mean = float(hb.mean_loss(one, x, y, "selected", 2))
    assert abs(float(drawn.mean()) - mean) < 5 * float(drawn.std()) / math.sqrt(20_000)


def test_copies_are_the_same_function_and_curvature_is_that_of_the_hessian():
    blocks, data = block(4)
    twice = hb.copied(blocks, 2)
    noise = torch.cat([data.noise] * 2, 2)
    x, y = data.x[0, 0], data.y[0, 0]
    a = hb.loss(first(blocks), x, y, data.noise[0, 0], hb.appendix_c, 4)
    assert float(hb.loss(first(twice), x, y, noise[0, 0], hb.appendix_c, 8)) == pytest.approx(float(a), rel=1e-12)
    beta, square = hb.curvature(blocks, data, hb.appendix_c, 2)
    experts, heads = hb.gradient_squares(blocks, data, hb.appendix_c, 2)
    assert torch.allclose(square, (experts + heads)[:, 0], rtol=1e-10) and (beta > 0).all()


def test_bounds_and_their_errors():
    s = hb.Sizes(*torch.tensor([2.0, 3.0, 0.5, 0.0], dtype=F64))
    assert float(hb.lipschitz_bound(2.0, s, 8, 4)) == pytest.approx(2 * 2 / 8 * 2.5)
    assert float(hb.mean_lipschitz_bound(2.0, s, 16)) == pytest.approx(2 / 4 * math.hypot(2, 4.5))
    for k in (0, 9):
        with pytest.raises(ValueError, match="k: expected"):
            hb.lipschitz_bound(1.0, s, 8, k)


def test_slopes_of_averaged_losses():
    assert float(pl.slope_bound(torch.tensor(1 - 1 / math.e, dtype=F64))) == pytest.approx(1 / math.e)
    assert pl.slope_bound(torch.tensor([0.0, 1.0])).tolist() == [0, 0]
    members = pl.subsets(4, 2)
    values = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 16.0], dtype=F64)  # 12, 13, 14, 23, 24, 34
    assert float(pl.largest_jump(values, members)) == 15  # 13 against 34; 12 against 34 is no exchange
    h = torch.tensor([0.3, -0.4, 0.8, 0.1], dtype=F64)
    losses = lambda t, m: (m * torch.arange(4)).sum(1).double() ** 2 + 0 * t.sum()  # noqa: E731
    score = pl.score_by_orders(h, 2, losses)
    pathwise, other = pl.pathwise_and_score(h, 2, losses)
    assert torch.allclose(score, other, atol=1e-12) and not pathwise.any()


def test_drawn_sets():
    problem = drawn_sets.draw_problem(400, 3, seed=2)
    gates = hb.section_42(problem.h.expand(400, 4, 6), 6, problem.noise)
    eps, learned = drawn_sets.stability(problem, gates, 0.5)
    assert 0 < eps < 2 * 0.5 * 3 / 4 * float(gates.square().sum(-1).max()) and learned > 0
    for gate in ("all", "selected"):
        assert drawn_sets.overlap(problem.h, 6, gate) == pytest.approx(float(problem.h.softmax(0).square().sum()))
    p = pl.inclusion_by_sets(problem.h, 3)
    assert drawn_sets.overlap(problem.h, 3, "all") == pytest.approx(float((p * problem.h.softmax(0)).square().sum()))


@pytest.mark.parametrize("M, K, N", [(3, 1, 3), (3, 2, 2), (4, 4, 3), (8, 4, 1)])
def test_sets_drawn_anew(M, K, N):
    loss, x, y = drawn_sets.fresh_witness(N)
    problem = drawn_sets.equal_logits(x, y, M, N, torch.Generator().manual_seed(1))
    assert len({tuple(visits) for visits in problem.index.tolist()}) == len(problem.index) == 4**N
    alpha = K / (4 * loss.curvature)
    eps = drawn_sets.fresh_stability(problem, K, alpha, loss)
    assert eps == pytest.approx(2 * alpha * N / (4 * M), rel=1e-12)
    bound = drawn_sets.fresh_bound(alpha, loss.curvature, K, M, N, 4)
    by_hand = 2 * alpha / 4 * sum((1 + (K - 1) / (4 * M)) ** t for t in range(N)) / M
    assert bound == pytest.approx(min(by_hand, 2 * alpha * N / 4 / (K * M) ** 0.5), rel=1e-12)
    assert eps <= bound * (1 + 1e-12)


def test_one_fresh_set_has_the_mean_of_its_shifts():
    rng = torch.Generator().manual_seed(2)
    loss, x, y = drawn_sets.random_points(rng)
    one = drawn_sets.equal_logits(x, y, 5, 2, rng)
    many = one._replace(index=one.index.repeat(2000, 1), noise=gumbel((32_000, 3, 5), rng, x.dtype))
    gates = topk_set(many.noise, 2).double() / 2
    single, _ = drawn_sets.stability(many, gates, 2.0)
    assert drawn_sets.fresh_stability(many, 2, 2.0, loss) == pytest.approx(single, rel=0.03)
