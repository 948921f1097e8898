"""Trainings that look unusual by design, in which the guard must find nothing. The package's tests run some of them."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from programs import BATCH, Data, Net, Program, program, sgd
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": partial(torchvision.models.resnet18, num_classes=3),
    "MobileNet V3": partial(torchvision.models.mobilenet_v3_small, num_classes=3),
    "ShuffleNet V2": partial(torchvision.models.shufflenet_v2_x0_5, num_classes=3),
    "SqueezeNet": partial(torchvision.models.squeezenet1_1, num_classes=3),
}
STRATEGIES = ("ddp", "ddp_balanced", "hybrid_pipeline", "parameter_server", "spatial")


class Published(Net):
    """Training of a published network on small images.

    Args:
        network: Function that makes the network.
    """

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__(lambda parameters: SGD(parameters, 0.005, momentum=0.9))
        self.net = network()
        self.example_input_array = torch.zeros(2, 3, 64, 64)


class Images(Data):
    """Random images of 64 x 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dataset = TensorDataset(torch.randn(48, 3, 64, 64, generator=generator), torch.arange(48) % 3)


def published(network: str, strategy: str) -> Program:
    """Return the training of a published network under a strategy."""
    made = program(strategy, partial(Published, NETWORKS[network]))
    made.data = Images()
    return made


