"""The implementations of a step of Algorithm 1, on one problem, ready to be timed.

Each `make(problem)` returns a function without arguments that draws the routing noise, takes one
step and returns the loss before it. The function holds its own copy of the parameters in `.state`.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import baselines
import numpy as np
import torch
from torch import Tensor

from moe_theory.models.experts import ACTIVATIONS, Activation
from moe_theory.models.moe import PatchMoE
from moe_theory.streams import stream
from moe_theory.tasks.patches import PatchBatch, PatchTask
from moe_theory.training import algorithm1, engine
from moe_theory.training.grouped import Experts
from moe_theory.training.parts import take_apart
from moe_theory.training.variants import VARIANTS

N, M, J, D, P, K = 16_000, 8, 16, 50, 4, 4
ETA, ETA_R, SIGMA_0, SEED = 1e-3, 0.1, 0.01, 0
CUBIC, HOW = ACTIVATIONS["cubic"], VARIANTS["as written"]
ANY = Activation(CUBIC.value, CUBIC.slope)  # cubic, and nobody says so


@dataclass(frozen=True)
class Problem:
    """n examples of the patch task and M experts at their initialization."""

    batch: PatchBatch
    W: Tensor

    def theta(self) -> Tensor:
        return self.W.new_zeros(D, len(self.W))


def problem(n=N, experts=M, dtype=torch.float32) -> Problem:
    """The synthetic study's task at sizes n and M."""
    batch = PatchTask(K=K, P=P, d=D).sample(n, SEED, dtype)
    return Problem(batch, HOW.initial(D, experts, J, SIGMA_0, SEED).to(dtype))


def drawn_by(shape, like: Tensor):
    """A source of routing noise of that shape, from the engine's generator."""
    rng = stream(SEED, "routing noise")
    return lambda: torch.from_numpy(rng.random(shape, dtype=np.float32)).to(like.dtype)


def move(theta, W, to_theta, to_W):
    """Eq. 3.4 and 3.5; no expert's gradient is zero here."""
    theta.sub_(ETA_R * to_theta)
    W.sub_(ETA * to_W / torch.linalg.vector_norm(to_W, dim=(1, 2), keepdim=True))


def engine_step(p: Problem, noise=None, sigma=CUBIC):
    """The loop body of `train_patch_moe`."""
    theta, W = p.theta(), p.W.clone()
    data = Experts(take_apart("train", p.batch, sigma), W.new_ones(J), sigma)
    rng = stream(SEED, "routing noise")

    @torch.no_grad()
    def step():
        r = engine.uniform(data, len(W), rng) if noise is None else noise
        loss, to_theta, to_W = engine.gradients(data, theta, W, r, HOW, 0.0)
        theta.sub_(ETA_R * to_theta)
        W.sub_(ETA * (to_W / engine.gradient_norm(to_W, HOW)))
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


def closed_step(p: Problem, noise=None):
    """`baselines.sorted_gradients`."""
    theta, W, x, total = p.theta(), p.W.clone(), p.batch.x, p.batch.x.sum(1)
    draw = drawn_by((len(x), len(W)), W)

    @torch.no_grad()
    def step():
        r = draw() if noise is None else noise.T
        loss, *gradients = baselines.sorted_gradients(x, total, p.batch.y, theta, W, r)
        move(theta, W, *gradients)
        return loss.item()

    step.state = theta, W
    return step


def autograd_step(loss_of, p: Problem, noise=None):
    """A loss of `baselines` and what automatic differentiation makes of it."""
    theta, W, x, total = p.theta().requires_grad_(), p.W.clone().requires_grad_(), p.batch.x, p.batch.x.sum(1)
    draw = drawn_by((len(x), len(W)), W)

    def step():
        loss = loss_of(x, total, p.batch.y, theta, W, draw() if noise is None else noise.T)
        gradients = torch.autograd.grad(loss, (theta, W))
        with torch.no_grad():
            move(theta, W, *gradients)
        return loss.item()

    step.state = theta, W
    return step


def compiled_step(p: Problem, noise=None):
    """The dense loss through `torch.compile`, for this size and type alone."""
    return autograd_step(torch.compile(baselines.dense_loss, dynamic=False), p, noise)


@dataclass(frozen=True)
class Implementation:
    """How a step is made, what it is told about the data besides patches and labels, and whether it can run here."""

    make: Callable
    told: str = "nothing"
    runs: bool = True


STEPS = {
    "engine": Implementation(engine_step, "which patch is which, and its coefficient"),
    "engine, untold": Implementation(partial(engine_step, sigma=ANY)),
    "sorted, closed form": Implementation(closed_step),
    "sorted, autograd": Implementation(partial(autograd_step, baselines.sorted_loss)),
    "readable": Implementation(readable_step),
    "dense, compiled": Implementation(compiled_step, runs=shutil.which(os.environ.get("CXX", "g++")) is not None),
    "dense, autograd": Implementation(partial(autograd_step, baselines.dense_loss)),
}
