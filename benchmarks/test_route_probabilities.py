"""Exact routing probabilities against the ways people usually get them, as ratios within one run.

`make bench` prints the times; the number in brackets is the ratio to the fastest. A row of M = 8
costs the exact rule 8 pieces x 5 nodes x 8 experts x 3 multiplications, about 1,000 and, with all the
rest, 3,000 operations. 100,000 rows: 0.3 billion operations on 13 MB of logits and answers.
"""

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from moe_theory.theory.smoothing import route_probabilities

ROWS = torch.rand(20, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_sampling(h, draws=100_000):
    """Frequencies over `draws` noise vectors: three digits at best, for comparison only."""
    r = torch.rand(draws, *h.shape, generator=torch.Generator().manual_seed(1), dtype=h.dtype)
    return torch.nn.functional.one_hot((h + r).argmax(-1), h.shape[1]).double().mean(0)


def by_adaptive_quadrature(h):
    """scipy's `quad`, expert by expert."""

    def chosen(row, m):
        behind = row[m] - np.delete(row, m)
        return quad(lambda r: np.prod(np.clip(r + behind, 0, 1)), 0, 1)[0]

    return np.array([[chosen(row, m) for m in range(len(row))] for row in h.numpy()])


@pytest.mark.benchmark(group="20 rows, M = 8, uniform noise")
@pytest.mark.parametrize("method", [route_probabilities, by_sampling, by_adaptive_quadrature], ids=lambda f: f.__name__)
def test_uniform(benchmark, method):
    p = benchmark.pedantic(method, args=(ROWS,), rounds=3, warmup_rounds=1)
    assert np.abs(np.asarray(p).sum(1) - 1).max() < 1e-6


@pytest.mark.benchmark(group="100,000 rows, M = 8")
@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_hundred_thousand_rows(benchmark, noise):
    rows = ROWS.repeat(5000, 1)
    p = benchmark.pedantic(route_probabilities, args=(rows, noise), rounds=3, warmup_rounds=1)
    assert p.shape == rows.shape
