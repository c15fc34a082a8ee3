"""Mixtures whose gates are a softmax over all experts, and dense networks, R of them side by side.

Training weights the answers of all experts; a trained mixture sends an input to one (Dikkala et al. 2023, Section 2).
Weights are stacked, so that a step of all R networks is one batch of products.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_theory import _validate as check
from moe_theory.streams import stream


def _stacked(seeds: Sequence[int], purpose: str, shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """For each shape a parameter (R, *shape) from N(0, 1 / last dimension), network r from the stream of `seeds[r]`."""
    streams = [stream(seed, purpose) for seed in seeds]
    drawn = [np.stack([rng.standard_normal(s) for rng in streams]) / math.sqrt(s[-1]) for s in shapes]
    return [nn.Parameter(torch.from_numpy(w).float()) for w in drawn]


class Nets(nn.Module):
    """R times M networks side by side, `a <- ReLU(W a + b)` from layer to layer, without the ReLU after the last.

    Args:
        sizes: of the input, the hidden layers and the output.
        number: M.
        seeds: R of them; each draws the weights of M networks, from N(0, 1/fan_in). Biases start at zero.
        purpose: of the streams that they are drawn from.

    Attributes:
        W: of every layer (R, M, out, in); b: of every layer (R, M, out).
    """

    def __init__(self, sizes: Sequence[int], number: int, seeds: Sequence[int], *, purpose: str = "weights"):
        super().__init__()
        shapes = [(check.integer("number", number, 1), out, d) for d, out in pairwise(sizes)]
        self.W = nn.ParameterList(_stacked(seeds, purpose, shapes))
        self.b = nn.ParameterList(torch.zeros(W.shape[:-1]) for W in self.W)

    def forward(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R M n o"]:
        """What all networks say; the M networks r read `x[r]`."""
        R, M = self.b[0].shape[:2]
        a = x[:, None].expand(R, M, *x.shape[1:]).flatten(0, 1)
        for W, b in zip(self.W, self.b, strict=True):
            a = a if W is self.W[0] else a.relu()
            a = torch.baddbmm(b.flatten(0, 1)[:, None], a, W.flatten(0, 1).mT)
        return a.unflatten(0, (R, M))


class DenseNets(nn.Module):
    """R dense networks side by side, one for each seed; the sizes are those of the input, hidden layers and output."""

    def __init__(self, sizes: Sequence[int], seeds: Sequence[int]):
        super().__init__()
        self.nets = Nets(sizes, 1, seeds)

    def forward(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n o"]:
        return self.nets(x)[:, 0]

    routed = forward


class SoftMoE(nn.Module):
    """R mixtures `F(x) = sum_m pi_m(x) f_m(x)` side by side, pi the softmax of the router's logits.

    Args:
        d, outputs: dimensions of an input and of an answer.
        experts: number M of experts.
        expert_layers: layers of products of an expert: 0 for a constant one, a vector that the input does not enter,
            1 for a linear one, 3 for what the paper calls depth 3.
        router_layers: those of the router: 1 for a linear one, `softmax(W x)` without biases; more have biases.
        width: of the hidden layers; 96 in the paper.
        seeds: one mixture each; a seed draws its weights, from N(0, 1/fan_in), where the fan-in of a constant
            expert is M.

    Attributes:
        router: the parameters that logits depend on, as a module: `W` is its list of layers' weights.
        experts: those that the answers depend on: a `Nets`, or the vectors U (R, M, o) of constant experts.

    Raises:
        ValueError: for sizes below 1, or a number of layers outside its range.
    """

    def __init__(
        self,
        d: int,
        outputs: int,
        experts: int,
        *,
        expert_layers: int = 0,
        router_layers: int = 1,
        width: int = 96,
        seeds: Sequence[int] = (0,),
    ):
        super().__init__()
        for name, value in {"d": d, "outputs": outputs, "experts": experts, "width": width}.items():
            check.integer(name, value, 1)
        hidden = [width] * (check.integer("router_layers", router_layers, 1) - 1)
        self.router = Nets([d, *hidden, experts], 1, seeds, purpose="router weights")
        if not hidden:
            self.router.b[0].requires_grad_(False)
        if check.integer("expert_layers", expert_layers, 0):
            self.experts = Nets([d, *[width] * (expert_layers - 1), outputs], experts, seeds)
        else:
            self.experts = nn.Module()
            (U,) = _stacked(seeds, "weights", [(outputs, experts)])
            self.experts.U = nn.Parameter(U.detach().mT.contiguous())

    def probabilities(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n M"]:
        """The gates pi; mixture r reads `x[r]`."""
        return self.router(x)[:, 0].softmax(-1)

    def answers(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R M n o"]:
        if isinstance(self.experts, Nets):
            return self.experts(x)
        return self.experts.U[:, :, None].expand(-1, -1, x.shape[1], -1)

    def forward(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n o"]:
        pi = self.probabilities(x)
        if isinstance(self.experts, Nets):
            return torch.einsum("rnm,rmno->rno", pi, self.answers(x))
        return pi @ self.experts.U

    def chosen(self, x: Float[Tensor, "R n d"]) -> Tensor:
        return self.router(x)[:, 0].argmax(-1)

    def routed(self, x: Float[Tensor, "R n d"]) -> Float[Tensor, "R n o"]:
        """The answer of that expert alone, without its gate: the trained network of Section 2."""
        at = self.chosen(x)[:, None, :, None]
        return self.answers(x).take_along_dim(at, 1)[:, 0]
