"""A warning about `load_state_dict` with `strict=False` that loads hardly anything."""

import warnings

import pytest
from torch import Tensor, nn

from cnnstrategies.guarding.loading import lines_about_loading, watch_loading


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def state(prefix: str = "", first: int = 0) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in list(network().state_dict().items())[first:]}


@pytest.mark.light
@pytest.mark.parametrize(
    ("values", "strict", "words"),
    [
        (state("module."), False, "has loaded 0 of 7 tensors into Sequential: the state has module.0.weight, and"),
        (state(), False, ""),
        (state(), True, ""),
        (state("module.") | state(first=6), False, ""),  # One tensor of eight is loaded.
        (state(first=6), False, ""),  # A part of the module, as for adapters.
        (state("module.", first=5), False, ""),  # Too few to judge.
        ({}, False, ""),
    ],
)
def test_only_a_state_that_is_hardly_loaded_is_named(values: dict[str, Tensor], strict: bool, words: str) -> None:
    watch_loading()
    watch_loading()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = nn.ModuleList([network()])
        module[0].load_state_dict(values, strict=strict)
    lines = lines_about_loading(module)
    assert [line in str(warning.message) for warning, line in zip(caught, lines, strict=True)] == [True] * len(lines)
    assert [words in line for line in lines] == [True] * bool(words)
    module[0].load_state_dict(state())
    assert lines_about_loading(module) == []
    assert all(warning.filename == __file__ for warning in caught)
