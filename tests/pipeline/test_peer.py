"""The weights are those of torch.distributed.pipelining's Schedule1F1B, where that can run: a plain row of layers."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cnnstrategies.pipeline.engine import Pipeline

CUT = 3
MICROBATCHES = 4


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(128, 5),
    ).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 1, 8, 8, generator=generator, dtype=torch.float64)
    return [(images, torch.randint(5, (16,), generator=generator))] * 5


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def both() -> dict[str, tuple[Tensor, Tensor]]:
    """Five steps of ours and of the peer: (ours, the peer's) for each of this stage's parameters."""
    ours = Pipeline(make_network(), [str(CUT - 1)], (1, 1), MICROBATCHES, schedule="1f1b")
    optimizer = sgd(ours.module)
    for images, targets in batches():
        ours.step(images, targets, F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

    rank = dist.get_rank()
    layers = make_network()
    peer = layers[:CUT] if rank == 0 else layers[CUT:]
    schedule: Any = Schedule1F1B(
        PipelineStage(peer, rank, 2, torch.device("cpu")), MICROBATCHES, loss_fn=F.cross_entropy
    )
    optimizer = sgd(peer)
    for images, targets in batches():
        schedule.step(*([images] if rank == 0 else []), **({} if rank == 0 else {"target": targets}))
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(layers.named_parameters())
    return {name: (value, expected[name].detach()) for name, value in ours.module.state_dict().items()}


def test_five_steps_equal_schedule_1f1b() -> None:
    first, second = run_ranks(2, both)
    assert {**first, **second}.keys() == make_network().state_dict().keys()
    for name, (ours, peers) in {**first, **second}.items():
        assert (ours - peers).norm() <= 1e-10 * peers.norm(), name
