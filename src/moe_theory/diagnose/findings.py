"""What can be found wrong with a layer, and the claim of the book that says why it matters."""

from typing import NamedTuple

#: Decisions that chance could bring about are taken at this level.
LEVEL = 1e-6

#: Share of the experts beyond the k of a collapsed router in use below which a collapse is found, by default.
COLLAPSE = 0.1


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
        "compare the numbers of the experts and their gates where they are handed on, and look for a temperature",
    ),
    "bias in gate": Kind(
        "book-diagnose-faults",
        "the gates are taken from the scores with the bias, which is there to select",
        "select with the bias, and gather the gates from the scores without it",
    ),
    "config": Kind(
        "book-diagnose-faults",
        "the gate or the number of experts is not the one that the configuration names",
        "set the configuration to what the code computes, or change the code",
    ),
    "factor": Kind(
        "book-diagnose-faults",
        "the constant factor on the gates is not the one that the configuration names",
        "multiply once, in the router or behind the experts",
    ),
    "shared gate": Kind(
        "book-diagnose-faults",
        "a part of the block beside router and experts has no effect on what it returns",
        "look where the shared expert, its gate or the norm is added; a converter may have left it out",
    ),
    "gradient": Kind(
        "smooth-prop-1",
        "the task loss gives the router no gradient at the tokens asked, or one that is not its gate's",
        "with one expert selected, take the gate from a softmax over all; with copies as experts, wait until they "
        "differ; else look for a detached tensor, or for a softmax that has saturated",
    ),
    "frozen": Kind(
        "smooth-prop-1",
        "experts are trained, and no router is",
        "set requires_grad of the routers' weights, or name them among the modules to be trained",
    ),
    "selection": Kind(
        "book-noisy-set",
        "tokens go to experts other than those of the largest scores",
        "look for a mask, a sort or a permutation between the scores and the dispatch, or for logits so far apart that "
        "the smaller probabilities round to 0",
    ),
    "bias lost": Kind(
        "book-noisy-set",
        "the router has a bias that selects, and tokens are sent as if it had none",
        "add it to the scores before the experts are selected",
    ),
    "bias rounded": Kind(
        "book-noisy-set",
        "the bias that selects is kept, or added, in half precision",
        "keep it in single precision, and take it out of what converts the model",
    ),
    "scores rounded": Kind(
        "book-noisy-set",
        "scores are rounded, to half precision or to 0, before experts are selected, and ties are broken by number",
        "select by the logits or by scores in single precision, and round the gates afterwards",
    ),
    "groups": Kind(
        "book-noisy-set",
        "tokens are not limited to the groups of experts that the configuration names",
        "compare number of groups, groups kept, and what a group is valued by: its largest score, or its two largest; "
        "experts of other groups need minus infinity for a score, as 0 may be the largest",
    ),
    "balance": Kind(
        "book-pooled-balance",
        "the balancing loss has not the gradient of its formula at these loads",
        "where selection is found too, mend that first; else hand it logits before any softmax, for it takes one "
        "itself, and the number of experts selected",
    ),
    "loads": Kind(
        "book-pooled-balance",
        "the balancing loss counts other loads than those dispatched",
        "hand it the experts that were selected; it selects again by the logits, without the bias or the groups",
    ),
    "padding": Kind(
        "book-pooled-balance",
        "the balancing loss counts padding",
        "hand it the attention mask",
    ),
    "unused": Kind(
        "book-pooled-balance",
        "a balancing loss is configured, and a training step does not add it",
        "switch output_router_logits on in the call; some families read it in the configuration, too",
    ),
    "dropped": Kind(
        "chen-eq-6.1",
        "tokens pass the layer with fewer experts than others, or without one",
        "raise the capacity, or balance the load",
    ),
    "capacity": Kind(
        "chen-eq-6.1",
        "an expert takes more tokens than the capacity that is configured",
        "expect the time and memory of the busiest expert, or use code that has a capacity",
    ),
    "collapse": Kind(
        "chen-tab-9",
        "few experts get most of the tokens",
        "balance the load, or lower the rate with which the router learns; the limit is the argument collapse",
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
