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
        "the gate is not the one that the configuration names",
        "set the configuration to the gate that the code computes, or change the code",
    ),
    "gradient": Kind(
        "smooth-prop-1",
        "the task loss gives the router no gradient, or one that is not its gate's",
        "with one expert selected, take the gate from a softmax over all; look for a detached tensor",
    ),
    "selection": Kind(
        "book-noisy-set",
        "tokens go to experts other than those of the largest logits",
        "look for a mask, a sort or a permutation between the logits and the dispatch",
    ),
    "balance": Kind(
        "book-pooled-balance",
        "the balancing loss has not the gradient of its formula at these loads",
        "hand it the raw logits and the number of experts selected",
    ),
    "dropped": Kind(
        "chen-eq-6.1",
        "tokens pass the layer without an expert",
        "raise the capacity, or balance the load",
    ),
    "ties": Kind(
        "book-noisy-set",
        "more logits tie within their rounding than chance gives",
        "start the router away from zero, and compute its logits in higher precision",
    ),
    "dead": Kind(
        "chen-tab-4",
        "experts that are never selected",
        "balance the load, or remove them",
    ),
    "twins": Kind(
        "book-split-exact",
        "experts with one and the same function",
        "merge them: no data tell what each of them does",
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
        """Id of the claim behind it."""
        return FINDINGS[self.name].claim
