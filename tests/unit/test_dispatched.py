"""Mixtures of whole networks, and Algorithm 1 by autograd: against closed forms and against the patch engine."""

import pytest
import torch
from torch import nn

from moe_theory.models.dispatched import CubicLayer, DispatchedMoE, PixelRouter
from moe_theory.models.image_networks import NETWORKS, cnn
from moe_theory.models.image_router import ImageRoutedMoE
from moe_theory.models.moe import PatchMoE
from moe_theory.models.routers import LinearRouter
from moe_theory.training.minibatch import answers, balancing_loss, normalize, train


def cubic(M: int = 4, d: int = 6) -> DispatchedMoE:
    """A mixture of cubic layers whose router sends inputs to all experts."""
    rng = torch.Generator().manual_seed(0)
    moe = DispatchedMoE(LinearRouter(d, M), [CubicLayer(d, 2, rng) for _ in range(M)])
    moe.router.theta.data.normal_(generator=rng)
    return moe


def test_dispatch_against_a_loop():
    """Each example meets its own expert only, in its own place, and is weighed by the softmax of the plain logits."""
    moe, x = cubic(), torch.randn(40, 1, 6)
    noise = torch.rand(40, 4)
    out, _, m = moe(x, noise)
    assert m.equal((moe.router(x) + noise).argmax(1)) and len(m.unique()) == 4
    for i in range(40):
        alone = moe.experts[m[i]](x[i : i + 1])[0] * torch.softmax(moe.router(x[i : i + 1]), 1)[0, m[i]]
        torch.testing.assert_close(out[i], alone)


def test_same_layer_as_patch_moe():
    """With a patch CNN for experts it is `PatchMoE`."""
    patch = PatchMoE(6, experts=3, filters=2, sigma_0=1.0)
    patch.router.theta.data.normal_()

    class Expert(nn.Module):
        def __init__(self, W):
            super().__init__()
            self.W = W

        def forward(self, x):
            return (x @ self.W.T).pow(3).sum((1, 2))[:, None]

    moe = DispatchedMoE(patch.router, [Expert(W) for W in patch.W])
    x = torch.randn(10, 4, 6)
    out, m = patch(x)
    found, _, same = moe(x)
    assert m.equal(same)
    torch.testing.assert_close(found[:, 0], out)


