"""Common parts of the cases: their registry, small networks, and a module that trains a classifier."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

CLASSES = 5
SAMPLES = 48
BATCH = 8

Kind = TypeVar("Kind", bound=type[LightningModule])


def labelled_images() -> Dataset[Any]:
    """Return images with labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(CLASSES, (SAMPLES,), generator=generator))


class Part(DistributedSampler[Any]):
    """Shuffles samples as for one process, and takes every n-th sample, without repetitions at the end.

    Args:
        data: The dataset.
        parts: The number n of parts.
        part: Index of this part.
        **options: Options of DistributedSampler.
    """

    def __init__(self, data: Dataset[Any], parts: int, part: int, **options: Any) -> None:
        super().__init__(data, 1, 0, **options)
        self.parts, self.part = parts, part

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.part, None, self.parts)

    def __len__(self) -> int:
        return len(range(self.part, super().__len__(), self.parts))


@dataclass(frozen=True)
class Case:
    """A program that trains the same on one device and under a pipeline, or must end with an error.

    Attributes:
        name: Name of the case.
        module: Function that makes the LightningModule. The runner compares its weights, its buffers, its logged
            values, and the values in its list ``history``, which are values that the user's code has read.
        cuts: Modules after which the network is cut into three stages. Two stages have the first cut only.
        microbatches: Number of microbatches. With batch normalisation, only 1 is as on one device.
        submodule: The submodule that is divided; None for the strategy's choice.
        epochs: Number of epochs.
        trainer: Options of the Trainer.
        callbacks: Function that makes the callbacks.
        data: Function that makes the dataset.
        samples: Number of samples used. The last batch is smaller if `BATCH` does not divide it.
        then: Methods of the Trainer that follow ``fit``: ``validate``, ``test`` and ``predict``.
        validates: Whether ``fit`` gets a loader for validation.
        loads_itself: Whether the module makes its loaders, so that ``fit`` gets none.
        error: Part of the error message with which a run in several stages must end. By default it must not fail.
    """

    name: str
    module: Callable[[], LightningModule]
    cuts: tuple[str, str] = ("1", "3")
    microbatches: int = 4
    submodule: str | None = "net"
    epochs: int = 2
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    data: Callable[[], Dataset[Any]] = labelled_images
    samples: int = SAMPLES
    then: tuple[str, ...] = ()
    validates: bool = False
    loads_itself: bool = False
    error: str = ""

    def training_loader(self, parts: int = 1, part: int = 0) -> DataLoader[Any]:
        """Return the loader of one of the ranks that load, with its part of each batch."""
        data = Subset(self.data(), range(self.samples))
        return DataLoader(data, BATCH // parts, sampler=Part(data, parts, part, seed=7))

    def evaluation_loader(self, parts: int = 1, part: int = 0) -> DataLoader[Any]:
        """Return a loader of some of the data, in order."""
        data = Subset(self.data(), range(0, self.samples, 3))
        return DataLoader(data, BATCH // parts, sampler=Part(data, parts, part, shuffle=False))


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Kind], Kind]:
    """Register a class of modules as a case. The case's name is the class's name in snake case."""

    def register(module: Kind) -> Kind:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", module.__name__).lower()
        assert name not in CASES, name
        CASES[name] = Case(name, module, **options)
        return module

    return register


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(x))


def classifier(block: Callable[[], nn.Module] = Block, middle: nn.Module | None = None) -> nn.Sequential:
    """Return a small CNN with a score for each class."""
    middle = nn.Identity() if middle is None else middle
    layers = [nn.Conv2d(3, 8, 3, 2, 1), block(), middle, block(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def dense(channels: int = 3) -> nn.Sequential:
    """Return a small CNN whose output has the size of the images."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), Block(), nn.Identity(), Block(), nn.Conv2d(8, channels, 1))


class StemBodyHead(nn.Module):
    """A network whose own forward calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3, 2, 1), Block(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Classifier(LightningModule):
    """A classifier, as in a tutorial. The cases override what they do differently.

    Attributes:
        block: Class of the network's blocks.
        middle: Class of the layer between the blocks.
    """

    block: type[nn.Module] = Block
    middle: type[nn.Module] = nn.Identity

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = self.network()
        self.history: list[float] = []

    def network(self) -> nn.Module:
        return classifier(self.block, self.middle())

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step_loss(*batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Dense(Classifier):
    """A module whose network's output has the size of the images."""

    def network(self) -> nn.Module:
        return dense()


class Manual(Classifier):
    """A module that calls its optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def train_with(self, loss: Tensor, *optimizers: Any) -> None:
        """Make a step of optimizers with the gradients of a loss."""
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
