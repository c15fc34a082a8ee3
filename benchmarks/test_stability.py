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

from moe_theory.measure.stability import BATCH, DRAWS, estimate, estimate_loop
from moe_theory.models.sparse import SparseCNN, SparseMLP, SparseTransformer

LOOPED = 10  # draws of the loop that are timed; it takes the same time for each


def networks():
    """The three networks of the experiment at K = 2, and random data of their shapes."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(4, (2_000,), generator=rng)
    yield "mlp", SparseMLP(128, 10, 5, "sampled_topk", 2, "multi", 0), torch.randn(2_000, 128, generator=rng), y
    images = torch.randn(2_000, 1, 28, 28, generator=rng)
    yield "cnn", SparseCNN(28, 10, 5, "sampled_topk", 2, "multi", 0), images, y
    tokens = torch.randint(1_000, (2_000, 16), generator=rng)
    yield "transformer", SparseTransformer(1_000, 16, 16, 4, 7, "sampled_topk", 2, "multi", 0), tokens, y


def clocked(function, *args, **kwargs) -> tuple[float, torch.Tensor]:
    start = time.process_time()
    found = function(*args, **kwargs)
    return time.process_time() - start, found.eps


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_estimators(record, request, name):
    timed = request.config.getoption("benchmark_enable")
    (model, x, y) = next(rest for own, *rest in networks() if own == name)
    looped = LOOPED if timed else 1
    estimate(model, x, y, rate=0.05, draws=2)
    loop_seconds, by_loop = clocked(estimate_loop, model, x, y, rate=0.05, draws=looped)
    _, same = clocked(estimate, model, x, y, rate=0.05, draws=looped)
    torch.testing.assert_close(by_loop, same, rtol=1e-3, atol=0)
    if timed:
        stacked_seconds = min(clocked(estimate, model, x, y, rate=0.05)[0] for _ in range(3))
        row = dict(
            parameters=sum(p.numel() for p in model.parameters()),
            loop=loop_seconds / looped,
            stacked=stacked_seconds / DRAWS,
            ratio=loop_seconds / looped / (stacked_seconds / DRAWS),
        )
        record.setdefault("stability", {})[name] = row
        record["stability_sizes"] = dict(draws=DRAWS, batch=BATCH, looped=LOOPED)
