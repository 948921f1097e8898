"""Mode local whose workers make outer steps each on its own, against the same in one process."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from roles import Roles, join
from torch import Tensor
from training import SGD, batches, make_network, make_optimizer

from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper

EVERY = 3
# Who makes the next own step: the first is faster. No exchange begins while another's is on its way.
ORDER = [0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1]
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}


def own_step(network: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    images, targets = batches(len(ORDER), 6)[number]
    optimizer.zero_grad()
    F.cross_entropy(network(images), targets).backward()
    optimizer.step()


def alone(outer_lr: float, outer_momentum: float, overlap: int) -> list[list[Tensor]]:
    """Both workers in one process: the weights of each after its last outer step."""
    networks = [make_network() for _ in range(2)]
    optimizers = [make_optimizer(network, SGD) for network in networks]
    own = [[value.data for value in network.parameters()] for network in networks]
    values = [value.clone() for value in own[0]]
    begun = [[value.clone() for value in values] for _ in range(2)]
    velocity, total = ([torch.zeros_like(value) for value in values] for _ in range(2))
    made, come = [0, 0], 0
    late: dict[int, list[Tensor]] = {}

    def exchange(id: int) -> None:
        nonlocal come
        come += 1
        for index, value in enumerate(values):
            difference = begun[id][index] - own[id][index]
            value -= outer_lr * difference / 2
            total[index] += difference
            if come % 2 == 0:
                velocity[index] = outer_momentum * velocity[index] + total[index] / 2
                value -= outer_lr * outer_momentum * velocity[index]
                total[index] = torch.zeros_like(value)
        begun[id] = [value.clone() for value in values]
        late[id] = [value.clone() for value in own[id]]

    def take(id: int) -> None:
        if id in late:
            for mine, pushed, new in zip(own[id], late.pop(id), begun[id], strict=True):
                mine.copy_(new + (mine - pushed))

    for number, id in enumerate(ORDER):
        own_step(networks[id], optimizers[id], number)
        made[id] += 1
        if made[id] % EVERY == overlap:
            take(id)
        if made[id] % EVERY == 0:
            exchange(id)
            if not overlap:
                take(id)
    for id in range(2):
        take(id)
        exchange(id)
        take(id)
    for mine, known, value in zip(own[0], begun[0], values, strict=True):  # It takes the present values, and goes on.
        known.copy_(value)
        mine.copy_(value)
    own_step(networks[0], optimizers[0], 0)
    exchange(0)
    take(0)
    return own


def joined(run: Roles, number: int, strategy: ParameterServerStrategy) -> tuple[torch.nn.Module, Stepper]:
    """A worker that trains a network of its own from now on."""
    module = LightningModule()
    module.network = make_network()
    optimizer = make_optimizer(module.network, SGD)
    worker = run.connect(number, [parameter.data for parameter in module.parameters()])
    join([worker])
    outer = strategy.options.outer_steps(run.specification, [])
    return module.network, Stepper(module, worker, run.specification, optimizer, outer=outer, workers=lambda: 2)


@pytest.mark.parametrize("loses", [False, True], ids=["", "a server dies"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("outer", [DILOCO, {"outer_lr": 1.0, "outer_momentum": 0.0}], ids=["diloco", "averaging"])
def test_outer_steps_of_each_worker_equal_one_process(
    outer: dict[str, float], overlap: int, loses: bool, tmp_path: Path
) -> None:
    """Also what own steps change while an exchange is on its way, which counts in the next."""
    expected = alone(**outer, overlap=overlap)
    strategy = ParameterServerStrategy("local", sync_every=EVERY, overlap=overlap, outer_mode="async", **outer)
    module = LightningModule()
    module.network = make_network()
    specification = strategy.options.specification(
        module, make_optimizer(module.network, SGD), 1, 2, servers=2, replication=2, timeout=60.0
    )
    with Roles(tmp_path, specification) as run:
        workers = [joined(run, number, strategy) for number in range(2)]
        for number, id in enumerate(ORDER):
            if loses and number == 10:  # Within a round of the momentum.
                run.lose(1)
            network, stepper = workers[id]
            own_step(network, stepper.optimizer, number)
            stepper.samples = 6
            stepper.after_step()
        for _, stepper in workers:
            stepper.outer_step()
        network, first = workers[0]
        first.refresh()
        own_step(network, first.optimizer, 0)
        first.after_step()
        first.outer_step()
        for (_, stepper), values in zip(workers, expected, strict=True):
            for got, value in zip(stepper.parameters, values, strict=True):
                torch.testing.assert_close(got.data, value, rtol=1e-10, atol=1e-13)
