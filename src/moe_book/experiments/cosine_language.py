"""Narrow language models under five routers, two also with null directions held (Nguyen et al. 2025, Section 5.2).

Table 2 of the paper is on enwik8, text8 and Wikitext-103 with 6 and 8 layers of mixtures. Here it is the model of
`experiments.language`: two blocks, width 16, 16 experts of which two are selected, 1,000 steps on manual pages. The
projection to 8 dimensions is that of the paper (Appendix E.2), the learned temperature that of Chi et al. (2022).
"""

import time
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from moe_book.experiments import language_runs as language
from moe_book.experiments.catalogue import peak_memory, rounded
from moe_book.experiments.language_runs import CURVE, FIRST, LENGTH, POINTS, SMOKE, STEPS, seen, text  # noqa: F401
from moe_theory.models.language import LanguageModel, TokenRouter
from moe_theory.models.routers import Cosine, Perturbed, Router
from moe_theory.tasks.characters import ALPHABET
from moe_theory.theory.identifiability import held, null_part
from moe_theory.training.passages import evaluated, train_language

#: For each arm the router, and whether what no function sees of its vectors is held.
ARMS: dict[str, tuple[Router | str, bool]] = {
    "linear": ("linear", False),
    "projected": ("projected", False),
    "cosine": ("cosine", False),
    "perturbed": ("perturbed", False),
    "cosine, held": ("cosine", True),
    "perturbed, held": ("perturbed", True),
    "tau = 1": (Perturbed(1.0), False),
}
EXPERTS, SEEDS = 16, 8
#: Of so many steps one is taken apart.
OFTEN = 10
#: The tau by which trained routers are exchanged; 0 is the cosine router.
TAUS = (0.0, 0.01, 0.1, 1.0, 10.0)


def grid() -> list[dict]:
    """All arms of a seed, one seed after the other."""
    return [dict(arm=arm, steps=STEPS, seed=seed) for seed in range(SEEDS) for arm in ARMS]


def build_model(key: dict) -> LanguageModel:
    """The model of a row before its training."""
    kind, _ = ARMS[key["arm"]]
    d, how = language.NARROW, dict(experts=EXPERTS, k=language.K, kind=kind, seed=key["seed"])
    return LanguageModel(len(ALPHABET), LENGTH, d, language.TIMES * d, **how)


def trained(model: LanguageModel, key: dict) -> Iterator[float]:
    """The training of a row; yields the bits per character of its batches."""
    how = dict(steps=key["steps"], batch=language.BATCH, rate=language.RATE, seed=key["seed"])
    losses = train_language(model, text().train, **how)
    return holding(routers(model), losses) if ARMS[key["arm"]][1] else losses


def routers(model: LanguageModel) -> list[TokenRouter]:
    """The routers of a model, by block."""
    return [feed.router for feed in model.feed]


def holding(routers: list[TokenRouter], losses: Iterator[float]) -> Iterator[float]:
    """A training after each step of which the router vectors are put back to where `held` has them."""
    before = [r.beta1.detach().clone() for r in routers]
    for loss in losses:
        for r, b in zip(routers, before, strict=True):
            r.beta1.data = held(b, r.beta1.data, r.router)
            b.copy_(r.beta1.data)
        yield loss


