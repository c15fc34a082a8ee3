"""The table of decisions of the chapter on routers: what is advised, when, how large it was, and what it rests on.

Names in braces are numbers that the chapter computes and puts in. A size is a loss over the reference's, if nothing
else is said.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

WHEN = ("before the first run", "while it trains", "when it is read", "not covered")


class Decision(NamedTuple):
    """One choice of someone who builds a mixture.

    Attributes:
        when: one of `WHEN`.
        decision, advice, condition: in words; the advice is "open" where the rows leave it so.
        size: how large the effect was, "" where no number of the chapter says it.
        rests_on: ids of claims that carry the advice or its condition.
        shown: where the rest of it is shown, if no card judges that.
    """

    when: str
    decision: str
    advice: str
    condition: str
    size: str
    rests_on: tuple[str, ...]
    shown: str = ""


BEFORE, WHILE, READ, NOT = WHEN
DECISIONS = (
    Decision(
        BEFORE,
        "A mixture at all",
        "train a plain network of as many products beside it",
        "single intervals: the plain network is ahead on {plain_ahead}, behind on {plain_behind} tasks",
        "plain network: {ends[plain network]}, by the task",
        (),
        "no card: the wall",
    ),
    Decision(
        BEFORE,
        "Train the router",
        "yes, where clusters have functions of their own",
        "small tasks; where one function does it costs a little; in small language models the gain is of the "
        "size of the seeds' spread",
        "frozen: {four[frozen]} on the four tasks with regions",
        ("book-router-clusters", "dikkala-fig-5"),
    ),
    Decision(
        BEFORE,
        "Selected, K",
        "two experts rather than one, if you can pay: in use they cost twice as much",
        "two are ahead, on {ahead} tasks of nine, of one with twice the steps, which has the other order of the "
        "softmax besides; 400 steps; not where one expert to a cluster is right; smooth-fig-3 compares all five "
        "experts with one whose router has no gradient, at equal steps",
        "one expert, twice the steps: {twice}, by the task; against two with the same softmax behind on {ahead_same}; "
        "all eight: {nine[dense softmax]}, at {dense_times} times the products",
        ("smooth-fig-3",),
        "no card: the table of twice the steps",
    ),
    Decision(
        BEFORE,
        "Order, K = 1",
        "softmax before the selection, the kept gate as it is",
        "the other way only the balancing loss teaches the router: of the four tasks with regions better on {better}, "
        "worse on {worse}",
        "after over before: {order_1} on the four tasks with regions, {order_1_all} on all nine, by the task",
        ("smooth-prop-1", "book-router-graph", "book-router-order"),
    ),
    Decision(
        BEFORE,
        "Order, K = 2",
        "open; both teach the router",
        "after needs experts that meet and disagree; that before is ahead on the tasks with regions taken together was "
        "seen after the fact (on {order_2_behind} of the four its mean is behind); over all nine nothing is decided",
        "before: {four[softmax, then top 2]} on the four, {nine[softmax, then top 2]} on all nine, "
        "{patches} on patches",
        ("smooth-prop-1", "book-router-graph"),
        "no card: the wall",
    ),
    Decision(
        BEFORE,
        "More heads",
        "not to revive a router",
        "in loss {decided[heads]} of its nine cells on the wall are decided; beside wide experts they cost next to "
        "nothing",
        "heads: {times:.1f} times the products, beside affine experts",
        ("smooth-fig-6",),
    ),
    Decision(
        BEFORE,
        "Cosine scores",
        "if at all, with a learned temperature; no gain over linear shows",
        "with it {decided[cosine, tempered]} of nine cells are decided on the wall, by single intervals behind linear "
        "on {tempered_behind}, ahead on {tempered_ahead}; no gain from tau = 0.1 shows, there and in small language "
        "models",
        "cosine: {nine[cosine]}; tempered: {nine[cosine, tempered]}",
        ("book-router-perturbed", "nguyen-tab-2", "nguyen-tab-3"),
        "the temperature, no card: the wall",
    ),
    Decision(
        BEFORE,
        "Drawn experts",
        "not for accuracy",
        "gates of the softmax over all experts; gates normalized over the drawn set, which the rates of chapter 18 are "
        "about, were not on the wall; one draw, also in the test; draws in training only were not tried; what it "
        "smooths is the mean over draws",
        "one draw of two experts: {nine[sampled 2]}",
        ("book-soft-expected", "smooth-thm-2"),
        "accuracy, no card: the wall",
    ),
    Decision(
        BEFORE,
        "Start",
        "open; rows at samples, if there are enough, give every cluster a specialist; rows of zeros do no harm that "
        "shows, if experts differ",
        "clusters far apart and of one width; proved for random samples with the bias, measured for samples chosen far "
        "apart; trained here from the first eight samples only, undecided",
        "samples: {start_gaussians} on gaussians, {start_fashion} on fashion",
        ("dikkala-thm-2",),
        "trainings, no card: one decision in several degrees",
    ),
    Decision(
        BEFORE,
        "Start from copies",
        "behind a gate normalized over the selected the router learns nothing of the task until they differ: give it "
        "rows of its own, not zeros",
        "the task's gradient in the router is zero while they agree; tokens that go to other experts part them in a "
        "step, and a balancing loss moves the router meanwhile",
        "zero at the start, for K above 1 up to rounding",
        ("smooth-prop-1",),
    ),
    Decision(
        BEFORE,
        "Code you did not write",
        "lower an unselected logit; differentiate the balancing loss",
        "single precision",
        "",
        ("book-diagnose-faults",),
    ),
    Decision(
        WHILE,
        "Balancing loss",
        "let it be computed from softmax probabilities, layer by layer if every layer shall be balanced, and set it by "
        "the load; a library's function may take the softmax itself: then hand it logits",
        "no effect on the loss that eight seeds show, on two tasks, K = 2; it helps and ruins trainings of chapter 7; "
        "only layer by layer balances every layer, whether that trains better is not measured; the best value is open",
        "experts in use on fashion: {used}, coefficient 0 and 1",
        ("chen-tab-9", "chen-tab-10", "book-pooled-balance"),
    ),
    Decision(
        WHILE,
        "Noise",
        "wider than the lag of an expert that is still to be tried, or none",
        "bounded noise, K = 1; the wider it is, the less a step of the logits changes who is selected; which width is "
        "best is open",
        "fashion, ten times the usual width over 0.3: {noise}; on gaussians it does not show",
        ("chen-lem-c.4", "book-smooth-tv"),
        "losses, no card: one decision in several degrees",
    ),
    Decision(
        WHILE,
        "Decay of the router",
        "open; a little on its rows empties them of what carries no signal; on a bias less, or none",
        "a router with a bias: without one spurious weights can stay at a minimum, and common code has none; proved "
        "for minima and Gaussian inputs; a penalty in the loss, not AdamW's decay; in chapter 9 it cost loss at "
        "every seed with one set of choices, and went either way with another",
        "",
        ("dikkala-thm-1", "book-spurious-bias", "dikkala-exp-spurious"),
    ),
    Decision(
        WHILE,
        "Precision",
        "logits in float32, or ask how many tokens a rounding moves",
        "small roundings, taken for independent noise; how many move, not what that costs",
        "their share is in proportion to the rounding",
        ("book-noisy-set",),
    ),
    Decision(
        READ,
        "Compare checkpoints",
        "after what no gate sees is taken off, and experts are matched",
        "softmax gates. Linear scores: the mean row of all experts. Perturbed: the mean of beta / (|beta| + tau). "
        "Cosine: compare directions; with no more experts than inputs they are one choice of several",
        "",
        ("book-router-graph", "nguyen-prop-1", "book-cosine-fibre"),
    ),
    Decision(
        READ,
        "Prune or merge",
        "not homogeneous experts one by one: what two of them do together is determined, not what each does",
        "a softmax over all experts: with K selected two copies take two places, and no split is exact; more experts "
        "than the data call for; ReLU and linear experts, and by the same argument all with a linear last "
        "layer, SwiGLU among them, which are homogeneous in that layer",
        "",
        ("book-split-exact",),
    ),
    Decision(
        NOT,
        "What was not trained here",
        "–",
        "capacity limits and dropped tokens; shared and fine-grained experts; biases that only select; a router's "
        "z-loss; sigmoid gates; normalized gates at K above 2, but for one sweep; hundreds of experts; long trainings",
        "",
        (),
        "no rows",
    ),
)


def tables(numbers: Mapping[str, object], link: Callable[[str], str]) -> Iterator[list[dict[str, str]]]:
    """The rows of each part of the table, with the chapter's numbers put in and links to the claims.

    Args:
        numbers: what stands for the names in braces.
        link: what makes a link of an id.
    """
    for when, part in groupby(DECISIONS, lambda d: d.when):
        yield [
            {
                when: d.decision,
                "advice": d.advice,
                "condition": d.condition.format_map(numbers),
                "how large": d.size.format_map(numbers) or "–",
                "rests on": ", ".join([*map(link, d.rests_on), *filter(None, [d.shown])]),
            }
            for d in part
        ]
