"""Examples grouped by the expert they were sent to, and what the experts answer.

At full scale the time goes into memory. So the tensors with n rows or columns are allocated once and written
over, step after step, and what is computed for each example stays in the order of the experts.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory.models.experts import Activation
from moe_theory.training.parts import Parts


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
        S = self.sigma.slope(self.Z) if p is None else torch.pow(self.Z, p - 1, out=self.S)  # pyright: ignore
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
        answers = torch.cat([math.comb(p, r) * (self.a @ self._power(r, p - r)) for r in x.powers], 1)  # pyright: ignore
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
                to_A = (pull * r * self._power(r - 1, p - r)).flatten(0, 1)  # pyright: ignore[reportOptionalOperand]
                to_W[:, :, : x.u.shape[1]] += (to_A @ x.u).view(M, -1, x.u.shape[1])
            if r < p:
                to_W[:, :, x.u.shape[1] :] += (pull * (p - r) * self._power(r, p - r - 1)).sum(2, keepdim=True)  # pyright: ignore
        return to_W
