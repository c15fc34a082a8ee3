"""Every router on every task under one protocol: what an engineer's choice of a router changes, and what it costs.

A row is one router on one task, trained with `SEEDS` side by side. The networks of one seed have one task, data set,
initial experts and order of examples, whatever their router. Rates are chosen first, for every router and task by
itself, among `SETTINGS`, by the test loss at `PILOT`, a seed that no result is read from.
"""

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_book.experiments.catalogue import rounded
from moe_book.experiments.router_tasks import TRIALS, Part, sampled
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.measure.selection import effective_experts, paired_steps, together
from moe_theory.models import choices
from moe_theory.models.choices import Choice, ChosenMoE, PlainNet
from moe_theory.models.rules import Rule, sampled_topk, softmax_topk
from moe_theory.streams import torch_stream
from moe_theory.training.batched import batches
from moe_theory.training.paired import Adam, descend

M, STEPS, BATCH = 8, 400, 64
SEEDS, PILOT = list(range(20, 28)), 1_000  # sizes of tasks were set at seeds 0 to 9, which are not read again
SETTINGS = list(itertools.product((1e-2, 3e-2), (1 / 3, 1.0, 3.0)))  # rates of experts, and of routers over those
DRAWS, SHAKEN, STEP = 10, 64, 0.05  # of the two steps that stability is measured with: draws, examples, rate
LIVE = 20  # steps that a recomputation takes
DIGITS = 6  # significant, of stored values
SMOKE = dict(task="gaussians", steps=LIVE)

noisy_softmax_topk = Rule("noisy_softmax_topk", over_all=True, needs_noise=True)
hashed_topk = Rule("hashed_topk", over_all=False, needs_noise=True)

#: The routers, each one decision away from the first; those with one expert differ in k besides.
ROUTERS = {
    "linear, top 2": Choice(),
    "dense softmax": Choice(k=M),
    "softmax, then top 2": Choice(rule=softmax_topk),
    "sampled 2": Choice(rule=sampled_topk, noise="gumbel"),
    "cosine": Choice(scores="cosine"),
    "cosine, tempered": Choice(scores="cosine", tempered=True),
    "perturbed": Choice(scores="perturbed"),
    "heads": Choice(scores="heads"),
    "frozen": Choice(learned=False),
    "hash": Choice(scores="none", rule=hashed_topk, noise="hash", learned=False),
    "top 1, then softmax": Choice(k=1),
    "softmax, then top 1": Choice(rule=softmax_topk, k=1),
    "noisy top 1": Choice(rule=noisy_softmax_topk, noise="uniform", k=1),
}
PLAIN = "plain network"
REFERENCE = "linear, top 2"
TWICE = "softmax, then top 1"  # also trained twice as long

#: One decision at a time, in more than two degrees: name to value to choice.
SWEEPS = {
    "balance": {b: Choice(balance=b) for b in (0.0, 0.001, 0.1, 1.0)},
    "noise": {s: Choice(rule=noisy_softmax_topk, noise="uniform", k=1, scale=s) for s in (0.3, 3.0, 10.0)},
    "k": {k: Choice(k=k) for k in (3, 4)},
    "start": {name: Choice(start=name) for name in ("zero", "samples")},
}
SWEPT = ("gaussians", "fashion")


def grid() -> list[dict]:
    """All routers on all tasks; one with K = 1 also for as many evaluations of experts as the others have."""
    rows = [dict(task=task, router=name, steps=STEPS) for task in TRIALS for name in ROUTERS]
    return rows + [dict(task=task, router=TWICE, steps=2 * STEPS) for task in TRIALS]


def plain() -> list[dict]:
    """The plain network on all tasks; there is no router to look at."""
    return [dict(task=task, router=PLAIN, steps=STEPS) for task in TRIALS]


def sweeps() -> list[dict]:
    """The degrees of one decision, on two tasks."""
    return [dict(task=task, router=name, steps=STEPS) for name in _swept() for task in SWEPT]


