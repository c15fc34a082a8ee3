"""The largest eigenvalue of a Hessian, against full Hessians."""

import math

import pytest
import torch
from torch.func import hessian

from moe_theory.measure.curvature import largest_curvature


def _loss(w):
    return torch.sin(w).prod() + (w[0] * w[1] - w[2]) ** 4 - (w * w.roll(1)).exp().sum()


def test_the_largest_eigenvalue_in_absolute_value_is_found_with_its_sign():
    rng = torch.Generator().manual_seed(1)
    for seed in range(5):
        w = torch.randn(30, generator=rng, dtype=torch.float64)
        values = torch.linalg.eigvalsh(hessian(_loss)(w))
        largest = values[values.abs().argmax()]
        found = largest_curvature(_loss, w, seed=seed)
        assert found.value == pytest.approx(float(largest), rel=1e-5)
        assert found.residual <= 1e-4 * abs(found.value)
        assert values.min() < 0 < values.max()  # so that the sign is not given away


def test_a_negative_eigenvalue_can_be_the_largest_and_flat_losses_have_none():
    w = torch.ones(4, dtype=torch.float64)
    assert largest_curvature(lambda w: -3 * w[0] ** 2 + w[1] ** 2, w).value == pytest.approx(-6)
    assert largest_curvature(lambda w: w.sum(), w) == (0.0, 0.0)


def test_bad_arguments_are_named():
    for w, tolerance, message in (
        (torch.tensor([1.0, math.nan]), 1e-6, "w: expected finite"),
        (torch.ones(1), 1e-6, "w: expected a vector of at least two parameters"),
        (torch.ones(2, 2), 1e-6, "w: expected a vector of at least two parameters"),
        (torch.ones(3), 0.0, "tolerance: expected a finite number > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            largest_curvature(_loss, w, tolerance=tolerance)
