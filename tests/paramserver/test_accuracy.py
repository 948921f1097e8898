"""Modes in which workers run on their own learn as sync does: the digits, with four workers."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import PlainCNN
from roles import Roles
from torch import Tensor

from cnnstrategies.data.digits import FILE
from cnnstrategies.paramserver.specification import Specification, hyperparameters

WORKERS, BATCH = 4, 8
MOST_EPOCHS = 40  # About 6 are needed.
ENOUGH = 0.95
lock = threading.Lock()


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(FILE) as data:
        images = torch.tensor(data["images"], dtype=torch.float32)[:, None] / 16
        targets = torch.tensor(data["targets"], dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order[:1300]], targets[order[:1300]], images[order[1300:]], targets[order[1300:]]


def network_and_optimizer(rate: float) -> tuple[PlainCNN, torch.optim.Optimizer]:
    with lock:  # Threads have one generator.
        torch.manual_seed(0)
        network = PlainCNN()
    return network, torch.optim.SGD(network.parameters(), lr=rate)


def train(connect: Callable[..., Any], id: int, rate: float, all_there: threading.Barrier) -> list[float]:
    """The accuracy after each epoch, until it is enough, with the servers' parameters."""
    images, targets, test_images, test_targets = digits()
    network, optimizer = network_and_optimizer(rate)
    parameters = list(network.parameters())
    worker = connect([parameter.data for parameter in parameters])
    worker.initialise()
    worker.join()
    accuracies: list[float] = []
    while len(accuracies) < MOST_EPOCHS and max(accuracies, default=0) < ENOUGH:
        epoch = len(accuracies)
        all_there.wait()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))[id::WORKERS]
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            worker.wait_all()
            optimizer.zero_grad()
            F.cross_entropy(network(images[batch]), targets[batch]).backward()
            worker.begin_step(hyperparameters(optimizer), len(batch))
            for index, parameter in enumerate(parameters):
                worker.push(index, parameter.grad)
            worker.end_step()
        worker.wait_all()
        all_there.wait()
        worker.refresh()
        accuracies.append((network(test_images).argmax(1) == test_targets).float().mean().item())
    worker.leave()
    return accuracies


def best_accuracy(mode: str, rate: float, directory: Path, **options: Any) -> float:
    network, optimizer = network_and_optimizer(rate)
    named = network.named_parameters()
    specification = Specification.of(named, optimizer, WORKERS, mode=mode, servers=2, **options)
    directory.mkdir()
    with Roles(directory, specification) as run:
        results = run.train(train, rate, threading.Barrier(WORKERS, timeout=60))
    assert all(result == results[0] for result in results), "all workers hold the servers' parameters"
    return max(results[0])


@pytest.mark.parametrize(("mode", "options"), [("async", {}), ("ssp", {"staleness": 3})])
def test_every_mode_learns(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    """At a quarter of sync's rate, for four times the updates; staleness is itself a momentum, so none is added."""
    assert best_accuracy(mode, 0.1, tmp_path / mode, **options) >= ENOUGH
