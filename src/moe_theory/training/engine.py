"""Algorithm 1 at full scale: the step of `algorithm1.step` without the products it does not need.

Each example touches one expert, and three of its P patches are multiples s u of 2K known signals u.
If sigma(z) = z^p, an expert's answer to such a patch is a polynomial in s with one set of
coefficients for each signal, so a small table serves all examples, and only the P - 3 noise patches
enter a matrix product, grouped by expert. A step then costs about 4 n d M operations in the router,
forward and back, and 4 n (P-3) d J in the experts, whatever M is. Other activations send all P
patches through that product. `benchmarks/` sets the time against this count.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.models.experts import ACTIVATIONS, Activation
from moe_theory.tasks.patches import NOISE, SIGNAL, PatchBatch
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


@dataclass(frozen=True)
class Parts:
    """A batch taken apart for the products of a step.

    Attributes:
        total: (n, d) the sum of an example's patches, all that a linear router sees.
        dense: (n, Q D) the Q patches of an example that need a product with its expert's filters;
            D is d, or d + 1 where a 1 is appended for a bias.
        u: (2K, d) the signals v_1..v_K, c_1..c_K.
        k: (3, n) the other patches are multiples `s u[k]` of them.
        powers: `s**r` (3, n) for each power r of s that an expert's answer holds; none if Q = P.
        y, cluster: (n,) labels and clusters.
    """

    total: Float[Tensor, "n d"]
    dense: Float[Tensor, "n QD"]
    u: Float[Tensor, "S d"]
    k: Int[Tensor, "3 n"]
    powers: dict[int, Float[Tensor, "3 n"]]
    y: Float[Tensor, " n"]
    cluster: Int[Tensor, " n"]


def take_apart(
    name: str, batch: PatchBatch, sigma: Activation, input_scale: float = 1.0, biases: bool = False
) -> Parts:
    """The `Parts` of a batch, its patches multiplied by `input_scale`, for experts with or without biases.

    Raises:
        ValueError: if the patches are not those that the batch's coefficients describe.
    """
    u = torch.cat([batch.v, batch.c])
    s = torch.stack([batch.y * batch.alpha, batch.beta, batch.epsilon * batch.gamma])
    k = torch.stack([batch.cluster, batch.cluster + len(batch.v), batch.other])
    for q, role in enumerate(range(SIGNAL, NOISE)):
        off = (batch.patch(role) - s[q, :, None] * u[k[q]]).abs().max()
        if not off <= 8 * torch.finfo(u.dtype).eps * s[q].abs().max():
            raise ValueError(f"{name}: its patches differ by up to {off:.1e} from what its coefficients describe")
    p = sigma.degree
    exponents = () if p is None else range(0 if biases else p, p + 1)
    by_product = range(NOISE if exponents else SIGNAL, batch.role.shape[1])
    x, ones = input_scale * batch.x, batch.x.new_ones(len(batch), int(biases))
    dense = [torch.cat([input_scale * batch.patch(role), ones], 1) for role in by_product]
    dense = torch.cat([x.new_zeros(len(x), 0), *dense], 1)
    return Parts(x.sum(1), dense, u, k, {r: (input_scale * s) ** r for r in exponents}, batch.y, batch.cluster)


def first_argmax(h: Float[Tensor, "M n"]) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """`h.max(0)`, ties to the first row, by two vectorized maxima: four times as fast on a CPU."""
    winner = h.amax(0)
    from_last = torch.arange(len(h), 0, -1, dtype=torch.int16, device=h.device)[:, None]
    return winner, len(h) - (h.eq(winner) * from_last).amax(0).long()


def grouped(m: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """A stable order of the examples by expert; numpy sorts small integers by digits, torch does not."""
    return torch.from_numpy(np.argsort(m.short().numpy(), kind="stable")) if m.is_cpu else m.argsort(stable=True)


class Experts:
    """M patch CNNs `f_m(x) = sum_j a_j sum_p sigma(<w_mj, x_p> + b_mj)` on examples that chose one each.

    Biases, if any, are a last column of W. The large tensors are allocated once: asking the
    system for fresh memory in every step costs as much as the arithmetic.

    Args:
        x: the examples.
        a: (J,) output signs.
        sigma: the activation.
    """

    def __init__(self, x: Parts, a: Float[Tensor, " J"], sigma: Activation):
        self.x, self.a, self.sigma = x, a, sigma
        self.rows = torch.empty_like(x.dense)
        self.Z = self.S = None

    def forward(self, W: Float[Tensor, "M J D"], m: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`f_{m_i}(x_i)`; keeps what `gradient` needs."""
        M, J, D = W.shape
        Q = self.x.dense.shape[1] // D
        self.W, self.m, self.order = W, m, grouped(m)
        torch.index_select(self.x.dense, 0, self.order, out=self.rows)
        sizes = (Q * torch.bincount(m, minlength=M)).tolist()
        self.patches = self.rows.view(-1, D).split(sizes)
        if self.Z is None:
            self.Z, self.S = self.rows.new_empty(2, Q * len(m), J)
        for w, xi, z in zip(W, self.patches, self.Z.split(sizes), strict=True):
            torch.mm(xi, w.T, out=z)
        p = self.sigma.degree
        answers = self.sigma.value(self.Z) if p is None else torch.pow(self.Z, p, out=self.S)
        dense = (answers @ self.a).view(len(m), -1).sum(1)
        return self._known().index_add_(0, self.order, dense)

    def gradient(self, weight: Float[Tensor, " n"]) -> Float[Tensor, "M J D"]:
        """The gradient of `sum_i weight_i f_{m_i}(x_i)` in W."""
        p, scale = self.sigma.degree, weight.index_select(0, self.order)
        S = self.sigma.slope(self.Z) if p is None else torch.pow(self.Z, p - 1, out=self.S)
        S.view(len(weight), -1, len(self.a)).mul_((scale * (p or 1))[:, None, None])
        per_expert = zip(S.split([len(xi) for xi in self.patches]), self.patches, strict=True)
        to_W = torch.stack([s.T @ xi for s, xi in per_expert])
        return to_W.add_(self._known_gradient(weight)).mul_(self.a[:, None])

    def _known(self) -> Float[Tensor, " n"]:
        """What known patches add: `(s A + b)^p` is a sum over r of `s^r binom(p, r) A^r b^(p-r)`, A = <w, u>."""
        x, d, p = self.x, self.x.u.shape[1], self.sigma.degree
        self.A = x.u @ self.W[:, :, :d].mT
        self.b = self.W[:, :, d:].mT if self.W.shape[2] > d else self.W.new_ones(1)
        self.key = (self.m * len(x.u) + x.k).flatten()
        f = torch.zeros_like(x.y)
        for r, s_r in x.powers.items():
            answer = math.comb(p, r) * (self.A**r * self.b ** (p - r)) @ self.a
            f += (s_r * answer.flatten().index_select(0, self.key).view_as(s_r)).sum(0)
        return f

    def _known_gradient(self, weight: Float[Tensor, " n"]) -> Float[Tensor, "M J D"]:
        x, d, p, A, b = self.x, self.x.u.shape[1], self.sigma.degree, self.A, self.b
        to_W = torch.zeros_like(self.W)
        for r, s_r in x.powers.items():
            pull = A.new_zeros(A.shape[:2].numel()).index_add_(0, self.key, (s_r * weight).flatten())
            pull = math.comb(p, r) * pull.view(*A.shape[:2], 1)
            if r > 0:
                to_W[:, :, :d] += (pull * r * A ** (r - 1) * b ** (p - r)).mT @ x.u
            if r < p:
                to_W[:, :, d:] += (pull * (p - r) * A**r * b ** (p - r - 1)).sum(1, keepdim=True).mT
        return to_W


