"""Tests of comparisons up to rounding, in pieces of some rows."""

import pytest
import torch

from cnnstrategies.pipeline import combining
from cnnstrategies.pipeline.combining import is_near

pytestmark = pytest.mark.light


@pytest.mark.parametrize("piece", [1, 5, 2**20])
def test_the_largest_element_of_a_whole_tensor_is_the_measure_of_all_its_pieces(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combining, "PIECE", piece)
    values = torch.ones(7, 3, dtype=torch.float64)
    values[6] = 1000.0
    for row, difference, near in ((0, 0.5, True), (6, 0.5, True), (0, 2.0, False), (6, 2.0, False)):
        other = values.clone()
        other[row, 2] += difference
        assert is_near(other, values, 1e-3) is near
        assert is_near(torch.complex(values, other), torch.complex(values, values), 1e-3) is near
    unknown = values.clone()
    unknown[3] = torch.nan
    assert is_near(unknown, unknown.clone(), 1e-3)
    assert not is_near(unknown, values, 1e-3)
    assert is_near(torch.tensor(2.0), torch.tensor(2.0), 0.0)
    assert not is_near(values[:6], values, 1e-3)
