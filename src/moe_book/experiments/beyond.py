"""Sequences of tokens and sums of atoms (Dikkala et al. 2023, C.2 and C.3).

In every row the learned mixture, the frozen one and the dense network have one task, one training set, one test set
and one order of examples; learned and frozen start from the same weights. A loss of 1 is that of a constant.
"""

from itertools import islice

import torch
from torch import Tensor, nn

from moe_book.experiments.catalogue import rounded
from moe_theory.measure.sparsity import average_sparsity, shuffled
from moe_theory.models.gated import HeadedMoE, TopTwoMoE
from moe_theory.models.soft import DenseNets, SoftMoE
from moe_theory.models.token_networks import TokenMoE, TokenNets
from moe_theory.tasks.dictionary import DictionaryTask, Sums
from moe_theory.tasks.tokens import Sequences, TokenTask
from moe_theory.training.batched import losses, train

SEEDS = range(5)
#: Examples of a test, and steps that a live recomputation takes.
N_TEST, FIRST = 4_096, 20
#: C.2 and C.3 name no optimizer, and these are ours.
TOKENS, DICTIONARY = dict(rate=1e-2, router_rate=1e-2, batch=128), dict(rate=1e-2, router_rate=1e-2, batch=256)
#: Hidden width of the dense networks: as many parameters as 32 linear experts and their router.
WIDTH = 64
SMOKE = dict(n=512, steps=FIRST)


def tokens() -> list[dict]:
    """Tables 1 and 2, and the quadratic output, for which the paper names no length."""
    cases = [("linear", 4), ("linear", 8), ("linear", 16), ("quadratic", 4)]
    return [dict(output=o, s=s, n=16_384, steps=1000, seed=seed) for seed in SEEDS for o, s in cases]


def dictionary() -> list[dict]:
    """C.3: 32 and 128 atoms, two in an input, 32 linear experts."""
    return [dict(c=c, n=32_768, steps=1200, seed=seed) for seed in SEEDS for c in (32, 128)]


def _learn(net: nn.Module, data, key: dict, how: dict, *, frozen: tuple[bool, ...] = (False,)) -> list[float]:
    """Trains the networks of a row; the losses of the first steps, their sum over networks."""
    R, steps = len(frozen), key["steps"]
    how = dict(how) if isinstance(net, SoftMoE) else {k: v for k, v in how.items() if k != "router_rate"}
    course = train(net, [data] * R, steps=steps, seeds=[key["seed"]] * R, frozen=frozen, **how)
    first = list(islice(course, FIRST))
    for _ in course:
        pass
    return first


def _loss(net: nn.Module, data) -> list[float]:
    """Mean squared error of each network with the gates of the training, all on the same data."""
    return losses(net, [data] * len(next(net.parameters())), weighted=True).tolist()


def _sparsities(moe: SoftMoE, x: Tensor, cluster: Tensor, seed: int) -> dict:
    """Of the learned router (the first), the same with its columns shuffled, and the frozen one if it is the second."""
    learned, *frozen = moe.router.W[0].detach()[:2, 0]
    routers = {"sparsity": learned, "sparsity_shuffled": shuffled(learned, seed)}
    routers |= dict(zip(["sparsity_frozen"], frozen, strict=False))
    return {name: average_sparsity((x @ W.T).softmax(-1), cluster) for name, W in routers.items()}


def _token_mixtures(key: dict) -> tuple[TokenMoE, Sequences, Sequences, float]:
    """A learned and a frozen router trained on sequences, the examples, and the first losses."""
    seed = key["seed"]
    task = TokenTask(32, 32, key["s"], output=key["output"], seed=seed)
    data, test = task.sample(key["n"], 2 * seed + 1), task.sample(N_TEST, 2 * seed + 2)
    moe = TokenMoE(32, 1, 32, expert_layers=1, seeds=[seed, seed])
    return moe, data, test, sum(_learn(moe, data, key, TOKENS, frozen=(False, True)))


def tokens_row(key: dict) -> dict:
    """Losses, sparsities by the Gaussian of a token, and the start of the training."""
    (moe, data, test, first), seed = _token_mixtures(key), key["seed"]
    dense = TokenNets([32, WIDTH, 1], [seed])
    _learn(dense, data, key, TOKENS)
    values = dict(zip(("learned", "frozen"), _loss(moe, test), strict=True)) | {"dense": _loss(dense, test)[0]}
    values |= _sparsities(moe, test.x.flatten(0, 1), test.cluster.flatten(), seed)
    return rounded(values | {"first": first}, 5)


def _sum_mixtures(key: dict, frozen: tuple[bool, ...] = (False, True)) -> tuple[SoftMoE, Sums, Sums, float]:
    """A learned and a frozen router trained on sums of atoms, the examples, and the first losses."""
    seed = key["seed"]
    task = DictionaryTask(key["c"], 32, seed=seed)
    data, test = task.sample(key["n"], 2 * seed + 1), task.sample(N_TEST, 2 * seed + 2)
    moe = SoftMoE(32, 1, 32, expert_layers=1, seeds=[seed] * len(frozen))
    return moe, data, test, sum(_learn(moe, data, key, DICTIONARY, frozen=frozen))


def _sums_sparsities(moe: SoftMoE, test: Sums, seed: int) -> dict:
    """Experts in use for one input, by three routers; for the inputs with one atom in common, and for all inputs."""
    each, one = torch.arange(len(test.x)), torch.zeros(len(test.x), dtype=torch.long)
    pi = (test.x @ moe.router.W[0].detach()[0, 0].T).softmax(-1)
    return _sparsities(moe, test.x, each, seed) | {
        "sparsity_atom": average_sparsity(pi.repeat_interleave(2, 0), test.atoms.flatten()),
        "sparsity_all": average_sparsity(pi, one),
    }


def dictionary_row(key: dict) -> dict:
    """Losses of six networks; of the learned softmax how many experts it uses; and the start of its training.

    `wide` is a softmax over 48 experts, with as many parameters as `heads`, two softmaxes over 32. The numbers of
    experts are those of one input, of the inputs with one atom in common, and of all inputs.
    """
    (moe, data, test, first), seed = _sum_mixtures(key), key["seed"]
    values = dict(zip(("learned", "frozen"), _loss(moe, test), strict=True))
    others = {
        "top_two": TopTwoMoE(32, 1, 32, expert_layers=1, seeds=[seed]),
        "heads": HeadedMoE(32, 1, 32, seeds=[seed]),
        "wide": SoftMoE(32, 1, 48, expert_layers=1, seeds=[seed]),
        "dense": DenseNets([32, WIDTH, 1], [seed]),
    }
    for name, net in others.items():
        _learn(net, data, key, DICTIONARY)
        (values[name],) = _loss(net, test)
    return rounded(values | _sums_sparsities(moe, test, seed) | {"first": first}, 5)


def _start(mixtures, key: dict) -> dict:
    return rounded({"first": mixtures({**key, "steps": FIRST})[-1]}, 5)


def tokens_live(key: dict) -> dict:
    """The start of a row's training."""
    return _start(_token_mixtures, key)


def dictionary_live(key: dict) -> dict:
    """The start of a row's training, and its learned mixture, trained to the end: it needs no other beside it."""
    moe, _, test, _ = _sum_mixtures(key, (False,))
    learned = {"learned": _loss(moe, test)[0]} | _sums_sparsities(moe, test, key["seed"])
    return _start(_sum_mixtures, key) | rounded(learned, 5)
