"""Faults of the reduction: gradients of the ranks that are not combined, or combined in a wrong way."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import Net, Program, fault, own_rank, program
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

TRAINCHECK, TTRACE = "TrainCheck", "TTrace"


def stop_reducing(module: Net) -> None:
    """Turn off the all-reduce of DDP."""
    module.trainer.strategy.model.require_backward_grad_sync = False


@fault(TRAINCHECK, step=4)
def skipped_all_reduce(program: Program) -> None:
    """DDP does not reduce gradients any more, because `no_sync` is left on."""
    program.when(stop_reducing, "on_train_batch_start", 4, again=True)


class Freezes(Net):
    """Network whose first layer is frozen when DDP wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.net.conv1.requires_grad_(False)


@fault(TTRACE, partial(program, module=Freezes), module="net.conv1", step=4)
def unfrozen_parameter_that_is_not_reduced(program: Program) -> None:
    """A layer is unfrozen after DDP has wrapped the network, so its gradients are not reduced."""
    program.when(lambda module: module.net.conv1.requires_grad_(True), "on_train_batch_start", 4)


class Adapter(nn.Module):
    """Scale that is created in the first forward.

    Args:
        late: Whether the parameter is created in the first forward of a training, after DDP has wrapped the network.
    """

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = None if late else nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        """Scaled values."""
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(1, dtype=values.dtype))
        return values * self.scale


class Adapted(Net):
    """Network with an adapter.

    Args:
        late: Whether the adapter creates its parameter in its first forward.
    """

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.net.act3 = Adapter(late)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the optimizer also train a parameter that was created after the optimizer."""
        scale, group = self.net.act3.scale, self.optimizers().param_groups[0]
        if scale is not None and all(scale is not parameter for parameter in group["params"]):
            group["params"].append(scale)


@fault(TRAINCHECK, partial(program, module=Adapted), module="net.act3", step=1)
def parameter_created_after_wrapping(program: Program) -> None:
    """A parameter is created in the first forward, which DDP does not know."""
    program.module = Adapted(late=True)


def skip_last_reduction(module: Net) -> None:
    """Reduce the gradients of the first batch of each accumulation, and not those of the last batch."""
    module.trainer.strategy.model.require_backward_grad_sync = False


def accumulating() -> Program:
    """Return a program that accumulates two batches."""
    made = program()
    made.trainer["accumulate_grad_batches"] = 2
    return made


@fault(TTRACE, accumulating, step=1)
def accumulation_without_reduction(program: Program) -> None:
    """With accumulated gradients, those of the last batch are not reduced."""
    program.when(skip_last_reduction, "on_train_batch_start", 1, again=True)


class Reduces(Net):
    """Network that sums gradients over the ranks, although DDP has already averaged them."""

    def on_after_backward(self) -> None:
        """Sum the gradients."""
        for parameter in self.parameters():
            if parameter.grad is not None and dist.is_initialized():
                dist.all_reduce(parameter.grad)


@fault(TTRACE, step=1)
def sum_in_place_of_mean(program: Program) -> None:
    """Gradients are summed over the ranks in place of averaged."""
    program.module = Reduces()


class IgnoresTargets(Net):
    """Network whose loss is the mean over the samples that are not of class 0."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the samples that count."""
        return F.cross_entropy(scores, targets, ignore_index=0)


@fault(TTRACE, step=1)
def mean_over_each_ranks_own_count(program: Program) -> None:
    """The loss is a mean over the samples that count, whose number differs between the ranks."""
    program.module = IgnoresTargets()


class Compresses(Net):
    """Network that lets DDP reduce gradients in bfloat16."""

    def on_train_start(self) -> None:
        """Register the hook."""
        if isinstance(wrapped := self.trainer.strategy.model, DistributedDataParallel):
            wrapped.register_comm_hook(None, bf16_compress_hook)


@fault(TRAINCHECK, step=1)
def downcast_in_the_all_reduce(program: Program) -> None:
    """Gradients are rounded to bfloat16 for the all-reduce."""
    program.module = Compresses()


class WrongScale(Net):
    """Network whose loss scale is not removed on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Scaled loss."""
        return super().training_step(batch, batch_idx) * (1024 if own_rank() else 1)


@fault(TRAINCHECK, rank=1, step=1)
def loss_scale_left_on_one_rank(program: Program) -> None:
    """The loss scale of one rank is not removed from its gradients."""
    program.module = WrongScale()
