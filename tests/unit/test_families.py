"""One layer, written in several places for several purposes: all of them agree."""

import pytest
import torch

from moe_theory.measure.inner import expert_errors
from moe_theory.models.mixture import MixingMeasure, regression_function
from moe_theory.models.moe import PatchMoE
from moe_theory.models.routers import Linear
from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.models.sparse import WIDTH, SparseBlock
from moe_theory.streams import torch_stream
from moe_theory.tasks.patches import PatchTask
from moe_theory.theory import tanh_blocks
from moe_theory.theory.gates import gate_jacobian
from moe_theory.theory.jacobians import router_jacobian
from moe_theory.theory.router_gradient import logit_jacobian

M, D, OUT, N = 5, 4, 3, 20
F64 = torch.float64


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_four_forms_of_the_derivative_in_the_logits():
    h, f = normal(0, M), normal(1, M, OUT)
    pi = h.softmax(0)
    by_autograd = torch.func.jacrev(lambda h: h.softmax(0) @ f)(h).T
    for found in (
        gate_jacobian(pi, f),
        router_jacobian(pi, f, torch.eye(M, dtype=F64)).T,
        logit_jacobian(h, f, M, topk_softmax),
        logit_jacobian(h, f, M, softmax_topk),  # nothing is left out, so the order does not matter
    ):
        assert (found - by_autograd).abs().max() < 1e-14


@pytest.mark.parametrize("k", [1, 2, M])
def test_a_sparse_block_is_a_block_of_tanh_experts(k):
    block = tanh_blocks.Block(normal(0, M, D), normal(1, M, WIDTH, D), normal(2, M, OUT, WIDTH))
    module = SparseBlock(D, M, OUT, rule=topk_softmax, k=k, heads="single", activation="tanh", seed=0).double()
    module.experts.hidden.W.data, module.experts.out.W.data = block.W, block.V
    x, noise = normal(3, N, D), torch.zeros(N, M, dtype=F64)
    module.router = torch.nn.Linear(D, M, bias=False, dtype=F64)
    module.router.weight.data = block.theta
    output, pi = module(x, noise)
    assert torch.allclose(output, tanh_blocks.output(block, x, k), atol=1e-13)
    s = tanh_blocks.terms(block, x, k)
    assert torch.allclose((s.pi[..., None] * s.f).sum(1), output, atol=1e-13)
    assert torch.equal((pi > 0).sum(1), torch.full((N,), k))


def test_a_mixture_of_a_linear_router_is_a_block_that_selects_all():
    G = MixingMeasure(torch.zeros(M, dtype=F64), normal(0, M, D), torch.cat([normal(1, M, D), torch.zeros(M, 1)], 1))
    block = tanh_blocks.Block(G.beta1, G.eta[:, None, :-1], torch.ones(M, 1, 1, dtype=F64))
    x = normal(2, N, D)
    assert torch.allclose(
        regression_function(G, x, Linear(), "tanh"), tanh_blocks.output(block, x, M)[:, 0], atol=1e-14
    )


@pytest.mark.parametrize("normalized", [False, True])
def test_the_loss_behind_two_blocks_is_that_of_two_outputs(normalized):
    k, rho, seed, d = 3, 0.5, 4, 8
    loss, w = tanh_blocks.behind_two_blocks(k, rho, normalized, seed)
    rng = torch_stream(seed, "weights")
    z = tanh_blocks.normal(rng, d)
    for _ in range(2):
        theta = 0.1 * tanh_blocks.normal(rng, 32, d) / d**0.5
        W, V = (tanh_blocks.correlated(rng, rho, 32, d, d) for _ in range(2))
        z = tanh_blocks.output(tanh_blocks.Block(theta[:k], W[:k], V[:k]), z[None], k)[0]
        z = z / z.square().mean().sqrt() if normalized else z
    expected = torch.nn.functional.cross_entropy(z[:4], torch.tensor(0))
    assert float(loss(w)) == pytest.approx(float(expected), rel=1e-12)


def test_what_all_experts_of_a_patch_layer_answer():
    batch = PatchTask(d=12, seed=0).sample(N, 1, F64)
    model = PatchMoE(12, M, 3, sigma_0=0.5, seed=2, dtype=F64)
    f = model.answers(batch.x)
    assert f.shape == (N, M)
    for m in range(M):
        assert torch.equal(model.dispatched(batch.x, torch.full((N,), m)), f[:, m])
    wrong = (batch.y[:, None] * f <= 0).double()
    for k in batch.cluster.unique():
        assert torch.allclose(expert_errors(model, batch)[:, k], wrong[batch.cluster == k].mean(0))
