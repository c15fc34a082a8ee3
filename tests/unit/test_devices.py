"""Results lie where the arguments lie: on torch's meta device, which computes no numbers, every mixture is refused.

What looks at numbers on its way cannot run there. It is given arguments on the CPU while meta is the device of
everything that is made without one.
"""

from functools import partial

import numpy as np
import pytest
import torch

from moe_theory.models import routers
from moe_theory.models.mixture import draw_measure
from moe_theory.models.routers import ROUTERS
from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.tasks.patches import PatchTask
from moe_theory.tasks.regression import uniform_inputs
from moe_theory.theory import concentration, fisher, function_sets, identifiability, single_expert, tanh_blocks
from moe_theory.theory import router_gradient as rg
from moe_theory.theory import threshold as th
from moe_theory.training import least_squares as lse

B, N, K, D = 2, 7, 3, 4


class Shapes:
    """A mixing measure without the checks of its numbers, of which the device has none."""

    def __init__(self):
        draw = partial(torch.empty, dtype=torch.float64, device="meta")
        self.beta0, self.beta1, self.eta = draw(K), draw(K, D), draw(K, D + 1)


@pytest.fixture(params=ROUTERS)
def router(request, monkeypatch):
    monkeypatch.setattr(routers, "_norm", lambda name, v: v.norm(dim=-1, keepdim=True))  # it counts zero vectors
    return ROUTERS[request.param]()


def test_what_a_router_computes(router):
    G, x = Shapes(), torch.empty(N, D, dtype=torch.float64, device="meta")
    s = router.embedding(G.beta1)
    found = (s, router.slope(G.beta1), router.gauge(s), router.pull_back(G.beta1, s), router.scores(G.beta0, s, x))
    assert [t.device.type for t in found] == ["meta"] * 5
    assert [tuple(t.shape) for t in found] == [(K, D), (K, D, D), (D, D), (K, D), (N, K)]


def test_what_least_squares_computes(router):
    x = torch.empty(B, N, D, dtype=torch.float64, device="meta")
    data = lse.problems(x, x[..., 0], router, "tanh")
    at = torch.stack([lse.unknowns(Shapes(), router)] * B)
    state, (r, w, v) = lse.State.start(at, data), lse.evaluate(at, data)
    domain, g = lse.Domain(router, router.bound(1.0)), lse.gradient(r, w, v, data)
    normal = domain.normals(at, g)
    H, g = lse.projected(lse.normal_matrix(w, v, data), g, normal)
    step = (lse.trades(at) @ torch.linalg.solve(H, g)[..., None]).view_as(at)
    found = domain.retracted(at + domain.constrained(step, at, domain.free(normal)), normal)
    assert {t.device.type for t in (found, H, g, state.steps, state.gains)} == {"meta"}


def test_what_the_theory_of_a_router_computes(router):
    G = Shapes()
    assert {t.device.type for t in fisher._parts(G, router).values()} == {"meta"}
    assert identifiability.centred_tangents(G, router).device.type == "meta"


def test_what_a_block_computes():
    draw = partial(torch.empty, dtype=torch.float64, device="meta")
    block = tanh_blocks.Block(draw(K, D), draw(K, 5, D), draw(K, 2, 5))
    s, x = tanh_blocks.terms(block, draw(3, D), 2), draw(3, D)
    found = [tanh_blocks.first_term(s, x), tanh_blocks.own_curvatures(s, x, draw(3, 2))]
    assert {t.device.type for t in (*found, *s)} == {"meta"}


def test_what_an_atom_computes(router):
    G, x = Shapes(), torch.empty(N, D, dtype=torch.float64, device="meta")
    found = function_sets.derivatives(router, "tanh", G.beta1[0], G.eta[0], x, 2).values()
    assert {t.device.type for t in (*found, *function_sets.tangent_functions(G, x, router, "tanh"))} == {"meta"}


def test_what_quadrature_in_the_plane_computes(monkeypatch):
    rays = [rg.Ray(0.3, 0, 1), rg.Ray(2.5, 1, 2), rg.Ray(4.0, 2, 0)]
    monkeypatch.setattr(rg, "_ties", lambda theta: rays)  # it reads the angles off
    monkeypatch.setattr(rg, "boundary_rays", lambda theta, k: rays)
    draw = partial(torch.empty, dtype=torch.float64, device="meta")
    theta, loss = draw(3, 2), rg.affine_loss(draw(3, 2), draw(3), softmax_topk)
    jump = lambda x: x[..., 0]  # noqa: E731
    found = [f(theta, 1, loss) for f in (rg.mean_gradient, rg.boundary_term, rg.risk_differences)]
    found += [f(jump, draw(2), draw(())) for f in (rg.disc_integral, rg.circle_term)]
    assert {t.device.type for t in (*found, *rg.plane_nodes(theta))} == {"meta"}
    assert {t.device.type for t in rg.legendre([-1.0, 0.5, 1.0], 24, torch.device("meta"))} == {"meta"}


def test_what_one_expert_and_sums_over_a_sample_compute():
    draw = partial(torch.empty, dtype=torch.float64, device="meta")
    assert single_expert.witness_margins(draw(K), draw(K)).device.type == "meta"
    cnn = single_expert._relu_cnn([(draw(D), 0.5, 1.0), (draw(D), 0.2, -1.0)])
    assert {t.device.type for t in (cnn.w, cnn.b, cnn.a)} == {"meta"}


def real(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


G, X, SAMPLE = draw_measure(2, 2, 0), uniform_inputs(60, 2, 1), PatchTask(K=3, d=8).coefficients(50, 0)
THETA, AT, LOSS = real(3, 2), real(1)[0], rg.affine_loss(real(3, 2), real(3), softmax_topk)
ON_THE_CPU = {
    "rays": lambda: rg.boundary_rays(THETA, 2),
    "boundary term": lambda: rg.boundary_term(THETA, 1, LOSS),
    "threshold": lambda: th.threshold_risk(AT, softmax_topk),
    "threshold under noise": lambda: th.noisy_threshold_risk(AT, 0.3),
    "learners": lambda: th.learn_threshold(topk_softmax, [torch.Generator().manual_seed(s) for s in (0, 1)], steps=3),
    "relations": lambda: [
        function_sets.count_relations(ROUTERS[r](), "tanh", G.beta1[0], G.eta[0], X, 2) for r in ROUTERS
    ],
    "separation": lambda: function_sets.separation(G, X, ROUTERS["perturbed"](), "tanh", [1]),
    "margins": lambda: single_expert.witness_margins(G.beta0, G.beta0),
    "sums over a sample": lambda: list(concentration.signal_sums(SAMPLE, 3).values()),
}


def numbers(found):
    """What a function gives, as a flat list of numbers."""
    if isinstance(found, list | tuple):
        return [n for part in found for n in numbers(part)]
    return np.asarray(found).ravel().tolist()


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_no_device_is_taken_but_that_of_the_arguments(name):
    compute = ON_THE_CPU[name]
    expected = numbers(compute())
    with torch.device("meta"):
        np.testing.assert_array_equal(numbers(compute()), expected)
