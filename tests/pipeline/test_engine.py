"""The pipeline trains the same model as one process on the same global batch."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline

CUTS = {1: [], 2: ["2"], 3: ["2", "5"]}


class Network(nn.Sequential):
    """No normalisation and no dropout, so that the result depends on the global batch only."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(8 * 16, 5),
        )


def global_batches(steps: int, sizes: tuple[int, ...] = (12,)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(sizes[i % len(sizes)], 1, 8, 8, generator=generator),
            torch.randint(5, (sizes[i % len(sizes)],), generator=generator),
        )
        for i in range(steps)
    ]


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-2)


def local_part(pipeline: Pipeline, tensor: Tensor) -> Tensor:
    replicas = pipeline.placement.replicas[0]
    return tensor[pipeline.place.replica :: replicas]


def train(
    replicas: tuple[int, ...],
    schedule: str,
    optimizer_name: str,
    microbatches: int,
    sizes: tuple[int, ...],
    recompute: str,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    torch.manual_seed(0)
    network = Network()
    alone = copy.deepcopy(network)
    pipeline = Pipeline(
        network,
        CUTS[len(replicas)],
        replicas,
        microbatches,
        schedule,
        activation_checkpointing=recompute,
        bucket_bytes=500,
    )
    optimizer = optimizer_of(optimizer_name, pipeline.module.parameters())
    reference = optimizer_of(optimizer_name, alone.parameters())
    losses, expected = [], []
    for images, targets in global_batches(5, sizes):
        optimizer.zero_grad()
        losses.append(
            float(pipeline.step(local_part(pipeline, images), local_part(pipeline, targets), F.cross_entropy))
        )
        optimizer.step()
        reference.zero_grad()
        loss = F.cross_entropy(alone(images), targets)
        loss.backward()
        reference.step()
        expected.append(loss.item())
    return pipeline.module.state_dict(), alone.state_dict(), losses, expected


def assert_equal_weights(results: list[Any], names: int) -> None:
    seen = set()
    for weights, expected, losses, expected_losses in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, value in weights.items():
            seen.add(name)
            assert (value - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert len(seen) == names


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 2), (3, 1), (1, 2, 1)])
def test_weights_equal_one_process(replicas: tuple[int, ...], schedule: str) -> None:
    for optimizer in ("sgd", "adamw"):
        results = run_ranks(sum(replicas), train, replicas, schedule, optimizer, 6, (12,), "never")
        assert_equal_weights(results, 8)
