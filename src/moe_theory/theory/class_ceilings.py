"""What each kind of single expert could reach on the task of Table 7 of Chen et al. (2022), without noise patches.

Strengths are uniform on (1, 2). A noise patch lowers no number here but that of cubic experts, which then come near
7/8 only as d grows; for linear ones the upper ends hold with noise patches, too.
"""

from typing import NamedTuple

from moe_theory import _validate as check
from moe_theory.models.experts import ACTIVATIONS
from moe_theory.theory.linear_ceiling import PROVED, exact_linear_error, explicit_expert, two_cluster_optimum
from moe_theory.theory.single_expert import ceiling

MOST_CUBIC = 6  # clusters for which cubic experts attain 7/8


class ClassCeiling(NamedTuple):
    """Ends between which the supremum of a class's accuracies lies, and whether an expert is known to attain it."""

    low: float
    high: float
    attained: bool


def class_ceilings(K: int = 4) -> dict[str, ClassCeiling]:
    """The ceilings of the six activations of Table 7, and of experts blind to centres, for 2 to 6 clusters.

    Cubic experts attain 7/8 by polynomials. Wide ReLU, CELU, GELU and tanh experts attain it because the expert with
    7/8 is continuous on the signals and each of its margins is at least 1 away from 0.
    """
    if check.integer("K", K, 2) > MOST_CUBIC:
        raise ValueError(f"K: expected at most {MOST_CUBIC}, the most clusters for which all are known, got {K}")
    every, blind = (ceiling((1, 2), (1, 2), blind=b) for b in (False, True))
    found = {name: ClassCeiling(every, every, True) for name in ACTIVATIONS}
    low = 1 - float(exact_linear_error(*explicit_expert(K)))
    if K == 2:
        _, least, most = two_cluster_optimum()
        found["linear"] = ClassCeiling(float(1 - most), float(1 - least), True)
    else:
        found["linear"] = ClassCeiling(low, 1 - PROVED[min(K, max(PROVED))], False)
    return found | {"blind to centres": ClassCeiling(blind, blind, True)}
