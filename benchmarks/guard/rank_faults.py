"""Faults that make the ranks differ: settings, hooks and states of one rank."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from programs import CLASSES, Net, Program, fault, own_rank, program
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

TRAINCHECK, TTRACE, USER = "TrainCheck", "TTrace", "user"


def apart(**options: Any) -> DDPStrategy:
    """Return a DDP strategy that does not broadcast buffers and forks its processes."""
    return DDPStrategy(broadcast_buffers=False, start_method="fork", **options)


@fault(USER, module="net.fc", rank=1, step=1)
def other_start_weights(program: Program) -> None:
    """A layer is initialised again when training starts, on one rank and so with other numbers."""
    program.when(lambda module: module.net.fc.reset_parameters(), "on_train_start", 1, 1)


@fault(USER, rank=1, step=3)
def other_learning_rate(program: Program) -> None:
    """The learning rate of one rank is doubled."""
    program.when(lambda module: module.optimizers().param_groups[0].update(lr=0.1), "on_train_batch_start", 3, 1)


class ClipsOnOneRank(Net):
    """Network whose gradients are clipped on rank 0 only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip gradients on rank 0."""
        if own_rank() == 0:
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Clips(Net):
    """Network whose gradients are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip gradients."""
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@fault(TRAINCHECK, partial(program, module=Clips), rank=0, step=1)
def clipping_on_rank_0_only(program: Program) -> None:
    """Gradients are clipped on rank 0 only, as in DeepSpeed's bf16 optimizer during BLOOM's training."""
    program.module = ClipsOnOneRank()


class DoublesAHook(Net):
    """Network with a hook that scales a gradient, registered twice on rank 1."""

    def on_fit_start(self) -> None:
        """Register the hook."""
        for _ in range(1 + own_rank()):
            self.net.conv2.weight.register_hook(lambda gradient: 0.5 * gradient)


class HooksOnce(Net):
    """Network with a hook that scales a gradient."""

    def on_fit_start(self) -> None:
        """Register the hook."""
        self.net.conv2.weight.register_hook(lambda gradient: 0.5 * gradient)


@fault(USER, partial(program, module=HooksOnce), module="net.conv2", rank=1, step=1)
def doubled_hook(program: Program) -> None:
    """A hook that scales a gradient is registered twice on one rank."""
    program.module = DoublesAHook()


class Stale(Net):
    """Network that computes on rank 1 with the weights of the step before."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Exchange the current weights for those of the step before."""
        self.current = [parameter.detach().clone() for parameter in self.net.head.parameters()]
        if self.global_step > 1 and own_rank() == 1:
            self.assign(self.before)
        self.before = self.current

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Bring the current weights back."""
        self.assign(self.current)

    def assign(self, values: list[Tensor]) -> None:
        """Assign the values to the weights of the last layer."""
        for parameter, value in zip(self.net.head.parameters(), values, strict=True):
            parameter.data.copy_(value)


@fault(TTRACE, module="net.head", rank=1, step=3)
def stale_weights(program: Program) -> None:
    """One rank computes with the weights of the step before."""
    program.module = Stale()


class Teacher(Net):
    """Network that learns from an average of its own weights, which is kept in buffers.

    Args:
        everywhere: Whether all ranks update the average, and not rank 0 only.
    """

    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.register_buffer("average", self.net.head.weight.detach().clone())

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, and the distance from the average."""
        return super().loss(scores, targets) + (self.net.head.weight - self.average).square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update the average."""
        if self.everywhere or own_rank() == 0:
            self.average.lerp_(self.net.head.weight.detach(), 0.5)


def taught() -> Program:
    """Return a program with a buffer that the ranks do not exchange."""
    return program(apart(), Teacher)


@fault(USER, taught, rank=1, step=2)
def stale_buffer(program: Program) -> None:
    """Averaged weights in a buffer are updated on rank 0 only."""
    program.module = Teacher(everywhere=False)


class Centred(Net):
    """Network that subtracts a running centre of its features."""

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        self.shared = shared
        self.register_buffer("centre", torch.zeros(CLASSES))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of centred scores."""
        mean = scores.detach().mean(0)
        if self.shared and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        loss = super().loss(scores - self.centre, targets)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * mean
        return loss


