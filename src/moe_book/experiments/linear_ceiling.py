"""Branch and bound for linear experts on the task of Table 7 of Chen et al. (2022), without noise patches.

A row says whether `certify` proved that no linear expert for K clusters errs less often than `error`. The page
computes the rows of two and three clusters again, and one of four.
"""

from moe_theory.theory.linear_ceiling import certify

ERRORS = {2: (0.1305,), 3: (0.16956,), 4: (0.172, 0.176554, 0.1765545), 5: (0.18,)}
SMOKE = dict(K=2, error=0.13)


def grid() -> list[dict]:
    """For two clusters what the convex problem does not settle, for three and four close to the best expert."""
    return [dict(K=K, error=error) for K, errors in ERRORS.items() for error in errors]


def row(key: dict) -> dict:
    """Whether it is proved, the boxes bounded, and the levels of halving."""
    return certify(key["K"], key["error"])._asdict()
