"""Training: Algorithm 1 of Chen et al. (2022), the variant their notebooks run, single experts."""

from moe_theory.training.algorithm1 import expert_gradient, router_gradient
from moe_theory.training.engine import Run, train_patch_moe
from moe_theory.training.single import train_single_expert

__all__ = ["Run", "expert_gradient", "router_gradient", "train_patch_moe", "train_single_expert"]
