"""The mixture with shared weights against autograd and against scikit-learn's k-means."""

import warnings

import pytest
import torch
from sklearn.cluster import KMeans

from moe_theory.streams import torch_stream
from moe_theory.theory import quantization as q


def drawn(seed=0, n=200, d=3, M=5):
    rng = torch_stream(seed, "chapter", 10, 90)
    x = torch.randn(n, d, generator=rng, dtype=torch.float64)
    return x, torch.randn(M, d, generator=rng, dtype=torch.float64)


def test_a_step_is_that_of_autograd():
    x, u = drawn()
    v = u.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(q.quantization_loss(x, v), v)
    torch.testing.assert_close(q.gradient_step(x, u, 0.3), u - 0.3 * gradient)


def test_a_step_size_for_each_center_gives_that_of_lloyd():
    x, u = drawn()
    n, mean = q.cells(x, u)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lloyd = KMeans(len(u), init=u.numpy(), n_init=1, max_iter=1).fit(x.numpy()).cluster_centers_
    torch.testing.assert_close(q.gradient_step(x, u, len(x) / (2 * n[:, None])), torch.from_numpy(lloyd))
    torch.testing.assert_close(mean, torch.from_numpy(lloyd))


def test_an_empty_cell_keeps_its_center():
    x, u = drawn(M=4)
    u[-1] = 100.0
    n, mean = q.cells(x, u)
    assert n[-1] == 0 and n.sum() == len(x)
    assert torch.equal(mean[-1], u[-1]) and torch.equal(q.gradient_step(x, u, 0.5)[-1], u[-1])


@pytest.mark.parametrize("eta", [1e-6, 0.5, 0.9])
def test_a_step_lowers_the_loss_by_what_is_said(eta):
    x, u = drawn()
    lowered = float(q.quantization_loss(x, u) - q.quantization_loss(x, q.gradient_step(x, u, eta)))
    assert lowered >= q.drop(x, u, eta) - 1e-12
    if eta < 1e-3:  # no input changes its cell
        assert lowered == pytest.approx(q.drop(x, u, eta), rel=1e-6)


def test_bad_step_sizes():
    with pytest.raises(ValueError, match="eta: expected a finite number > 0, got 0"):
        q.drop(*drawn(), 0.0)
