"""Single steps of the routers of `cosine_language`: what they have of null directions, and what they do to radii.

For the propositions on a training of Nguyen et al.'s (2025) routers, which chapter 24 proves.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_book.experiments import cosine_language as cl
from moe_theory import _validate as check
from moe_theory.models.language import LanguageModel, TokenRouter
from moe_theory.theory.identifiability import null_part
from moe_theory.training.passages import bits_per_character, passages

BATCH = 16


def batches(steps: int, seed: int) -> Iterator[Int[Tensor, "batch L_1"]]:
    """Passages of the training part, fewer in a batch than the stored trainings have."""
    return passages(cl.text().train, cl.LENGTH, BATCH, steps, seed=seed)


def gradients(model: LanguageModel, batch: Int[Tensor, "batch L_1"]) -> list[Float[Tensor, "M low"]]:
    """Of the loss of a batch in the router vectors, by block; those of all parameters are left in the model."""
    model.zero_grad()
    bits_per_character(model(batch[:, :-1]), batch[:, 1:]).backward()
    return [r.beta1.grad.clone() for r in cl.routers(model)]  # pyright: ignore[reportOptionalMemberAccess]


def share(router: TokenRouter, step: Float[Tensor, "M low"]) -> float:
    """Of the square of a step from where the router is, what lies along null directions."""
    null = null_part(router.beta1.detach(), step, router.router)
    return float(null.square().sum() / step.square().sum())


def adam_share(arm: str, seed: int, steps: int = 30) -> float:
    """`cosine_language.null_share` of one step at the start of a training, the larger of the two blocks'."""
    key = dict(arm=arm, steps=cl.STEPS, seed=seed)
    model = cl.build_model(key)
    training, before = cl.trained(model, key), []
    for _ in islice(training, steps - 1):
        before = [r.beta1.detach().clone() for r in cl.routers(model)]
    next(training)
    return max(map(cl.null_share, before, cl.routers(model)))


def turned(optimizer: type[torch.optim.Optimizer], rate: float, scale: float, seed: int) -> Float[Tensor, " M"]:
    """tan of the angles by which one step turns the vectors of the first cosine router, all `scale` times as long."""
    model = cl.build_model(dict(arm="cosine", seed=seed)).double()
    vectors = [r.beta1 for r in cl.routers(model)]
    for beta1 in vectors:
        beta1.data *= scale
    before, by = vectors[0].detach().clone(), optimizer(vectors, rate)
    gradients(model, next(batches(1, seed)))
    by.step()
    u, step = torch.nn.functional.normalize(before, dim=1), vectors[0].detach() - before
    along = (step * u).sum(1, keepdim=True)  # what is beyond, directly: by Pythagoras half of the digits are lost
    return (step - along * u).norm(dim=1) / (before.norm(dim=1) + along[:, 0]).abs()


def slowed(by: type[torch.optim.Optimizer], seed: int) -> Float[Tensor, " n"]:
    """tan of the angles of a step with vectors twice as long, over those before, of the n vectors that it turns.

    The vector of an expert that no token of the batch selects has no gradient, and stays.
    """
    after, before = turned(by, 1e-4, 2.0, seed), turned(by, 1e-4, 1.0, seed)
    return after[before > 0] / before[before > 0]


def outward(momentum: float, seed: int, *, steps: int = 200) -> float:
    """Of the growth of squared radii under Adam with rate 0.01, the share of `2 beta . step`.

    Raises:
        ValueError: for a momentum that is not below 1.
    """
    if check.not_negative("momentum", momentum) >= 1:
        raise ValueError(f"momentum: expected 0 <= momentum < 1, got {momentum}")
    model = cl.build_model(dict(arm="cosine", seed=seed))
    by = torch.optim.Adam(model.parameters(), 0.01, betas=(momentum, 0.999))
    vectors, along, beyond = [r.beta1 for r in cl.routers(model)], 0.0, 0.0
    for batch in batches(steps, seed):
        before = [beta1.detach().clone() for beta1 in vectors]
        gradients(model, batch)
        by.step()
        for old, beta1 in zip(before, vectors, strict=True):
            step = beta1.detach() - old
            along += 2 * float((old * step).sum())
            beyond += float(step.square().sum())
    return along / (along + beyond)
