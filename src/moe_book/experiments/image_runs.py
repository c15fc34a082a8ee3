"""Table 2 and Figure 4 of Chen et al. (2022) on Fashion-MNIST: single networks and mixtures, plain images and -Rotate.

CIFAR-10 cannot be had where these rows were computed; the sizes are those of two cores. Images have a side of 16 in
place of 32, networks an eighth of the paper's width, and there are 8,000 training images; the two larger networks
have fewer blocks, too. Noise is such that a single CNN is about as good as the paper's (77 % on -Rotate); without it
garments are too easy. Sizes, noise, rates and steps were fixed by pilot runs at other seeds; those of the larger
networks' lengths are stored (`images_pilot`).
"""

import itertools
import time
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from moe_book.experiments.catalogue import peak_memory, rounded
from moe_book.experiments.router_tasks import images_at_hand
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.models.dispatched import DispatchedMoE, PixelRouter
from moe_theory.models.image_networks import NETWORKS
from moe_theory.streams import torch_stream
from moe_theory.tasks.rotated import Clustered, plain_task, rotate_task
from moe_theory.training.minibatch import answers, train

EXPERTS = 4
SEEDS, FEWER_SEEDS = range(8), range(3)
N_TRAIN, N_TEST, SIDE, NOISE = 8_000, 2_000, 16, 0.5
WIDTH, RATE, BATCH, STEPS = 8, 0.01, 128, 600  # the rate is that of experts and single networks
LONGER = 4 * STEPS
LARGER = {"MobileNetV2": (4, 0.05), "ResNet18": (8, 0.05)}  # width and rate
LARGER_STEPS, PILOT = 400, 100  # steps, and the seed of the pilot runs
ROUTER_RATE, BALANCE = 0.01, 1e-3  # the paper's are 1e-4, over some 50 times as many steps, and 1e-3
POINTS, LIVE, DIGITS = 4, 20, 5
MODELS = ("single", "moe")
CONTROLS = ("normalized", "wide", "frozen")
GROUPS = [0, 1, 0, 1, 0, 2, 0, 2, 3, 2]  # of garments: tops; trousers and dresses; shoes; bags
SHOWN, NEIGHBOURS = 300, 10  # images in a picture of the latent space, and neighbours that are asked for their class
SMOKE = dict(data="digits", steps=LIVE)  # which are always at hand


def cnn_grid() -> list[dict]:
    """Single, as a mixture, and three controls, on both tasks; on -Rotate also a mixture that is routed by classes."""
    return _grid(MODELS + CONTROLS) + _grid(["classes"], tasks=["rotated"])


def latent_grid() -> list[dict]:
    """Single and as a mixture, on -Rotate."""
    return _grid(MODELS, tasks=["rotated"], seeds=FEWER_SEEDS)


def longer_grid() -> list[dict]:
    """Single, wide and as a mixture, on -Rotate, for four times the steps."""
    return _grid(["single", "wide", "moe"], tasks=["rotated"], seeds=FEWER_SEEDS, steps=LONGER)


def pilot_grid() -> list[dict]:
    """The larger networks, single and as a mixture, on both tasks at a seed of their own."""
    return larger_grid([PILOT])


def larger_grid(seeds=range(5)) -> list[dict]:
    """The larger networks on both tasks, seed by seed: single and as a mixture; on fewer seeds two controls."""
    every = {s: MODELS + CONTROLS[:2] if s in FEWER_SEEDS else MODELS for s in seeds}
    each = itertools.product(every, LARGER)
    return [row for s, name in each for row in _grid(every[s], network=name, seeds=[s], steps=LARGER_STEPS)]


def _grid(models, *, network="CNN", tasks=("plain", "rotated"), seeds=SEEDS, steps=STEPS) -> list[dict]:
    """Every task, seed and model."""
    key = dict(data="fashion-mnist", network=network, steps=steps)
    every = itertools.product(tasks, seeds, models)
    return [{**key, "model": model, "task": task, "seed": seed} for task, seed, model in every]


def baseline_grid() -> list[dict]:
    """Both tasks, three seeds."""
    return [dict(data="fashion-mnist", task=task, seed=seed) for task in ("plain", "rotated") for seed in FEWER_SEEDS]


