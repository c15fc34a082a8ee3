"""What can be found wrong with a layer, and the claim of the book that says why it matters."""

from typing import NamedTuple

#: Decisions that chance could bring about are taken at this level.
LEVEL = 1e-6


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        claim: id of the claim behind it.
        says: what is found; act: what can be done.
    """

    claim: str
    says: str
    act: str


FINDINGS = {
    "gate": Kind(
        "book-diagnose-faults",
        "the layer's output is that of no known gate on its own logits",
        "compare the numbers of the experts and their gates where they are handed on",
    ),
    "config": Kind(
        "book-diagnose-faults",
        "the gate, the constant factor on it or the number of experts is not the one that the configuration names",
        "set the configuration to what the code computes, or change the code",
    ),
    "gradient": Kind(
        "smooth-prop-1",
        "the task loss gives the router no gradient at the tokens asked, or one that is not its gate's",
        "with one expert selected, take the gate from a softmax over all; with copies as experts, wait until they "
        "differ; else look for a detached tensor, in the router or behind the experts, or for logits so far apart that "
        "their softmax has saturated",
    ),
    "selection": Kind(
        "book-noisy-set",
        "tokens go to experts other than those of the largest logits",
        "look for a bias, a mask, a sort or a permutation between the logits and the dispatch, or for logits so far "
        "apart that the smaller probabilities round to 0",
    ),
    "balance": Kind(
        "book-pooled-balance",
        "the balancing loss has not the gradient of its formula at these loads",
        "where selection is found too, mend that first; else hand it logits before any softmax, for it takes one "
        "itself, and the number of experts selected",
    ),
    "dropped": Kind(
        "chen-eq-6.1",
        "tokens pass the layer without an expert",
        "raise the capacity, or balance the load",
    ),
    "ties": Kind(
        "book-noisy-set",
        "more logits tie within their rounding than chance gives",
        "compute its logits in higher precision; a router that starts at zero is meant to tie, and there noise or the "
        "order of the experts decides",
    ),
    "dead": Kind(
        "chen-tab-9",
        "experts that are never selected, or that answer 0",
        "show it more tokens; if they stay idle, balance the load, or remove them: idle is no failure by itself; "
        "weights of 0 are left by pruning, or where a copy broke off",
    ),
    "twins": Kind(
        "book-split-exact",
        "experts with one and the same function",
        "at the start of a training from copies they are meant; later no data tell what each does, only what both do",
    ),
}


class Finding(NamedTuple):
    """One thing found wrong.

    Attributes:
        name: key of `FINDINGS`; where: the layer.
        value: what was measured; limit: what it was compared with.
        detail: which experts, gate or loss.
    """

    name: str
    where: str
    value: float
    limit: float
    detail: str

    @property
    def claim(self) -> str:
        return FINDINGS[self.name].claim
