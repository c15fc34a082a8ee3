"""Algorithm 1 at full scale: the step of `algorithm1.step` without the products it does not need.

Each example touches one expert, and of its patches only those that are no multiples of known signals enter a
product (`parts`), grouped by expert (`grouped`). A step then costs about 4 n d M operations in the router,
forward and back, and 4 n (P-3) d J in the experts, whatever M is. `benchmarks/` sets the time against the
operations and the bytes. What is not the paper's takes the path of `plain`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.models.experts import Activation
from moe_theory.streams import stream
from moe_theory.tasks.patches import PatchBatch
from moe_theory.training.grouped import Dispatch, Experts, dispatch
from moe_theory.training.parts import described, take_apart
from moe_theory.training.plain import (
    Elementwise,
    GateFunction,
    Layer,
    Noise,
    RouterFunction,
    linear_router,
    resolve_activation,
    resolve_noise,
    softmax_gate,
)
from moe_theory.training.variants import VARIANTS, Variant


@dataclass(frozen=True)
class Run:
    """One trained MoE.

    Attributes:
        seed: the seed of initialization and routing noise.
        test_accuracy: share of test examples with y F(x) > 0, in [0, 1].
        dispatch_entropy: Eq. 6.1 on the test examples, in nats.
        history: one dict per recorded step: step, loss, test_accuracy, dispatch_entropy, dispatch
            (the counts n_km (K, M) of test examples), and what `measure` returned.
        parameters: the trained tensors by name: `theta` (d, M) and `W` (M, J, d); in the released
            variant W has a last column of biases, and both act on inputs times 10.
    """

    seed: int
    test_accuracy: float
    dispatch_entropy: float
    history: list[dict]
    parameters: dict[str, Tensor]


def softmax_(h: Float[Tensor, "M n"]) -> Float[Tensor, "M n"]:
    """Softmax over the experts in place, row by row; torch's own goes down the columns."""
    h.sub_(h.amax(0)).exp_()
    return h.div_(h.sum(0))


def forward(
    layer: Experts,
    theta: Float[Tensor, "d M"],
    W: Float[Tensor, "M J D"],
    noise: Float[Tensor, "M n"] | None,
    variant: Variant,
):
    """The dispatch, softmax pi of the noiseless logits (M, n), gate values (n,), outputs f_{m_i}(x_i) (n,).

    `noise` (M, n) is added to the logits before the choice; None is the test-time rule. Gate values
    and outputs are in the order of the experts, and pi is None where the gate is the noisy logit.
    """
    h, noisy = layer.tables(len(W))
    torch.mm(theta.T.contiguous(), layer.x.total.T, out=h)
    noisy = h if noise is None else torch.add(h, noise, out=noisy)
    sent = dispatch(noisy)
    pi = None if variant.raw_gate else softmax_(h)
    gate = (noisy if pi is None else pi).take(sent.at)
    return sent, pi, gate, layer.forward(W, sent)


def gradients(layer: Experts, theta, W, noise: Float[Tensor, "M n"], variant: Variant, balance: float):
    """The loss (3.3) at given routing noise, and its gradients in theta (Eq. E.1) and W (Eq. E.2).

    The router's gradient includes `balance` times that of the load-balancing loss
    `M sum_m rho_m q_m`, with rho_m the share of examples sent to expert m and q_m the mean softmax
    probability (Fedus et al. 2021) or, in the released variant, the mean noisy logit; where the variant centers
    the loss, rho_m - 1/M stands for rho_m.
    """
    sent, pi, gate, f = forward(layer, theta, W, noise, variant)
    loss, slope = loss_and_slope(layer.x.y.take(sent.order), gate, f, variant)
    to_h = to_logits(layer, sent, pi, slope * f if pi is None else slope * f * gate, balance, centered=variant.centered)
    return loss, (to_h @ layer.x.total).T, layer.gradient(slope * gate)


def loss_and_slope(y: Float[Tensor, " n"], gate: Float[Tensor, " n"], f: Float[Tensor, " n"], variant: Variant):
    """The mean loss of the outputs F = gate f, and its derivative in each F."""
    margin = y * gate * f
    return variant.loss(margin).mean(), variant.slope(margin) * y / len(y)


def to_logits(
    layer: Experts,
    sent: Dispatch,
    pi: Float[Tensor, "M n"] | None,
    pull: Float[Tensor, " n"],
    balance: float,
    *,
    centered: bool = False,
) -> Float[Tensor, "M n"]:
    """The loss's gradient in the logits, `pull_i (1[m_i = m] - pi_m)`, or without pi where the gate is raw."""
    M, n = len(sent.sizes), len(pull)
    to_h, _ = layer.tables(M)
    if balance:
        rho = pull.new_tensor(sent.sizes)[:, None] / n - centered / M
        to_balance = balance * M / n * (rho if pi is None else pi * (rho - (rho * pi).sum(0)))
    if pi is None:
        to_h.zero_()
    else:
        torch.mul(pi, torch.empty_like(pull).index_copy_(0, sent.order, -pull), out=to_h)
    to_h.view(-1).index_add_(0, sent.at, pull)
    return to_h.add_(to_balance) if balance else to_h


