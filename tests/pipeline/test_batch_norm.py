"""Tests of the buffers that steps change: running statistics of batch normalisation and buffers of other layers."""

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline
from tests.runner.ranks import run_ranks

# Channels of the layers that compute statistics in training, and the largest number of calls of a layer.
CHANNELS, LAYERS, CALLS = 8, 2, 2


class Network(nn.Module):
    """A network with batch normalisation that runs once, twice or only in evaluation, and other layers with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.once = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.left, self.right, self.twice = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.evaluated = nn.BatchNorm2d(4)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.instance, self.head = nn.InstanceNorm2d(4, track_running_stats=True), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.once(x)[:, :, 2:, 2:] + self.twice(self.left(x)).relu() + self.twice(self.right(x))
        if not self.training:
            x = self.evaluated(x)
        return self.head(self.instance(self.spectral(x)).flatten(1))


def buffers_after_steps(recompute: str, microbatches: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
    """Return the buffers of this rank's stage, the buffers of one process, and the messages with statistics.

    Each message has its bytes, and the number of the rank's backwards that had not ended when it was sent.
    """
    network = Network().double()
    alone = copy.deepcopy(network)
    options: Any = {"activation_checkpointing": recompute, "shares": (1, 3, 1)}
    pipeline = Pipeline(network, ["stem"], (1, 2), microbatches, **options)
    generator = torch.Generator().manual_seed(1)
    sent: list[Any] = []
    ended: list[str] = []
    pipeline.watchers.append(lambda span: ended.append(span.kind))
    gather = dist.all_gather_into_tensor

    def counted(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if group is pipeline.reducer.group:
            sent.append((tensor.nbytes, len(pipeline.own_microbatches) - ended.count("backward")))
        return gather(output, tensor, group=group, async_op=async_op)

    with mock.patch.object(dist, "all_gather_into_tensor", counted):
        for size in (16, 8, 16):
            images = 3 * torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64) + 20
            pipeline.train(pipeline.share(images, torch.randint(5, (size,), generator=generator)), F.cross_entropy)
            ended.clear()
            with torch.no_grad():
                alone(images)
    return dict(pipeline.module.named_buffers()), dict(alone.named_buffers()), sent


def test_running_statistics_of_batch_norm_equal_one_process() -> None:
    """Running statistics equal one process's, and all buffers are equal on the replicas of a stage.

    A replica sends one mean and variance for each channel and call in a step, whatever the number of its microbatches,
    and begins to send them before its last backward.
    """
    for recompute, microbatches in (("never", 4), ("always", 8)):
        _, *replicas = run_ranks(3, buffers_after_steps, recompute, microbatches)
        (buffers, expected, _), (replica_buffers, _, _) = replicas
        assert buffers.keys() == replica_buffers.keys() == expected.keys()
        for name, value in buffers.items():
            assert torch.equal(replica_buffers[name], value), (recompute, name)
            if name.startswith(("once", "twice", "evaluated")):
                torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
        for *_, sent in replicas:
            # Each call of a layer has a number of values, and each of its channels a mean and a variance, in float64.
            assert sent == [(8 * CALLS * (LAYERS + 2 * CHANNELS), 1)] * 3