def test_router_on_pixels():
    """One patch: any linear function. Small patches: it sees their sum only, and swapping them changes nothing."""
    x = torch.randn(3, 2, 8, 8)
    whole, small = PixelRouter(2, 8, 4), PixelRouter(2, 4, 4)
    for router in (whole, small):
        router.theta.data.normal_()
    torch.testing.assert_close(whole(x), x.flatten(1) @ whole.theta)
    swapped = torch.cat([x[..., 4:, :], x[..., :4, :]], 2)
    torch.testing.assert_close(small(x), small(swapped), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(whole(x), whole(swapped))


def test_balancing_loss():
    """1 for an even router; M if all goes to one."""
    m = torch.arange(8) % 4
    assert balancing_loss(torch.full((8, 4), 0.25), m) == pytest.approx(1)
    assert balancing_loss(torch.eye(4)[torch.zeros(8, dtype=torch.long)], torch.zeros(8, dtype=torch.long)) == 4


def test_normalized_by_expert():
    """Each expert that got examples has a gradient of length 1, the others none."""
    moe, x = cubic(), torch.randn(20, 1, 6)
    moe.dispatched(x, torch.tensor([0, 2] * 10)).square().sum().backward()
    normalize(moe.experts)
    norms = [sum(float(p.grad.square().sum()) for p in e.parameters() if p.grad is not None) for e in moe.experts]
    assert norms == pytest.approx([1, 0, 1, 0], abs=1e-5)


def test_first_step_is_of_algorithm_1():
    """Without momentum's past, an expert moves by the rate, decay aside; a frozen router stays."""
    moe, x, y = cubic(), torch.randn(64, 1, 6), torch.arange(64) % 2
    moe.router.requires_grad_(False)
    before = [e.W.detach().clone() for e in moe.experts]
    theta = moe.router.theta.detach().clone()
    next(train(moe, (x, y), steps=1, rate=0.1, router_rate=1.0, seed=0))
    for expert, start in zip(moe.experts, before, strict=True):
        moved = torch.cat([expert.W - start, expert.b[:, None]], 1).norm()
        assert float(moved.detach()) == pytest.approx(0.1, abs=0.1 * 5e-4 * float(start.norm().detach()) + 1e-6)
    assert moe.router.theta.equal(theta)


def test_training_learns_and_repeats():
    """A linear label is learned by both kinds, and the same seed gives the same losses."""
    x = torch.randn(400, 1, 6)
    y = (x[:, 0, 0] > 0).long()
    rng = torch.Generator().manual_seed(1)
    single = CubicLayer(6, 2, rng)
    list(train(single, (x, y), steps=150, rate=0.05, seed=0))
    moe, other = cubic(), cubic()
    losses = [list(train(net, (x, y), steps=150, rate=0.05, router_rate=0.1, seed=0)) for net in (moe, other)]
    assert losses[0] == losses[1] and losses[0][-1] < 0.6 * losses[0][0]
    for net in (single, moe):
        out, m = answers(net, x)
        assert (out.argmax(1) == y).double().mean() > 0.9 and len(m) == 400


def test_the_cnn():
    """Shapes; the embedding is what the head reads; the same generator state gives the same weights; A.3's sizes."""
    made = [cnn(1, 16, 10, 4, torch.Generator().manual_seed(5)) for _ in range(2)]
    x = torch.randn(6, 1, 16, 16)
    assert made[0](x).shape == (6, 10)
    torch.testing.assert_close(made[0](x), made[1](x))
    torch.testing.assert_close(made[0].head(made[0].embedding(x)), made[0](x))
    layers = cnn(3, 32, 10, 64, torch.Generator()).modules()
    assert [m.out_channels for m in layers if isinstance(m, nn.Conv2d)] == [64, 128]


@pytest.mark.parametrize(("name", "convolutions"), [("MobileNetV2", 17), ("ResNet18", 12)])
def test_the_larger_networks(name, convolutions):
    """Their convolutions; an expert that gets one image normalizes it by its pixels, and the test by running means."""
    net = NETWORKS[name](1, 16, 10, 4, torch.Generator().manual_seed(5))
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == convolutions
    x = torch.randn(6, 1, 16, 16)
    assert net(x).shape == (6, 10) and net(x[:1]).isfinite().all()
    torch.testing.assert_close(net.head(net.embedding(x)), net(x))
    net.eval()
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


def test_image_router():
    """Frozen parts do not move; experts that read v alone answer alike for every image; gates weigh the answers."""
    x, v = torch.randn(5, 1, 16, 16), torch.randn(5, 3)
    blind = ImageRoutedMoE(16, 3, 4, 8, reads="v", frozen="CNN", seed=0)
    torch.testing.assert_close(blind.parts(x, v)[1], blind.parts(x.flip(0), v)[1])
    assert not any(p.requires_grad for p in blind.router.parameters())
    sees = ImageRoutedMoE(16, 3, 4, 8, reads="v and z", frozen="head", seed=0)
    h, said = sees.parts(x, v)
    torch.testing.assert_close(sees(x, v), (h.softmax(1) * said).sum(1))
    assert [p.requires_grad for p in sees.router.head.parameters()] == [False, False]
    assert all(p.requires_grad for p in sees.router.layers.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: next(train(cubic(), (torch.zeros(4, 1, 6), torch.zeros(4).long()), steps=1, rate=0.1, seed=0)),
            "router_",
        ),
        (lambda: ImageRoutedMoE(16, 3, 4, 8, reads="z", frozen="CNN", seed=0), "reads: expected one of"),
        (lambda: ImageRoutedMoE(16, 3, 4, 8, reads="v", frozen="all", seed=0), "frozen: expected one of"),
        (lambda: PixelRouter(1, 0, 4), "patch: expected an integer >= 1"),
    ],
)
def test_bad_arguments(call, message):
    """Each is named."""
    with pytest.raises(ValueError, match=message):
        call()
