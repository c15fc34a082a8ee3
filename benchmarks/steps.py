"""The three implementations of a step of Algorithm 1, on one problem, ready to be timed.

Each `*_step(problem)` returns a function without arguments that draws the routing noise, takes one
step and returns the loss before it. The function holds its own copy of the parameters in `.state`.
"""

from dataclasses import dataclass
from functools import partial

import dense
import torch
from torch import Tensor

from moe_theory.models.experts import ACTIVATIONS
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchBatch, PatchTask
from moe_theory.training import algorithm1, engine
from moe_theory.training.variants import VARIANTS, Variant

N, M, J, D, P, K = 16_000, 8, 16, 50, 4, 4
ETA, ETA_R, SIGMA_0, SEED = 1e-3, 0.1, 0.01, 0
CUBIC = ACTIVATIONS["cubic"]


@dataclass(frozen=True)
class Problem:
    """n examples of the patch task, M experts at their initialization, and the variant of the algorithm."""

    batch: PatchBatch
    W: Tensor
    variant: str

    @property
    def how(self) -> Variant:
        return VARIANTS[self.variant]

    def theta(self) -> Tensor:
        return self.W.new_zeros(D, len(self.W))


def problem(n=N, experts=M, variant="as written", dtype=torch.float32) -> Problem:
    """The synthetic study's task at sizes n and M."""
    batch = PatchTask(K=K, P=P, d=D).sample(n, SEED, dtype)
    return Problem(batch, VARIANTS[variant].initial(D, experts, J, SIGMA_0, SEED).to(dtype), variant)


def drawn_by(shape, like: Tensor):
    """A source of routing noise of that shape."""
    return partial(torch.rand, shape, generator=torch.Generator().manual_seed(SEED), dtype=like.dtype)


def engine_step(p: Problem, noise=None, sigma=CUBIC):
    """The loop body of `train_patch_moe`."""
    how, theta, W = p.how, p.theta(), p.W.clone()
    parts = engine.take_apart("train", p.batch, sigma, how.input_scale, how.biases)
    data = engine.Experts(parts, engine.output_signs(J, how).to(W), sigma)
    rng = torch.Generator().manual_seed(SEED)

    @torch.no_grad()
    def step():
        r = engine.uniform(data, len(W), rng) if noise is None else noise
        loss, to_theta, to_W = engine.gradients(data, theta, W, r, how, 0.0)
        theta.sub_(ETA_R * to_theta)
        W.sub_(ETA * (to_W / engine.speed(to_W, how)))
        return loss.item()

    step.state = theta, W
    return step


def readable_step(p: Problem, noise=None):
    """`algorithm1.step`, the algorithm with its closed-form gradients as the paper writes them."""
    model = PatchMoE(D, len(p.W), J, dtype=p.W.dtype)
    model.W.data.copy_(p.W)
    draw = drawn_by((len(p.batch), len(p.W)), p.W)

    @torch.no_grad()
    def step():
        return algorithm1.step(model, p.batch, draw() if noise is None else noise.T, ETA, ETA_R)

    step.state = model.router.theta.data, model.W.data
    return step


def dense_step(p: Problem, noise=None):
    """`dense.step`: one-hot dispatch and autograd."""
    theta, W = p.theta().requires_grad_(), p.W.clone().requires_grad_()
    draw = drawn_by((len(p.batch), len(p.W)), p.W)

    def step():
        r = draw() if noise is None else noise.T
        return dense.step(p.batch.x, p.batch.y, theta, W, r, ETA, ETA_R, p.variant)

    step.state = theta, W
    return step


STEPS = {"engine": engine_step, "readable": readable_step, "dense": dense_step}
#: What can be compared; the readable step is Algorithm 1 as written.
COMPARED = [(v, s) for v in VARIANTS for s in STEPS if (v, s) != ("released", "readable")]
