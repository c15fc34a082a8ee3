"""Training one patch CNN on the patch task, as for Tables 7 and 8 of Chen et al. (2022)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.experts import PatchCNN
from moe_theory.tasks.patches import PatchBatch
from moe_theory.training.grouped import Experts, all_to_one
from moe_theory.training.parts import take_apart
from moe_theory.training.variants import logistic_loss, loss_slope

#: Examples whose activations fit the cache together; the gradient of an epoch is summed over such parts.
PART = 1000

#: Section 6 of the paper names gradient descent for single models, its Appendix A.2 Adam.
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}

#: How far a loss must lie above the smallest before it to end a released training.
RISE = 0.02


def _parts(name: str, batch: PatchBatch, model: PatchCNN, scale: float) -> list[Experts]:
    parts = (batch[i : i + PART] for i in range(0, len(batch), PART))
    return [Experts(take_apart(name, part, model.sigma, scale, biases=True), model.a, model.sigma) for part in parts]


def _outputs(part: Experts, model: PatchCNN) -> Float[Tensor, " n"]:
    """F(x) of one part: a layer of one expert that gets every example."""
    W = torch.cat([model.w, model.b[:, None]], 1)[None]
    return part.forward(W, all_to_one(part.x))


def _accuracy(model: PatchCNN, parts: list[Experts]) -> float:
    right = torch.cat([part.x.y * _outputs(part, model) > 0 for part in parts])
    return float(right.double().mean())


@torch.no_grad()
def train_single_expert(
    train: PatchBatch,
    test: PatchBatch,
    *,
    activation: str,
    filters: int = 128,
    epochs: int = 800,
    optimizer: str = "adam",
    learning_rate: float = 0.01,
    weight_decay: float = 5e-4,
    input_scale: float = 1.0,
    seed: int = 0,
    record_every: int = 10,
    stop_after: int | None = None,
) -> tuple[PatchCNN, list[dict]]:
    """Full-batch Adam (Appendix A.2) or gradient descent (Section 6) on the logistic loss.

    Args:
        train, test: batches of `PatchTask.sample`.
        activation: a key of `moe_theory.models.experts.ACTIVATIONS`.
        filters: number of filters, even; half carry the output sign +1, half -1.
        epochs: full-batch steps.
        optimizer: a key of `OPTIMIZERS`.
        learning_rate, weight_decay: of the optimizer.
        input_scale: multiplies every patch; the released notebooks use 10.
        seed: of the initialization.
        record_every: epochs between two entries of the history.
        stop_after: after so many steps the first loss more than `RISE` above the smallest one before it
            ends the training, without a step; 500 in the released notebooks, None trains to the end.

    Returns:
        The trained model (acting on scaled inputs) and its history: epoch, loss before its step, and the
        accuracy after it on train and test, in [0, 1]. The last entry is the last epoch, or the one that
        ended the training.

    Raises:
        ValueError: for an argument outside its range, naming it.
    """
    check.integer("epochs", epochs, 1)
    check.integer("record_every", record_every, 1)
    check.positive("learning_rate", learning_rate)
    check.positive("input_scale", input_scale)
    if stop_after is not None:
        check.integer("stop_after", stop_after, 0)
    for name, batch in (("train", train), ("test", test)):
        check.instance(name, batch, PatchBatch).checked(name)
    model = PatchCNN(train.x.shape[2], filters, activation, seed).to(train.x)
    rule = OPTIMIZERS[check.choice("optimizer", optimizer, OPTIMIZERS)]
    descent = rule(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    data, held_out = _parts("train", train, model, input_scale), _parts("test", test, model, input_scale)
    history, least = [], math.inf
    for epoch in range(1, epochs + 1):
        loss, gradient = 0.0, 0.0
        for part in data:
            y = part.x.y
            margin = y * _outputs(part, model)
            loss += float(logistic_loss(margin).sum()) / len(train)
            gradient = gradient + part.gradient(loss_slope(margin) * y / len(train))[0]
        stopped = stop_after is not None and epoch - 1 > stop_after and loss > least + RISE
        least = min(least, loss)
        if not stopped:
            model.w.grad, model.b.grad = gradient[:, :-1], gradient[:, -1]
            descent.step()
        if stopped or epoch % record_every == 0 or epoch == epochs:
            history.append(
                {
                    "epoch": epoch,
                    "loss": loss,
                    "train": _accuracy(model, data),
                    "test": _accuracy(model, held_out),
                }
            )
        if stopped:
            break
    return model, history
