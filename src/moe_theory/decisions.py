"""The table of decisions of the chapter on routers: what is advised, on which condition, and the claims it rests on.

Names in braces are numbers that the chapter computes and puts in.
"""

from typing import NamedTuple


class Decision(NamedTuple):
    """One choice of someone who builds a mixture.

    Attributes:
        decision, advice, condition: in words.
        rests_on: ids of claims.
    """

    decision: str
    advice: str
    condition: str
    rests_on: tuple[str, ...]


DECISIONS = (
    Decision(
        "A mixture at all",
        "train a plain network of as many products beside it",
        "the wall, single intervals: the plain network is ahead on {plain_ahead}, behind on {plain_behind} tasks",
        ("book-router-clusters",),
    ),
    Decision(
        "Order, K = 1",
        "softmax before the selection, the kept gate as it is",
        "the other way only the balancing loss teaches the router: better on {better} task of four, worse on {worse}",
        ("smooth-prop-1", "book-router-graph", "book-router-order"),
    ),
    Decision(
        "Order, K = 2",
        "both teach the router; try before first",
        "seen after the fact, on tasks with regions; after needs experts that meet and disagree",
        ("smooth-prop-1", "book-router-graph"),
    ),
    Decision(
        "More heads",
        "not to revive a router",
        "no cell of the wall is decided; {times:.1f} times the products beside affine experts, next to nothing beside "
        "wide ones",
        ("smooth-fig-6",),
    ),
    Decision(
        "Train the router",
        "yes, where clusters have functions of their own",
        "small tasks; where one function does it costs a little; in small language models the gain is of the "
        "size of the seeds' spread",
        ("book-router-clusters", "dikkala-fig-5"),
    ),
    Decision(
        "K",
        "two experts rather than one, if you can pay: in use they cost twice as much",
        "at equal evaluations in the training on {ahead} tasks of nine (this chapter's table of twice the steps, no "
        "card), the order of the softmax changed with it; 400 steps; not where one expert to a cluster is right",
        ("smooth-fig-3",),
    ),
    Decision(
        "Noise",
        "wider than the lag of an expert that is still to be tried, or none",
        "bounded noise, K = 1; which width is best is open",
        ("chen-lem-c.4", "book-smooth-tv"),
    ),
    Decision(
        "Drawing experts at random",
        "not for accuracy",
        "one draw, also in the test; draws in training only were not tried; what it smooths is the mean over draws",
        ("book-soft-expected", "smooth-thm-2"),
    ),
    Decision(
        "Balancing loss",
        "softmax probabilities, layer by layer; set it by the load",
        "no effect on the loss that eight seeds show, K = 2; it helps and ruins trainings of chapter 7; only layer by "
        "layer balances every layer, whether that trains better is not measured; the best value is open",
        ("chen-tab-9", "chen-tab-10", "book-pooled-balance"),
    ),
    Decision(
        "Cosine scores",
        "only with a learned temperature; no gain over linear shows",
        "the wall: decided nowhere, single intervals behind linear on {tempered_behind} tasks of nine, ahead on "
        "{tempered_ahead}; eight seeds; small language models; no gain from tau = 0.1 shows",
        ("nguyen-eq-4", "nguyen-tab-2", "nguyen-tab-3"),
    ),
    Decision(
        "Start",
        "rows at samples chosen far apart; zero does no harm that shows",
        "measured for rows chosen far apart, proved for random ones with the bias; "
        "clusters far apart and of one width; trained here only from the first eight samples, undecided",
        ("dikkala-thm-2",),
    ),
    Decision(
        "Start from copies",
        "not behind a gate normalized over the selected, unless something else parts them",
        "the router's gradient is zero while they agree",
        ("smooth-prop-1",),
    ),
    Decision(
        "Decay of the router",
        "a little on its rows; on a bias less, or none",
        "proved for minima, Gaussian inputs that carry no signal; a penalty in the loss, not AdamW's decay",
        ("dikkala-thm-1", "book-spurious-bias"),
    ),
    Decision(
        "Precision",
        "logits in float32, or ask how many tokens a rounding moves",
        "their share is in proportion to the rounding",
        ("book-noisy-set",),
    ),
    Decision(
        "Compare checkpoints",
        "after the mean row is taken off and experts are matched",
        "softmax gates",
        ("nguyen-prop-1",),
    ),
    Decision(
        "Prune or merge",
        "not homogeneous experts (ReLU, linear) one by one",
        "more experts than the data call for",
        ("book-split-exact",),
    ),
    Decision(
        "Code you did not write",
        "lower an unselected logit; differentiate the balancing loss",
        "single precision",
        ("book-diagnose-faults",),
    ),
)
