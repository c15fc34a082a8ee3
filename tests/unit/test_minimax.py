import math

import pytest
import torch
from scipy.stats import norm

from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models.mixture import MixingMeasure, draw_measure, gates, jacobian, regression_function
from moe_theory.models.routers import ROUTERS, Cosine, Linear, Perturbed
from moe_theory.tasks.regression import uniform_inputs
from moe_theory.theory.identifiability import shifted
from moe_theory.theory.minimax import radial_sequence, rescaled, split_sequence, two_point_bound, weight_bound

COSINE = Cosine()
OTHERS = (Linear(), Perturbed(0.1), Perturbed(3.0))
SEQUENCES = (radial_sequence, split_sequence)


def real(values):
    return torch.tensor(values, dtype=torch.float64)


def apart(k=3, d=2, seed=0, experts=8.0):
    """A measure whose atoms are at least 8 from each other."""
    G = draw_measure(k, d, seed, router_scale=2.0)
    return G.with_(eta=G.eta + experts * torch.arange(k)[:, None])


def differ(G, H, router, expert="tanh"):
    x = uniform_inputs(500, G.d, 1)
    f, g = (regression_function(measure, x, router, expert) for measure in (G, H))
    return float((f - g).abs().max())


def both(H, G, other, r):
    return voronoi_loss(H, G, "L1r", r) + voronoi_loss(H, other, "L1r", r)


def midpoint(G, other):
    return G.with_(beta1=(G.beta1 + other.beta1) / 2)


def without(G, j):
    kept = [i for i in range(len(G)) if i != j]
    return MixingMeasure(G.beta0[kept], G.beta1[kept], G.eta[kept])


# --- The sequences ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SEQUENCES)
@pytest.mark.parametrize("n", [2, 3, 10, 1000])
@pytest.mark.parametrize("expert", ["relu", "tanh", "quadratic"])
def test_the_cosine_router_does_not_see_the_sequences(make, n, expert):
    G = draw_measure(4, 5, n)
    assert differ(make(G, n), G, COSINE, expert) < 1e-13


def test_the_first_sequence_starts_at_one_and_the_gates_agree():
    G = draw_measure(4, 5, 0)
    assert differ(radial_sequence(G, 1), G, COSINE) < 1e-13
    x = uniform_inputs(200, 5, 0)
    assert (gates(radial_sequence(G, 1), x, COSINE) - gates(G, x, COSINE)).abs().max() < 1e-14


@pytest.mark.parametrize("make, power", list(zip(SEQUENCES, (1, 2), strict=True)))
@pytest.mark.parametrize("router", OTHERS)
def test_other_routers_do(make, power, router):
    G = draw_measure(4, 5, 3, router_scale=2.0)
    far, near = (differ(make(G, n), G, router) for n in (100, 1000))
    assert near > 1e-10
    assert abs(math.log10(far / near) - power) < 0.1


@pytest.mark.parametrize("make", SEQUENCES)
@pytest.mark.parametrize("r", [1, 2, 3.5])
def test_losses_of_the_sequences(make, r):
    G = draw_measure(4, 5, 1, expert_scale=3.0)
    for n in (10, 40):
        expected = float(G.beta0[0].exp() * (G.beta1[0].norm() / n) ** r)
        assert voronoi_loss(make(G, n), G, "L1r", r) == pytest.approx(expected, rel=1e-8)


def test_the_split_keeps_the_weight_and_adds_one_atom():
    G = draw_measure(3, 4, 0)
    H = split_sequence(G, 5)
    assert len(H) == 4
    assert float(H.beta0.exp().sum()) == pytest.approx(float(G.beta0.exp().sum()), rel=1e-14)
    assert torch.equal(H.eta[0], H.eta[1])
    assert torch.allclose(H.beta1[:2], G.beta1[0] * real([[0.8], [1.2]]))
    assert torch.equal(H.atoms()[2:], G.atoms()[1:])


