"""Small training programs as users write them, and the tools with which a fault is planted into one of them."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, CLASSES = 48, 4, 3  # An epoch on two ranks has six steps.
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer], Any]


def own_rank() -> int:
    """Return this process's rank; 0 in a run of one process."""
    return int(os.environ.get("LOCAL_RANK", 0))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of most programs."""
    return SGD(parameters, 0.05, momentum=0.9)


class Net(LightningModule):
    """A small convolutional network with batch normalisation and dropout.

    Args:
        optimizer: Function that makes the optimizer.
        schedule: Function that makes the schedule, which makes a step after each batch; None for a constant rate.
    """

    def __init__(self, optimizer: MakeOptimizer = sgd, schedule: MakeSchedule | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make_optimizer, self.make_schedule = optimizer, schedule
        self.net = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 4, 3, padding=1),
                norm1=nn.BatchNorm2d(4),
                act1=nn.ReLU(),
                conv2=nn.Conv2d(4, 8, 3, padding=1),
                norm2=nn.BatchNorm2d(8),
                act2=nn.ReLU(),
                pool=nn.AdaptiveAvgPool2d(2),
                flat=nn.Flatten(),
                drop=nn.Dropout(0.1),
                fc=nn.Linear(32, 16),
                act3=nn.ReLU(),
                head=nn.Linear(16, CLASSES),
            )
        )
        self.example_input_array = torch.zeros(2, 1, 8, 8)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (samples, classes)."""
        scores: Tensor = self.net(images)
        return scores

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(scores, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Loss of a batch."""
        loss = self.loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Loss of a batch, logged."""
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Optimizer, and a schedule if the program has one."""
        optimizer = self.make_optimizer(self.parameters())
        if self.make_schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_schedule(optimizer), "interval": "step"}]


class Data(LightningDataModule):
    """Random images of 8 x 8 pixels with targets that depend on the images.

    Args:
        samples: Number of samples.
    """

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(samples, 1, 8, 8, generator=generator)
        scores = images.mean((1, 2, 3)) * 8
        self.dataset = TensorDataset(images, (scores > -0.3).long() + (scores > 0.3).long())

    def train_dataloader(self) -> Any:
        """Return shuffled batches, which Lightning divides among the ranks."""
        return DataLoader(self.dataset, BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return the first two batches of each rank."""
        return DataLoader(TensorDataset(*self.dataset[: 4 * BATCH]), BATCH)


@dataclass
class Program:
    """A training program.

    Attributes:
        module: The module.
        data: The data module.
        strategy: Registered name of the strategy, or a strategy.
        callbacks: The user's callbacks.
        trainer: Other arguments of ``Trainer``.
        resume: Function that changes the checkpoint from which the program continues; None if it starts anew.
    """

    module: Net
    data: LightningDataModule
    strategy: Any = "ddp"
    callbacks: list[Callback] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    resume: Callable[[dict[str, Any]], None] | None = None

    def when(
        self, action: Callable[[Net], Any], hook: str, step: int = 1, rank: int | None = None, **options: Any
    ) -> None:
        """Let a callback call a function in a run; see :class:`When`."""
        self.callbacks.append(When(action, hook, step, rank, **options))


def program(strategy: Any = "ddp", module: Callable[..., Net] = Net, **options: Any) -> Program:
    """Return a program without a fault.

    Args:
        strategy: Registered name of the strategy, or a strategy.
        module: Function that makes the module.
        **options: Arguments of the module.
    """
    return Program(module(**options), Data(), strategy)


class When(Callback):
    """Callback that calls a function at a point of the training.

    Args:
        action: Function that is called with the module.
        hook: Name of the callback's hook in which the function is called.
        step: Number of the first step, beginning with 1, at which the function is called.
        rank: Rank that calls the function; None for all ranks.
        again: Whether the function is also called in all later steps.
    """

    def __init__(
        self, action: Callable[[Net], Any], hook: str, step: int, rank: int | None, again: bool = False
    ) -> None:
        def call(trainer: Trainer, *_: Any) -> None:
            begun = trainer.global_step + (0 if hook.endswith("_end") else 1)
            if rank in (None, own_rank()) and (begun == step or (again and begun > step)):
                action(trainer.lightning_module)

        setattr(self, hook, call)


def flip(value: Tensor, bit: int, index: int = 0) -> None:
    """Flip a bit of an element of a tensor.

    Args:
        value: The tensor, in float32 or float64; it is changed.
        bit: Number of the bit, from the most significant one, which is the sign and has number 0. Numbers of an
            exponent's bits begin with 1.
        index: Number of the element.
    """
    with torch.no_grad():
        element = value.detach().reshape(-1)[index : index + 1]
        integers = element.view(INTEGERS[element.dtype])
        integers ^= torch.tensor(1, dtype=integers.dtype) << (8 * element.element_size() - 1 - bit)
        value.detach().view(-1)[index] = element[0]


@dataclass(frozen=True)
class Fault:
    """A fault that is planted into a program, and the truth about it.

    Attributes:
        name: Short name.
        text: Description for the page.
        source: Where this kind of fault is known from.
        base: Function that makes the program without the fault.
        plant: Function that plants the fault into the program.
        module: Name of the module in which the fault is; empty if the fault is not in a module.
        rank: Rank on which the fault is; None if it is on all ranks, or if it is not on a rank.
        step: Number of the first step in which the fault acts, beginning with 1.
        steps: Number of steps in which a guard watches the program.
    """

    name: str
    text: str
    source: str
    base: Callable[[], Program]
    plant: Callable[[Program], None]
    module: str = ""
    rank: int | None = None
    step: int = 1
    steps: int = 60

    def program(self, faulty: bool = True) -> Program:
        """Return the program, with the fault or without it."""
        made = self.base()
        if faulty:
            self.plant(made)
        return made


FAULTS: dict[str, Fault] = {}
UNSEEN: dict[str, Fault] = {}  # Faults that were written after the checks.


def fault(
    source: str, base: Callable[[], Program] = program, table: dict[str, Fault] = FAULTS, **truth: Any
) -> Callable[[Any], Any]:
    """Register the decorated function, which plants a fault into a program and is described by its docstring.

    Args:
        source: Where this kind of fault is known from.
        base: Function that makes the program without the fault.
        table: Table in which the fault is registered.
        **truth: Attributes of :class:`Fault` that say where the fault is.
    """

    def register(plant: Callable[[Program], None]) -> Callable[[Program], None]:
        name = getattr(plant, "__name__", "").replace("_", " ")
        table[name] = Fault(name, " ".join((plant.__doc__ or "").split()), source, base, plant, **truth)
        return plant

    return register
