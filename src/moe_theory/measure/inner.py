"""Inner products of a patch MoE's parameters with the signals: what experts and router have learned."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory.models.moe import PatchMoE
from moe_theory.tasks.patches import PatchBatch


def professions(W: Float[Tensor, "M J d"], v: Float[Tensor, "K d"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """Definition D.3: `(k*_m, j*_m) = argmax_{k,j} <v_k, w_mj>` of every expert; M_k holds the m with k*_m = k."""
    products = v @ W.mT
    best = products.flatten(1).argmax(1)
    return best // W.shape[1], best % W.shape[1]


def inner_products(parameters: dict[str, Tensor], batch: PatchBatch) -> dict[str, Float[Tensor, "M K"]]:
    """What Figures 5 and 6 of Chen et al. (2022) show, one number per expert m and cluster k.

    Returns:
        `expert_v`, `expert_c`: `max_j <w_mj, v_k>` and `max_j <w_mj, c_k>`; `router_v`, `router_c`:
        `<theta_m, v_k>` and `<theta_m, c_k>`.
    """
    theta, W, d = parameters["theta"], parameters["W"], batch.v.shape[1]
    signals = {"v": batch.v, "c": batch.c}
    experts = {f"expert_{name}": (W[:, :, :d] @ u.T).amax(1) for name, u in signals.items()}
    return experts | {f"router_{name}": theta.T @ u.T for name, u in signals.items()}


def feature_ratios(products: dict[str, Float[Tensor, "M K"]]) -> dict[str, Float[Tensor, " M"]]:
    """Of `inner_products`: does an expert hold one label signal and no center, and its router only centers?

    Returns:
        For each expert `second` and `centers`, its second label signal and its largest center over its leading
        label signal, and `router`, the largest of its router weights on label signals over the largest on centers,
        in absolute value.
    """
    v = products["expert_v"].sort(1, descending=True).values
    return {
        "second": v[:, 1] / v[:, 0],
        "centers": products["expert_c"].amax(1) / v[:, 0],
        "router": products["router_v"].abs().amax(1) / products["router_c"].abs().amax(1),
    }


def expert_errors(model: PatchMoE, batch: PatchBatch) -> Float[Tensor, "M K"]:
    """`P(y f_m(x) <= 0 | cluster k)`: how often each expert alone errs on each cluster of a batch."""
    with torch.no_grad():
        wrong = (batch.y * model.answers(batch.x).T <= 0).double()
    counts = torch.bincount(batch.cluster, minlength=len(batch.v))
    return wrong.new_zeros(len(wrong), len(counts)).index_add_(1, batch.cluster, wrong) / counts