def gradient_norm(to_W: Float[Tensor, "M J D"], variant: Variant) -> Float[Tensor, "M 1 1"]:
    """What normalized descent divides an expert's gradient by (Eq. 3.4); infinity for a zero gradient."""
    parts = (to_W[:, :, :-1], to_W[:, :, -1:]) if variant.biases else (to_W,)
    norm = sum(torch.linalg.vector_norm(part, dim=(1, 2)) for part in parts)
    return norm.masked_fill(norm == 0, torch.inf)[:, None, None]  # pyright: ignore[reportAttributeAccessIssue]


def tested(layer: Experts, theta, W, variant: Variant, *, seed: int, step: int) -> dict:
    """Test accuracy (a tie y F = 0 is an error, as in Theorem 4.1), dispatch entropy and table.

    Noise at test time has a stream for each step, so that it does not depend on which steps are recorded.
    """
    test = layer.x
    noise = None
    if variant.noisy_test:
        noise = uniform(layer, len(W), stream(seed, "test noise", step))
    sent, _, gate, f = forward(layer, theta, W, noise, variant)
    right, cluster = test.y.take(sent.order) * gate * f > 0, test.cluster.take(sent.order)
    return {
        "test_accuracy": float(right.double().mean()),
        "dispatch_entropy": dispatch_entropy(cluster, sent.expert),
        "dispatch": dispatch_counts(cluster, sent.expert, len(W)),
    }


