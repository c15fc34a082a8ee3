"""The stacked estimators of smooth2025, 5.3, against a loop over draws and examples, within one run.

One draw of the MLP (p = 21,575 parameters with heads of their own, batches of 64) takes two gradients of
a batch and 2 x 64 gradients of single examples. In operations that is six passes over 64 examples
(a gradient counts three), 6 x 2 x 64 p = 17 Mflop, so that 200 draws are 3.3 Gflop. A gradient of an
example has p numbers: formed one by one, 200 x 128 p = 5.5e8 numbers would be written and read, 2.2 GB
each way. The stacked way writes what a layer read and its slope instead, about 600 numbers an example,
and its own floor is the two stacks of stepped parameters, 200 x 2 p numbers, 35 MB.
"""

import time

import pytest
import torch
from torch.func import grad, vmap

from moe_theory.measure.stability import BATCH, DRAWS, draw_batches, estimate, estimate_loop, losses
from moe_theory.models.rules import sampled_topk
from moe_theory.models.sparse import SparseCNN, SparseMLP, SparseTransformer

LOOPED = 10  # draws of the loop that are timed; it takes the same time for each


def networks():
    """The three networks of the experiment at K = 2, and random data of their shapes."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(4, (2_000,), generator=rng)
    yield "mlp", SparseMLP(128, 10, 5, sampled_topk, 2, "multi", 0), torch.randn(2_000, 128, generator=rng), y
    images = torch.randn(2_000, 1, 28, 28, generator=rng)
    yield "cnn", SparseCNN(28, 10, 5, rule=sampled_topk, k=2, heads="multi", seed=0), images, y
    tokens = torch.randint(1_000, (2_000, 16), generator=rng)
    yield (
        "transformer",
        SparseTransformer(1_000, 16, 16, 4, 7, rule=sampled_topk, k=2, heads="multi", seed=0),
        tokens,
        y,
    )


def by_examples(model, x, y, rate, draws):
    """beta of a few draws, one after the other, the gradients of a batch's examples formed at once by vmap."""
    theta_0 = {name: p.detach() for name, p in model.named_parameters()}
    mean = grad(lambda *args: losses(model)(*args)[0].mean())
    each = vmap(grad(lambda p, x, y, u: losses(model)(p, x[None], y[None], u[None])[0][0]), in_dims=(None, 0, 0, 0))
    found = []
    for index, noise in zip(*draw_batches(model, len(x), draws, BATCH, seed=0), strict=True):
        steps = [mean(theta_0, x[index[i]], y[index[i]], noise[i]) for i in (0, 1)]
        theta = [{name: theta_0[name] - rate * g[name] for name in g} for g in steps]
        one, two = (each(p, x[index[2]], y[index[2]], noise[2]) for p in theta)
        apart = sum((one[name] - two[name]).square().flatten(1).sum(1) for name in one).sqrt().mean()
        r = sum((theta[0][name] - theta[1][name]).square().sum() for name in one).sqrt()
        found.append(apart / r)
    return torch.stack(found)


def clocked(function, *args, **kwargs):
    """Seconds of the processor, and what the function gave."""
    start = time.process_time()
    found = function(*args, **kwargs)
    return time.process_time() - start, found


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_estimators(record, request, name):
    timed = request.config.getoption("benchmark_enable")
    (model, x, y) = next(rest for own, *rest in networks() if own == name)
    looped = LOOPED if timed else 1
    estimate(model, x, y, rate=0.05, draws=2)
    loop_seconds, by_loop = clocked(estimate_loop, model, x, y, rate=0.05, draws=looped)
    _, same = clocked(estimate, model, x, y, rate=0.05, draws=looped)
    examples_seconds, beta = clocked(by_examples, model, x, y, rate=0.05, draws=looped)
    torch.testing.assert_close(by_loop.eps, same.eps, rtol=1e-3, atol=0)
    torch.testing.assert_close(beta, same.beta, rtol=1e-3, atol=0)
    if timed:
        stacked_seconds = min(clocked(estimate, model, x, y, rate=0.05)[0] for _ in range(3))
        row = dict(
            parameters=sum(p.numel() for p in model.parameters()),
            loop=loop_seconds / looped,
            examples=examples_seconds / looped,
            stacked=stacked_seconds / DRAWS,
            ratio=loop_seconds / looped / (stacked_seconds / DRAWS),
        )
        record.setdefault("stability", {})[name] = row
        record["stability_sizes"] = dict(draws=DRAWS, batch=BATCH, looped=LOOPED)
