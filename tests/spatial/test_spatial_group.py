"""Divided images between processes, over a process group of torch."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.spatial import GroupLink, SpatialParts
from tests.runner.ranks import run_ranks

torch.manual_seed(5)
NETWORK = nn.Sequential(
    nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3, padding=1)
).double()
IMAGES = torch.randn(2, 3, 23, 10, dtype=torch.float64)
TARGETS = torch.randint(0, 3, (2, 11, 5))


def gradients(images: Tensor, targets: Tensor) -> list[Tensor]:
    network = copy.deepcopy(NETWORK)
    torch.autograd.backward(F.cross_entropy(network(images), targets))
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


def train() -> tuple[list[Tensor], list[Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    with SpatialParts(GroupLink(group)) as parts:
        has_images = parts.rank == 1
        images = parts.hand_out(IMAGES if has_images else None, -2, 1, cpu)
        targets = parts.hand_out(TARGETS if has_images else None, -2, 1, cpu)
        rows = torch.full((3, 2), parts.rank + 1.0)
        last = IMAGES.bfloat16().contiguous(memory_format=torch.channels_last)
        received = [
            parts.gather(images, "test"),
            parts.gather(parts.hand_out(last if has_images else None, 2, 1, cpu), "test"),
            parts.reduce(rows.bfloat16()),
            parts.reduce(rows > 1, "max"),
            parts.reduce(rows > 1, "min"),
        ]
        assert received[1].is_contiguous(memory_format=torch.channels_last)
        return gradients(images, targets), received


def test_processes_train_as_one_process() -> None:
    reports = run_ranks(3, train)  # In this process, nothing has run backward before.
    sums = torch.full((3, 2), 6.0).bfloat16()
    expected = [IMAGES, IMAGES.bfloat16(), sums, torch.full((3, 2), True), torch.full((3, 2), False)]
    for trained, received in reports:
        torch.testing.assert_close(received, expected, rtol=0, atol=0)
        torch.testing.assert_close(trained, gradients(IMAGES, TARGETS), rtol=1e-12, atol=1e-12)
