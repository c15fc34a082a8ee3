"""Figures 3 to 7 of smooth2025: three sparse networks trained by SGD, measured on the way by the estimators of 5.3.

What the paper leaves open, and what a machine without an accelerator cannot do, is set here: means and
scales of the Gaussians, widths, manual pages in place of Banking77, a small transformer pretrained here
in place of BERT, and steps and rates of the shorter runs. `at_length` trains MLP and CNN as long as the
paper does, at its rate, and looks at what training leaves at other rates.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_book.experiments.catalogue import rounded
from moe_theory import _validate as check
from moe_theory.measure.stability import Draws, estimate
from moe_theory.models.rules import RULES, gumbel, topk_softmax
from moe_theory.models.sparse import SparseCNN, SparseMLP, SparseNetwork, SparseTransformer
from moe_theory.tasks.gaussians import GaussianClasses, Labelled
from moe_theory.tasks.images import load_images
from moe_theory.tasks.text import load_text
from moe_theory.training.fit import fit

SEEDS, TOP_K = range(5), range(1, 6)
WINDOW = 101  # steps in a window of the loss, as in the paper
POINTS = 40  # recorded points of a curve
STAGES = {"all": (0, 0.05, 0.25, 1), "ends": (0, 1), "none": ()}  # shares of training done when it is measured
DIGITS = 5  # of what is stored
SHOWN = 2_000  # training examples over which the loss of a stage is averaged
VOCABULARY = 1_000
RATE = 0.001  # of MLP and CNN in the paper (5.2)
RATES = (0.05, 0.005, 0.0005, 0.00005)  # at which a trained network is measured besides; the last is that of BERT
SMOKE = dict(task="gaussians", steps=10)


class Task(NamedTuple):
    """A data set and the network trained on it.

    Attributes:
        data: gives training and test sets.
        network: makes a network of its rule, k, heads and seed.
        pretrain: trains a network's parameters outside the router, in place, given the training set.
        rate, steps, batch: of the training.
    """

    data: Callable[[], tuple[Labelled, Labelled]]
    network: Callable[..., SparseNetwork]
    pretrain: Callable[[SparseNetwork, Labelled, torch.Generator], None]
    rate: float
    steps: int
    batch: int


@cache
def gaussians() -> tuple[Labelled, Labelled]:
    """The sizes of the paper: 20,000 and 8,000 examples of ten classes in 128 dimensions."""
    task = GaussianClasses(classes=10, d=128, seed=0)
    return task.sample(2_000, 1_001), task.sample(800, 1_002)


@cache
def images() -> tuple[Labelled, Labelled]:
    """Fashion-MNIST, centred and scaled; ValueError where only a stand-in can be had."""
    data = load_images()
    if data.name != "fashion-mnist":
        raise ValueError(f"task: expected Fashion-MNIST to be at hand, got {data.name}; install dataset-fashion-mnist")
    mean, sd = data.train_x.mean(), data.train_x.std()
    return Labelled((data.train_x - mean) / sd, data.train_y), Labelled((data.test_x - mean) / sd, data.test_y)


@cache
def texts() -> tuple[Labelled, Labelled]:
    """Windows of 16 words from Debian's manual pages, labelled with the section."""
    data = load_text(n_train=4_000, n_test=1_000, vocabulary=VOCABULARY)
    return Labelled(data.train_tokens, data.train_y), Labelled(data.test_tokens, data.test_y)


def batches(data: Labelled, size: int, count: int, rng: torch.Generator) -> Iterator[Labelled]:
    """Batches of examples drawn with repetition."""
    for _ in range(count):
        index = torch.randint(len(data.x), (size,), generator=rng)
        yield Labelled(data.x[index], data.y[index])


def routed(network: SparseNetwork, x: Tensor, rng: torch.Generator) -> Tensor:
    """The network's logits, its routing noise drawn anew."""
    return network(x, gumbel(network.noise_shape(len(x)), rng))[0]