class Gan(Net):
    """Two networks that train in turns, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def configure_optimizers(self) -> Any:
        """An optimizer for each network."""
        return [sgd(self.net.parameters()), Adam(self.generator.parameters(), 1e-3)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train one of the networks, in turns of four batches."""
        images, targets = batch
        optimizer = self.optimizers()[batch_idx // 4 % 2]
        self.toggle_optimizer(optimizer)
        generated = self.generator(torch.randn(len(images), 8)).reshape(images.shape)
        if batch_idx // 4 % 2 == 0:
            loss = self.loss(self(images), targets) + F.softplus(self(generated.detach())[:, 0]).mean()
        else:
            loss = F.softplus(-self(generated)[:, 0]).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


class Adversaries(Net):
    """Two parts of a network that train in each step, each with an optimizer, while the other part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        """An optimizer for the features, and one for the classifier."""
        return [Adam(self.net[:8].parameters(), 0.01), Adam(self.net[8:].parameters(), 0.01)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train both parts."""
        parts = self.net[:8], self.net[8:]
        for optimizer, part, other in zip(self.optimizers(), parts, parts[::-1], strict=True):
            part.requires_grad_(True).train()
            other.requires_grad_(False).eval()
            loss = self.loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class Averaged(Net):
    """Network with a moving average of its weights, which no gradient reaches.

    Args:
        every: Number of steps from one update of the average to the next.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every = every
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        """Update the average."""
        if self.global_step % self.every == 0:
            for mean, value in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(value.detach(), 0.1)


class Freezes(Net):
    """Network whose first layers are frozen in evaluation mode in the second and the third epoch."""

    def on_train_epoch_start(self) -> None:
        """Freeze or unfreeze the layers."""
        if self.current_epoch in (1, 3):
            self.net[:3].requires_grad_(self.current_epoch == 3).train(self.current_epoch == 3)


class WarmsUp(Net):
    """Network that sets its learning rate itself in the first 30 steps, and leaves it to a schedule afterwards."""

    def __init__(self) -> None:
        super().__init__(schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Make a step, and set the rate of the next one."""
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 30:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * self.trainer.global_step / 30


class Penalised(Net):
    """Network whose loss has a large penalty in each sixteenth step."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy with a penalty."""
        factor = 20.0 if self.training and self.global_step % 16 == 15 else 0.0
        return super().loss(scores, targets) + factor * self.net.head.weight.square().mean()


class FrozenStatistics(Net):
    """Network whose batch normalisation stays in evaluation mode in training."""

    def on_train_epoch_start(self) -> None:
        """Set the layers to evaluation mode."""
        self.net.norm1.eval()
        self.net.norm2.eval()


class Weighted(Data):
    """Data with rare samples drawn more often."""

    def train_dataloader(self) -> Any:
        """Return batches of samples that are drawn with weights."""
        sampler = WeightedRandomSampler([1.0 + (index % 5 == 0) * 4 for index in range(48)], 48)
        return DataLoader(self.dataset, BATCH, sampler=sampler)


class KeepsZeros(Net):
    """Network whose gradients are set to zero, and not to None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Set gradients to zero."""
        optimizer.zero_grad(set_to_none=False)


class DrawsPredictions(Net):
    """Network whose dropout draws numbers in validations, too."""

    def on_validation_start(self) -> None:
        """Set dropout to training mode."""
        self.net.drop.train()

    def on_validation_end(self) -> None:
        """Set dropout to training mode, as it was before the validation."""
        self.net.drop.train()


class Accumulates(Net):
    """Network that accumulates the gradients of three batches by its own hooks."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Set gradients to None before each third batch."""
        if batch_idx % 3 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Make a step after each third batch."""
        if batch_idx % 3 == 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class DecaysByEpoch(Net):
    """Network whose learning rate falls after each second epoch."""

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule."""
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [StepLR(optimizer, 2, 0.7)]


def warm_up(optimizer: Any) -> Any:
    """Return a schedule that begins with 0, and ends with 0 after 60 steps."""
    parts = [LinearLR(optimizer, 1e-8, 1.0, 10), LinearLR(optimizer, 1.0, 0.0, 50)]
    return SequentialLR(optimizer, parts, [10])


def with_options(made: Program, **options: Any) -> Program:
    """Return a program with other arguments of the trainer."""
    made.trainer |= options
    return made


def with_callback(callback: Any, module: Callable[[], Net] = Net) -> Program:
    """Return a program with a callback."""
    made = program(module=module)
    made.callbacks.append(callback)
    return made


class LooksInEvaluationMode(Callback):
    """Callback that computes outputs on rank 0 after each step, in evaluation mode."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Compute the outputs."""
        if trainer.is_global_zero:
            pl_module.eval()
            with torch.no_grad():
                pl_module(torch.ones(2, 1, 8, 8))
            pl_module.train()


def weighted() -> Program:
    """Return a program with weighted samples."""
    made = program()
    made.data = Weighted()
    return made


PROGRAMS: dict[str, Callable[[], Program]] = {
    "an average of weights (EMAWeightAveraging)": lambda: with_callback(EMAWeightAveraging()),
    "an average of weights (StochasticWeightAveraging)": lambda: with_callback(StochasticWeightAveraging(0.05, 2)),
    "two networks that train in turns": partial(program, "ddp_find_unused_parameters_true", Gan),
    "two parts that train against each other": partial(program, "ddp_find_unused_parameters_true", Adversaries),
    "an average of weights in the module": partial(program, module=Averaged),
    "an average of weights after each 50 steps": partial(program, module=partial(Averaged, 50)),
    "layers frozen for two epochs": partial(program, "ddp_find_unused_parameters_true", Freezes),
    "a warm-up in the module": partial(program, module=WarmsUp),
    "a cyclic learning rate": partial(program, schedule=lambda opt: CyclicLR(opt, 0.0, 0.1, 7, mode="triangular2")),
    "a learning rate in one cycle": partial(program, schedule=lambda opt: OneCycleLR(opt, 0.1, 60)),
    "a learning rate with warm restarts": partial(
        program, schedule=lambda opt: CosineAnnealingWarmRestarts(opt, 40, eta_min=0.0005)
    ),
    "a warm-up from 0, and an end at 0": partial(program, schedule=warm_up),
    "a learning rate that rises by a factor of 10": partial(
        program, schedule=lambda opt: LambdaLR(opt, lambda step: 1.0 if step > 30 else 0.1)
    ),
    "large penalties in each sixteenth step": partial(program, module=Penalised),
    "statistics frozen at the start of an epoch": partial(program, module=FrozenStatistics),
    "dropout in validations": lambda: with_options(program(module=DrawsPredictions), val_check_interval=3),
    "gradients accumulated by hooks": partial(program, module=Accumulates),
    "a schedule of epochs": partial(program, module=DecaysByEpoch),
    "samples drawn with weights": weighted,
    "accumulated gradients, clipped": lambda: with_options(
        program(), accumulate_grad_batches=2, gradient_clip_val=0.01
    ),
    "clipping by value": lambda: with_options(program(), gradient_clip_val=0.001, gradient_clip_algorithm="value"),
    "outputs for a logger on rank 0, in evaluation mode": lambda: with_callback(LooksInEvaluationMode()),
    "gradients set to zeros": partial(program, module=KeepsZeros),
    "two batches again and again (overfit_batches)": lambda: with_options(program(), overfit_batches=2),
}
# Losses and gradients are compared with their history after 200 steps. Other programs make 60 steps.
STEPS = {"large penalties in each sixteenth step": 300, "a learning rate with warm restarts": 300}
STEPS |= dict.fromkeys(NETWORKS, 25)


def cases() -> Iterator[tuple[str, str, Callable[[], Program]]]:
    """Yield all trainings: their names, strategies, and the functions that make them."""
    for name, make in PROGRAMS.items():
        yield name, "ddp", make
    for network in NETWORKS:
        for strategy in STRATEGIES:
            yield network, strategy, partial(published, network, strategy)