def row(key: dict) -> dict:
    """Bits per character on the way and at the end, what became of the routers, and what the training took."""
    model, began = build_model(key), time.process_time()
    bits, curve, courses, shares = [], [], [course(model)], []
    mine, before = routers(model), []
    for step, of_batch in enumerate(trained(model, key), 1):
        bits.append(of_batch)
        if step % OFTEN == 0:
            shares.append([null_share(b, r) for b, r in zip(before, mine, strict=True)])
        before = [r.beta1.detach().clone() for r in mine]
        if step % (key["steps"] // POINTS) == 0:
            curve.append(evaluated(model, text().validation[:CURVE])[0])
            courses.append(course(model))
    spent = time.process_time() - began
    test, accuracy = evaluated(model, text().test)
    return rounded(
        {
            **dict(test=test, accuracy=accuracy, curve=curve, first=np.mean(bits[:FIRST])),
            **{name: [c[name] for c in courses] for name in courses[0]},
            "null_share": np.mean(shares, 0),
            **seen(model),
            **norms(model),
            **exchanged(model),
            "parameters": sum(p.numel() for p in model.parameters()),
            "speed": key["steps"] * language.BATCH * LENGTH / spent,
            "memory": peak_memory(),
            **dict(text=text().name, digest=text().digest),
        },
        6,
    )


@torch.no_grad()
def course(model: LanguageModel) -> dict[str, list[float]]:
    """By block: the mean norm of the router vectors, and what the scores are multiplied by."""
    mine = routers(model)
    return {
        "radius": [r.beta1.norm(dim=1).mean().item() for r in mine],
        "sharpness": [1.0 if r.sharpness is None else r.sharpness.exp().item() for r in mine],
    }


@torch.no_grad()
def null_share(before: torch.Tensor, router: TokenRouter) -> float:
    """The share of the squared step of a router's vectors that lies along null directions."""
    step = router.beta1 - before
    return float(null_part(before, step, router.router).square().sum() / step.square().sum())


@torch.no_grad()
def read(model: LanguageModel) -> list[torch.Tensor]:
    """By block what the scores are products with, before any normalization, for the first validation passages."""
    x = text().validation[:CURVE].view(-1, LENGTH).long()
    return [r.read(z) for r, (z, _) in zip(routers(model), model.routed(x), strict=True)]


@torch.no_grad()
def norms(model: LanguageModel) -> dict[str, list]:
    """By block the norms of all router vectors, and the mean and the standard deviation of those that tokens have."""
    tokens = [u.norm(dim=1) for u in read(model)]
    return {
        "radii": [r.beta1.norm(dim=1) for r in routers(model)],
        "token_norm": [n.mean() for n in tokens],
        "token_norm_sd": [n.std() for n in tokens],
    }


@torch.no_grad()
def exchanged(model: LanguageModel) -> dict[str, list[float]]:
    """What the trained model does with another tau: for each of `TAUS` bits per character and share of sets changed.

    The temperature makes up for the mean change of the scores. Validation characters; sets of the second block count
    where the first has the other router too.
    """
    mine, part = routers(model), text().validation[:CURVE]
    if mine[0].router.plain:
        return {"exchanged_bits": [], "exchanged_sets": []}
    x, found, own = part.view(-1, LENGTH).long(), [], [(r.router, r.sharpness.clone()) for r in mine]  # pyright: ignore
    before, tokens = [m.sort(1).values for _, m in model.routed(x)], read(model)
    for tau in TAUS:
        for r, (router, sharpness), u in zip(mine, own, tokens, strict=True):
            r.router = Perturbed(tau) if tau else Cosine()
            r.sharpness.data = sharpness + (size(router, r.beta1, u) / size(r.router, r.beta1, u)).log()  # pyright: ignore
        after = [m.sort(1).values for _, m in model.routed(x)]
        moved = np.mean([(a != b).any(1).double().mean() for a, b in zip(before, after, strict=True)])
        found.append((evaluated(model, part)[0], moved))
    for r, (router, sharpness) in zip(mine, own, strict=True):
        r.router, r.sharpness.data = router, sharpness  # pyright: ignore[reportOptionalMemberAccess]
    return dict(zip(("exchanged_bits", "exchanged_sets"), map(list, zip(*found, strict=True)), strict=True))


def size(router: Router, beta1: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The mean norm of the embeddings times that of the features: about what the scores are proportional to."""
    return router.embedding(beta1).norm(dim=1).mean() * router.feature(u).norm(dim=1).mean()


def begun(key: dict) -> list[float]:
    """A row's first losses; of held routers also bits on the way and mean norms, after a tenth of the steps."""
    model, is_held = build_model(key), ARMS[key["arm"]][1]
    losses = list(islice(trained(model, key), key["steps"] // POINTS if is_held else FIRST))
    later = [evaluated(model, text().validation[:CURVE])[0], *course(model)["radius"]] if is_held else []
    return [float(np.mean(losses[:FIRST])), *later]


def live(key: dict) -> dict:
    """The start of a row's training: the mean over its first batches."""
    return rounded({"first": np.mean(list(islice(trained(build_model(key), key), FIRST)))}, 6)