def specialists(network: SparseNetwork, train: Labelled, rng: torch.Generator) -> None:
    """Expert j learns classes 2j and 2j + 1 in 200 steps of SGD, the rest of the network as it is (5.1.1, 5.1.2)."""
    experts, read = network.block.experts, {}
    optimizer = torch.optim.SGD(experts.parameters(), 0.1)
    handle = network.block.register_forward_hook(lambda _, inputs, __: read.update(z=inputs[0].detach()))

    def loss(batch):
        with torch.no_grad():
            routed(network, batch.x, rng)
        return F.cross_entropy(experts(read["z"])[torch.arange(len(batch.y)), batch.y // 2], batch.y)

    for _ in fit(loss, batches(train, 256, 200, rng), optimizer):
        pass
    handle.remove()


def without_block(network: SparseNetwork, train: Labelled, rng: torch.Generator) -> None:
    """All but the block learns the task in 600 steps of Adam at 0.003: the part of BERT's pretraining (5.1.3)."""
    optimizer = torch.optim.Adam([p for n, p in network.named_parameters() if not n.startswith("block")], 0.003)
    scale, network.block.scale = network.block.scale, 0.0
    for _ in fit(entropy(network, rng), batches(train, 64, 600, rng), optimizer):
        pass
    network.block.scale = scale


def entropy(network: SparseNetwork, rng: torch.Generator) -> Callable[[Labelled], Tensor]:
    """The cross-entropy of a batch, as `fit` takes it."""
    return lambda batch: F.cross_entropy(routed(network, batch.x, rng), batch.y)


TASKS = {
    "gaussians": Task(gaussians, partial(SparseMLP, 128, 10, 5), specialists, 0.05, 2_000, 256),
    "fashion-mnist": Task(images, partial(SparseCNN, 28, 10, 5), specialists, 0.05, 500, 256),
    "manual pages": Task(texts, partial(SparseTransformer, VOCABULARY, 16, 16, 4, 7), without_block, 0.1, 938, 64),
}


class Arm(NamedTuple):
    """What is trained, and how it is looked at.

    Attributes:
        rule: a key of `RULES`.
        heads: "single" or "multi".
        output: "as is", or "matched": rescaled to the size it has under topk_softmax.
        measured: when the estimators run, a key of `STAGES`.
    """

    rule: str
    heads: str
    output: str
    measured: str


ARMS = (
    Arm("topk_softmax", "single", "as is", "all"),
    Arm("softmax_topk", "single", "as is", "ends"),
    Arm("sampled_topk", "single", "as is", "ends"),
    Arm("softmax_topk", "single", "matched", "ends"),
    Arm("sampled_topk", "single", "matched", "ends"),
    Arm("topk_softmax", "multi", "as is", "none"),
    Arm("softmax_topk", "multi", "as is", "none"),
    Arm("sampled_topk", "multi", "as is", "ends"),
)


def grid() -> list[dict]:
    """Eight arms, K = 1 to 5, five seeds for three tasks; no rescaling for the transformer, whose output is normalized.

    Besides: the MLP under the first arm with rate K/5 times its rate, and at the paper's length and rate.
    """
    rows = [
        _key(name, arm, k, seed, task.rate, task.steps)
        for arm in ARMS
        for name, task in TASKS.items()
        for k in TOP_K
        for seed in SEEDS
        if not (name == "manual pages" and arm.output == "matched")
    ]
    mlp = TASKS["gaussians"]
    rows += [_key("gaussians", ARMS[0], k, s, mlp.rate * k / 5, mlp.steps) for k in TOP_K if k < 5 for s in SEEDS]
    return rows + [_key("gaussians", ARMS[0], k, s, 0.001, 7_900) for k in TOP_K for s in SEEDS]


def stream(seed: int, purpose: int) -> int:
    """A seed of its own for each purpose, apart from those of data (1,001 ...) and weights (below 100)."""
    return 1_000_000 + 10 * seed + purpose


def _key(task: str, arm: Arm, k: int, seed: int, rate: float, steps: int) -> dict:
    return dict(task=task, **arm._asdict(), k=k, seed=seed, rate=round(rate, 6), steps=steps)


def long_grid() -> list[dict]:
    """MLP and CNN at the paper's rate over 100 passes, and the transformer as in `grid`; three seeds of the CNN.

    Under the first rule; MLP and CNN also under the two others, which are the same at K = M.
    """
    text, arms = TASKS["manual pages"], ARMS[:3]
    mlp, cnn = ("gaussians", RATE, 7_900), ("fashion-mnist", RATE, 23_500)  # 100 passes in batches of 256, rounded up
    kinds = [(*mlp, arms[0]), ("manual pages", text.rate, text.steps, arms[0]), (*mlp, arms[1]), (*mlp, arms[2])]
    kinds += [(*cnn, arm) for arm in arms]
    return [
        _key(name, arm, k, seed, rate, steps)
        for name, rate, steps, arm in kinds
        for seed in (SEEDS if name != "fashion-mnist" else SEEDS[:3])
        for k in TOP_K
        if arm is arms[0] or k < 5
    ]


def more_seeds_grid() -> list[dict]:
    """The CNN of `long_grid` under the first rule at seven more seeds, for K = 1 and 5 alone."""
    return [_key("fashion-mnist", ARMS[0], k, seed, RATE, 23_500) for seed in range(3, 10) for k in (1, 5)]


def start(key: dict) -> tuple[SparseNetwork, float]:
    """The network of a row before training, in evaluation mode, and the mean kept mass P_T of its softmax over all."""
    task = TASKS[key["task"]]
    network = task.network(rule=RULES[key["rule"]], k=key["k"], heads=key["heads"], seed=key["seed"]).eval()
    state = network.state_dict()
    network.load_state_dict({**state, **_pretrained(key["task"], key["seed"])})
    x = task.data()[0].x[:SHOWN]
    with torch.no_grad():
        pi = network(x, gumbel(network.noise_shape(len(x)), torch.Generator().manual_seed(stream(key["seed"], 0))))[1]
    kept = float(pi.sum(-1).mean())
    if key["output"] == "matched":
        network.block.scale = 1 / kept
    return network, kept


@cache
def _pretrained(task: str, seed: int) -> dict[str, Tensor]:
    """What pretraining leaves in the layers outside the router: the same for every rule, K and kind of heads."""
    network = TASKS[task].network(rule=topk_softmax, k=1, heads="single", seed=seed).eval()
    TASKS[task].pretrain(network, TASKS[task].data()[0], torch.Generator().manual_seed(stream(seed, 1)))
    return {name: value for name, value in network.state_dict().items() if "router" not in name}


def row(key: dict) -> dict:
    """Curves of the training and the estimators at its stages.

    Over the recorded steps `steps_at`: `loss`, `variance`, `detrended` of the batch losses of the 101
    steps that end there (mean, variance, variance about the window's regression line). Over the steps
    `gradient_at`: `router_gradient`, `expert_gradient`, norms of the step's gradient. Over the stages:
    `train_loss` and what `summary` gives. `kept` is the mean P_T at the start.
    """
    network, rng, curves, stages = _followed(key, key["steps"])
    return {**curves, **_tested(network, TASKS[key["task"]].data()[1], rng), **stages}


def at_length(key: dict) -> dict:
    """`row`, and under the first rule the estimators of the trained network at RATES.

    These are lists over `at`, named as in `summary` with "at_" before. The network is trained in training
    mode, in which convolutions are computed as such.
    """
    network, rng, curves, stages = _followed(key, key["steps"], training=True)
    train, test = TASKS[key["task"]].data()
    at, seed = RATES if key["rule"] == ARMS[0].rule else (), stream(key["seed"], 4)
    found = [summary(estimate(network, *train, rate=rate, seed=seed)) for rate in at]
    rates = {f"at_{name}": rounded([f[name] for f in found], DIGITS) for name in SUMMARIES}
    return {**curves, **_tested(network, test, rng), **stages, "at": list(at), **rates}


def beginning(key: dict, until: int, *, training: bool = False) -> dict:
    """What `row`, or in training mode `at_length`, records up to step `until`, from a training that stops there.

    Raises:
        ValueError: for a step outside the training.
    """
    if check.integer("until", until, 0) > key["steps"]:
        raise ValueError(f"until: expected at most steps = {key['steps']}, got {until}")
    _, _, curves, stages = _followed(key, until, training=training)
    return {**curves, **stages}


def _followed(key: dict, until: int, *, training: bool = False) -> tuple[SparseNetwork, torch.Generator, dict, dict]:
    """Network and generator after `until` steps of a row's training, and what was recorded: curves, stages."""
    task, train = TASKS[key["task"]], TASKS[key["task"]].data()[0]
    network, kept = start(key)
    network.train(training)
    rng = torch.Generator().manual_seed(stream(key["seed"], 2))
    optimizer = torch.optim.SGD(network.parameters(), key["rate"])
    training = fit(entropy(network, rng), batches(train, task.batch, until, rng), optimizer)
    stages = {round(share * key["steps"]): share for share in STAGES[key["measured"]]}
    losses, gradients, found = [], [], []
    for step in range(until + 1):
        if step in stages:
            found.append({"stage": float(stages[step]), **_stage(network, train, key)})
        if step < until:
            losses.append(next(training))
            gradients.append([_norm(network.block.router), _norm(network.block.experts)])
    names = ["stage", "train_loss", *SUMMARIES]
    measured = rounded({name: [values[name] for values in found] for name in names}, DIGITS)
    return network, rng, {"kept": rounded(kept, DIGITS), **_curves(losses, gradients, key["steps"])}, measured


def live(key: dict) -> dict:
    """The part of a row before training: the kept mass, which rests on data, pretraining and router."""
    return {"kept": rounded(start(key)[1], DIGITS)}


def _norm(module: torch.nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in module.parameters()).sqrt())  # pyright: ignore


def _points(first: int, steps: int, until: int) -> Tensor:
    """The recorded steps below `until`, of POINTS from `first` to the last of `steps`, the first step being 0."""
    at = torch.linspace(first, steps - 1, POINTS).round().long().unique()
    return at[at < until]


def _curves(losses: list[float], gradients: list[list[float]], steps: int) -> dict[str, list]:
    """The curves of `row` as far as there are batch losses and gradient norms, of every step, to read them off."""
    values, width = torch.full((steps,), torch.nan, dtype=torch.float64), min(WINDOW, steps)
    values[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
    at = _points(width - 1, steps, len(losses))
    windows = values.unfold(0, width, 1)[at - width + 1]
    t = torch.linspace(-1, 1, width, dtype=torch.float64)
    t = t / t.norm()
    centred = windows - windows.mean(1, keepdim=True)
    variance = centred.square().mean(1)
    early = _points(0, steps, len(losses))
    router, experts = torch.tensor(gradients).view(-1, 2)[early].T
    return {
        "steps_at": (at + 1).tolist(),
        "loss": rounded(windows.mean(1), DIGITS),
        "variance": rounded(variance, DIGITS),
        "detrended": rounded(variance - (centred @ t).square() / width, DIGITS),
        "gradient_at": (early + 1).tolist(),
        "router_gradient": rounded(router, DIGITS),
        "expert_gradient": rounded(experts, DIGITS),
    }


def _tested(network: SparseNetwork, test: Labelled, rng: torch.Generator) -> dict[str, float]:
    with torch.no_grad():
        logits = routed(network, test.x, rng)
    accuracy = 100 * (logits.argmax(1) == test.y).double().mean().item()
    return rounded({"test_loss": F.cross_entropy(logits, test.y).item(), "test_accuracy": accuracy}, DIGITS)


def _stage(network: SparseNetwork, train: Labelled, key: dict) -> dict[str, float]:
    """Loss on the first training examples, and the estimators with 200 draws at the rate of the training."""
    x, y = train.x[:SHOWN], train.y[:SHOWN]
    with torch.no_grad():
        noise = gumbel(network.noise_shape(len(x)), torch.Generator().manual_seed(stream(key["seed"], 3)))
        loss = F.cross_entropy(network(x, noise)[0], y).item()
    return {"train_loss": loss, **summary(estimate(network, *train, rate=key["rate"], seed=stream(key["seed"], 4)))}


def summary(draws: Draws) -> dict[str, float]:
    """The paper's maxima over the draws, and what they leave out.

    `eps_max`, `L_max`, `beta_max` are the estimates; `eps_median`, `L_median`, `beta_median`, `eps_q95`
    other quantiles; `eps_odd`, `L_even`, `beta_even` the maxima of half the draws each, so that eps and
    L^2/beta share no draw; `eps_independent` the maximum with routing noise of their own; `flips` the
    mean share of inputs whose selected set differs.
    """
    parts = {name: getattr(draws, name) for name in ("eps", "L", "beta")}
    found = {f"{name}_max": v.max() for name, v in parts.items()}
    found |= {f"{name}_median": v.median() for name, v in parts.items()}
    found |= {"eps_q95": draws.eps.quantile(0.95), "eps_odd": draws.eps[1::2].max()}
    found |= {f"{name}_even": parts[name][::2].max() for name in ("L", "beta")}
    found |= {"eps_independent": draws.eps_independent.max(), "flips": draws.flips.mean()}
    return {name: float(value) for name, value in found.items()}


SUMMARIES = list(summary(Draws(*torch.ones(6, 2))))  # the names in a `summary`
