import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from moe_theory.measure.pairs import lead, p_value

ONE, OTHER = np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 2.9])


def test_a_lead_is_by_number_of_examples():
    rows = [
        dict(model=model, n=n, seed=seed, loss=value * (1 if n == 8 or model == "b" else 0.1))
        for model, values in (("a", ONE), ("b", OTHER))
        for n in (8, 16)
        for seed, value in enumerate(values)
    ]
    rows.append(dict(model="b", n=32, seed=0, loss=1.0))
    found = lead(pd.DataFrame(rows).sample(frac=1, random_state=0), "loss", "a", "b")
    assert list(found.index) == [8, 16] and list(found.every) == [False, True]
    assert found.ratio.tolist() == pytest.approx([6 / 7.9, 0.6 / 7.9])
    assert found.p[8] == pytest.approx(ttest_1samp(np.log(ONE / OTHER), 0).pvalue)
    assert found.p[8] == pytest.approx(p_value(ONE, OTHER))


def test_models_without_common_rows_are_refused():
    rows = pd.DataFrame([dict(model="a", n=1, seed=0, loss=1.0), dict(model="b", n=2, seed=0, loss=1.0)])
    for other in ("b", "c"):
        with pytest.raises(ValueError, match="^model, other: expected"):
            lead(rows, "loss", "a", other)