def output_signs(filters: int, variant: Variant) -> Float[Tensor, " J"]:
    """The weights a_j of an expert's filters: 1, or with biases -1 on the first half."""
    a = torch.ones(filters)
    a[: filters // 2] -= 2 * variant.biases
    return a


def uniform(layer: Experts, M: int, rng: np.random.Generator) -> Float[Tensor, "M n"]:
    """Routing noise: independent draws from Unif[0, 1], in the memory of the noisy logits."""
    noise = layer.tables(M)[1]
    return noise.copy_(torch.from_numpy(rng.random(noise.shape, dtype=np.float32)))


@torch.no_grad()
def train_patch_moe(
    train: PatchBatch,
    test: PatchBatch,
    *,
    experts: int = 8,
    filters: int = 16,
    activation: str | Activation | Elementwise = "cubic",
    steps: int,
    seeds: tuple[int, ...] = (0,),
    eta: float = 1e-3,
    eta_r: float = 0.1,
    sigma_0: float = 0.01,
    normalized: bool = True,
    balance: float = 0.0,
    same_start: bool = False,
    variant: str = "as written",
    noise: str | tuple[str, float] | Noise = "uniform",
    gate: GateFunction = softmax_gate,
    router: RouterFunction = linear_router,
    record_every: int = 100,
    measure: Callable[[dict[str, Tensor]], dict] | None = None,
) -> list[Run]:
    """Algorithm 1 of Chen et al. (2022), once for each seed.

    Experts step by per-expert normalized gradient (Eq. 3.4), the router by plain gradient (Eq. 3.5)
    from zero, selection adds Unif[0, 1] noise in training and none at test time, and the gate value
    is the softmax of the noiseless logits. An expert without a gradient stays where it is. The
    defaults are those of Appendix A.2; the paper names no sigma_0.

    Patches or labels that the batch's coefficients do not describe, and noise, gate or router of one's own, are trained
    by automatic differentiation, some times slower (`moe_theory.training.plain`).

    Args:
        train, test: batches of `PatchTask.sample`, on the device and in the dtype to train with; their patches and
            labels may be replaced by others.
        experts, filters: M and J; in the released variant J is even, half for each logit.
        activation: a key of `moe_theory.models.experts.ACTIVATIONS`, an `Activation`, or a function of a tensor.
        steps: number T of full-batch iterations, at least 1.
        seeds: one run each; a seed draws the initialization and the routing noise.
        eta, eta_r: learning rates of experts and router, > 0.
        sigma_0: scale of the initialization, > 0; the released variant has its own.
        normalized: whether the experts' gradients are divided by their norms.
        balance: coefficient of the load-balancing loss, >= 0.
        same_start: whether all experts start from the same weights.
        variant: a key of `moe_theory.training.variants.VARIANTS`.
        noise: "uniform" or "gaussian", one of them with a scale, `("uniform", 0.3)`, or a function of a NumPy generator
            and a shape (M, n) that draws an array of that shape.
        gate: a function of logits (n, M) and selected experts (n,) that gives the factors (n,) of their outputs.
        router: a function of patches (n, P, d) and weights theta (d, M), zero at the start, that gives logits (n, M).
        record_every: steps between two entries of `Run.history`, at least 1.
        measure: called with the parameters after each recorded step; its dict joins the entry.

    Raises:
        ValueError: for an argument of another kind or outside its range, naming it, or a released variant with data,
            noise, gate or router of one's own. All are looked at before the first step.
    """
    seeds, how, sigma = _checked(locals())
    paper = noise == "uniform" and gate is softmax_gate and router is linear_router
    paths = _fast if paper and all(map(described, (train, test))) else _plain
    if paths is _plain and how.biases:
        raise ValueError("variant: expected 'as written' with data, noise, gate or router of your own, got " + variant)
    layer = Layer(sigma.value, router, gate, resolve_noise(noise))
    step, tested = paths(layer, train, test, sigma, how, filters, balance)
    runs = []
    for seed in seeds:
        W = how.initial(train.x.shape[2], experts, filters, sigma_0, seed).to(train.y)
        W = W[:1].repeat(experts, 1, 1) if same_start else W
        theta, history = train.y.new_zeros(train.x.shape[2], experts), []
        options = dict(steps=steps, seed=seed, eta=eta, eta_r=eta_r, normalized=normalized)
        for t, loss, last in _descent(step, theta, W, how, **options):
            if last or t % record_every == 0:
                entry = {"step": t, "loss": loss, **tested(theta, W, seed=seed, step=t)}
                history.append({**entry, **(measure({"theta": theta, "W": W}) if measure else {})})
        end = history[-1]
        runs.append(Run(seed, end["test_accuracy"], end["dispatch_entropy"], history, {"theta": theta, "W": W}))
    return runs


def _checked(given: dict) -> tuple[list[int], Variant, Activation]:
    """The seeds, variant and activation of `train_patch_moe`, whose arguments are looked at here."""
    kinds = {"train": PatchBatch, "test": PatchBatch, "seeds": Iterable, "measure": Callable | None}
    kinds |= {"normalized": bool | np.bool_, "same_start": bool | np.bool_, "gate": Callable, "router": Callable}
    for name, kind in kinds.items():
        check.instance(name, given[name], kind)
    for name in ("train", "test"):
        given[name].checked(name)
    seeds = [check.integer("seeds", seed, 0) for seed in given["seeds"]]
    check.tensor("test", given["test"].x, "n", "P", given["train"].x.shape[2])
    for name in ("experts", "steps", "record_every"):
        check.integer(name, given[name], 1)
    for name in ("eta", "eta_r", "sigma_0"):
        check.positive(name, given[name])
    check.not_negative("balance", given["balance"])
    how = VARIANTS[check.choice("variant", given["variant"], VARIANTS)]
    if check.integer("filters", given["filters"], 1) % 2 and how.biases:
        raise ValueError(f"filters: expected an even number, half for each logit, got {given['filters']}")
    return seeds, how, resolve_activation(given["activation"], given["train"].y)


def _fast(layer: Layer, train: PatchBatch, test: PatchBatch, sigma: Activation, how: Variant, filters: int, balance):
    """A step's gradients and a test's results, by the products of this module."""
    a = output_signs(filters, how).to(train.y)
    data, held_out = (
        Experts(take_apart(name, batch, sigma, how.input_scale, how.biases), a, sigma)
        for name, batch in (("train", train), ("test", test))
    )

    def step(theta: Tensor, W: Tensor, rng: np.random.Generator):
        return gradients(data, theta, W, uniform(data, len(W), rng), how, balance)

    return step, lambda theta, W, **when: tested(held_out, theta, W, how, **when)


def _plain(layer: Layer, train: PatchBatch, test: PatchBatch, sigma: Activation, how: Variant, filters: int, balance):
    """The same by automatic differentiation."""

    def step(theta: Tensor, W: Tensor, rng: np.random.Generator):
        return layer.gradients(train, theta, W, rng, balance)

    return step, lambda theta, W, **when: layer.tested(test, theta, W)


def _descent(
    step: Callable, theta, W, how: Variant, *, steps: int, seed: int, eta, eta_r, normalized: bool
) -> Iterator[tuple[int, float, bool]]:
    """The steps of one run, in place: the number of each, the loss before it, and whether it is the last."""
    rng, least = stream(seed, "routing noise"), torch.inf
    for t in range(1, steps + 1):
        loss, to_theta, to_W = step(theta, W, rng)
        stop = how.stops(loss.item(), least)
        least = min(least, loss.item())
        if not stop:
            theta -= eta_r * to_theta
            W -= eta * (to_W / gradient_norm(to_W, how) if normalized else to_W)
        yield t, loss.item(), stop or t == steps
        if stop:
            return
