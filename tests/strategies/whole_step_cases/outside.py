"""Cases of values outside of modules: global variables, attributes of classes, closures, and objects of the user."""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import Block, Classifier, StemBodyHead, case, classifier

PENALTIES: list[Tensor] = []
LAST: Any = None
STORE = SimpleNamespace(norm=torch.zeros(()))
GRIDS: dict[Any, Tensor] = {}
SCALE = 1.0
SETTINGS = SimpleNamespace(model=SimpleNamespace(head=SimpleNamespace(gain=1.0)))


class ListBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        PENALTIES.append(x.square().mean())
        return x


@case()
class GlobalList(Classifier):
    """Blocks append penalties to a list that is a global variable."""

    block = ListBlock

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        PENALTIES.clear()
        loss = F.cross_entropy(self.net(x), y)
        self.history.append(float(len(PENALTIES)))
        return loss + 0.1 * sum(PENALTIES)


class VariableBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST = super().forward(x)
        STORE.norm = LAST.abs().mean()
        return LAST


@case()
class GlobalVariable(Classifier):
    """A block assigns its result to a global variable, and a norm to an attribute of an object."""

    block = VariableBlock

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        return loss + torch.cov(LAST.mean((2, 3)).T).square().sum() + 0.1 * STORE.norm


class SharedTerms(Block):
    terms: ClassVar[list[Tensor]] = []
    total: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.terms.append(x.abs().mean())
        type(self).total = self.total + x.square().mean()
        return x


@case()
class ClassAttributes(Classifier):
    """Blocks append to a list that all blocks share, and add to an attribute of their class."""

    block = SharedTerms

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        SharedTerms.terms.clear()
        SharedTerms.total = 0.0
        loss = F.cross_entropy(self.net(x), y)
        return loss + 0.1 * sum(SharedTerms.terms) + 0.1 * SharedTerms.total


def recording_block() -> tuple[type[nn.Module], Any]:
    """Return a class of blocks that count and record in variables of this function, and a function that reads them."""
    norms: list[Tensor] = []
    largest: Any = torch.zeros(())

    def record(x: Tensor) -> None:
        nonlocal largest
        largest = x.detach().abs().mean((0, 2, 3)).amax()
        norms.append(x.square().mean())

    class Recorded(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            record(x)
            return x

    def read() -> tuple[list[Tensor], Tensor]:
        result = list(norms)
        norms.clear()
        return result, largest

    return Recorded, read


@case()
class EnclosedVariables(Classifier):
    """Blocks of a class that a function has made store values in variables of this function."""

    def network(self) -> nn.Module:
        block, self.read = recording_block()
        return classifier(block)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        norms, largest = self.read()
        self.history.append(float(largest))
        return loss + 0.1 * sum(norms)


def grid(x: Tensor) -> Tensor:
    """Return a table of positions for feature maps of a size, which is computed once."""
    key = x.shape[-1]
    if key not in GRIDS:
        GRIDS[key] = torch.linspace(-1, 1, key)
    return GRIDS[key]


class Positions(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * grid(x))


@case()
class GlobalCache(Classifier):
    """Blocks of several stages use the same cache."""

    block = Positions

    def on_train_end(self) -> None:
        self.history += GRIDS[4].tolist()
        GRIDS.clear()


class ReadingNet(StemBodyHead):
    """A network whose own forward reads numbers from a global variable, its class, and objects."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body.strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x) * SCALE) * self.body.strength
        return self.head(x.mean((2, 3)) * self.gain) * SETTINGS.model.head.gain


class Annealing(Callback):
    """Changes the numbers that a network reads, each in another step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        global SCALE
        step = trainer.global_step
        SCALE = 1.0 if step < 2 else 0.5
        SETTINGS.model.head.gain = 1.0 if step < 4 else 2.0
        ReadingNet.gain = 1.0 if step < 6 else 1.5
        module.net.body.strength = 1.0 if step < 8 else 0.25
        if step >= 10:
            module.net.gain = 0.75


@case(cuts=("stem", "body"), callbacks=lambda: [Annealing()])
class NumbersOutside(Classifier):
    """A callback changes numbers that the network's own forward reads from outside of its modules."""

    network = ReadingNet


@case(cuts=("stem", "body"), submodule=None)
class EpochInForward(Classifier):
    """The module itself is the network, and its forward reads the epoch and the step from the trainer."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3, 2, 1), Block(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x) / (1 + self.current_epoch))
        return self.head(x.mean((2, 3)) / (1 + self.trainer.global_step % 3))


class Gate(Block):
    """A block that stores a number for a block behind it."""

    def __init__(self, source: Any = None) -> None:
        super().__init__()
        self.source = [source]
        self.level = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.level = 1 + float(x.detach().abs().mean())
        return x if self.source[0] is None else x * self.source[0].level


@case(error="pass values to each other")
class GateAcross(Classifier):
    """A block reads in its forward what a block of another stage has stored in the same forward."""

    def network(self) -> nn.Module:
        first = Gate()
        layers = [nn.Conv2d(3, 8, 3, 2, 1), first, nn.Identity(), Gate(first)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