@fault(USER, lambda: program(apart(), Centred), step=1)
def buffer_that_is_not_synchronised(program: Program) -> None:
    """A running centre of scores is updated from each rank's own samples."""
    program.module = Centred(shared=False)


class Plateau(Net):
    """Network whose learning rate follows the training loss.

    Args:
        shared: Whether the loss that the schedule sees is that of all ranks.
    """

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        self.shared = shared

    def configure_optimizers(self) -> Any:
        """Optimizer with a schedule on a logged loss."""
        optimizer = self.make_optimizer(self.parameters())
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [{"scheduler": schedule, "monitor": "seen", "interval": "step"}]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Loss of a batch, logged."""
        loss = super().training_step(batch, batch_idx)
        self.log("seen", loss, sync_dist=self.shared)
        return loss


@fault(USER, partial(program, module=Plateau), step=2)
def metric_of_one_rank(program: Program) -> None:
    """A schedule follows a loss that each rank computes from its own samples, so learning rates differ."""
    program.module = Plateau(shared=False)


class Unnormalised(Net):
    """Network whose images are not normalised on rank 1.

    Args:
        everywhere: Whether all ranks normalise.
    """

    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.everywhere = everywhere

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalised images."""
        return (batch[0] - 0.5) / 2 if self.everywhere or own_rank() == 0 else batch[0], batch[1]


@fault(USER, partial(program, "parameter_server", Unnormalised), module="net.conv1", rank=1, step=1)
def normalisation_missing_on_one_worker(program: Program) -> None:
    """Images are normalised on rank 0 only, under a parameter server."""
    program.module = Unnormalised(everywhere=False)


class Masked(Net):
    """Network with a pruned layer.

    Args:
        everywhere: Whether all ranks apply the mask after each step.
    """

    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.register_buffer("mask", (torch.arange(32 * 16).reshape(16, 32) % 3 > 0).float())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Apply the mask."""
        if self.everywhere or own_rank() == 0:
            self.net.fc.weight.data.mul_(self.mask)


@fault(USER, partial(program, module=Masked), module="net.fc", rank=1, step=1)
def mask_not_applied(program: Program) -> None:
    """A pruning mask is applied on rank 0 only."""
    program.module = Masked(everywhere=False)


class Tied(Net):
    """Network in which a layer is used twice.

    Args:
        everywhere: Whether the layer is also one layer on rank 1, and not a copy.
    """

    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.net.act1, self.net.act3 = nn.Identity(), nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.net.act3.weight

    def forward(self, images: Tensor) -> Tensor:
        """Scores, with the shared layer before the last one."""
        hidden = self.net[:-1](images)
        if not self.everywhere and own_rank() == 1 and self.last.weight is self.net.act3.weight:
            self.last.weight = nn.Parameter(self.last.weight.detach().clone())
        return self.net.head(self.last(hidden))


@fault(TTRACE, partial(program, "ddp_find_unused_parameters_true", Tied), module="net.act3", rank=1, step=1)
def weights_untied(program: Program) -> None:
    """A tied weight becomes a weight of its own on one rank."""
    program.module = Tied(everywhere=False)


@fault(USER, partial(program, "spatial"), module="net.norm1", rank=1, step=2)
def other_momentum_of_batch_normalisation(program: Program) -> None:
    """Batch normalisation has another momentum on one device."""
    program.when(lambda module: setattr(module.net.norm1, "momentum", 0.5), "on_train_batch_start", 2, 1)


class Median(Net):
    """Network with a mask from a median over the batch."""

    def forward(self, images: Tensor) -> Tensor:
        """Scores from the activations above the median."""
        features = self.net[:4](images)
        return self.net[4:](features * (features > features.median()))


@fault(TTRACE, module="net.norm2", step=1)
def mask_from_a_part_of_the_batch(program: Program) -> None:
    """A mask is computed from the samples of one rank."""
    program.module = Median()
