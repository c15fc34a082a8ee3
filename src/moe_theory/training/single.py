"""Training one patch CNN on the patch task, as for Tables 7 and 8 of Chen et al. (2022)."""

import torch

from moe_theory import _validate as check
from moe_theory.models.experts import PatchCNN
from moe_theory.tasks.patches import PatchBatch
from moe_theory.training.variants import logistic_loss

#: Examples whose activations fit the cache together; the gradient of an epoch is summed over such parts.
PART = 1000


@torch.no_grad()
def _accuracy(model: PatchCNN, batch: PatchBatch, scale: float) -> float:
    right = [(y * model(scale * x) > 0).double().sum() for x, y in _parts(batch)]
    return float(sum(right) / len(batch))


def _parts(batch: PatchBatch):
    return zip(batch.x.split(PART), batch.y.split(PART), strict=True)


def train_single_expert(
    train: PatchBatch,
    test: PatchBatch,
    *,
    activation: str,
    filters: int = 128,
    epochs: int = 800,
    learning_rate: float = 0.01,
    weight_decay: float = 5e-4,
    input_scale: float = 1.0,
    seed: int = 0,
    record_every: int = 10,
) -> tuple[PatchCNN, list[dict]]:
    """Full-batch Adam on the logistic loss (Appendix A.2).

    Args:
        train, test: batches of `PatchTask.sample`.
        activation: a key of `moe_theory.models.experts.ACTIVATIONS`.
        filters: number of filters, even; half carry the output sign +1, half -1.
        epochs: full-batch steps.
        learning_rate, weight_decay: of Adam.
        input_scale: multiplies every patch; the released notebooks use 10.
        seed: of the initialization.
        record_every: epochs between two entries of the history.

    Returns:
        The trained model (acting on scaled inputs) and its history: epoch, loss, and the accuracy on
        train and test, in [0, 1].

    Raises:
        ValueError: for an argument outside its range, naming it.
    """
    check.integer("epochs", epochs, 1)
    check.integer("record_every", record_every, 1)
    check.positive("learning_rate", learning_rate)
    check.positive("input_scale", input_scale)
    model = PatchCNN(train.x.shape[2], filters, activation, seed).to(train.x)
    adam = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    history = []
    for epoch in range(1, epochs + 1):
        adam.zero_grad()
        loss = 0.0
        for x, y in _parts(train):
            part = logistic_loss(y * model(input_scale * x)).sum() / len(train)
            part.backward()
            loss += part.item()
        adam.step()
        if epoch % record_every == 0 or epoch == epochs:
            history.append(
                {
                    "epoch": epoch,
                    "loss": loss,
                    "train": _accuracy(model, train, input_scale),
                    "test": _accuracy(model, test, input_scale),
                }
            )
    return model, history
