"""Layers that are computed twice: only those of which a rank has all values, as others need the other ranks."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.guarding.replay import Replay
from cnnstrategies.recording.steps import StepRecorder


class Counts(nn.Linear):
    """Layer that counts its computations."""

    __module__ = nn.Linear.__module__  # Layers of other packages are not computed twice.
    count = 0

    def forward(self, value: Tensor) -> Tensor:
        self.count += 1
        return super().forward(value)


@pytest.mark.light
@pytest.mark.parametrize("missing", ["", "weight", "argument", "output"])
def test_only_a_layer_of_which_a_rank_has_all_values_is_computed_twice(missing: str) -> None:
    layer, value, places = Counts(2, 3), torch.ones(1, 2), []
    elsewhere = {"weight": layer.weight, "argument": value}.get(missing)

    @contextlib.contextmanager
    def local_code() -> Iterator[None]:
        places.append("local")
        yield

    def is_held(tensor: Tensor) -> bool:
        return tensor is not elsewhere and not (missing == "output" and tensor.shape == (1, 3))

    replay = Replay(nn.Sequential(layer), is_held, local_code, every=2)
    recorder = StepRecorder([replay])
    recorder.begin_batch(value, 0, steps=1)
    layer(value)
    recorder.end_batch(None)
    assert replay.take() == []
    assert layer.count == (1 if missing else 2)
    assert places == {"": ["local"] * 2, "output": ["local"]}.get(missing, [])