def forward(experts: Experts, theta: Float[Tensor, "d M"], W: Float[Tensor, "M J D"], noise, variant: Variant):
    """Choices m (n,), softmax pi of the noiseless logits (M, n), gate values (n,), outputs f_{m_i}(x_i) (n,).

    `noise` (M, n) is added to the logits before the choice; None is the test-time rule.
    """
    h = theta.T @ experts.x.total.T
    winner, m = first_argmax(h if noise is None else h + noise)
    pi = h.softmax(0)
    gate = winner if variant.raw_gate else pi.gather(0, m[None]).squeeze(0)
    return m, pi, gate, experts.forward(W, m)


def gradients(experts: Experts, theta, W, noise: Float[Tensor, "M n"], variant: Variant, balance: float):
    """The loss (3.3) at given routing noise, and its gradients in theta (Eq. E.1) and W (Eq. E.2).

    The router's gradient includes `balance` times that of the load-balancing loss
    `M sum_m rho_m q_m`, with rho_m the share of examples sent to expert m and q_m the mean softmax
    probability (Fedus et al. 2021) or, in the released variant, the mean noisy logit.
    """
    y, n, M = experts.x.y, len(experts.x.y), len(W)
    m, pi, gate, f = forward(experts, theta, W, noise, variant)
    margin = y * gate * f
    slope = variant.slope(margin) * y / n
    to_gate = slope * f
    if variant.raw_gate:
        to_h = torch.zeros_like(pi).scatter_(0, m[None], to_gate[None])
    else:
        to_h = (pi * (-gate * to_gate)).scatter_add_(0, m[None], (gate * to_gate)[None])
    if balance:
        rho = torch.bincount(m, minlength=M).to(pi)[:, None] / n
        to_h += balance * M / n * (rho if variant.raw_gate else pi * (rho - (rho * pi).sum(0)))
    return variant.loss(margin).mean(), (to_h @ experts.x.total).T, experts.gradient(slope * gate)


def speed(to_W: Float[Tensor, "M J D"], variant: Variant) -> Float[Tensor, "M 1 1"]:
    """What normalized descent divides an expert's gradient by (Eq. 3.4); infinity for a zero gradient."""
    columns = to_W.split([to_W.shape[2] - variant.biases, int(variant.biases)], dim=2)
    norm = sum(part.flatten(1).norm(dim=1) for part in columns)
    return norm.masked_fill(norm == 0, torch.inf)[:, None, None]


