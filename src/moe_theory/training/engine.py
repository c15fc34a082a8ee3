"""Algorithm 1 at full scale: the step of `algorithm1.step` without the products it does not need.

Each example touches one expert, and three of its P patches are multiples s u of 2K known signals u.
If sigma(z) = z^p, an expert's answer to such a patch is a polynomial in s with one set of
coefficients for each signal, so a table of M x 2K numbers serves all examples, and only the P - 3
noise patches enter a matrix product, grouped by expert. A step then costs about 4 n d M operations in
the router, forward and back, and 4 n (P-3) d J in the experts, whatever M is. Other activations send
all P patches through that product.

At such counts the time goes into memory. So the tensors with n rows or columns are allocated once and
written over, step after step, and what is computed for each example stays in the order of the experts.
`benchmarks/` sets the time against the operations and the bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy
from moe_theory.models.experts import ACTIVATIONS, Activation
from moe_theory.streams import stream
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
        u: (2K, d) the signals v_1..v_K, c_1..c_K; the other patches are multiples s u of them.
        powers: the powers r of s that an expert's answer to those holds; none if Q = P.
        known: (R 2K, n) for each of the R powers and each signal, `s**r`; 0 where an example has no such patch.
        y, cluster: (n,) labels and clusters.
    """

    total: Float[Tensor, "n d"]
    dense: Float[Tensor, "n QD"]
    u: Float[Tensor, "S d"]
    powers: tuple[int, ...]
    known: Float[Tensor, "RS n"]
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
    powers = () if p is None else tuple(range(0 if biases else p, p + 1))
    by_product = range(NOISE if powers else SIGNAL, batch.role.shape[1])
    x, ones = input_scale * batch.x, batch.x.new_ones(len(batch), int(biases))
    dense = [torch.cat([input_scale * batch.patch(role), ones], 1) for role in by_product]
    dense = torch.cat([x.new_zeros(len(x), 0), *dense], 1)
    known = x.new_zeros(len(powers), len(u), len(x))
    for table, r in zip(known, powers, strict=True):
        table.scatter_(0, k, (input_scale * s) ** r)
    return Parts(x.sum(1), dense, u, powers, known.flatten(0, 1), batch.y, batch.cluster)


@dataclass(frozen=True)
class Dispatch:
    """Who was sent where, the examples in the order of their experts.

    Attributes:
        at: (n,) the places m_i n + i of the choices in a flattened table (M, n), rising.
        order: (n,) the examples i in that order.
        sizes: how many examples each expert got.
    """

    at: Int[Tensor, " n"]
    order: Int[Tensor, " n"]
    sizes: list[int]

    @property
    def expert(self) -> Int[Tensor, " n"]:
        """m_i, in that order."""
        return self.at // len(self.at)


def places(table: Bool[Tensor, "M n"]) -> Int[Tensor, " N"]:
    """Where a flattened table is true; numpy reads eight truth values at once, torch does not."""
    return torch.from_numpy(np.flatnonzero(table.numpy())) if table.is_cpu else table.flatten().nonzero().flatten()


def equal(h: Float[Tensor, "M n"], top: Float[Tensor, " n"]) -> Bool[Tensor, "M n"]:
    """`h == top`; on a CPU numpy compares many numbers at once, torch does not."""
    return torch.from_numpy(np.equal(h.numpy(), top.numpy())) if h.is_cpu else h == top


def dispatch(h: Float[Tensor, "M n"]) -> Dispatch:
    """Every example to the expert with its largest entry, ties to the first.

    Raises:
        ValueError: if h holds a NaN.
    """
    M, n = h.shape
    top = h.amax(0)
    if top.sum().isnan():
        raise ValueError(f"h: expected numbers, got NaN for {int(top.isnan().sum())} of {n} examples")
    at = places(chosen := equal(h, top))
    if len(at) > n:
        at = places(chosen & (chosen.cumsum(0) == 1))
    ends = torch.searchsorted(at, n * torch.arange(M + 1, device=at.device))
    return Dispatch(at, at % n, ends.diff().tolist())


