"""How much time training networks side by side saves: run it, it prints seconds for a step.

Twenty-five mixtures of 64 constant experts, and five of 64 experts of depth 3, as in Figures 2 and 3 of Dikkala et
al. (2023): all in one `SoftMoE`, and one after the other.
"""

from time import process_time

import torch

from moe_theory.models.soft import SoftMoE
from moe_theory.tasks.gaussians import GaussianMixture
from moe_theory.training.batched import train

BATCH, OPTIMIZERS = (
    64,
    {0: dict(rate=3.2e-4, router_rate=3.2e-3), 3: dict(rate=1e-2, router_rate=1e-1, optimizer="sgd")},
)


def seconds(expert_layers: int, seeds: list[int], steps: int) -> float:
    """Processor time of a step of all these networks."""
    data = [GaussianMixture(64, 24, seed=s).sample(1024, s) for s in seeds]
    networks = SoftMoE(24, 10, 64, expert_layers=expert_layers, seeds=seeds)
    course = train(networks, data, steps=steps + 5, batch=BATCH, seeds=seeds, **OPTIMIZERS[expert_layers])
    for _ in range(5):
        next(course)
    start = process_time()
    for _ in course:
        pass
    return (process_time() - start) / steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    for layers, number, steps in ((0, 25, 200), (3, 5, 10)):
        together = seconds(layers, [*range(number)], steps)
        apart = sum(seconds(layers, [s], steps) for s in range(number))
        print(f"{number} mixtures, {layers} layers: {1e3 * together:.2f} ms, {1e3 * apart:.2f} ms one by one")