def evaluate(experts: Experts, theta, W, rng: torch.Generator, variant: Variant) -> dict:
    """Test accuracy (a tie y F = 0 is an error, as in Theorem 4.1), dispatch entropy and table."""
    test = experts.x
    noise = uniform(len(W), test, rng) if variant.noisy_test else None
    m, _, gate, f = forward(experts, theta, W, noise, variant)
    right = test.y * gate * f > 0
    return {
        "test_accuracy": float(right.double().mean()),
        "dispatch_entropy": dispatch_entropy(test.cluster, m),
        "dispatch": dispatch_counts(test.cluster, m, len(W)),
    }


def output_signs(filters: int, variant: Variant) -> Float[Tensor, " J"]:
    """The weights a_j of an expert's filters: 1, or with biases -1 on the first half."""
    a = torch.ones(filters)
    a[: filters // 2] -= 2 * variant.biases
    return a


def uniform(experts: int, x: Parts, rng: torch.Generator) -> Float[Tensor, "M n"]:
    """Routing noise: independent draws from Unif[0, 1]."""
    return torch.rand(experts, len(x.y), generator=rng, dtype=x.y.dtype, device=x.y.device)


@torch.no_grad()
def train_patch_moe(
    train: PatchBatch,
    test: PatchBatch,
    *,
    experts: int = 8,
    filters: int = 16,
    activation: str = "cubic",
    steps: int,
    seeds: tuple[int, ...] = (0,),
    eta: float = 1e-3,
    eta_r: float = 0.1,
    sigma_0: float = 0.01,
    normalized: bool = True,
    balance: float = 0.0,
    same_start: bool = False,
    variant: str = "as written",
    record_every: int = 100,
    measure: Callable[[dict[str, Tensor]], dict] | None = None,
) -> list[Run]:
    """Algorithm 1 of Chen et al. (2022), once for each seed.

    Experts step by per-expert normalized gradient (Eq. 3.4), the router by plain gradient (Eq. 3.5)
    from zero, selection adds Unif[0, 1] noise in training and none at test time, and the gate value
    is the softmax of the noiseless logits. An expert without a gradient stays where it is. The
    defaults are those of Appendix A.2; the paper names no sigma_0.

    Args:
        train, test: batches of `PatchTask.sample`, on the device and in the dtype to train with.
        experts, filters: M and J; in the released variant J is even, half for each logit.
        activation: a key of `moe_theory.models.experts.ACTIVATIONS`.
        steps: number T of full-batch iterations, at least 1.
        seeds: one run each; a seed draws the initialization and the routing noise.
        eta, eta_r: learning rates of experts and router, > 0.
        sigma_0: scale of the initialization, > 0; the released variant has its own.
        normalized: whether the experts' gradients are divided by their norms.
        balance: coefficient of the load-balancing loss, >= 0.
        same_start: whether all experts start from the same weights.
        variant: "as written" or "released", see `moe_theory.training.variants`.
        record_every: steps between two entries of `Run.history`, at least 1.
        measure: called with the parameters after each recorded step; its dict joins the entry.

    Raises:
        ValueError: for an argument outside its range, naming it, or a batch whose patches are not
            those that its coefficients describe.
    """
    check.integer("experts", experts, 1)
    check.integer("steps", steps, 1)
    check.integer("record_every", record_every, 1)
    for name, value in (("eta", eta), ("eta_r", eta_r), ("sigma_0", sigma_0)):
        check.positive(name, value)
    check.not_negative("balance", balance)
    sigma = ACTIVATIONS[check.choice("activation", activation, ACTIVATIONS)]
    how = VARIANTS[check.choice("variant", variant, VARIANTS)]
    if check.integer("filters", filters, 1) % 2 and how.biases:
        raise ValueError(f"filters: expected an even number, half for each logit, got {filters}")
    a = output_signs(filters, how).to(train.y)
    data, held_out = (
        Experts(take_apart(name, batch, sigma, how.input_scale, how.biases), a, sigma)
        for name, batch in (("train", train), ("test", test))
    )
    d = train.x.shape[2]
    runs = []
    for seed in seeds:
        W = how.initial(d, experts, filters, sigma_0, seed).to(a)
        W = W[:1].repeat(experts, 1, 1) if same_start else W
        theta = a.new_zeros(d, experts)
        rng = torch.Generator(theta.device).manual_seed(seed)
        history, least = [], torch.inf
        for t in range(1, steps + 1):
            loss, to_theta, to_W = gradients(data, theta, W, uniform(experts, data.x, rng), how, balance)
            stop = how.stops(loss.item(), least)
            least = min(least, loss.item())
            if not stop:
                theta -= eta_r * to_theta
                W -= eta * (to_W / speed(to_W, how) if normalized else to_W)
            if stop or t == steps or t % record_every == 0:
                entry = {"step": t, "loss": loss.item(), **evaluate(held_out, theta, W, rng, how)}
                history.append({**entry, **(measure({"theta": theta, "W": W}) if measure else {})})
            if stop:
                break
        last = history[-1]
        runs.append(Run(seed, last["test_accuracy"], last["dispatch_entropy"], history, {"theta": theta, "W": W}))
    return runs
