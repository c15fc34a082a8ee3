"""The tasks on which routers are compared: eight of the book's and one that one function solves.

All are small, so that a whole comparison fits on one core; labels have variance 1, or are -1 and 1.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory.models.choices import Form
from moe_theory.models.mixture import draw_measure, gates, regression_function
from moe_theory.models.routers import Linear
from moe_theory.streams import torch_stream
from moe_theory.tasks.dictionary import DictionaryTask
from moe_theory.tasks.gaussians import GaussianMixture
from moe_theory.tasks.images import Images, load_images
from moe_theory.tasks.patches import PatchTask
from moe_theory.tasks.regression import NOISE, sample_regression
from moe_theory.tasks.rotated import rotate_task
from moe_theory.tasks.subspaces import SubspaceTask
from moe_theory.tasks.tokens import TokenTask

N_TRAIN, N_TEST = 2_048, 2_048
SIDE = 10  # of an image, in pixels


class Part(NamedTuple):
    """n inputs of s parts, their labels, and the clusters of what is routed, N = n or n s; all 0 where there are none.

    Of a stack of R parts every array has R in front.
    """

    x: Float[Tensor, "*R n s d"]
    y: Float[Tensor, "*R n 1"]
    cluster: Int[Tensor, "*R N"]


class Trial(NamedTuple):
    """A task: its form, parts of an input, whether labels are -1 and 1, training and test set of a seed, and about it.

    Attributes:
        specialists: what theory says a learned router can gain: "linear", if there are clusters with a function each
            that a linear router can tell apart; "none", if one expert does; "" if it is not said.
    """

    form: Form
    parts: int
    signs: bool
    sample: Callable[[int], tuple[Part, Part]]
    specialists: str
    about: str


def _clustered(a) -> Part:
    """Examples that have x, y and cluster."""
    return Part(a.x[:, None] if a.x.ndim == 2 else a.x, a.y, a.cluster.flatten())


def _of(task, seed: int, part: Callable[..., Part] = _clustered) -> tuple[Part, Part]:
    """Training and test set of a task with `sample(n, seed)`: what `part` makes of its examples."""
    return tuple(part(task.sample(n, 2 * seed + 1 + i)) for i, n in enumerate((N_TRAIN, N_TEST)))


def gaussians(seed: int) -> tuple[Part, Part]:
    """Eight Gaussians in 24 dimensions, a linear function of `x - mu` to each (Dikkala et al. 2023, 3.2)."""
    return _of(GaussianMixture(8, 24, outputs=1, label="linear", seed=seed), seed)


def spurious(seed: int) -> tuple[Part, Part]:
    """Eight Gaussians in 8 dimensions beside 40 in which they do not differ (3.1)."""
    return _of(GaussianMixture(8, 8, spurious=40, outputs=1, label="linear", seed=seed), seed)


def subspaces(seed: int) -> tuple[Part, Part]:
    """Eight subspaces of dimension 4 in 24, a linear function to each (3.3); x and -x are in the same one."""
    return _of(SubspaceTask(8, 4, 24, seed=seed), seed)


def tokens(seed: int) -> tuple[Part, Part]:
    """Sequences of 4 tokens from 16 Gaussians in 8 dimensions, a linear function to each, added up (C.2)."""
    return _of(TokenTask(16, 8, 4, seed=seed), seed)


def dictionary(seed: int) -> tuple[Part, Part]:
    """Sums of two of 8 atoms in 16 dimensions (C.3); the cluster is the pair."""
    task = DictionaryTask(8, 16, seed=seed)
    return _of(task, seed, lambda a: Part(a.x[:, None], a.y, 8 * a.atoms[:, 0] + a.atoms[:, 1]))


def regression(seed: int) -> tuple[Part, Part]:
    """Eight affine experts behind a sharp linear router with a softmax over all of them (Nguyen et al. 2025, 5.1)."""
    G = draw_measure(8, 8, seed, router_scale=6.0)
    return _regression(
        lambda x: regression_function(G, x, Linear(), "linear"), 8, seed, lambda x: gates(G, x, Linear()).argmax(-1)
    )


def one_function(seed: int) -> tuple[Part, Part]:
    """One linear function: there is nothing to specialize on."""
    w = torch.randn(8, generator=torch_stream(seed, "classes"), dtype=torch.float64)
    return _regression(lambda x: x @ w, 8, seed, lambda x: torch.zeros(len(x), dtype=torch.long))


def _regression(f, d: int, seed: int, cluster) -> tuple[Part, Part]:
    """Noisy values of a function in the cube, centred and scaled by those of the training set."""
    drawn = [sample_regression(f, n, d, 2 * seed + 1 + i, NOISE) for i, n in enumerate((N_TRAIN, N_TEST))]
    sd, mean = torch.std_mean(drawn[0][1])
    return tuple(Part(x.float()[:, None], ((y - mean) / sd).float()[:, None], cluster(x)) for x, y in drawn)


def patches(seed: int) -> tuple[Part, Part]:
    """The patch task of Chen et al. (2022), setting 1: four clusters, labels -1 and 1; the sum of patches is routed."""
    return _of(PatchTask(seed=seed), seed, lambda a: Part(a.x, a.y[:, None], a.cluster))


def images_at_hand(name: str) -> Images:
    """A data set of `load_images`; ValueError where only a stand-in for it can be had."""
    images = load_images(name)
    if images.name != name:
        raise ValueError(f"data: expected {name} to be at hand, got {images.name}; install dataset-fashion-mnist")
    return images


def at_hand(task: str) -> bool:
    """Whether the data of a task can be had on this machine; all tasks but *fashion* draw theirs."""
    if task != "fashion":
        return True
    with warnings.catch_warnings(action="ignore"):  # that the digits stand in
        return load_images("fashion-mnist").name == "fashion-mnist"


def fashion(seed: int) -> tuple[Part, Part]:
    """Is a piece of clothing turned by 30 degrees (Chen et al. 2022, 6.2)? Fashion-MNIST, 10 by 10 pixels."""
    images = images_at_hand("fashion-mnist")
    drawn = rotate_task(images, N_TRAIN // 2, N_TEST // 2, side=SIDE, seed=seed)
    return tuple(Part(a.x.flatten(1)[:, None], 2.0 * a.y[:, None] - 1, a.cluster) for a in drawn)


TRIALS = {
    "gaussians": Trial(Form(24), 1, False, gaussians, "linear", "a function to a Gaussian"),
    "spurious": Trial(Form(48), 1, False, spurious, "linear", "the same, with spurious inputs"),
    "tokens": Trial(Form(8), 4, False, tokens, "linear", "sums over tokens"),
    "patches": Trial(Form(50, hidden=4, whole=True), 4, True, patches, "", "signal patches"),
    "regression": Trial(Form(8), 1, False, regression, "linear", "data from a mixture"),
    "subspaces": Trial(Form(24), 1, False, subspaces, "", "a function to a subspace"),
    "dictionary": Trial(Form(16), 1, False, dictionary, "", "sums of two atoms"),
    "one function": Trial(Form(8), 1, False, one_function, "none", "no clusters"),
    "fashion": Trial(Form(SIDE**2, hidden=4), 1, True, fashion, "", "rotated clothing"),
}


@lru_cache(maxsize=256)
def sampled(task: str, seed: int) -> tuple[Part, Part]:
    """Training and test set of a task and seed, kept for the other routers."""
    return TRIALS[task].sample(seed)
