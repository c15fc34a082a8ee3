import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_book.experiments.rates import truth
from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models.mixture import (
    EXPERTS,
    MixingMeasure,
    draw_measure,
    expert_profile,
    jacobian,
    regression_function,
)
from moe_theory.models.routers import ROUTERS, Cosine, Linear, Perturbed
from moe_theory.tasks.regression import uniform_inputs
from moe_theory.theory.function_sets import (
    count_relations,
    derivatives,
    relations,
    relations_formula,
    separation,
    tangent_functions,
)
from moe_theory.theory.identifiability import (
    admissible_shifts,
    centred,
    centred_tangents,
    null_vectors,
    nullity,
    nullity_formula,
    numerical_nullity,
    shifted,
    singular_gap,
)
from moe_theory.theory.lower_bound import centred_ratio, loss_blocks, lower_bound_constant, smallest_ratio, whitened
from moe_theory.theory.minimax import two_point_bound
from moe_theory.theory.spare_bound import OneTooMany, lowest
from moe_theory.theory.splits import bump_square, scaled, searched_sum, split
from moe_theory.training.twice import fit

PERTURBED, COSINE = Perturbed(), Cosine()
KINDS = (*EXPERTS, "constant")


def real(values):
    return torch.tensor(values, dtype=torch.float64)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apart(G, H, router, expert="relu"):
    """Largest difference of two regression functions over 2,000 inputs."""
    x = uniform_inputs(2000, G.d, 9)
    return float((regression_function(G, x, router, expert) - regression_function(H, x, router, expert)).abs().max())


def pair():
    """The counterexample of chapter 21: two experts in the plane, beta_02 = 0 in both measures."""
    G = MixingMeasure(real([0, 0]), real([[0.15, 0], [0, 0]]), real([[1, 1, 0], [1, -1, 0.5]]))
    return G, shifted(G, real([-0.6, 0]), PERTURBED)


