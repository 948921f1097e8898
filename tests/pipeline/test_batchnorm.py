"""What batch normalisation costs a step beside the layers themselves."""

from collections import Counter
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cnnstrategies.pipeline.buffers import StageBuffers

MICROBATCHES = 8


class Calls(TorchDispatchMode):
    """Counts calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.light
@pytest.mark.parametrize("mode", ["deferred", "microbatch"])
def test_running_statistics_take_few_calls_and_read_no_value(mode: Any) -> None:
    """All 53 layers of a ResNet-50 together: on a GPU each call takes longer than its arithmetic."""
    layers = [module for module in torchvision.models.resnet50().modules() if isinstance(module, nn.BatchNorm2d)]
    stage = nn.Sequential(*layers)
    buffers = StageBuffers(stage, mode, None, Counter(str(index) for index in range(len(layers))))
    for _ in range(2):
        with Calls() as calls:
            buffers.begin(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            with buffers.microbatch(microbatch), torch.no_grad():
                for layer in layers:
                    layer(torch.ones(2, layer.num_features, 1, 1))
        with calls:
            buffers.finish()
    assert sum(calls.names.values()) < 100, calls.names
    assert not {"_local_scalar_dense", "item", "is_nonzero"} & calls.names.keys()
    assert {int(layer.num_batches_tracked) for layer in layers} == {2 if mode == "deferred" else 2 * MICROBATCHES}