def test_early_members_may_lie_in_another_cell():
    """The closed form of the loss holds once the moved atom is in its own cell, not for every n."""
    G = MixingMeasure(real([0.0, 0.0]), real([[1.0, 0.0], [2.1, 0.0]]), real([[0.0, 0, 0.1], [0.0, 0, 0.2]]))
    assert voronoi_loss(radial_sequence(G, 1), G) > 1.5 * float(G.beta1[0].norm())
    assert voronoi_loss(radial_sequence(G, 2), G) == pytest.approx(0.5)


# --- The bound ----------------------------------------------------------------------------------


def candidates(G, other, rng, count):
    """Measures with atoms on, between and about those of G and other; split, missing, with all sorts of weights."""
    for _ in range(count):
        m = int(torch.randint(1, 3 * len(G), (1,), generator=rng))
        cell = torch.randint(len(G), (m,), generator=rng)
        t = 1.6 * torch.rand(m, 1, generator=rng, dtype=torch.float64) - 0.3
        t = t.round() if torch.rand(1, generator=rng) < 0.2 else t
        spread = 10 ** (-6 * torch.rand(1, generator=rng, dtype=torch.float64))
        at = (1 - t) * G.atoms()[cell] + t * other.atoms()[cell]
        at = at + spread * torch.randn(at.shape, generator=rng, dtype=torch.float64)
        share = G.beta0[cell] - torch.bincount(cell)[cell].double().log()
        low = torch.where(torch.rand(m, generator=rng) < 0.1, -20.0, 0.0)
        beta0 = share + low + spread * torch.randn(m, generator=rng, dtype=torch.float64)
        yield MixingMeasure(beta0, at[:, : G.d], at[:, G.d :])


def descended(H, G, other, r, rng, steps=150):
    """Random descent on the sum of the two losses, from H."""
    best, size = both(H, G, other, r), 0.1
    for _ in range(steps):
        a, b, c = (size * torch.randn(t.shape, generator=rng, dtype=t.dtype) for t in (H.beta0, H.beta1, H.eta))
        tried = MixingMeasure(H.beta0 + a, H.beta1 + b, H.eta + c)
        value = both(tried, G, other, r)
        H, best, size = (tried, value, 1.3 * size) if value < best else (H, best, 0.93 * size)
    return best


@pytest.mark.parametrize("r", [1, 2, *(pytest.param(r, marks=pytest.mark.slow) for r in (1.5, 4))])
@pytest.mark.parametrize("factors", [[1.4, 1.0, 1.0], [0.3, 1.7, 1.5], [2.2, 2.2, 1.0]])
def test_no_measure_is_near_to_both(factors, r):
    rng = torch.Generator().manual_seed(7)
    G = apart()
    other = rescaled(G, real(factors))
    bound = two_point_bound(G, other, r)
    found = sorted(candidates(G, other, rng, 150), key=lambda H: both(H, G, other, r))
    assert both(found[0], G, other, r) >= bound
    for H in found[:3]:
        assert descended(H, G, other, r, rng) >= bound * (1 - 1e-12)


@pytest.mark.parametrize("r", [1, 2, 4])
def test_the_constant_is_attained_and_a_larger_one_is_refuted(r):
    G = apart()
    short, long = (rescaled(G, 1 + real([move, 0.0, 0.0]) / G.beta1.norm(dim=1)) for move in (1.5, 3.0))
    assert both(midpoint(G, short), G, short, r) == pytest.approx(two_point_bound(G, short, r), rel=1e-12)
    assert both(midpoint(G, short), G, short, r) < 1.001 * two_point_bound(G, short, r)
    # a move of more than 2: leaving the atom out costs its weight twice, and the midpoint more
    assert two_point_bound(G, long, r) == pytest.approx(2 * float(G.beta0[0].exp()), rel=1e-12)
    assert both(without(G, 0), G, long, r) == pytest.approx(two_point_bound(G, long, r), rel=1e-12)
    assert both(midpoint(G, long), G, long, r) > two_point_bound(G, long, r)
    for best, other in ((midpoint(G, short), short), (without(G, 0), long)):  # so the larger loss is half the sum
        assert voronoi_loss(best, G, "L1r", r) == pytest.approx(voronoi_loss(best, other, "L1r", r), rel=1e-12)


