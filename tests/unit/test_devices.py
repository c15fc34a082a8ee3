"""Results lie where the arguments lie: on torch's meta device, which computes no numbers, every mixture is refused."""

from functools import partial

import pytest
import torch

from moe_theory.models import routers
from moe_theory.models.routers import ROUTERS
from moe_theory.theory import fisher, identifiability, tanh_blocks
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
    found = domain.retracted(at + domain.constrained(step, at, domain.free(normal)))
    assert {t.device.type for t in (found, H, g, state.steps, state.gains)} == {"meta"}


def test_what_the_theory_of_a_router_computes(router):
    G = Shapes()
    assert {t.device.type for t in fisher._parts(G, router).values()} == {"meta"}
    assert identifiability.centred_tangents(G, router).device.type == "meta"


def test_what_a_block_computes():
    draw = partial(torch.empty, dtype=torch.float64, device="meta")
    block = tanh_blocks.Block(draw(K, D), draw(K, 5, D), draw(K, 2, 5))
    found = tanh_blocks.floor(block, lambda x: x[:, :2], draw(2, 3, D), 2)
    assert {t.device.type for t in found} == {"meta"}
