import math

import pytest
import torch
from scipy.stats import norm

from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models.mixture import MixingMeasure, draw_measure, gates, jacobian, regression_function
from moe_theory.models.routers import ROUTERS, Cosine, Linear, Perturbed
from moe_theory.tasks.regression import uniform_inputs
from moe_theory.theory.identifiability import shifted
from moe_theory.theory.minimax import (
    exchange,
    least_sum,
    likely_places,
    radial_sequence,
    rescaled,
    split_sequence,
    two_point_bound,
    weight_bound,
)

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


def separation(G, other, r):
    """Smallest distance of atoms j, l over what the bound asks for: at least 1 where it holds."""
    router, expert = (G.beta1 - other.beta1).norm(dim=1), (G.eta - other.eta).norm(dim=1)
    delta = (router**r + expert**r) ** (1 / r)
    apart = (G.atoms()[:, None] - other.atoms()).norm(dim=2).fill_diagonal_(math.inf)
    return float((apart / torch.maximum(delta[:, None], delta)).min()) / max(1, 2 ** (0.5 - 1 / r))


@pytest.mark.parametrize("r", [1, 1.5, 2, 4])
@pytest.mark.parametrize("factors", [[1.4, 1.0, 1.0], [0.3, 1.7, 1.5], [2.2, 2.2, 1.0], [6.0, 1.0, 1.0]])
def test_no_measure_is_near_to_both(factors, r):
    rng = torch.Generator().manual_seed(7)
    G = apart()
    other = rescaled(G, real(factors))
    assert least_sum(G, other, likely_places(G, other, 1500, rng), r) == pytest.approx(
        two_point_bound(G, other, r), rel=1e-9
    )


def along(start, way):
    """The measure with log-weights, router vectors and experts in the columns; the weights stay."""
    return MixingMeasure(start[:, 0], (start + way)[:, 1:3], (start + way)[:, 3:])


@pytest.mark.parametrize("r", [1, 1.5, 2, 3, 8])
def test_pairs_as_close_as_the_bound_allows(r):
    """Random moves of routers and experts, as large as the separation permits: still no measure is nearer."""
    tried = 0
    for seed in range(30):
        rng = torch.Generator().manual_seed(seed)
        k = int(torch.randint(2, 5, (1,), generator=rng))
        start, way = torch.randn(2, k, 6, generator=rng, dtype=torch.float64) * real([1, 1, 1, 0.3, 0.3, 0.3])
        G = along(start, 0 * way)
        low, high = 1e-6, 3.0
        if separation(G, along(start, high * way), r) > 1:
            continue
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if separation(G, along(start, middle * way), r) > 1 else (low, middle)
        other = along(start, low * way)
        assert least_sum(G, other, likely_places(G, other, 1500, rng), r) == pytest.approx(
            two_point_bound(G, other, r), rel=1e-9
        )
        tried += 1
    assert tried > 15


@pytest.mark.parametrize("r", [1, 1.5, 2, 3, 4, 8])
@pytest.mark.parametrize("share", [0.8, 0.95])
def test_the_separation_cannot_be_weakened(r, share):
    """Closer by a factor, and the least sum is that factor to the power r of what the formula says."""
    rng = torch.Generator().manual_seed(1)
    close, far = exchange(share, r), exchange(1.001, r)
    assert separation(*close, r) == pytest.approx(share)
    with pytest.raises(ValueError, match="times the larger move"):
        two_point_bound(*close, r)
    formula = two_point_bound(*far, r)  # the moves are the same
    assert least_sum(*far, likely_places(*far, 1500, rng), r) == pytest.approx(formula, rel=1e-9)
    assert least_sum(*close, likely_places(*close, 1500, rng), r) == pytest.approx(share**r * formula, rel=1e-9)


def test_least_sum_is_the_sum_of_two_losses():
    """At two places, where the best weights can be seen; and never above the losses of a measure there."""
    G = MixingMeasure(real([0.0]), real([[1.0, 0.0]]), real([[0.0, 0.0, 0.0]]))
    other = rescaled(G, real([2.0]))
    at = real([[1.3, 0, 0, 0, 0], [1.6, 0, 0, 0, 0]])
    assert least_sum(G, other, at, 2) == pytest.approx(0.6**2 + 0.4**2)
    assert least_sum(G, other, at[:1], 2) == pytest.approx(0.3**2 + 0.7**2)
    rng = torch.Generator().manual_seed(3)
    G, other = apart(), rescaled(apart(), real([1.4, 0.5, 1.0]))
    at = likely_places(G, other, 20, rng)
    for _ in range(20):
        some = torch.randperm(len(at), generator=rng)[:5]
        H = MixingMeasure(torch.randn(5, generator=rng, dtype=torch.float64), at[some, :2], at[some, 2:])
        assert least_sum(G, other, at[some], 3) <= both(H, G, other, 3) + 1e-9


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


@pytest.mark.parametrize("name", ["linear", "cosine", "perturbed"])
@pytest.mark.parametrize("r", [1, 3])
def test_two_splits_of_a_relu_expert(name, r):
    """Only experts move: one function under every router, and a positive bound for one expert too many."""
    G = draw_measure(2, 2, 5, 2.0, 2.0)
    twice = torch.tensor([0, 0, 1])
    pair = [
        MixingMeasure(G.beta0[twice] - real([math.log(2)] * 2 + [0]), G.beta1[twice], G.eta[twice] * sizes[:, None])
        for sizes in (real([0.8, 1.2, 1]), real([0.4, 1.6, 1]))
    ]
    assert differ(*pair, ROUTERS[name](), "relu") < 1e-14
    move = 0.4 * float(G.eta[0].norm())
    expected = 2 * float(G.beta0[0].exp()) * min(1, move / 2) ** r
    assert two_point_bound(*pair, r) == pytest.approx(expected, rel=1e-12)


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
    with pytest.raises(ValueError, match="other: expected the beta0 of G"):
        two_point_bound(G, G.with_(beta0=G.beta0 + 1))
    with pytest.raises(ValueError, match="other: expected 3 atoms in d = 2, got 4 in d = 2"):
        two_point_bound(G, split_sequence(G, 3))
    with pytest.raises(ValueError, match="other: expected 3 atoms in d = 2, got 3 in d = 4"):
        two_point_bound(G, apart(d=4))
    with pytest.raises(ValueError, match="apart, 1 times the larger move"):
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