# --- null spaces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ROUTERS)
@given(k=st.integers(2, 10), d=st.integers(2, 40), seed=st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_nullity_is_the_formula(router, k, d, seed):
    assert nullity(router, k, d, seed=seed) == nullity_formula(router, k, d)


@pytest.mark.parametrize("expert", EXPERTS)
def test_nullity_does_not_depend_on_the_expert(expert):
    for router in ROUTERS:
        assert nullity(router, 3, 5, expert=expert) == nullity_formula(router, 3, 5)


@pytest.mark.parametrize("router, expert", list(itertools.product(ROUTERS, EXPERTS)))
def test_jacobian_against_automatic_differentiation(router, expert):
    G, x, r = draw_measure(3, 4, 1), uniform_inputs(40, 4, 2), ROUTERS[router]()
    flat = torch.cat([G.beta0, G.beta1.flatten(), G.eta.flatten()])

    def f(p):
        return regression_function(MixingMeasure(p[:3], p[3:15].view(3, 4), p[15:].view(3, 5)), x, r, expert)

    by_autograd = torch.autograd.functional.jacobian(f, flat)
    assert torch.allclose(jacobian(G, x, r, expert), by_autograd, atol=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("k, d", [(2, 5), (4, 4), (6, 3)])
def test_named_null_vectors_are_all_and_wrong_ones_are_not_null(router, k, d):
    G, x, r = draw_measure(k, d, 3), uniform_inputs(300, d, 4), ROUTERS[router]()
    J, named = jacobian(G, x, r, "tanh"), null_vectors(G, r)
    V = torch.cat(list(named.values()), 1)
    assert torch.linalg.matrix_rank(V) == nullity_formula(router, k, d)
    assert (J @ V).abs().max() < 1e-12 * J.abs().max() * V.abs().max()
    for name, vectors in named.items():
        for v in vectors.T:
            broken = v.clone()
            last = broken[k - 1 : k] if name == "shift of beta0" else broken[k + (k - 1) * d : k + k * d]
            last *= -0.5  # the last atom moves otherwise than the rest
            if name != "radius":  # each radius is a null vector of its own
                assert (J @ broken).abs().max() > 1e-4 * broken.norm()
    if router == "perturbed":
        assert (J @ null_vectors(G, COSINE)["radius"]).norm(dim=0).min() > 1e-4


def test_the_nullity_at_the_papers_truth():
    x = uniform_inputs(1600, 32, 0)
    for name, expert, expected in (("paper", "relu", 34), ("paper", "tanh", 33), ("regular", "relu", 33)):
        assert numerical_nullity(jacobian(truth(name), x, PERTURBED, expert)) == expected
    assert numerical_nullity(jacobian(truth("regular"), x, COSINE, "relu")) == nullity_formula("cosine", 8, 32)


def test_two_relu_experts_with_one_router_trade_weights_against_sizes():
    G, x, factor = truth("paper"), uniform_inputs(500, 32, 0), real([1.4, 0.6])  # the last two routers are zero, w = 1
    H = G.with_(beta0=torch.cat([G.beta0[:6], factor.log()]), eta=torch.cat([G.eta[:6], G.eta[6:] / factor[:, None]]))
    difference = regression_function(H, x, PERTURBED) - regression_function(G, x, PERTURBED)
    assert difference.abs().max() < 1e-13 and voronoi_loss(H, G, "L3") > 1


def test_numerical_nullity_counts_dependent_and_zero_columns():
    J = normal(0, 50, 4)
    assert numerical_nullity(J) == 0
    assert numerical_nullity(torch.cat([J, J[:, :2] @ normal(1, 2, 3), torch.zeros(50, 1, dtype=J.dtype)], 1)) == 4
    q = torch.linalg.qr(normal(1, 50, 3)).Q
    undecided = torch.stack([q[:, 0], q[:, 0] + 3e-13 * q[:, 1], q[:, 0] + 5e-15 * q[:, 2]], 1)
    with pytest.raises(ValueError, match="no gap"):
        numerical_nullity(undecided)


# --- the gauge, and what leaves the function alone --------------------------------------------------------


def test_the_counterexample_to_proposition_1():
    G, H = pair()
    assert G.beta0[-1] == H.beta0[-1] == 0
    assert max(apart(G, H, PERTURBED, expert) for expert in EXPERTS) < 1e-13
    assert voronoi_loss(H, G, "L3") > 0.1 and voronoi_loss(H, G, "L2") > 0.1


@given(seed=st.integers(0, 50), k=st.integers(2, 5), d=st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_a_common_shift_keeps_the_function_and_one_atom_left_behind_changes_it(seed, k, d):
    c = 0.05 * normal(seed + 1, d)
    G = draw_measure(k, d, seed, router_scale=0.1)
    for router in (PERTURBED, Linear()):
        H = shifted(G, c, router)
        assert apart(G, H, router) < 1e-13
        left = H.beta1.clone()
        left[-1] = G.beta1[-1]
        assert apart(G, H.with_(beta1=left), router, "tanh") > 1e-7  # a ReLU may be dead on all inputs
        assert (H.beta1 - G.beta1).norm() > 1e-3


@pytest.mark.parametrize("k, d", [(2, 4), (3, 4), (4, 4), (6, 4), (3, 2)])
def test_the_cosine_fibre_is_a_sphere_and_two_points_at_k_equal_d_and_one_above(k, d):
    G = draw_measure(k, d, k)
    s = COSINE.embedding(G.beta1)
    shifts, sigma = admissible_shifts(s, starts=40)
    assert len(shifts) == 40 and sigma.shape == (40, min(k, d))
    for c in shifts:
        assert apart(G, shifted(G, c, COSINE), COSINE, "tanh") < 1e-13
    differences = s[1:] - s[0]
    o = s[0] - torch.linalg.pinv(differences) @ (differences @ s[0])
    assert (shifts @ differences.T).abs().max() < 1e-9
    assert ((shifts + o).norm(dim=1) - o.norm()).abs().max() < 1e-9
    assert len(torch.unique(shifts.round(decimals=6), dim=0)) == (40 if k < d else 2 if k == d else 1)
    assert (sigma[:, -1] > 1e-6 * sigma[:, 0]).all()  # rank min(k, d): a manifold of dimension d - k
    if k < d:
        assert torch.linalg.matrix_rank(shifts, rtol=1e-9) == d - k + 1
    if k <= d:
        with pytest.raises(ValueError, match="cosine router reaches norm 1"):
            shifted(G, 1.01 * shifts[shifts.norm(dim=1).argmax()], COSINE)


def test_opposite_directions_have_null_shifts_and_no_other_solution():
    s = COSINE.embedding(normal(0, 1, 4)) * real([[1], [-1]])
    shifts, sigma = admissible_shifts(s, starts=40)
    assert len(shifts) == 40 and shifts.abs().max() < 1e-6
    assert (sigma[:, 1] < 1e-6).all()


def test_a_cosine_measure_and_its_mirror_image_mix_without_a_trace():
    G = draw_measure(3, 3, 1)
    s = COSINE.embedding(G.beta1)
    shifts, _ = admissible_shifts(s)
    c = shifts[shifts.norm(dim=1).argmax()]
    moves = torch.stack([torch.zeros(7).double(), torch.cat([c, torch.zeros(4).double()])])
    H = split(G, {j: moves for j in range(3)}, COSINE, share=0.3)
    for expert in EXPERTS:
        assert apart(G, H, COSINE, expert) < 1e-13
    assert apart(G, split(G, {0: moves}, COSINE, share=0.3), COSINE, "tanh") > 1e-5


def test_z_squared_plus_z_splits_like_z_squared():
    z, c1 = torch.linspace(-2, 2, 9).double(), 1.2
    c2 = (2 - c1**2) ** 0.5
    first, second = (c * (z + 0.5) - 0.5 for c in (c1, c2))
    assert ((first**2 + first + second**2 + second) / 2 - z**2 - z).abs().max() < 1e-14


@pytest.mark.parametrize("expert, p", [("linear", 1), ("relu", 1), ("quadratic", 2), ("cubic", 3)])
def test_homogeneous_experts_split_exactly(expert, p):
    G = draw_measure(3, 3, 0, router_scale=0.1)
    share, c1 = 0.3, 0.8
    c2 = ((1 - share * c1**p) / (1 - share)) ** (1 / p)

    def in_two(first, second):
        move = torch.cat([torch.zeros(2, 3, dtype=torch.float64), (real([first, second]) - 1)[:, None] * G.eta[1]], 1)
        return split(G, {1: move}, PERTURBED, share=share)

    H = in_two(c1, c2)
    assert len(H) == 4 and voronoi_loss(H, G, "L2") > 0.005
    assert torch.allclose(H.beta0.exp().sum(), G.beta0.exp().sum())
    assert apart(G, H, PERTURBED, expert) < 1e-13
    assert apart(G, in_two(c1, 1.1 * c2), PERTURBED, expert) > 1e-4
    assert apart(G, H, PERTURBED, "tanh") > 1e-5


def test_all_atoms_split_in_the_router_keep_every_function_and_all_but_one_do_not():
    G, c = draw_measure(3, 3, 0, router_scale=0.1), torch.cat([real([0.3, 0.2, -0.1]), torch.zeros(4).double()])
    moves = {j: torch.stack([c, -c]) for j in range(3)}
    H = split(G, moves, PERTURBED)
    assert len(H) == 6 and voronoi_loss(H, G, "L2") > 0.01
    for expert in EXPERTS:
        assert apart(G, H, PERTURBED, expert) < 1e-13
    del moves[2]
    assert apart(G, split(G, moves, PERTURBED), PERTURBED, "tanh") > 1e-5


def test_relu_across_is_seen_at_order_three_halves():
    G = MixingMeasure(real([0]), real([[0.1, 0]]), real([[1, 0, 0]]))
    x = torch.stack([torch.linspace(-1, 1, 200_001).double(), torch.zeros(200_001).double()], 1)
    for size in (0.05, 0.3):
        H = split(G, {0: size * torch.eye(5, dtype=torch.float64)[[4, 4]] * real([[1], [-1]])}, PERTURBED)
        difference = regression_function(H, x, PERTURBED) - regression_function(G, x, PERTURBED)
        assert abs(float(difference.square().mean().sqrt()) / ((0.5 / 6) ** 0.5 * size**1.5) - 1) < 1e-3


@pytest.mark.slow
def test_the_square_of_the_bump_against_its_law_and_random_inputs():
    G, e, x = draw_measure(2, 3, 0), normal(1, 4), uniform_inputs(200_000, 3, 2)
    G.eta[0, 3] = 0.1
    off = []
    for t in (0.2, 0.05, 0.0125):
        quadrature, law = bump_square(G, e, t, PERTURBED)
        off.append(abs(quadrature / law - 1))
    assert off[2] < off[0] and off[2] < 0.02
    step = torch.cat([torch.zeros(3).double(), 0.2 * e])
    H = split(G, {0: torch.stack([step, -step])}, PERTURBED)
    square = (regression_function(H, x, PERTURBED) - regression_function(G, x, PERTURBED)).square()
    error = float(square.std()) / len(x) ** 0.5
    assert abs(float(square.mean()) - bump_square(G, e, 0.2, PERTURBED)[0]) < 5 * error + 0.01 * float(square.mean())


# --- the constant of the lower bound -----------------------------------------------------------------------


def test_lower_bound_constant_in_two_dimensions():
    J, blocks = normal(0, 30, 2), [([0], 2.0), ([1], 0.5)]
    angle = torch.linspace(0, 3.1415926536, 200_001).double()
    delta = torch.stack([angle.cos(), angle.sin()])
    ratios = (J @ delta).norm(dim=0) / 30**0.5 / (2 * delta[0].abs() + 0.5 * delta[1].abs())
    found = lower_bound_constant(J, blocks)
    assert abs(found.found / float(ratios.min()) - 1) < 1e-6
    assert 0 < found.certified <= found.found
    v = found.direction
    assert abs(float((J @ v).norm()) / 30**0.5 / float(2 * v[0].abs() + 0.5 * v[1].abs()) / found.found - 1) < 1e-9


def test_centred_measures_and_their_tangents():
    G = centred(draw_measure(3, 3, 0, router_scale=0.1), PERTURBED)
    w, s, basis = G.beta0.exp(), PERTURBED.embedding(G.beta1), centred_tangents(G, PERTURBED)
    assert abs(float(w.sum()) - 1) < 1e-14 and (w @ s).abs().max() < 1e-14
    assert apart(G, draw_measure(3, 3, 0, router_scale=0.1), PERTURBED) < 1e-13
    assert basis.shape == (24, 20) and torch.allclose(basis.T @ basis, torch.eye(20).double())
    for v in basis.T:
        beta0, moved_s = G.beta0 + 1e-6 * v[:3], s + 1e-6 * v[3:12].view(3, 3)
        assert abs(float(beta0.exp().sum()) - 1) < 1e-11 and (beta0.exp() @ moved_s).abs().max() < 1e-11
    gauge = torch.zeros(24).double()
    gauge[3:12] = real([1, 2, 3]).repeat(3)
    assert (gauge - basis @ (basis.T @ gauge)).norm() > 0.1
    with pytest.raises(ValueError, match="reaches norms below 1"):
        centred(MixingMeasure(real([0, 3]), real([[90, 0], [-90, 0]]), torch.ones(2, 3).double()), PERTURBED)


@pytest.mark.parametrize("expert", ["relu", "tanh"])
def test_the_constant_bounds_the_ratio_of_theorem_6(expert):
    G, x = centred(draw_measure(3, 3, 0, router_scale=0.1), PERTURBED), uniform_inputs(3000, 3, 1)
    J, basis = jacobian(G, x, PERTURBED, expert, in_s=True), centred_tangents(G, PERTURBED)
    assert numerical_nullity(J) == 4 and singular_gap(J @ basis).zero == 0
    constant, M = lower_bound_constant(J, loss_blocks(G), basis), whitened(J, basis)
    assert 0 < constant.certified <= constant.found < 2 * constant.certified
    starts = normal(2, 4, M.shape[1])
    starts[0] = torch.linalg.lstsq(M, constant.direction).solution
    assert abs(float((J @ (M @ starts[1])).norm()) / len(x) ** 0.5 / float(starts[1].norm()) - 1) < 1e-9
    for v in starts @ M.T:
        change, loss = centred_ratio(G, x, PERTURBED, expert, 1e-5 * v / v.norm())
        assert change / loss > 0.999 * constant.certified
    s, delta = PERTURBED.embedding(G.beta1), 0.05 * normal(3, 24)
    change, loss = centred_ratio(G, x, PERTURBED, expert, delta)
    H = centred(
        MixingMeasure(
            G.beta0 + delta[:3], PERTURBED.preimage(s + delta[3:12].view(3, 3)), G.eta + delta[12:].view(3, 4)
        ),
        PERTURBED,
    )
    by_s = [m.with_(beta1=PERTURBED.embedding(m.beta1)) for m in (H, G)]
    assert abs(voronoi_loss(*by_s, "L3") / float(loss) - 1) < 1e-9
    f_H, f_G = (regression_function(m, x, PERTURBED, expert) for m in (H, G))
    assert abs(float((f_H - f_G).square().mean().sqrt() / change) - 1) < 1e-9
    ends = smallest_ratio(G, x, PERTURBED, expert, 1e-3, M, starts)
    assert abs(ends[:, 1].min() / constant.found - 1) < 0.02 and (ends[:, 1] > 0.99 * constant.certified).all()


# --- Definitions 1 and 2 -----------------------------------------------------------------------------------


def functions(router, expert, d, order, seed=0):
    beta1, eta = normal(seed, d), normal(seed + 1, 1 if expert == "constant" else d + 1)
    found = derivatives(ROUTERS[router](), expert, beta1, eta, uniform_inputs(1500, d, 5), order)
    named = relations(ROUTERS[router](), expert, beta1, eta, order)
    rows = [[row.get(key, 0.0) for key in found] for row in itertools.chain(*named.values())]
    assert all(key in found for rows_ in named.values() for row in rows_ for key in row)
    return torch.stack(list(found.values()), 1), real(rows).view(len(rows), len(found))


@pytest.mark.parametrize("router, expert", list(itertools.product(ROUTERS, KINDS)))
@pytest.mark.parametrize("d, order", [(2, 1), (4, 1), (2, 2), (3, 2)])
def test_relations_are_counted_predicted_and_named(router, expert, d, order):
    M, C = functions(router, expert, d, order)
    predicted = relations_formula(ROUTERS[router](), expert, d, order)
    assert numerical_nullity(M) == predicted
    assert torch.linalg.matrix_rank(C) == predicted if len(C) else not predicted
    assert (M @ C.T).abs().max() < 1e-11 * M.abs().max() if len(C) else True
    beta1, eta = normal(0, d), normal(1, 1 if expert == "constant" else d + 1)
    counted = count_relations(ROUTERS[router](), expert, beta1, eta, uniform_inputs(1500, d, 5), order)
    assert {counted.measured, counted.predicted, counted.named} == {predicted}
    assert counted.residual < 1e-11 and (counted.smallest < 1e-11) == (counted.measured > 0)


@pytest.mark.parametrize("router, expert", [("perturbed", "tanh"), ("cosine", "cubic"), ("linear", "quadratic")])
def test_a_wrong_coefficient_breaks_every_relation(router, expert):
    M, C = functions(router, expert, 3, 2)
    for row in C:
        wrong = row.clone()
        wrong[row.abs().argmax()] *= -1
        assert (M @ wrong).abs().max() > 1e-3


@pytest.mark.parametrize("router", ROUTERS)
def test_derivatives_against_differences(router):
    beta1, eta, x, r = normal(0, 2), normal(1, 3), uniform_inputs(50, 2, 2), ROUTERS[router]()
    found = derivatives(r, "tanh", beta1, eta, x, 2)

    def H(move):
        b, e = (torch.cat([beta1, eta]) + move).split([2, 3])
        return ((r.embedding(b) * r.feature(x)).sum(1)).exp() * torch.tanh(x @ e[:2] + e[2])

    unit = 1e-4 * torch.eye(5, dtype=torch.float64)
    assert torch.allclose(found[()], H(torch.zeros(5).double()))
    for i, j in itertools.combinations_with_replacement(range(5), 2):
        by_difference = (
            H(unit[i] + unit[j]) - H(unit[i] - unit[j]) - H(unit[j] - unit[i]) + H(-unit[i] - unit[j])
        ) / 4e-8
        assert torch.allclose(found[i, j], by_difference, atol=1e-5)
        assert torch.allclose(found[(i,)], (H(unit[i]) - H(-unit[i])) / 2e-4, atol=1e-6)


# --- condition (S) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", [e for e in EXPERTS if e != "relu"])
def test_tangent_functions_against_automatic_differentiation(expert):
    G, x = draw_measure(2, 3, 0), uniform_inputs(6, 3, 1)
    first, second = tangent_functions(G, x, PERTURBED, expert)
    f, phi = regression_function(G, x, PERTURBED, expert), expert_profile(expert).value
    u, s = PERTURBED.feature(x), PERTURBED.embedding(G.beta1)
    D = (u @ s.T + G.beta0).exp().sum(1)
    for j, n in itertools.product(range(2), range(6)):
        psi = lambda v, n=n: (v[:3] @ u[n]).exp() * (phi(v[3:6] @ x[n] + v[6]) - f[n]) / D[n]  # noqa: E731
        at = torch.cat([s[j], G.eta[j]])
        expected = torch.cat([psi(at)[None], torch.autograd.functional.jacobian(psi, at)])
        assert torch.allclose(first[n, j], expected, atol=1e-12)
        assert torch.allclose(second[n, j], torch.autograd.functional.hessian(psi, at), atol=1e-12)


def residual(G, x, expert, atoms, T):
    """What is left of 1/2 sum <T_j, grad^2 Psi_j> / D_G off the tangent functions, by least squares."""
    first, second = tangent_functions(G, x, PERTURBED, expert)
    value = 0.5 * torch.einsum("nkij,kij->n", second[:, atoms], T)
    J = first.flatten(1)
    J = J / J.norm(dim=0)
    left = value - J @ (torch.linalg.pinv(J, rtol=1e-12) @ value)
    return float(left.square().mean().sqrt())


@pytest.mark.parametrize("expert", ["tanh", "gelu"])
def test_separation_of_smooth_experts_is_certified(expert):
    G, x = draw_measure(2, 2, 0, router_scale=0.1), uniform_inputs(1000, 2, 1)
    found = separation(G, x, PERTURBED, expert, [1])
    assert 1e-6 < found.certified <= found.found < 1.2 * found.certified
    assert (
        torch.linalg.eigvalsh(found.T).min() > -1e-12 and abs(float(found.T.diagonal(dim1=1, dim2=2).sum()) - 1) < 1e-9
    )
    assert abs(residual(G, x, expert, [1], found.T) / found.found - 1) < 1e-6
    for seed in range(30):
        v = normal(seed, 1, 5, 1 + seed % 4)
        T = v @ v.mT
        assert residual(G, x, expert, [1], T / T.diagonal(dim1=1, dim2=2).sum()) >= found.certified


def test_separation_vanishes_where_there_is_an_exact_split():
    G, x = draw_measure(2, 2, 0, router_scale=0.1), uniform_inputs(1000, 2, 1)
    for expert in ("tanh", "gelu", "quadratic"):
        every = separation(G, x, PERTURBED, expert, [0, 1])
        assert every.found < 1e-12 and every.certified < 1e-12
        assert every.T.diagonal(dim1=1, dim2=2).sum(1).min() > 1e-3  # both atoms take part
    along = torch.cat([torch.zeros(2, dtype=torch.float64), G.eta[0]])
    for expert in ("quadratic", "cubic", "linear"):
        assert separation(G, x, PERTURBED, expert, [0], tries=((0, along),)).found < 1e-12
    assert separation(G, x, PERTURBED, "tanh", [0], tries=((0, along),)).found > 1e-6


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [1, 2, 3.5])
def test_two_splits_of_one_relu_expert_have_one_function_and_nothing_near_to_both(r):
    G, (A, B) = pair()[0], (scaled(pair()[0], scale, PERTURBED, share=0.4) for scale in (1.2, 1.1))
    assert apart(A, G, PERTURBED) < 1e-14 > apart(B, A, PERTURBED)
    middle = A.with_(eta=(A.eta + B.eta) / 2)
    bound = two_point_bound(A, B, r)
    assert abs(voronoi_loss(middle, A, "L1r", r) + voronoi_loss(middle, B, "L1r", r) - bound) < 1e-12
    assert searched_sum(A, B, "L1r", r, starts=3, steps=30) >= bound


def test_one_expert_too_many_near_the_truth_changes_the_function_as_the_limit_says():
    G, x = centred(draw_measure(2, 3, 0, router_scale=0.1), PERTURBED), uniform_inputs(300, 3, 1)
    near, p = OneTooMany(G, 0, x, PERTURBED, "tanh"), normal(2, 19)
    change, loss = near.limit()(p)
    there = near.at(1e-3)(torch.cat([p, real([0.7])]))
    assert abs(float(there[0] / there[1] / (change / loss)) - 1) < 0.02


def test_the_lowest_ratios_are_below_those_of_their_starts_and_near_their_limit():
    G, x = centred(draw_measure(2, 3, 0, router_scale=0.1), PERTURBED), uniform_inputs(100, 3, 1)
    pair, starts = OneTooMany(G, 1, x, PERTURBED, "tanh"), normal(2, 3, 19)
    found = lowest(pair, starts, (0.03, 0.003))
    ratio = lambda price, p: float(price(p)[0] / price(p)[1])  # noqa: E731
    assert found.limit <= min(ratio(pair.limit(), p) for p in starts[:-1])
    assert abs(ratio(pair.limit(), found.p[:-1]) / found.limit - 1) < 1e-9
    assert list(found.near) == [0.03, 0.003] and found.near[0.003][0] <= ratio(pair.at(0.003), found.first)
    assert abs(found.near[0.003][0] / found.limit - 1) < 0.02


@pytest.mark.parametrize("penalty", [{}, {"decay": 1e-3}, {"z_loss": 1e-3}])
def test_a_penalty_fixes_the_common_shift_and_a_fit_without_keeps_it(penalty):
    x, y, start = uniform_inputs(100, 2, 0), normal(1, 100), draw_measure(2, 2, 2)
    G = fit(x, y, start, "tanh", **penalty).G
    lse = torch.logsumexp(Linear().scores(G.beta0, G.beta1, x), 1)
    where = {"decay": G.beta1.mean(0), "z_loss": x.T @ lse / len(x)}
    left = where[next(iter(penalty))] if penalty else (G.beta1 - start.beta1).mean(0)
    assert left.norm() < 1e-3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nullity("dense", 3, 3), "router: expected one of"),
        (lambda: nullity("cosine", 1, 3), "k: expected an integer >= 2, got 1"),
        (lambda: nullity("cosine", 3, 1), "d: expected an integer >= 2, got 1"),
        (lambda: Perturbed(0.0), "tau: expected a finite number > 0"),
        (lambda: nullity("perturbed", 3, 3, expert="swish"), "expert: expected one of"),
        (lambda: nullity_formula("dense", 3, 3), "router: expected one of"),
        (lambda: shifted(pair()[0], real([0.9, 0]), PERTURBED), "s: the perturbed router reaches norms below 1"),
        (lambda: admissible_shifts(torch.ones(2, 3).double()), "s: expected unit vectors"),
        (lambda: bump_square(pair()[0], real([1, 0, 0]), 0.1, PERTURBED), "expected inputs of dimension 3, got 2"),
        (lambda: smallest_ratio(pair()[0], real([[1, 2]]), PERTURBED, "tanh", 0.0, None, []), "radius: expected"),
        (lambda: split(pair()[0], {2: torch.zeros(2, 5)}, PERTURBED), "moves, share: expected atoms below 2"),
        (lambda: split(pair()[0], {0: torch.zeros(2, 5)}, PERTURBED, share=1.0), "0 < share < 1"),
        (lambda: split(pair()[0], {0: torch.ones(2, 5)}, PERTURBED), "s: the perturbed router reaches"),
        (lambda: scaled(pair()[0], 2.5, PERTURBED), "scale: expected a number between 0"),
        (lambda: lower_bound_constant(normal(0, 9, 2), [([0], 1.0)]), "blocks: expected each of the 2 columns once"),
        (lambda: lower_bound_constant(torch.ones(9, 2).double(), [([0, 1], 1.0)]), "J: expected full rank"),
        (lambda: relations_formula(COSINE, "relu", 3, 3), "order: expected one of"),
        (lambda: relations_formula(COSINE, "swish", 3, 2), "expert: expected one of"),
        (lambda: relations_formula(COSINE, "relu", 1, 2), "d: expected an integer >= 2"),
        (lambda: relations(COSINE, "relu", real([1]), real([1, 2]), 1), "d: expected an integer >= 2"),
        (
            lambda: derivatives(COSINE, "relu", real([1, 2]), real([1]), real([[1, 2]]), 1),
            "eta: expected d . 1 numbers",
        ),
        (lambda: derivatives(COSINE, "relu", real([0, 0]), real([1, 1, 1]), real([[1, 2]]), 1), "no zero vectors"),
        (lambda: tangent_functions(pair()[0], real([[1, 2]]), PERTURBED, "relu"), "twice differentiable"),
        (lambda: separation(pair()[0], real([[1, 2]]), PERTURBED, "tanh", [2]), "atoms: expected"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