def all_to_one(x: Parts) -> Dispatch:
    """The dispatch to a layer of one expert."""
    every = torch.arange(len(x.y), device=x.y.device)
    return Dispatch(every, every, [len(every)])


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
        self.rows, self.numbers = torch.empty_like(x.dense), torch.arange(len(x.y), device=x.y.device)
        self.rank, self.logits = torch.empty_like(self.numbers), x.y.new_empty(0, len(x.y))
        self.Z = self.S = None

    def tables(self, M: int) -> tuple[Float[Tensor, "M n"], Float[Tensor, "M n"]]:
        """Standing memory for two numbers of every expert and example; the first holds the logits."""
        if len(self.logits) != M:
            self.logits, self.table = self.x.y.new_empty(2, M, len(self.x.y))
        return self.logits, self.table

    def forward(self, W: Float[Tensor, "M J D"], sent: Dispatch) -> Float[Tensor, " n"]:
        """`f_{m_i}(x_i)` in the order of the experts; keeps what `gradient` needs."""
        self.W, self.sent = W, sent
        return self._known() + self._dense(self._grouped())

    def gradient(self, weight: Float[Tensor, " n"]) -> Float[Tensor, "M J D"]:
        """The gradient of `sum_i weight_i f_{m_i}(x_i)` in W; the weights are in the order of the experts."""
        return self._known_gradient(weight, self._dense_gradient(weight)).mul_(self.a[:, None])

    def _grouped(self) -> Float[Tensor, "n QD"]:
        """The rows of `x.dense` in the order of the experts; a CPU reads them as they lie and writes to M places."""
        if len(self.W) == 1:
            return self.x.dense
        if not self.rows.is_cpu:
            return torch.index_select(self.x.dense, 0, self.sent.order, out=self.rows)
        self.rank.index_copy_(0, self.sent.order, self.numbers)
        self.rows.numpy()[self.rank.numpy()] = self.x.dense.numpy()
        return self.rows

    def _dense(self, rows: Float[Tensor, "n QD"]) -> Float[Tensor, " n"]:
        """What the patches add that need products."""
        n, (_, J, D) = len(rows), self.W.shape
        Q, p = rows.shape[1] // D, self.sigma.degree
        if self.Z is None:
            self.Z, self.S = rows.new_empty(2, Q * n, J)
        self.sizes = [Q * size for size in self.sent.sizes]
        self.patches = rows.view(-1, D).split(self.sizes)
        for xi, w, z in zip(self.patches, self.W.mT.contiguous(), self.Z.split(self.sizes), strict=True):
            torch.mm(xi, w, out=z)
        answers = self.sigma.value(self.Z) if p is None else torch.pow(self.Z, p, out=self.S)
        return answers.view(n, Q * J) @ self.a.repeat(Q)

    def _dense_gradient(self, weight: Float[Tensor, " n"]) -> Float[Tensor, "M J D"]:
        p, to_W = self.sigma.degree, torch.empty_like(self.W)
        S = self.sigma.slope(self.Z) if p is None else torch.pow(self.Z, p - 1, out=self.S)
        S.view(len(weight), S.numel() // len(weight)).mul_((weight * (p or 1))[:, None])
        for s, xi, to_w in zip(S.split(self.sizes), self.patches, to_W, strict=True):
            torch.mm(s.T, xi, out=to_w)
        return to_W

    def _known(self) -> Float[Tensor, " n"]:
        """What known patches add: `(s A + b)^p` is a sum over r of `s^r binom(p, r) A^r b^(p-r)`, A = <w, u>."""
        x, (M, J, _), p = self.x, self.W.shape, self.sigma.degree
        if not x.powers:
            return torch.zeros_like(x.y)
        self.filters, self.b = self.W[:, :, : x.u.shape[1]].flatten(0, 1), self.W[:, :, x.u.shape[1] :]
        self.A = (self.filters @ x.u.T).view(M, J, -1)
        answers = torch.cat([math.comb(p, r) * (self.a @ self._power(r, p - r)) for r in x.powers], 1)
        return torch.mm(answers, x.known, out=self.tables(M)[1]).take(self.sent.at)

    def _power(self, r: int, q: int) -> Float[Tensor, "M J S"]:
        """A^r b^q, without a product by b^0."""
        return self.A**r * self.b**q if q else self.A**r

    def _known_gradient(self, weight: Float[Tensor, " n"], to_W: Float[Tensor, "M J D"]) -> Float[Tensor, "M J D"]:
        """`to_W` and what known patches add to it."""
        x, M, p = self.x, len(to_W), self.sigma.degree
        if not x.powers:
            return to_W
        pulls = self.tables(M)[1].zero_().put_(self.sent.at, weight) @ x.known.T
        for r, pull in zip(x.powers, pulls.split(len(x.u), 1), strict=True):
            pull = math.comb(p, r) * pull[:, None]
            if r > 0:
                to_A = (pull * r * self._power(r - 1, p - r)).flatten(0, 1)
                to_W[:, :, : x.u.shape[1]] += (to_A @ x.u).view(M, -1, x.u.shape[1])
            if r < p:
                to_W[:, :, x.u.shape[1] :] += (pull * (p - r) * self._power(r, p - r - 1)).sum(2, keepdim=True)
        return to_W


def softmax_(h: Float[Tensor, "M n"]) -> Float[Tensor, "M n"]:
    """Softmax over the experts in place, row by row; torch's own goes down the columns."""
    h.sub_(h.amax(0)).exp_()
    return h.div_(h.sum(0))


def forward(experts: Experts, theta: Float[Tensor, "d M"], W: Float[Tensor, "M J D"], noise, variant: Variant):
    """The dispatch, softmax pi of the noiseless logits (M, n), gate values (n,), outputs f_{m_i}(x_i) (n,).

    `noise` (M, n) is added to the logits before the choice; None is the test-time rule. Gate values
    and outputs are in the order of the experts, and pi is None where the gate is the noisy logit.
    """
    h, noisy = experts.tables(len(W))
    torch.mm(theta.T.contiguous(), experts.x.total.T, out=h)
    noisy = h if noise is None else torch.add(h, noise, out=noisy)
    sent = dispatch(noisy)
    pi = None if variant.raw_gate else softmax_(h)
    gate = (noisy if variant.raw_gate else pi).take(sent.at)
    return sent, pi, gate, experts.forward(W, sent)


def gradients(experts: Experts, theta, W, noise: Float[Tensor, "M n"], variant: Variant, balance: float):
    """The loss (3.3) at given routing noise, and its gradients in theta (Eq. E.1) and W (Eq. E.2).

    The router's gradient includes `balance` times that of the load-balancing loss
    `M sum_m rho_m q_m`, with rho_m the share of examples sent to expert m and q_m the mean softmax
    probability (Fedus et al. 2021) or, in the released variant, the mean noisy logit.
    """
    sent, pi, gate, f = forward(experts, theta, W, noise, variant)
    loss, slope = loss_and_slope(experts.x.y.take(sent.order), gate, f, variant)
    to_h = to_logits(experts, sent, pi, slope * f if pi is None else slope * f * gate, balance)
    return loss, (to_h @ experts.x.total).T, experts.gradient(slope * gate)


def loss_and_slope(y: Float[Tensor, " n"], gate: Float[Tensor, " n"], f: Float[Tensor, " n"], variant: Variant):
    """The mean loss of the outputs F = gate f, and its derivative in each F."""
    margin = y * gate * f
    return variant.loss(margin).mean(), variant.slope(margin) * y / len(y)


def to_logits(experts: Experts, sent: Dispatch, pi, pull: Float[Tensor, " n"], balance: float) -> Float[Tensor, "M n"]:
    """The loss's gradient in the logits, `pull_i (1[m_i = m] - pi_m)`, or without pi where the gate is raw."""
    M, n = len(sent.sizes), len(pull)
    to_h, _ = experts.tables(M)
    if balance:
        rho = pull.new_tensor(sent.sizes)[:, None] / n
        to_balance = balance * M / n * (rho if pi is None else pi * (rho - (rho * pi).sum(0)))
    if pi is None:
        to_h.zero_()
    else:
        torch.mul(pi, torch.empty_like(pull).index_copy_(0, sent.order, -pull), out=to_h)
    to_h.view(-1).index_add_(0, sent.at, pull)
    return to_h.add_(to_balance) if balance else to_h


def speed(to_W: Float[Tensor, "M J D"], variant: Variant) -> Float[Tensor, "M 1 1"]:
    """What normalized descent divides an expert's gradient by (Eq. 3.4); infinity for a zero gradient."""
    parts = (to_W[:, :, :-1], to_W[:, :, -1:]) if variant.biases else (to_W,)
    norm = sum(torch.linalg.vector_norm(part, dim=(1, 2)) for part in parts)
    return norm.masked_fill(norm == 0, torch.inf)[:, None, None]


def evaluate(experts: Experts, theta, W, seed: int, step: int, variant: Variant) -> dict:
    """Test accuracy (a tie y F = 0 is an error, as in Theorem 4.1), dispatch entropy and table.

    Noise at test time has a stream for each step, so that it does not depend on which steps are recorded.
    """
    test = experts.x
    noise = None
    if variant.noisy_test:
        noise = uniform(experts, len(W), stream(seed, "test noise", step))
    sent, _, gate, f = forward(experts, theta, W, noise, variant)
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


def uniform(experts: Experts, M: int, rng: np.random.Generator) -> Float[Tensor, "M n"]:
    """Routing noise: independent draws from Unif[0, 1], in the memory of the noisy logits."""
    noise = experts.tables(M)[1]
    return noise.copy_(torch.from_numpy(rng.random(noise.shape, dtype=np.float32)))


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
        rng = stream(seed, "routing noise")
        history, least = [], torch.inf
        for t in range(1, steps + 1):
            loss, to_theta, to_W = gradients(data, theta, W, uniform(data, experts, rng), how, balance)
            stop = how.stops(loss.item(), least)
            least = min(least, loss.item())
            if not stop:
                theta -= eta_r * to_theta
                W -= eta * (to_W / speed(to_W, how) if normalized else to_W)
            if stop or t == steps or t % record_every == 0:
                entry = {"step": t, "loss": loss.item(), **evaluate(held_out, theta, W, seed, t, how)}
                history.append({**entry, **(measure({"theta": theta, "W": W}) if measure else {})})
            if stop:
                break
        last = history[-1]
        runs.append(Run(seed, last["test_accuracy"], last["dispatch_entropy"], history, {"theta": theta, "W": W}))
    return runs
