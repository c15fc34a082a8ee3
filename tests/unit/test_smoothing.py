import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from moe_theory.theory import smoothing
from moe_theory.theory.smoothing import (
    gaussian_constant,
    kappa,
    local_lipschitz,
    route_probabilities,
    switch_bound,
    switch_probability,
    switching_rate,
    tie_variation,
)

LAWS = ("uniform", "gaussian")
logits = st.lists(st.floats(-3, 3), min_size=1, max_size=12)


def by_quadrature(h, m, noise):
    """p_m by adaptive quadrature over the noise of expert m, split at every kink."""
    others = [h[m] - h[j] for j in range(len(h)) if j != m]
    if noise == "gaussian":
        return quad(
            lambda r: norm.pdf(r) * np.prod([norm.cdf(r + t) for t in others]), -12, 12, epsabs=1e-13, limit=400
        )[0]
    kinks = sorted({x for t in others for x in (-t, 1 - t) if 0 < x < 1})
    edges = [0.0, *kinks, 1.0]
    integrand = lambda r: np.prod([min(max(r + t, 0.0), 1.0) for t in others])  # noqa: E731
    return sum(quad(integrand, a, b, epsabs=1e-14)[0] for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("noise", [pytest.param(law, marks=[pytest.mark.slow] * (law == "gaussian")) for law in LAWS])
@given(h=logits)
@settings(max_examples=30, deadline=None)
def test_against_adaptive_quadrature(noise, h):
    p = route_probabilities(h, noise)
    assert p.dtype == torch.float64
    for m in range(min(len(h), 3)):
        assert abs(float(p[m]) - by_quadrature(h, m, noise)) < 1e-11


@pytest.mark.parametrize("noise", LAWS)
@pytest.mark.parametrize("M", [1, 2, 3, 7, 8, 33, 64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_rows_sum_to_one_and_ties_are_uniform(noise, M):
    rng = torch.Generator().manual_seed(M)
    h = (
        torch.randn(12, M, generator=rng, dtype=torch.float64)
        * torch.tensor([0, 0.01, 0.3, 1, 4, 30]).repeat(2)[:, None]
    )
    h[6:] = h[6:].round()
    p = route_probabilities(h, noise)
    assert (p.sum(1) - 1).abs().max() < 1e-12
    assert (p >= 0).all()
    assert (p[0] - 1 / M).abs().max() < 1e-14


@pytest.mark.parametrize("noise", LAWS)
def test_shift_permutation_scale_and_batching(noise):
    h = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = route_probabilities(h, noise)
    assert p.shape == h.shape
    assert torch.allclose(p, route_probabilities(h + 5, noise), atol=1e-13)
    assert torch.allclose(p.flip(-1), route_probabilities(h.flip(-1), noise), atol=1e-13)
    assert torch.allclose(p, route_probabilities(0.3 * h, noise, 0.3), atol=1e-13)
    assert torch.allclose(p[1, 2], route_probabilities(h[1, 2], noise), atol=1e-15)
    assert route_probabilities(h[:0], noise).shape == (0, 4, 6)


@pytest.mark.parametrize("M", [1, 2, 3, 5, 8, 13])
def test_the_product_of_the_others_is_taken_without_a_division(M):
    G = torch.rand(4, M, 3, generator=torch.Generator().manual_seed(M), dtype=torch.float64)
    G[1, 0], G[2, : M // 2], G[3] = 0, 0, 1
    others = [torch.cat([G[:, :m], G[:, m + 1 :]], 1).prod(1) for m in range(M)]
    assert torch.allclose(smoothing._products_without(G), torch.stack(others, 1), rtol=1e-15, atol=0)


@pytest.mark.parametrize("noise", LAWS)
@pytest.mark.parametrize("block", [1, 100, 1 << 30])
def test_blocks_of_any_size_give_the_same_numbers(monkeypatch, noise, block):
    h = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def numbers():
        p = route_probabilities(h, noise)
        return p.detach(), torch.autograd.grad((weight * p).sum(), h)[0], local_lipschitz(h.detach(), noise)

    expected = numbers()
    monkeypatch.setattr(smoothing, "BLOCK", block)
    for found, wanted in zip(numbers(), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-14)


def test_the_loops_run_on_one_thread_and_leave_the_setting_as_it_was(monkeypatch):
    seen, before = [], torch.get_num_threads()

    def density(z):
        seen.append(torch.get_num_threads())
        if z.shape[1] == 3:
            raise RuntimeError("three experts")
        return z

    monkeypatch.setitem(smoothing._LAWS, "uniform", smoothing._LAWS["uniform"]._replace(density=density))
    try:
        torch.set_num_threads(2)
        route_probabilities([0.0, 1.0])
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError, match="three experts"):
            route_probabilities([0.0, 1.0, 2.0])
        assert torch.get_num_threads() == 2 and set(seen) == {1}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("noise", LAWS)
def test_ten_million_draws(noise):
    rng = torch.Generator().manual_seed(1)
    h = torch.tensor([0.0, 0.3, 0.9, -0.5])
    draws, counts = 10_000_000, torch.zeros(4, dtype=torch.float64)
    for _ in range(10):
        r = (torch.rand if noise == "uniform" else torch.randn)(draws // 10, 4, generator=rng)
        counts += torch.bincount((h + r).argmax(1), minlength=4)
    p = route_probabilities(h, noise)
    assert ((counts / draws - p).abs() <= 5 * (p * (1 - p) / draws).sqrt()).all()


def test_out_of_the_race():
    """Lemma C.4: at a gap of exactly the width, and beyond, the probability is exactly 0."""
    for width in (1.0, 0.25):
        p = route_probabilities([0.0, -width, -2 * width, -0.999 * width], scale=width)
        assert p[1] == 0 and p[2] == 0 and p[3] > 0
    assert (route_probabilities([0.0, -1.0, -5.0], "gaussian") > 0).all()


@pytest.mark.parametrize("noise", LAWS)
@given(h=st.lists(st.floats(-1, 1), min_size=2, max_size=9), scale=st.floats(0.2, 3))
@settings(max_examples=25, deadline=None)
def test_local_constant_is_the_row_sum_of_the_jacobian_and_below_two_kappa(noise, h, scale):
    at = torch.tensor(h, dtype=torch.float64)
    # a kink of the uniform law lies where a gap equals the width; step off it
    at = at + 1e-3 * torch.arange(len(h))
    jacobian = torch.autograd.functional.jacobian(lambda t: route_probabilities(t, noise, scale), at)
    constant = local_lipschitz(at, noise, scale)
    assert torch.allclose(jacobian.abs().sum(1), constant, atol=1e-10)
    assert (constant <= 2 * kappa(noise, scale) + 1e-12).all()


@given(h=st.lists(st.floats(-1, 1), min_size=2, max_size=9), step=st.lists(st.floats(-1, 1), min_size=9, max_size=9))
@settings(max_examples=60, deadline=None)
def test_two_kappa_holds_for_any_step_and_less_would_not(h, step):
    h = torch.tensor(h, dtype=torch.float64)
    d = torch.tensor(step[: len(h)], dtype=torch.float64)
    moved = (route_probabilities(h + d) - route_probabilities(h)).abs().max()
    assert moved <= 2 * d.abs().max() + 1e-13


@pytest.mark.parametrize("M", [2, 3, 8, 64, 256])
def test_uniform_noise_attains_two_at_a_tie(M):
    assert abs(float(local_lipschitz(torch.zeros(M))[0]) - 2) < 1e-13
    step = torch.full((M,), -1e-3, dtype=torch.float64)
    step[0] = 1e-3
    ratio = float(route_probabilities(step)[0] - 1 / M) / 1e-3
    assert ratio > 1.99  # a constant of 1.99 would be refuted here


def test_gaussian_constants():
    assert abs(gaussian_constant(2)[0] / kappa("gaussian") - 2**0.5) < 1e-9
    ratios = [gaussian_constant(M)[0] / kappa("gaussian") for M in (2, 3, 8, 100, 10**6)]
    assert ratios == sorted(ratios) and ratios[-1] < 2
    constant, lead = gaussian_constant(8)
    assert abs(float(local_lipschitz([lead] + [0.0] * 7, "gaussian")[0]) - constant) < 1e-11


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([0.0, float("nan")],), "h"),
        (([0.0, float("inf")],), "h"),
        ((torch.zeros(3, 0),), "h"),
        ((torch.tensor(1.0),), "h"),
        (([0.0, 1.0], "cauchy"), "noise"),
        (([0.0, 1.0], "uniform", 0), "scale"),
        (([0.0, 1.0], "gaussian", float("nan")), "scale"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    for function in (route_probabilities, local_lipschitz):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            function(*arguments)


@pytest.mark.parametrize("M", [2, 3, 4, 7, 32])
def test_total_variation_at_a_tie(M):
    """The best of all ways to move tied logits by +-D, by difference quotients; no logits do better than the bound."""
    like = dict(generator=torch.Generator().manual_seed(M), dtype=torch.float64)
    logits = torch.cat([torch.zeros(1, M, dtype=torch.float64), 0.3 * torch.rand(3, M, **like)])
    moves = torch.rand(200, M, **like).round() * 2 - 1
    moves[0, : M // 2], moves[0, M // 2 :] = 1, -1
    tie, *others = (
        float((route_probabilities(h + 1e-6 * moves) - route_probabilities(h)).abs().sum(1).max()) / 2e-6
        for h in logits
    )
    assert tie == pytest.approx(tie_variation(M), rel=1e-4)
    assert max(others) <= 2 * (M // 2) + 1e-6


# --- how many winners change --------------------------------------------------------------------


def exact_rate(h: list[Fraction], rises: list[bool]) -> Fraction:
    """2 int F_B' F_C' dz under Unif[0, 1] in rational numbers, piece by piece; the largest h is 0."""
    total, ends = Fraction(0), sorted({Fraction(0), *(1 + x for x in h if x > -1)})
    for left, right in itertools.pairwise(ends):
        best = {}
        for side in (True, False):
            best[side] = np.polynomial.Polynomial([Fraction(1)])
            for x, up in zip(h, rises, strict=True):
                if up == side and right <= 1 + x:
                    best[side] = best[side] * np.polynomial.Polynomial([-x, Fraction(1)])
        whole = (slope(best[True]) * slope(best[False])).coef
        total += sum((c * (right ** (k + 1) - left ** (k + 1)) / (k + 1) for k, c in enumerate(whole)), Fraction(0))
    return 2 * total


def slope(p: np.polynomial.Polynomial) -> np.polynomial.Polynomial:
    """The derivative, without leaving rational numbers."""
    return np.polynomial.Polynomial([k * c for k, c in enumerate(p.coef)][1:] or [Fraction(0)])


@pytest.mark.parametrize("M", [2, 3, 5, 8])
def test_the_rate_of_switching_in_rational_numbers_and_never_above_that_of_a_tie(M):
    rng = np.random.default_rng(M)
    for b in range(1, M):
        rises = [m < b for m in range(M)]
        most = Fraction(2 * b * (M - b), M - 1)
        for most_behind in (0, 1, 9, 40):
            h = [-Fraction(int(k), 30) for k in rng.integers(0, most_behind + 1, M)]
            h = [x - max(h) for x in h]
            rate = exact_rate(h, rises)
            found = switching_rate(
                torch.tensor([float(x) / 2 for x in h], dtype=torch.float64), torch.tensor(rises), scale=0.5
            )
            assert float(found) == pytest.approx(float(2 * rate), abs=1e-13)
            assert rate <= most and (any(h) or rate == most)


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_the_rate_of_switching_is_a_derivative_of_probabilities(noise):
    like = dict(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    h, rises = 0.7 * torch.rand(4, 6, **like), torch.tensor([True, False, True, False, False, True])
    move = 1e-5 * (2 * rises.double() - 1)
    ends = [route_probabilities(h + sign * move, noise)[:, rises].sum(1) for sign in (1, -1)]
    assert torch.allclose((ends[0] - ends[1]) / 2e-5, switching_rate(h, rises, noise=noise), rtol=1e-6)
    for none in (torch.zeros(6).bool(), torch.ones(6).bool()):
        assert torch.equal(switching_rate(h, none, noise=noise), torch.zeros(4).double())


@given(h=st.lists(st.floats(-1, 1), min_size=2, max_size=9), move=st.lists(st.floats(-1, 1), min_size=9, max_size=9))
@settings(max_examples=60, deadline=None)
def test_no_move_changes_more_winners_than_its_bound(h, move):
    h = torch.tensor(h, dtype=torch.float64)
    d = torch.tensor(move[: len(h)], dtype=torch.float64)
    changes, bound = float(switch_probability(h, h + d)), float(switch_bound(d))
    gains = float((route_probabilities(h + d) - route_probabilities(h)).abs().sum()) / 2
    assert gains - 1e-13 <= changes <= bound + 1e-13
    assert bound <= d.abs().max() * tie_variation(len(h)) + 1e-13
    small = float(switch_probability(torch.zeros_like(h), 1e-6 * d))
    assert small == pytest.approx(1e-6 * bound, rel=1e-4, abs=1e-12)  # attained to first order at a tie


def test_winners_that_change_are_counted():
    rng = np.random.default_rng(0)
    h, moved = torch.tensor([0.1, 0.0, -0.3, 0.05]), torch.tensor([0.0, 0.2, -0.3, -0.1])
    for noise, draws in (("uniform", rng.random((200_000, 4))), ("gaussian", rng.normal(size=(200_000, 4)))):
        bids = torch.from_numpy(0.5 * draws)
        share = float(((h + bids).argmax(1) != (moved + bids).argmax(1)).double().mean())
        p = float(switch_probability(h, moved, noise=noise, scale=0.5))
        assert abs(share - p) < 4 * (p * (1 - p) / 200_000) ** 0.5


def test_bad_moves_are_named():
    for function, name in (
        (lambda: switch_probability([0.0, 0.0], [0.0]), "moved"),
        (lambda: switching_rate(torch.zeros(3), torch.ones(2).bool()), "rises"),
        (lambda: switch_bound(torch.zeros(1)), "move"),
        (lambda: switch_bound(torch.zeros(2), 0), "scale"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            function()