def test_the_bound_adds_up_over_atoms_and_is_symmetric():
    G = apart()
    moves = real([0.5, 1.0, 1.5])
    other = rescaled(G, 1 + moves / G.beta1.norm(dim=1))
    expected = 2 * float((G.beta0.exp() * (moves / 2) ** 2).sum())
    assert two_point_bound(G, other, 2) == pytest.approx(expected, rel=1e-12)
    assert two_point_bound(other, G, 2) == pytest.approx(expected, rel=1e-12)
    assert two_point_bound(G, G, 2) == 0
    one = draw_measure(1, 2, 0)
    assert two_point_bound(one, rescaled(one, real([2.0]))) == pytest.approx(float(one.beta1.norm()))


def test_it_serves_every_pair_with_moved_router_vectors():
    """Also the common shift of the perturbed router, two measures with one function."""
    router = Perturbed(0.5)
    G = apart(d=3)
    G = G.with_(beta1=0.2 * G.beta1 / G.beta1.norm(dim=1, keepdim=True))
    other = shifted(G, real([0.2, 0.1, 0.0]), router)
    assert differ(G, other, router) < 1e-13
    assert both(midpoint(G, other), G, other, 1) == pytest.approx(two_point_bound(G, other), rel=1e-12)


def test_unit_vectors_do_not_save_the_cosine_router():
    """Two unit vectors in the plane: (s_1, s_2) and (-s_2, -s_1) differ by one shift, and have one function."""
    G = apart(k=2)
    G = G.with_(beta1=COSINE.embedding(G.beta1))
    other = G.with_(beta1=-G.beta1[[1, 0]])
    assert differ(G, other, COSINE) < 1e-13
    shift = float(G.beta1.sum(0).norm())
    expected = 2 * float(G.beta0.exp().sum()) * min(1, shift / 2)
    assert two_point_bound(G, other) == pytest.approx(expected, rel=1e-12)
    assert two_point_bound(G, other) > 0.1


def test_a_small_move_is_always_separated():
    """Near every G with distinct atoms there is a pair with a positive bound."""
    for seed in range(10):
        G = draw_measure(6, 2, seed)
        assert two_point_bound(G, rescaled(G, real([1.001, 1, 1, 1, 1, 1]))) > 0


