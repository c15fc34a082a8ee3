"""What is read off a trained model."""

from moe_theory.measure.dispatch import dispatch_counts, dispatch_entropy

__all__ = ["dispatch_counts", "dispatch_entropy"]
