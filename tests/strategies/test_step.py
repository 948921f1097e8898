"""What a step tells a worker's connection and when, and what is refused to have been done beside it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper


class Servers:
    """In the place of a worker's connection: keeps what it is told, and brings no values."""

    codecs, late, step, leader = ("none", "none"), False, 0, 0

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.pushed = 0

    def begin_step(self, options: Any, samples: int) -> None:
        self.begun.append((options, samples))

    def push(self, index: int, value: Tensor) -> None:
        self.pushed += 1

    def nothing(self, *_: Any) -> None: ...

    wait = wait_all = end_step = nothing


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(16, 2), nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(()))  # No forward of its own module is called.

    def training_step(self, index: int) -> Tensor:
        return self.scale * self.head(self.net(torch.ones(1, 16))).sum()


def connect(module: LightningModule, servers: Any, optimizer: Optimizer, mode: Any = "sync", **more: Any) -> Stepper:
    sync_every = 3 if mode == "local" else 0
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9} if sync_every else {}
    strategy = ParameterServerStrategy(mode, sync_every=max(sync_every, 1), **outer)
    specification = strategy.options.specification(module, optimizer, 1, 2)
    return Stepper(module, servers, specification, optimizer, sync_every=sync_every, **more)


# Own steps


def local(own_steps: int) -> tuple[Stepper, Servers]:
    module, servers = Module(), Servers()
    return connect(module, servers, torch.optim.AdamW(module.parameters(), 0.01), "local", own_steps=own_steps), servers


@pytest.mark.light
def test_a_newcomer_makes_outer_steps_with_the_others() -> None:
    """They have made one own step since the last: the second of the newcomer is the third."""
    stepper, servers = local(own_steps=1)
    for _ in range(2):
        stepper.samples += 4
        stepper.after_step()
    ((options, samples),) = servers.begun
    assert (options[0]["lr"], options[0]["momentum"], options[0]["nesterov"], samples) == (0.7, 0.9, True, 8)
    assert servers.pushed == 5, "each parameter once"
    for _ in range(3):
        stepper.after_step()
    assert len(servers.begun) == 2


@pytest.mark.light
def test_there_is_no_outer_step_without_own_ones() -> None:
    """A validation and then a checkpoint at the same moment: the momentum must not move the weights in between."""
    stepper, servers = local(own_steps=0)
    stepper.outer_step()
    assert not servers.begun
    stepper.after_step()
    stepper.outer_step()
    stepper.outer_step()
    assert len(servers.begun) == 1


# What others do to weights and gradients


def train(module: Module, servers: Servers, steps: int, **more: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    stepper = connect(module, servers, optimizer, **more)

    def closure(index: int) -> None:
        with stepper.forward():
            loss = module.training_step(index)
        stepper.before_backward()
        loss.backward()  # type: ignore[no-untyped-call]

    stepper.note_values()
    for index in range(steps):
        optimizer.step(closure=partial(closure, index))  # type: ignore[arg-type]
        stepper.after_step()


class Follower(Servers):
    """That of a worker whose node another one speaks for, which has died when the first step begins."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def begin_step(self, *_: Any) -> None:
        """The servers have gone on meanwhile."""
        self.leader = 1
        for parameter in self.module.parameters():
            parameter.data.add_(1)


def test_a_new_leaders_later_values_are_nobodys_writes() -> None:
    module, looks = Module(), ["Looks.on_train_batch_end"]
    train(module, Follower(module), 1, sees_weights=looks)
    with pytest.raises(ConfigurationError, match="was changed between two steps"):
        train(module, Follower(module), 2, sees_weights=looks)  # By somebody, as its leader is the same.


class Rewritten(Module):
    def training_step(self, index: int) -> Tensor:
        with torch.no_grad():
            self.net.weight.div_(2)
        return super().training_step(index)


class Replaced(Module):
    def training_step(self, index: int) -> Tensor:
        self.net.weight.data = self.net.weight.data * 1.0
        return super().training_step(index)


class Sudden(Module):
    """Uses a weight by itself, but in none of its first steps."""

    def training_step(self, index: int) -> Tensor:
        if index < 2:
            return super().training_step(index)
        return self.head(F.linear(torch.ones(1, 16), self.net.weight)).sum()


class Unseen(Module):
    """Its own hook comes after that of the strategy."""

    handle: RemovableHandle | None = None

    def training_step(self, index: int) -> Tensor:
        if self.handle is None:
            self.handle = self.head.weight.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        return super().training_step(index)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


REFUSED: list[tuple[Callable[[], Module], str]] = [
    (Rewritten, "net.weight was changed between two steps, or in training_step: the servers"),
    (Replaced, "net.weight was changed between two steps, or in training_step: the servers"),
    (Sudden, "net.weight was used without a forward of its own module"),
    (Unseen, "the gradient of head.weight was changed after backward"),
]


def test_what_servers_parameters_do_not_allow_is_refused() -> None:
    train(Module(), Servers(), 4)
    for kind, message in REFUSED:
        with pytest.raises(ConfigurationError, match=message):
            train(kind(), Servers(), 4)