@lru_cache(maxsize=2)
def data(name: str, task: str, seed: int) -> tuple[Clustered, Clustered]:
    """Training and test part of a task; ValueError where only a stand-in for the data can be had."""
    images = images_at_hand(name)
    sizes = (1_000, 400) if name == "digits" else (N_TRAIN, N_TEST)
    if task == "plain":
        return plain_task(images, *sizes, side=SIDE, seed=seed)
    return rotate_task(images, *sizes, side=SIDE, noise=NOISE, seed=seed)


def parameters(model: nn.Module) -> int:
    """How many numbers a model has to learn."""
    return sum(p.numel() for p in model.parameters())


def network(key: dict) -> nn.Module:
    """The model of a row before its training; "wide" is a single one with about as many parameters as a mixture."""
    outputs, rng = (10 if key["task"] == "plain" else 2), torch_stream(key["seed"], "weights")

    def one(width: int) -> nn.Module:
        return NETWORKS[key["network"]](1, SIDE, outputs, width, rng)

    own = width_and_rate(key)[0]
    if key["model"] in ("single", "normalized"):
        return one(own)
    if key["model"] == "wide":
        goal = EXPERTS * parameters(one(own))
        return one(min(range(own, 4 * own), key=lambda w: abs(parameters(one(w)) - goal)))
    moe = DispatchedMoE(PixelRouter(1, SIDE, EXPERTS), [one(own) for _ in range(EXPERTS)])
    if key["model"] == "frozen":
        draw = torch.randn(moe.router.theta.shape, generator=torch_stream(key["seed"], "router weights"))  # pyright: ignore
        moe.router.theta.data = draw / len(draw) ** 0.5
        moe.router.requires_grad_(False)
    if key["model"] == "classes":
        moe.router.theta.data = class_router(data(key["data"], key["task"], key["seed"])[0])
        moe.router.requires_grad_(False)
    return moe


def width_and_rate(key: dict) -> tuple[int, float]:
    """Of a row's single networks and experts."""
    return LARGER.get(key["network"], (WIDTH, RATE))


def class_router(part: Clustered) -> Tensor:
    """Weights (d, M) of a linear router that tells groups of classes, by logistic regression on the training images.

    It never sees the label. Ten times the logits of the regression: gates are near 0 or 1.
    """
    group = torch.tensor(GROUPS)[part.cluster].numpy()
    fitted = LogisticRegression(fit_intercept=False, max_iter=100).fit(part.x.flatten(1).numpy(), group)
    return 10 * torch.from_numpy(fitted.coef_.T).float()


def training(model: nn.Module, key: dict, train_part: Clustered) -> Iterator[float]:
    """The losses of a row's training, which trains `model`: Algorithm 1 for a mixture, else SGD."""
    mixture = isinstance(model, DispatchedMoE)
    how = dict(router_rate=ROUTER_RATE, balance=BALANCE) if mixture else {}
    normalized, (_, rate) = mixture or key["model"] == "normalized", width_and_rate(key)
    how |= dict(rate=rate, batch=BATCH, normalized=normalized, seed=key["seed"])
    return train(model, (train_part.x, train_part.y), steps=key["steps"], **how)


def first_losses(key: dict) -> list[float]:
    """The first loss of a row's training, and the mean of the first 20."""
    losses = training(network(key), key, data(key["data"], key["task"], key["seed"])[0])
    some = [value for value, _ in zip(losses, range(LIVE), strict=False)]
    return rounded([some[0], sum(some) / len(some)], DIGITS)


def live(key: dict) -> dict:
    """The first losses of a row: what its data, start, batches and noise decide."""
    return {"first": first_losses(key)}


def tested(model: nn.Module, test: Clustered) -> dict:
    """Accuracy in percent on test images, dispatch entropy over the classes of the images, and their counts n_km."""
    out, m = answers(model, test.x)
    return {
        "accuracy": 100 * (out.argmax(1) == test.y).double().mean().item(),
        "entropy": dispatch_entropy(test.cluster, m),
        "dispatch": dispatch_counts(test.cluster, m, EXPERTS).tolist(),
    }


def seen_by(model: nn.Module, test: Clustered) -> tuple[float, np.ndarray]:
    """Accuracy in percent, and for each label (first axis) how many images of each class go to each expert."""
    out, m = answers(model, test.x)
    of_label = [dispatch_counts(test.cluster[test.y == y], m[test.y == y], EXPERTS).numpy() for y in test.y.unique()]
    return 100 * (out.argmax(1) == test.y).double().mean().item(), np.stack(of_label)


