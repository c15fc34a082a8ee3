"""Section 3.4 of Dikkala et al. (2023) on Fashion-MNIST: a linear function of a vector v for each class of image.

CIFAR-100 cannot be had where these rows were computed: here are 10 classes in place of 100, 20 experts in place of 200,
grey images with a side of 16. The paper names neither the dimension of v, the law of v and w, widths, examples, steps,
optimizer nor rates; these were fixed by pilot runs at another seed.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.router_tasks import images_at_hand
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.models.image_router import ImageRoutedMoE
from moe_theory.streams import torch_stream
from moe_theory.tasks.rotated import plain_task
from moe_theory.training.fit import fit

SEEDS, EXPERTS, WIDTH, D, SIDE = range(3), 20, 32, 16, 16
N_TRAIN, N_TEST, STEPS, BATCH, RATE = 8_000, 2_000, 800, 128, 1e-3
POINTS, LIVE, DIGITS = 4, 20, 5
MODELS = (("v and z", "nothing"), ("v and z", "head"), ("v and z", "CNN"), ("v", "nothing"), ("v", "CNN"))
SMOKE = dict(data="digits", steps=LIVE)  # which are always at hand


def grid() -> list[dict]:
    """Experts that read v and the penultimate layer, or v alone; nothing, the head or the whole CNN frozen."""
    return [
        dict(data="fashion-mnist", reads=reads, frozen=frozen, steps=STEPS, seed=seed)
        for seed in SEEDS
        for reads, frozen in MODELS
    ]


def baseline_grid() -> list[dict]:
    """One row for each seed."""
    return [dict(data="fashion-mnist", seed=seed) for seed in SEEDS]


def target(seed: int) -> Tensor:
    """The functions w_c, unit vectors (10, d)."""
    return F.normalize(torch.randn(10, D, generator=torch_stream(seed, "target")), dim=1)


@lru_cache(maxsize=2)
def data(name: str, seed: int) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """The functions w (10, d), unit vectors, and for both parts images, v from N(0, I), `w_class . v`, and classes."""
    images, w = images_at_hand(name), target(seed)
    rng, parts = torch_stream(seed, "inputs"), []
    sizes = (1_000, 400) if name == "digits" else (N_TRAIN, N_TEST)
    for part in plain_task(images, *sizes, side=SIDE, seed=seed):
        v = torch.randn(len(part.x), D, generator=rng)
        parts.append((part.x, v, (w[part.y] * v).sum(1), part.y))
    return w, parts


def training(model: ImageRoutedMoE, key: dict):
    """The losses of a row's training, which trains `model` by Adam on the mean squared error."""
    image, v, y, _ = data(key["data"], key["seed"])[1][0]
    rng = torch_stream(key["seed"], "training")
    drawn = (torch.randint(len(y), (BATCH,), generator=rng) for _ in range(key["steps"]))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE)
    return fit(lambda at: F.mse_loss(model(image[at], v[at]), y[at]), drawn, optimizer)


def network(key: dict) -> ImageRoutedMoE:
    """The model of a row before its training."""
    return ImageRoutedMoE(SIDE, D, EXPERTS, WIDTH, reads=key["reads"], frozen=key["frozen"], seed=key["seed"])


@torch.no_grad()
def tested(model: ImageRoutedMoE, test) -> dict:
    """Test losses with the gates of the training and with one expert to an image; entropy over classes, and counts."""
    image, v, y, cluster = test
    h, said = model.parts(image, v)
    m = h.argmax(1)
    return {
        "weighted": F.mse_loss((h.softmax(1) * said).sum(1), y).item(),
        "routed": F.mse_loss(said.gather(1, m[:, None])[:, 0], y).item(),
        "entropy": dispatch_entropy(cluster, m),
        "dispatch": dispatch_counts(cluster, m, EXPERTS).tolist(),
    }


def live(key: dict) -> dict:
    """The first loss of a row's training, and the mean of the first 20."""
    some = [value for value, _ in zip(training(network(key), key), range(LIVE), strict=False)]
    return {"first": rounded([some[0], sum(some) / len(some)], DIGITS)}


def row(key: dict) -> dict:
    """`weighted` and `routed` losses over `steps_at`; in the end what `tested` gives of the routing."""
    test, model = data(key["data"], key["seed"])[1][1], network(key)
    at = [key["steps"] * (i + 1) // POINTS for i in range(POINTS)]
    course = [tested(model, test) for step, _ in enumerate(training(model, key), 1) if step in at]
    curves = {name: [found[name] for found in course] for name in ("weighted", "routed")}
    values = {**live(key), "steps_at": at, **curves, "entropy": course[-1]["entropy"]}
    return rounded({**values, "dispatch": course[-1]["dispatch"]}, DIGITS)


def floor(seed: int, dispatch: list[list[int]]) -> float:
    """`1 - sum_m rho_m |sum_c p_cm w_c|^2`: the least error of experts that read v alone, each asked for its images.

    `dispatch` are the counts n_cm of classes and experts, rho_m is the share of expert m, and p_cm that of class c
    among its images.
    """
    n = torch.tensor(dispatch, dtype=torch.double)
    sent = n.sum(0).clamp(min=1)  # an expert that gets no image counts for nothing
    u = n.T @ target(seed).double() / sent[:, None]
    return 1 - ((sent / n.sum())[:, None] * u.square()).sum().item()


def baseline_row(key: dict) -> dict:
    """Errors of what needs no mixture: the best linear function of v, and the class guessed by logistic regression.

    `variance` is that of the label, `linear` the error of the mean function, `guessed` that of the functions weighted
    by the class probabilities of a logistic regression on pixels: exact means over v of both, on test images.
    """
    w, ((image, _, _, cluster), (image_test, _, _, cluster_test)) = data(key["data"], key["seed"])
    fitted = LogisticRegression(max_iter=100).fit(image.flatten(1).numpy(), cluster.numpy())
    p = torch.from_numpy(fitted.predict_proba(image_test.flatten(1).numpy())).float()
    own, mean = w[cluster_test], w[cluster].mean(0)
    values = {"variance": own, "linear": own - mean, "guessed": own - p @ w}
    return rounded({name: v.square().sum(1).mean().item() for name, v in values.items()}, DIGITS)
