"""What steps change beside gradients: running statistics of batch normalisation, and the buffers of other layers."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cnnstrategies.pipeline.buffers import StageBuffers
from cnnstrategies.pipeline.engine import Pipeline

MICROBATCHES = 4
WAYS = [(mode, recompute) for mode in ("deferred", "microbatch") for recompute in ("never", "always")]


class Network(nn.Module):
    """Layers that normalise once, twice, and in evaluation alone; and others with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.once = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.one, self.two, self.twice = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.evaluated = nn.BatchNorm2d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.instance, self.head = nn.InstanceNorm2d(4, track_running_stats=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(self.stem(x))
        if not self.training:
            x = self.evaluated(x)
        x = self.twice(self.two(self.twice(self.one(x)).relu()))
        return self.head(self.instance(self.spectral(x)).flatten(1))


def buffers_after_steps(mode: Any, recompute: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of this rank's stage, and those that one process has."""
    network = Network().double()
    alone = copy.deepcopy(network)
    options: dict[str, Any] = {"batch_norm": mode, "activation_checkpointing": recompute}
    pipeline = Pipeline(network, ["stem"], (1, 2), MICROBATCHES, **options)
    generator = torch.Generator().manual_seed(1)
    for size in (16, 8, 16):
        images = 3 * torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64) + 20
        batch = pipeline.share(images, torch.randint(5, (size,), generator=generator))
        pipeline.train(batch, F.cross_entropy)
        with torch.no_grad():
            if mode == "deferred":
                # Full-batch statistics of a layer behind another depend on how that one normalised.
                alone.once(alone.stem(images))
                continue
            for microbatch in range(MICROBATCHES):
                alone(images[batch.split.global_rows(microbatch)])
    return dict(pipeline.module.named_buffers()), dict(alone.named_buffers())


def test_running_statistics_of_batch_norm() -> None:
    """Those of one process; and all buffers are alike on the replicas."""
    results = run_ranks(3, lambda: [buffers_after_steps(*way) for way in WAYS])
    for (mode, recompute), _, (found, expected), (other, _) in zip(WAYS, *results, strict=True):
        assert found.keys() == other.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(other[name], value), (mode, recompute, name)
            if name.startswith("once" if mode == "deferred" else ("once", "twice", "evaluated")):
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


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
    calls = Counter(str(index) for index in range(len(layers)))
    buffers = StageBuffers(nn.Sequential(*layers), mode, None, calls)
    for _ in range(2):
        with Calls() as counted:
            buffers.begin(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            with buffers.microbatch(microbatch), torch.no_grad():
                for layer in layers:
                    layer(torch.ones(2, layer.num_features, 1, 1))
        with counted:
            buffers.finish()
    assert sum(counted.names.values()) < 100, counted.names
    assert not {"_local_scalar_dense", "item", "is_nonzero"} & counted.names.keys()