def row(key: dict) -> dict:
    """Curves over `steps_at`: `loss` of the batches since the last point, test `curve` (percent); in the end `tested`.

    `images_per_second` and `peak_mib` (of the process) tell what the training took on this machine.
    """
    train_part, test = data(key["data"], key["task"], key["seed"])
    model, losses, course = network(key), [], []
    at = [round(key["steps"] * (i + 1) / POINTS) for i in range(POINTS)]
    began, spent = time.perf_counter(), 0.0
    for step, loss in enumerate(training(model, key, train_part), 1):
        losses.append(loss)
        if step in at:
            pause = time.perf_counter()
            course.append(tested(model, test))
            spent += time.perf_counter() - pause
    seconds = time.perf_counter() - began - spent
    values = {
        "first": first_losses(key),
        "steps_at": at,
        "loss": [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise([0, *at])],
        "curve": [found["accuracy"] for found in course],
        **course[-1],
        "parameters": parameters(model),
        "images_per_second": round(BATCH * key["steps"] / seconds),
        "peak_mib": peak_memory() // 1024,
    }
    return rounded(values, DIGITS)


def latent_row(key: dict) -> dict:
    """A row trained once more: `accuracy` in percent and `by_label` of `seen_by`, and what `latent` finds."""
    train_part, test = data(key["data"], key["task"], key["seed"])
    model = network(key)
    for _ in training(model, key, train_part):
        pass
    accuracy, by_label = seen_by(model, test)
    found = {"first": first_losses(key), "accuracy": accuracy, "by_label": by_label.tolist()}
    return rounded({**found, **latent(model, test)}, DIGITS)


def chance_by_expert(table: np.ndarray) -> float:
    """Chance that two images of one expert, at random, share their class: of counts by class and expert."""
    of_expert = table.sum(0)
    return (np.square(table).sum(0) / np.maximum(of_expert, 1)).sum() / of_expert.sum()


def same_expert(row: dict) -> tuple[float, float]:
    """Share of an image's neighbours in the plane of `latent` that have its expert, and that by chance."""
    points, m = np.array([row["tsne_x"], row["tsne_y"]]).T, np.array(row["tsne_expert"])
    near = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(points).kneighbors(return_distance=False)
    return (m[near] == m[:, None]).mean(), np.square(np.bincount(m) / len(m)).sum()


def baseline_row(key: dict) -> dict:
    """Logistic regression on the pixels (percent); and on the sums over 4 x 4 patches, for the image's class, too.

    The sums are all that the router of the released code reads.
    """
    parts = data(key["data"], key["task"], key["seed"])
    views = {"pixels": lambda x: x.flatten(1), "sums": lambda x: F.unfold(x, 4, stride=4).sum(2)}
    found = {}
    for name, view in views.items():
        a, b = (view(part.x).numpy() for part in parts)
        for what, target in (("", "y"), ("_class", "cluster")):
            fitted = LogisticRegression(max_iter=100).fit(a, getattr(parts[0], target).numpy())
            found[name + what] = 100 * fitted.score(b, getattr(parts[1], target).numpy())
    return rounded(found, 4)


@torch.no_grad()
def latent(model: nn.Module, test: Clustered) -> dict:
    """The latent embedding of test images of one label, 1 ("rotated"), by a trained model (Figure 4).

    `tsne_x`, `tsne_y`, `tsne_class`, `tsne_expert` are lists over the images shown; `same` is the share of an image's
    ten nearest neighbours in the embedding that are of its class, `chance` that of a random image, over all images of
    the label.
    """
    of_label = test.y == 1
    x, cluster = test.x[of_label], test.cluster[of_label]
    m = answers(model, x)[1]
    model.eval()
    moe = isinstance(model, DispatchedMoE)
    z = model.dispatched(x, m, lambda expert, a: expert.embedding(a)) if moe else model.embedding(x)  # pyright: ignore
    z = z.double().numpy()
    near = NearestNeighbors(n_neighbors=NEIGHBOURS + 1).fit(z).kneighbors(z, return_distance=False)[:, 1:]
    picture = TSNE(random_state=0, init="pca").fit_transform(z[:SHOWN])
    shares = cluster.bincount().double() / len(cluster)
    return {
        "tsne_x": rounded(picture[:, 0], 3),
        "tsne_y": rounded(picture[:, 1], 3),
        "tsne_class": cluster[:SHOWN].tolist(),
        "tsne_expert": m[:SHOWN].tolist(),
        "same": (cluster[near] == cluster[:, None]).double().mean().item(),
        "chance": shares.square().sum().item(),
    }
