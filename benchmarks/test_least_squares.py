"""The batched Levenberg-Marquardt fits against `scipy.optimize.least_squares` row by row, within one run.

One fit at n = 10,000, d = 32, k = 8 has p = 528 unknowns. A step needs the normal matrix, n p^2 / 2 =
1.4e9 multiplications by symmetry (twice that as it is done), and reads n p numbers, 42 MB in float64.
scipy's `trf` takes a singular value decomposition of the n x p Jacobian instead, its `lm` a QR
decomposition by MINPACK; both are given the analytic Jacobian and stop by the same rule, a step that
gains less than 0.05 residual variances. Left to itself scipy takes differences, p + 1 evaluations of
the function for a Jacobian; of that way two steps are timed.
"""

import time

import torch
from scipy.optimize import least_squares as scipy_least_squares

from moe_book.experiments.rates import NEAR, near
from moe_theory.models.mixture import MixingMeasure, draw_measure, jacobian, regression_function
from moe_theory.models.routers import Perturbed
from moe_theory.tasks.regression import sample_regression
from moe_theory.training.least_squares import least_squares

N, D, K, FITS, TOLERANCE = 10_000, 32, 8, 4, 0.05
ROUTER = Perturbed()
WAYS = {"trf": dict(method="trf", x_scale="jac"), "lm": dict(method="lm", x_scale="jac")}


def problems():
    """Data sets and starts, as the experiments draw them."""
    G = draw_measure(K, D, 0, router_scale=0.1)
    drawn = [sample_regression(lambda x: regression_function(G, x, ROUTER), N, D, 1 + i) for i in range(FITS)]
    starts = [near(G, K, NEAR, 1000 + i)[0] for i in range(FITS)]
    return torch.stack([x for x, _ in drawn]), torch.stack([y for _, y in drawn]), starts


def by_scipy(x, y, start, differences=False, **how):
    """One fit: seconds of the processor, residual sum of squares, steps."""

    def unpacked(p):
        p = torch.from_numpy(p)
        return MixingMeasure(p[:K], p[K : K + K * D].view(K, D), p[K + K * D :].view(K, D + 1))

    def residual(p):
        return (regression_function(unpacked(p), x, ROUTER) - y).numpy()

    def slopes(p):
        return jacobian(unpacked(p), x, ROUTER).numpy()

    p = torch.cat([start.beta0, start.beta1.flatten(), start.eta.flatten()]).numpy()
    clock = time.process_time()
    found = scipy_least_squares(
        residual, p, **({} if differences else dict(jac=slopes)), ftol=TOLERANCE / N, xtol=1e-12, gtol=1e-12, **how
    )
    return time.process_time() - clock, 2 * found.cost, found.njev or found.nfev


def test_fits_at_the_size_of_the_paper(record, request):
    x, y, starts = problems()
    fits = FITS if request.config.getoption("benchmark_enable") else 1
    clock = time.process_time()
    ours = least_squares(x[:fits], y[:fits], starts[:fits], ROUTER, tolerance=TOLERANCE)
    seconds = (time.process_time() - clock) / fits
    assert (ours.gain <= TOLERANCE).all()
    if fits < FITS:
        return
    rows = {"ours": dict(seconds=seconds, sse=float(ours.sse[0]), steps=float(ours.steps[0]))}
    for name, how in WAYS.items():
        rows[name] = dict(zip(("seconds", "sse", "steps"), by_scipy(x[0], y[0], starts[0], **how), strict=True))
    two = by_scipy(x[0], y[0], starts[0], differences=True, max_nfev=3, **WAYS["trf"])
    rows["trf, differences"] = dict(seconds_per_step=two[0] / two[2])
    record["least_squares"] = dict(n=N, d=D, k=K, fits=FITS, tolerance=TOLERANCE, rows=rows)
