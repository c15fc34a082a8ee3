"""The sum of squares as a function of one router vector, against the regression function at every place."""

import pytest
import torch

from moe_theory.measure.misfit import CHUNK, misfit
from moe_theory.models.mixture import draw_measure, regression_function
from moe_theory.models.routers import Cosine, Linear, Perturbed
from moe_theory.tasks.regression import sample_regression

NOISE = 0.3  # neither 1 nor its own square
SIDE = torch.linspace(-1.5, 2.0, 14, dtype=torch.float64)  # 0 is not among them; more places than a chunk holds


def _case(router, expert):
    G = draw_measure(3, 2, 4, 2.0, 2.0)
    return G, *sample_regression(lambda x: regression_function(G, x, router, expert), 50, 2, 1, NOISE)


@pytest.mark.parametrize("expert", ["tanh", "relu"])
@pytest.mark.parametrize("router", [Cosine(), Perturbed(0.2), Linear()])
def test_every_place_has_the_sum_of_squares_of_its_measure(router, expert):
    G, x, y = _case(router, expert)
    assert len(SIDE) ** 2 > CHUNK

    def squares(first, second):
        beta1 = torch.cat([torch.stack([first, second])[None], G.beta1[1:]])
        return (y - regression_function(G.with_(beta1=beta1), x, router, expert)).square().sum() / NOISE**2

    expected = torch.stack([torch.stack([squares(first, second) for first in SIDE]) for second in SIDE])
    found = misfit(G, x, y, router, SIDE, expert=expert, noise=NOISE)
    torch.testing.assert_close(found, expected - expected.min(), rtol=1e-10, atol=1e-10)
    assert found.min() == 0
    assert not torch.allclose(found, found.T)  # so that exchanged coordinates would show


def test_inputs_are_in_the_plane():
    G = draw_measure(2, 3, 0)
    with pytest.raises(ValueError, match="G: expected inputs of dimension 2, got 3"):
        misfit(G, torch.ones(4, 3, dtype=torch.float64), torch.ones(4), Linear(), SIDE, expert="tanh", noise=NOISE)
