"""Garments at an angle that was not trained on, under the routers of `cosine_language` (Nguyen et al. 2025, 5.3).

Tables 3 to 5 of the paper are on the five data sets of DomainBed with a vision transformer that was trained before.
Here it is Fashion-MNIST at six angles, as rotated MNIST in DomainBed, and a small network from its start, with one
mixture of six experts, two of them selected for each place of an image, as there. No model is selected: the rate
falls to 0, and the end counts.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.cosine_language import ARMS, holding
from moe_book.experiments.language_runs import information
from moe_book.experiments.router_tasks import images_at_hand
from moe_theory.models.language import dense_width
from moe_theory.models.places import PlacesNetwork
from moe_theory.streams import torch_stream
from moe_theory.tasks.rotated import ANGLES, Clustered, domain_task
from moe_theory.training.fit import annealed

#: The network without experts, which has as many operations as a mixture under a linear router; and arms.
MODELS = ("dense", *(arm for arm in ARMS if arm != "tau = 1"))
#: Images at each angle for training and for validation, and for the test; side of an image.
SIZES, SIDE = (800, 200, 2_000), 16
D, WIDTH, EXPERTS, K = 16, 32, 6, 2
#: The rate is the one of 0.003, 0.01 and 0.03 with the best validation accuracies at another seed.
BATCH, RATE, STEPS, SEEDS = 128, 0.03, 300, 5
#: Steps whose mean loss is stored, and that a live recomputation takes.
FIRST = 20
SMOKE = dict(steps=FIRST)


def grid() -> list[dict]:
    """All models and angles of a seed, one seed after the other."""
    keys = ((seed, angle, model) for seed in range(SEEDS) for angle in range(len(ANGLES)) for model in MODELS)
    return [dict(model=model, held_out=angle, steps=STEPS, seed=seed) for seed, angle, model in keys]


@lru_cache(maxsize=2)
def data(held_out: int, seed: int) -> tuple[Clustered, Clustered, Clustered]:
    """Training, validation and test part; ValueError where only a stand-in for the data can be had."""
    return domain_task(images_at_hand("fashion-mnist"), held_out, SIZES, side=SIDE, seed=seed)


def build_network(key: dict) -> PlacesNetwork:
    """The network of a row before its training."""
    if key["model"] == "dense":
        return PlacesNetwork(SIDE, 10, D, dense_width(WIDTH, EXPERTS, K), seed=key["seed"])
    kind, _ = ARMS[key["model"]]
    return PlacesNetwork(SIDE, 10, D, WIDTH, experts=EXPERTS, k=K, kind=kind, seed=key["seed"])


def batches(part: Clustered, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random examples of all domains of a part, drawn with replacement."""
    rng = torch_stream(seed, "training")
    for _ in range(steps):
        at = torch.randint(len(part.y), (BATCH,), generator=rng)
        yield part.x[at], part.y[at]


def trained(model: PlacesNetwork, key: dict) -> Iterator[float]:
    """The training of a row; yields the cross-entropy of its batches."""
    drawn = batches(data(key["held_out"], key["seed"])[0], key["steps"], key["seed"])
    losses = annealed(
        lambda b: F.cross_entropy(model(b[0]), b[1]), drawn, model.parameters(), rate=RATE, steps=key["steps"]
    )
    return holding([model.feed.router], losses) if key["model"].endswith("held") else losses


@torch.no_grad()
def accuracy(model: nn.Module, part: Clustered) -> float:
    """The share of right answers in percent."""
    return 100 * (model(part.x).argmax(1) == part.y).double().mean().item()


@torch.no_grad()
def routed(model: PlacesNetwork, part: Clustered) -> dict[str, float]:
    """The entropy of the loads of the first experts, in bits, and the mean norm of the router vectors."""
    if not hasattr(model.feed, "router"):
        return {"spread": 0.0, "radius": 0.0}
    first = model.feed.choice(F.layer_norm(model.tokens(part.x), (D,)).flatten(0, 1))[1][:, 0]  # pyright: ignore
    return {"spread": information(first, first), "radius": model.feed.router.beta1.norm(dim=1).mean().item()}  # pyright: ignore


def ended(key: dict, off: float) -> dict[str, float]:
    """A row's accuracies, each number of the network multiplied at the start by 1 plus a normal one of that size."""
    model, rng = build_network(key), torch_stream(key["seed"], "measure")
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + off * torch.randn(p.shape, generator=rng)
    for _ in trained(model, key):
        pass
    _, valid, test = data(key["held_out"], key["seed"])
    return {"test": accuracy(model, test), "valid": accuracy(model, valid)}


def row(key: dict) -> dict:
    """Accuracies at the angle held out and at the others, and the first losses."""
    model, (_, valid, test) = build_network(key), data(key["held_out"], key["seed"])
    losses = list(trained(model, key))
    found = dict(test=accuracy(model, test), valid=accuracy(model, valid), first=np.mean(losses[:FIRST]))
    return rounded(found | dict(last=np.mean(losses[-FIRST:])) | routed(model, test), 6)


def live(key: dict) -> dict:
    """The start of a row's training: the mean of its first losses."""
    return rounded({"first": np.mean(list(islice(trained(build_network(key), key), FIRST)))}, 6)