def _swept() -> dict[str, Choice]:
    """The choices of `SWEEPS` by their names."""
    return {f"{name} {value}": choice for name, degrees in SWEEPS.items() for value, choice in degrees.items()}


def choice_of(router: str) -> Choice:
    """The choice of that name, of `ROUTERS` or of `SWEEPS`; the plain network has that of the reference."""
    return {**ROUTERS, **_swept(), PLAIN: ROUTERS[REFERENCE]}[router]


class Sets(NamedTuple):
    """Training and test sets of R seeds, stacked."""

    train: Part
    test: Part


def data(task: str, seeds: list[int]) -> Sets:
    """The data of some seeds, each in its place."""
    both = zip(*(sampled(task, seed) for seed in seeds), strict=True)
    return Sets(*(Part(*(torch.stack(a) for a in zip(*parts, strict=True))) for parts in both))


def network(task: str, router: str, seeds: list[int], train: Part) -> nn.Module:
    """R networks before their training."""
    trial, choice = TRIALS[task], choice_of(router)
    if router == PLAIN:
        return PlainNet(trial.form, choices.plain_width(trial.form, choice, M, trial.parts), seeds)
    samples = None
    if choice.start == "samples":
        samples = (train.x.sum(2) if trial.form.whole else train.x.flatten(1, 2))[:, :M]
    return ChosenMoE(trial.form, choice, M, seeds, samples=samples)


def example_losses(net: nn.Module, signs: bool, x: Tensor, y: Tensor, rng: torch.Generator):
    """Losses of all examples (R, n), squared or logistic; gates and logits."""
    out, pi, h = net(x, rng)
    loss = torch.nn.functional.softplus(-y * out) if signs else (y - out).square()
    return loss.squeeze(2), pi, h


def trained(task: str, router: str, seeds: list[int], settings: list[tuple[float, float]], sets: Sets, steps: int):
    """R networks after their training, each with a setting of its own, and all R losses before every step (steps, R).

    Args:
        task, router: names; seeds: R of them; settings: R pairs of the experts' rate, and the router's over it.
        sets: of those seeds; steps: of the training that is taken; the rates fall to zero over them.
    """
    net, trial = network(task, router, seeds, sets.train), TRIALS[task]
    rates, factors = torch.tensor(settings).T
    adam = Adam([(net.experts.parameters(), rates), (net.router.parameters(), rates * factors)])  # pyright: ignore
    rng, balance, first = torch_stream(seeds[0], "routing noise"), choice_of(router).balance, []

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        values, pi, h = example_losses(net, trial.signs, *batch, rng)
        first.append(values.detach().mean(1))
        return values.mean(1) + (0.0 if pi is None else balance * choices.balancing(pi, h))

    parts = [Part(*(a[r] for a in sets.train)) for r in range(len(seeds))]
    net.train()
    for _ in descend(loss, batches(parts, steps, BATCH, seeds), adam, steps):
        pass
    return net.eval(), torch.stack(first)


@torch.no_grad()
def tested(net: nn.Module, signs: bool, test: Part, *, seed: int) -> dict:
    """Losses and errors on the test set, and what the router does there; lists over the R networks.

    `error` is the share of wrong signs where labels are signs, and else the mean squared error, 1 for a constant.
    """
    rng = torch_stream(seed, "test noise")
    loss, pi, _ = example_losses(net, signs, test.x, test.y, rng)
    wrong = (net(test.x, torch_stream(seed, "test noise"))[0] * test.y <= 0).float().mean((1, 2))
    values = {"loss": loss.mean(1), "error": wrong if signs else loss.mean(1)}
    if pi is None:
        return values
    chosen, top = pi > 0, choices.selected_expert(pi)
    load = chosen.double().mean(1)
    return values | {
        "entropy": [dispatch_entropy(c, m) for c, m in zip(test.cluster, top, strict=True)],
        "effective": effective_experts(chosen),
        "largest": (load / load.sum(1, keepdim=True)).amax(1),
        "components": [int(together(c).max()) + 1 for c in chosen],
        "largest_gate": pi.amax(2).mean(1),
    }