@pytest.mark.parametrize("r", [1.5, 2, 3])
def test_without_the_separation_the_bound_would_be_false(r):
    """A third atom in the middle: an estimate passes its errors on along the chain."""
    eta = real([[0.0, 0.0, 0.0], [0.0, 0.0, 1e-9]])
    G = MixingMeasure(real([0.0, 0.0]), real([[1.0, 0.0], [2.0, 0.0]]), eta)
    other = rescaled(G, real([3.0, 1.0]))
    chain = MixingMeasure(real([0.0, 0.0]), real([[1.49, 0.0], [2.51, 0.0]]), real([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert both(chain, G, other, r) == pytest.approx(2 * (0.49**r + 0.51**r), rel=1e-6)
    assert both(chain, G, other, r) < 0.99 * 2  # what the formula without its condition says
    with pytest.raises(ValueError, match="other: expected atoms 0 of G and 1 of it at least 4 apart"):
        two_point_bound(G, other, r)


@pytest.mark.parametrize("name", ["linear", "cosine", "perturbed"])
def test_the_weight_bound_is_below_the_exact_two_point_bound(name):
    """weight_bound is what two weights give; the exact error of the best test between them gives more."""
    n, noise = 400, 0.1
    for seed in range(5):
        G = draw_measure(3, 2, seed, 3.0, 3.0)
        bound = weight_bound(n, float(G.beta0[0].exp()), noise, 1)
        step = 2 * noise / math.sqrt(n)
        other = G.with_(beta0=G.beta0 + real([step, 0.0, 0.0]))
        x = uniform_inputs(n, 2, seed)
        f, g = (regression_function(measure, x, ROUTERS[name](), "tanh") for measure in (G, other))
        overlap = 2 * norm.sf(float((f - g).norm()) / (2 * noise))  # 1 - TV of the data given the inputs
        two_point = 0.5 * voronoi_loss(other, G) * overlap
        assert voronoi_loss(other, G) == pytest.approx(float(G.beta0[0].exp()) * math.expm1(step))
        assert bound <= two_point < 4 * bound
        slope = jacobian(G, x, ROUTERS[name](), "tanh")[:, 0].abs().max()
        assert slope <= 0.5


def test_the_slope_bound_behind_it_is_sharp():
    """|df/dbeta0| comes as close to largest / 2 as one likes: two opposite experts with equal gates."""
    G = MixingMeasure(real([0.0, 0.0]), real([[1.0], [1.0]]), real([[0.0, 9.0], [0.0, -9.0]]))
    slope = float(jacobian(G, real([[0.5]]), COSINE, "tanh")[0, 0])
    assert slope == pytest.approx(0.5, abs=1e-6)


def test_the_weight_bound_scales():
    assert weight_bound(100, 2.0, 0.1, 1.0) == pytest.approx(0.01)
    assert weight_bound(400, 2.0, 0.1, 1.0) == pytest.approx(0.005)
    assert weight_bound(100, 1.0, 0.2, 0.5) == pytest.approx(0.02)


# --- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factors", [[1.0, 1.0], [0.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [math.nan, 1.0, 1.0], [math.inf, 1, 1]]
)
def test_rescaled_names_its_factors(factors):
    with pytest.raises(ValueError, match="factors: expected 3 finite numbers > 0, got"):
        rescaled(draw_measure(3, 2, 0), real(factors))


@pytest.mark.parametrize(
    "make, n", [(radial_sequence, 0), (radial_sequence, 1.5), (split_sequence, 1), (split_sequence, -3)]
)
def test_sequences_name_n(make, n):
    with pytest.raises(ValueError, match="n: expected an integer"):
        make(draw_measure(3, 2, 0), n)


@pytest.mark.parametrize("r", [0.9, 0, math.nan, math.inf])
def test_the_bound_names_r(r):
    with pytest.raises(ValueError, match="r: expected a finite number >= 1"):
        two_point_bound(apart(), apart(), r)


def test_the_bound_names_what_differs():
    G = apart()
    with pytest.raises(ValueError, match="other: expected the beta0 and eta of G"):
        two_point_bound(G, G.with_(beta0=G.beta0 + 1))
    with pytest.raises(ValueError, match="other: expected the beta0 and eta of G"):
        two_point_bound(G, G.with_(eta=G.eta + 1))
    with pytest.raises(ValueError, match="other: expected 3 atoms in d = 2, got 4 in d = 2"):
        two_point_bound(G, split_sequence(G, 3))
    with pytest.raises(ValueError, match="other: expected 3 atoms in d = 2, got 3 in d = 4"):
        two_point_bound(G, apart(d=4))
    with pytest.raises(ValueError, match="apart, twice the larger move"):
        two_point_bound(G, rescaled(G, real([99.0, 1.0, 1.0])))
    twice = MixingMeasure(G.beta0[[0, 1, 1]], G.beta1[[0, 1, 1]], G.eta[[0, 1, 1]])
    with pytest.raises(ValueError, match="G: expected distinct atoms"):
        two_point_bound(twice, rescaled(twice, real([1.1, 1.0, 1.0])))


@pytest.mark.parametrize("name", ["weight", "noise", "largest"])
def test_the_weight_bound_names_its_arguments(name):
    good = dict(weight=1.0, noise=0.1, largest=1.0)
    with pytest.raises(ValueError, match=f"{name}: expected a finite number > 0"):
        weight_bound(10, **{**good, name: 0.0})
    with pytest.raises(ValueError, match="n: expected an integer >= 1"):
        weight_bound(0, **good)
