"""One mixture layer in which the router is a choice: how inputs are scored, how experts are selected, what is learned.

R of them train side by side, as in `moe_theory.models.soft`. An input has s parts, such as patches or tokens; the
experts answer each part, and the answers of the parts add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.models.routers import ROUTERS
from moe_theory.models.rules import Rule, gumbel, known, topk_softmax
from moe_theory.models.soft import Nets
from moe_theory.streams import torch_stream

HEAD_WIDTH = 4  # hidden units of each head of the multi-headed router
SCORES = (*ROUTERS, "heads", "none")
NOISES = ("none", "gumbel", "uniform", "hash")
STARTS = ("random", "zero", "samples")


@dataclass(frozen=True)
class Form:
    """What all networks of a task have in common.

    Attributes:
        d: dimension of a part of an input; outputs: of an answer.
        hidden: ReLU units of an expert, 0 for an affine one.
        whole: whether the sum of the parts is routed, and all parts go to its experts, or each part by itself.
    """

    d: int
    outputs: int = 1
    hidden: int = 0
    whole: bool = False

    @property
    def sizes(self) -> list[int]:
        return [self.d, *([self.hidden] if self.hidden else []), self.outputs]


@dataclass(frozen=True)
class Choice:
    """A router as a list of decisions; the defaults are the reference that each other choice differs from.

    Args:
        scores: "linear", "cosine", "perturbed", "heads" (`HEAD_WIDTH` hidden units each) or "none", all scores 0.
        rule: the order of softmax and selection, a `Rule`; k: experts selected.
        noise: added to scores before the selection if the rule needs noise: "gumbel", also in an evaluation;
            "uniform" on [0, 1], not in an evaluation; "hash", a fixed function of the bits of the input.
        scale: of the noise.
        start: of linear router vectors: "random", N(0, 1/d); "zero"; "samples", where the scores select the nearest
            of M training inputs.
        learned: whether the router is trained.
        tempered: whether all scores are multiplied by one learned number, 1 at the start.
        balance: coefficient of the load-balancing loss.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """

    scores: str = "linear"
    rule: Rule = field(default=topk_softmax)
    k: int = 2
    noise: str = "none"
    scale: float = 1.0
    start: str = "random"
    learned: bool = True
    tempered: bool = False
    balance: float = 0.01

    def __post_init__(self):
        check.choice("scores", self.scores, SCORES)
        check.choice("noise", self.noise, NOISES)
        check.choice("start", self.start, STARTS)
        check.integer("k", self.k, 1)
        check.not_negative("scale", self.scale)
        check.not_negative("balance", self.balance)
        if known(self.rule).needs_noise != (self.noise != "none"):
            raise ValueError(f"noise: expected noise if and only if the rule needs it, got {self.noise!r}")
        if self.start != "random" and self.scores != "linear":
            raise ValueError(f"start: expected a random start of {self.scores} scores, got {self.start!r}")


def hashed(x: Float[Tensor, "*batch d"], M: int) -> Float[Tensor, "*batch M"]:
    """M numbers in [0, 1) to an input that depend on all its bits and on nothing else, the same on every machine."""
    rng = torch_stream(0, "hash")
    odd = 2 * torch.randint(2**30, (x.shape[-1], M), generator=rng) + 1
    bits = x.contiguous().view({4: torch.int32, 8: torch.int64}[x.element_size()]).long()
    key = (bits[..., None] * odd.to(x.device)).sum(-2)  # integers wrap around: no rounding
    key = (key ^ (key >> 17)) * 0x9E3779B1
    return ((key >> 13) & 0xFFFFF).to(x) / 2**20


class ChosenMoE(nn.Module):
    """R mixtures `F(x) = sum_p sum_m gate_m f_m(x_p)` over the parts of an input, with the router of a choice.

    Args:
        form: of task and experts; choice: of the router; experts: number M.
        seeds: one mixture each; draws experts, and router from a stream of its own.
        samples: (R, M, d) routed inputs, for the start "samples" only.

    Attributes:
        experts: a `Nets`. router: the parameters that scores depend on, as a module.
    """

    def __init__(
        self,
        form: Form,
        choice: Choice,
        experts: int,
        seeds: Sequence[int],
        *,
        samples: Float[Tensor, "R M d"] | None = None,
    ):
        super().__init__()
        if choice.k > check.integer("experts", experts, 1):
            raise ValueError(f"k: expected at most M = {experts} experts, got {choice.k}")
        if (samples is None) == (choice.start == "samples"):
            raise ValueError(f"samples: expected inputs if and only if they are the start, got start={choice.start!r}")
        self.form, self.choice, self.M = form, choice, experts
        self.experts = Nets(form.sizes, experts, seeds)
        heads = choice.scores == "heads"
        sizes, number = ([form.d, HEAD_WIDTH, 1], experts) if heads else ([form.d, experts], 1)
        self.router = Nets(sizes, number, seeds, purpose="router weights")
        self.router.temperature = nn.Parameter(torch.ones(len(seeds), 1, 1))
        self.router.temperature.requires_grad_(choice.tempered)
        if choice.start != "random":
            self._start(samples)
        if not choice.learned or choice.scores == "none":
            self.router.requires_grad_(False)

    @torch.no_grad()
    def _start(self, samples: Tensor | None) -> None:
        """Zero router vectors, or scores `(x.a - |a|^2 / 2) / d`, largest for the sample a nearest to x."""
        W, b = self.router.W[0], self.router.b[0]
        W.zero_()
        if samples is not None:
            W.copy_(samples[:, None] / self.form.d)
            b.copy_(-samples.square().sum(-1)[:, None] / (2 * self.form.d))

    def routed(self, x: Float[Tensor, "R n s d"]) -> Float[Tensor, "R N d"]:
        return x.sum(2) if self.form.whole else x.flatten(1, 2)

    def scores(self, u: Float[Tensor, "R N d"]) -> Float[Tensor, "R N M"]:
        if self.choice.scores == "none":
            return u.new_zeros(*u.shape[:2], self.M)
        if self.choice.scores == "heads":
            return self.router.temperature * self.router(u)[..., 0].mT
        kind = ROUTERS[self.choice.scores]()
        s = kind.embedding(self.router.W[0][:, 0])
        return self.router.temperature * (kind.feature(u) @ s.mT) + self.router.b[0]

    def noise(self, u: Float[Tensor, "R N d"], rng: torch.Generator) -> Float[Tensor, "R N M"] | None:
        """Noise for the selection, None for a rule without."""
        shape, kind = (*u.shape[:2], self.M), self.choice.noise
        if kind == "none":
            return None
        if kind == "uniform" and not self.training:
            return u.new_zeros(shape)
        drawn = {
            "gumbel": lambda: gumbel(shape, rng),
            "uniform": lambda: torch.rand(shape, generator=rng),
            "hash": lambda: hashed(u, self.M),
        }
        return self.choice.scale * drawn[kind]().to(u)

    def gates(
        self, u: Float[Tensor, "R N d"], rng: torch.Generator
    ) -> tuple[Float[Tensor, "R N M"], Float[Tensor, "R N M"]]:
        h = self.scores(u)
        return self.choice.rule.gates(h, self.choice.k, self.noise(u, rng)), h

    def forward(
        self, x: Float[Tensor, "R n s d"], rng: torch.Generator
    ) -> tuple[Float[Tensor, "R n o"], Float[Tensor, "R N M"], Float[Tensor, "R N M"]]:
        """Outputs, gates and logits; mixture r reads `x[r]`."""
        n, s = x.shape[1:3]
        pi, h = self.gates(self.routed(x), rng)
        by_part = pi.unflatten(1, (n, -1)).expand(-1, -1, s, -1)
        said = self.experts(x.flatten(1, 2)).unflatten(2, (n, s))
        return torch.einsum("rnsm,rmnso->rno", by_part, said), pi, h


class PlainNet(nn.Module):
    """R networks with a layer of `hidden` ReLU units, `F(x) = sum_p f(x_p)`: the baseline without a router."""

    def __init__(self, form: Form, hidden: int, seeds: Sequence[int]):
        super().__init__()
        self.experts = Nets([form.d, hidden, form.outputs], 1, seeds)
        self.router = nn.Module()

    def forward(self, x: Float[Tensor, "R n s d"], rng: torch.Generator) -> tuple[Float[Tensor, "R n o"], None, None]:
        """Outputs; network r reads `x[r]`. There are no gates and no logits."""
        return self.experts(x.flatten(1, 2))[:, 0].unflatten(1, x.shape[1:3]).sum(2), None, None


def balancing(pi: Float[Tensor, "R N M"], h: Float[Tensor, "R N M"]) -> Float[Tensor, " R"]:
    """The load-balancing loss `M sum_m rho_m q_m`: shares of the selections, and mean softmax probabilities."""
    chosen = (pi > 0).to(h)
    rho = chosen.mean(1) / chosen.sum(2).mean(1, keepdim=True)
    return h.shape[-1] * (rho * h.softmax(-1).mean(1)).sum(1)


def layer_flops(sizes: Sequence[int]) -> int:
    """Products and sums of one input through layers of such sizes, biases and activations not counted: `2 d o` each."""
    return sum(2 * a * b for a, b in pairwise(sizes))


def flops(form: Form, choice: Choice, experts: int, parts: int) -> int:
    """What a sparse layer computes for an input of s parts: scores of what is routed, and k experts on each part."""
    scores = {"heads": experts * layer_flops([form.d, HEAD_WIDTH, 1]), "none": 0}
    routed = 1 if form.whole else parts
    scoring = scores.get(choice.scores, layer_flops([form.d, experts]))
    return routed * scoring + parts * choice.k * layer_flops(form.sizes)


def plain_width(form: Form, choice: Choice, experts: int, parts: int) -> int:
    """Hidden units with which a `PlainNet` computes most nearly as much as a sparse layer."""
    unit = parts * layer_flops([form.d, 1, form.outputs])
    return max(1, round(flops(form, choice, experts, parts) / unit))


def selected_expert(pi: Float[Tensor, "R N M"]) -> Int[Tensor, "R N"]:
    """The expert with the largest gate, of equal ones the first."""
    return pi.argmax(-1)
