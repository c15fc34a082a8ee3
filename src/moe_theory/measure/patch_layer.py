"""What a layer on the patch task tells apart, and how far it is from the layers that the theory describes.

Parameters are those of a `PatchMoE` as a training reports them: `theta` (d, M) of the router, `W` (M, J, d) of the
experts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.measure.inner import expert_errors
from moe_theory.models.experts import ACTIVATIONS
from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import CENTER, FEATURE_NOISE, NOISE, SIGNAL, PatchBatch, PatchTask


def sign_pair(batch: PatchBatch) -> Int[Tensor, " n"]:
    """The signs (y, epsilon) of each example, as a number from 0 to 3."""
    return ((batch.y > 0) * 2 + (batch.epsilon > 0)).long()


def with_weights(theta: Float[Tensor, "d M"], W: Float[Tensor, "M J d"], activation: str) -> PatchMoE:
    """The layer of these weights, none of which is trained further."""
    layer = PatchMoE(W.shape[2], W.shape[0], W.shape[1], activation).requires_grad_(False)
    layer.router.theta.data, layer.W.data = theta, W
    return layer


def wrong(layer: PatchMoE, batch: PatchBatch) -> Tensor:
    """Which examples of a batch a layer gets wrong, a tie being an error: (n,) bool."""
    return batch.y * layer(batch.x)[0] <= 0


def look(now: dict[str, Tensor], test: PatchBatch, activation: str) -> dict:
    """What experts and router of a layer tell apart.

    Returns:
        `differ`: size of the experts' differences in their response to label signals (a power of the inner
        products, summed over filters, as it enters the router's gradient), over that to centers;
        `reads`: size of the router's weights along centers, over that along label signals;
        `vote`: of the latter, squared, the share along the sum of the label signals;
        `signs`: entropy in nats of the pair of signs given the expert;
        `accuracies`: share of a cluster's examples that an expert gets right (M, K);
        `best`: in percent, mean over clusters of the largest of them;
        `by_centers`, `by_labels`: test accuracy in percent if the experts saw only their part in the span of
        the centers, or of the label signals, behind the same router.
    """
    theta, W, layer = now["theta"], now["W"], with_weights(now["theta"], now["W"], activation)
    responses = (((W @ u.T) ** ACTIVATIONS[activation].degree).sum(1) for u in (test.v, test.c))
    to_v, to_c = ((r - r.mean(0)).norm().item() for r in responses)
    along_c, along_v = ((u @ theta).norm().item() for u in (test.c, test.v))
    total = test.v.sum(0) / len(test.v) ** 0.5
    accuracies = 1 - expert_errors(layer, test)
    parts = {"by_centers": test.c, "by_labels": test.v}
    right = {name: ~wrong(with_weights(theta, W @ u.T @ u, activation), test) for name, u in parts.items()}
    return {
        "differ": to_v / to_c,
        "reads": along_c / along_v,
        "vote": ((total @ theta).norm().item() / along_v) ** 2,
        "signs": dispatch_entropy(sign_pair(test), layer(test.x)[1]),
        "accuracies": accuracies,
        "best": 100 * accuracies.amax(0).mean().item(),
        **{name: 100 * r.double().mean().item() for name, r in right.items()},
    }


def off_the_set(parameters: dict[str, Tensor], task: PatchTask, test: PatchBatch, activation: str) -> dict[str, Tensor]:
    """How far layer and router are from one that sees only features and one that sees only centers (Prop. E.9).

    Returns:
        `off_center`: (M,) root mean square of `h(x) - h(center)` over its expected size at these weights;
        `off_noise`: (M,) the same over its size if the weights were zero on label signals; `on_centers`: (M,)
        the squared share of router weights on centers; `rest`: mean `|f|` over centers and noise patches, over
        that over label signals and feature noise, all experts.

    Raises:
        ValueError: for a task without noise patches.
    """
    check.integer("task.P", task.P, NOISE + 1)
    theta, W = parameters["theta"], parameters["W"]
    off = ((test.x.sum(1) - test.patch(CENTER)) @ theta).square().mean(0).sqrt()
    noise = theta.norm(dim=0) * task.sigma_p * ((task.P - NOISE) / task.d) ** 0.5
    moments = _second_moment(*task.alpha) + _second_moment(*task.gamma)
    signals = (test.v @ theta).square().mean(0) * moments

    def answers(*roles):
        z = torch.stack([test.patch(role) for role in roles], 1) @ W.flatten(0, 1).T
        return ACTIVATIONS[activation].value(z).sum(1).unflatten(1, W.shape[:2]).sum(2).abs().mean()

    return {
        "off_center": off / (noise**2 + signals).sqrt(),
        "off_noise": off / noise,
        "on_centers": ((theta.T @ test.c.T).norm(dim=1) / theta.norm(dim=0)).square(),
        "rest": answers(CENTER, *range(NOISE, test.x.shape[1])) / answers(SIGNAL, FEATURE_NOISE),
    }


def _second_moment(low: float, high: float) -> float:
    """Of a uniform variable."""
    return (low**2 + low * high + high**2) / 3


def spread(parameters: dict[str, Tensor], train: PatchBatch, profession: Int[Tensor, " M"]) -> float:
    """`Delta_Theta` (Appendix E.2): the largest difference of logits of two experts of one M_k on its cluster."""
    h = train.x.sum(1) @ parameters["theta"]
    of_group = [h[train.cluster == c][:, profession == c] for c in range(len(train.v)) if (profession == c).sum() > 1]
    return max(float((g.amax(1) - g.amin(1)).max()) for g in of_group) if of_group else 0.0


def sampling_errors(
    batch: PatchBatch, layer: PatchMoE, m: Int[Tensor, " n"], u: Float[Tensor, "U d"], r: Float[Tensor, "R d"]
) -> tuple[Float[Tensor, "M U"], Float[Tensor, "M J R"]]:
    """Standard errors of a sample's gradients, if their expectations are zero (Chen et al. 2022, Eq. E.1, E.2).

    Along a direction a gradient is the mean of one term an example; this is the root of the sum of the squares of
    these terms, over n.

    Args:
        batch, layer: the sample and the layer; its router may read anything.
        m: the expert that each example is sent to.
        u, r: directions, for the router's gradient and for the filters'.

    Returns:
        Those of the router's gradient along u and of the filters' along r; 0 for an expert that gets no example.
    """
    n, i, y, W = len(batch), torch.arange(len(batch)), batch.y, layer.W.data
    pi = layer.router(batch.x).softmax(1).detach()
    f = layer.dispatched(batch.x, m).detach()
    weight = -torch.sigmoid(-y * pi[i, m] * f) * pi[i, m] * y
    sent = -pi * (weight * f)[:, None]
    sent[i, m] += weight * f
    router = (sent**2).T @ (batch.x.sum(1) @ u.T) ** 2
    slope = layer.sigma.slope(torch.einsum("npd,njd->njp", batch.x, W[m]))
    term = torch.einsum("n,njp,npr->njr", weight, slope, batch.x @ r.T)
    experts = term.new_zeros(*W.shape[:2], len(r)).index_add_(0, m, term**2)
    return router.sqrt() / n, experts.sqrt() / n