def pilot(task: str, router: str, steps: int) -> tuple[int, list[float]]:
    """The setting with the smallest test loss at the pilot seed, and all of them; not finite counts as worst."""
    seeds = [PILOT] * len(SETTINGS)
    sets = data(task, seeds)
    net, _ = trained(task, router, seeds, SETTINGS, sets, steps)
    found = (
        tested(net, TRIALS[task].signs, sets.test, seed=PILOT)["loss"].nan_to_num(nan=1e9, posinf=1e9).clamp(max=1e9)
    )
    return int(found.argmin()), found.tolist()


def row(key: dict) -> dict:
    """The chosen setting with the pilot's losses, then the lists of `tested` over `SEEDS`, and what one step changes.

    `first`: training losses before the step `LIVE`, at the middle of `SETTINGS`; `ratio` and `flips`: see
    `measure.selection.Shaken`.
    """
    task, router, steps = key["task"], key["router"], key["steps"]
    best, means = pilot(task, router, steps)
    sets = data(task, SEEDS)
    net, _ = trained(task, router, SEEDS, [SETTINGS[best]] * len(SEEDS), sets, steps)
    losses = partial(_losses_and_sets, net, TRIALS[task].signs)
    moved = paired_steps(net, losses, (sets.train.x, sets.train.y), STEP, draws=DRAWS, batch=SHAKEN, seed=SEEDS[0])
    values = {"best": best, "pilots": means, **live(key), **tested(net, TRIALS[task].signs, sets.test, seed=SEEDS[0])}
    return rounded(values | moved._asdict(), DIGITS)


def _losses_and_sets(net: nn.Module, signs: bool, x: Tensor, y: Tensor, rng: torch.Generator):
    loss, pi, _ = example_losses(net, signs, x, y, rng)
    return loss, None if pi is None else pi > 0


def live(key: dict) -> dict:
    """The mean training loss of each seed over the first `LIVE` steps, at fixed rates of which the second is the first.

    The rates are those of a training as long as this: the first steps of a row's own training depend on its pilots.
    """
    sets = data(key["task"], SEEDS)
    first = trained(key["task"], key["router"], SEEDS, [SETTINGS[1]] * len(SEEDS), sets, LIVE)[1]
    return rounded({"first": first.mean(0)}, DIGITS)


def least_squares(task: str, router: str | None = None) -> list[float]:
    """Test errors, for each of `SEEDS`, of what fits all training examples best: one affine function of the parts.

    With a `router` that is not learned, M of them behind its gates, which then are numbers: `M (d + 1)` unknowns.
    """
    sets, found = data(task, SEEDS), []
    net = None if router is None else network(task, router, SEEDS, sets.train).eval()
    X, Z = (_affine(a.x) if net is None else _gated(net, a.x) for a in sets)
    for r in range(len(SEEDS)):
        w = torch.linalg.lstsq(X[r], sets.train.y[r].double()).solution
        found.append(float((Z[r] @ w - sets.test.y[r]).square().mean()))
    return found


def _affine(x: Tensor) -> Tensor:
    """The sum of an input's parts (R, n, s, d), and a one (R, n, d + 1)."""
    return torch.cat([x.sum(2), torch.ones_like(x[:, :, 0, :1])], 2).double()


@torch.no_grad()
def _gated(net: ChosenMoE, x: Tensor) -> Tensor:
    """The sums over an input's parts (R, n, s, d) of each part, and a one, times each gate (R, n, M (d + 1))."""
    pi, _ = net.gates(net.routed(x), torch_stream(SEEDS[0], "test noise"))
    by_part = pi.unflatten(1, (x.shape[1], -1)).expand(-1, -1, x.shape[2], -1)
    ones = torch.ones_like(x[..., :1])
    return torch.einsum("rnsm,rnsd->rnmd", by_part, torch.cat([x, ones], 3)).flatten(2).double()
