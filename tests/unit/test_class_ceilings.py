import pytest

from moe_theory.models.experts import ACTIVATIONS
from moe_theory.theory.class_ceilings import class_ceilings


@pytest.mark.parametrize("K", range(2, 7))
def test_only_linear_experts_have_a_lower_ceiling(K):
    found = class_ceilings(K)
    assert [*found] == [*ACTIVATIONS, "blind to centres"]
    for name, one in found.items():
        assert one.low <= one.high
        if name not in ("linear", "blind to centres"):
            assert one[:2] == (0.875, 0.875)
    linear = found["linear"]
    assert found["blind to centres"].high == 0.75 < linear.low and linear.high < 0.8707
    assert linear.high - linear.low < {2: 1e-15, 3: 1e-6, 4: 1e-7, 5: 0.007, 6: 0.008}[K]


def test_the_linear_ceiling_falls_with_the_number_of_clusters():
    low = [class_ceilings(K)["linear"].low for K in range(2, 7)]
    assert low == sorted(low, reverse=True)


@pytest.mark.parametrize("K", [1, 7])
def test_other_numbers_of_clusters_are_refused(K):
    with pytest.raises(ValueError, match="^K: expected"):
        class_ceilings(K)
