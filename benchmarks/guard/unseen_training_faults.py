"""Faults of optimizers, gradients and loaded states that are the same on all ranks, written after the checks."""

from functools import partial
from typing import Any

from programs import CLASSES, UNSEEN, Net, Program, fault, program, sgd
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

TRAINCHECK, USER = "TrainCheck", "user"
unseen = partial(fault, table=UNSEEN)
unused = partial(program, "ddp_find_unused_parameters_true")


class Scaled(Net):
    """Network with a scaled loss.

    Args:
        times: Number of times that the scale is removed from the gradients.
    """

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Scaled loss."""
        return super().training_step(batch, batch_idx) * 1024

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Remove the scale."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad /= 1024**self.times


@unseen(TRAINCHECK, partial(program, module=Scaled), step=1)
def scale_removed_twice(program: Program) -> None:
    """The scale of the loss is removed twice from the gradients."""
    program.module = Scaled(2)


class FreezesLater(Net):
    """Network whose first layer is frozen after nine steps.

    Args:
        to_none: Whether gradients are set to None, and not to zero.
    """

    def __init__(self, to_none: bool = True) -> None:
        super().__init__(lambda parameters: SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01))
        self.to_none = to_none

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Remove the gradients."""
        optimizer.zero_grad(set_to_none=self.to_none)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Freeze the layer."""
        if self.global_step == 9:
            self.net.conv1.requires_grad_(False)


def not_validated() -> Program:
    """Return a program without validations, before which Lightning would set the gradients to None."""
    made = unused(FreezesLater)
    made.trainer["limit_val_batches"] = 0
    return made


@unseen(USER, not_validated, module="net.conv1", step=10)
def frozen_layer_that_decays(program: Program) -> None:
    """A layer is frozen, and its gradients are kept as zeros, so momentum and weight decay still change it."""
    program.module = FreezesLater(to_none=False)


class Gathers(Net):
    """Network that accumulates three batches by hand.

    Args:
        divisor: Number by which each loss is divided.
    """

    def __init__(self, divisor: int = 3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.divisor = divisor

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Add gradients, and make a step after each third batch."""
        self.manual_backward(self.loss(self(batch[0]), batch[1]) / self.divisor)
        if batch_idx % 3 == 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@unseen(USER, partial(program, module=Gathers), step=1)
def accumulation_without_division(program: Program) -> None:
    """Three batches are accumulated, and their losses are not divided by three."""
    program.module = Gathers(1)


class ForgetsTheHead(Net):
    """Network whose optimizer does not have the last layer."""

    def configure_optimizers(self) -> Any:
        """Optimizer."""
        return sgd(parameter for name, parameter in self.named_parameters() if "head" not in name)


@unseen(USER, module="net.head", step=1)
def layer_missing_in_the_optimizer(program: Program) -> None:
    """The last layer is in no parameter group."""
    program.module = ForgetsTheHead()


class Loads(Net):
    """Network that begins with loaded weights.

    Args:
        prefix: Prefix of the names in the file.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        values = {f"{prefix}{name}": value * 0.5 for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(values, strict=False)


@unseen(USER, partial(program, module=Loads), module="net.conv1", step=1)
def weights_that_were_not_loaded(program: Program) -> None:
    """`load_state_dict` with `strict=False` loads nothing, because all names have a prefix."""
    program.module = Loads("module.")


class TwoOptimizers(Net):
    """Network with an optimizer for the features and one for the classifier.

    Args:
        cleared: Number of the optimizers whose gradients are set to zero.
    """

    def __init__(self, cleared: int = 2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cleared = cleared

    def configure_optimizers(self) -> Any:
        """Two optimizers."""
        return [sgd(self.net[:9].parameters()), sgd(self.net[9:].parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make a step with both optimizers."""
        for optimizer in self.optimizers()[: self.cleared]:
            optimizer.zero_grad()
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        for optimizer in self.optimizers():
            optimizer.step()


@unseen(USER, partial(program, module=TwoOptimizers), module="net.fc", step=2)
def one_of_two_optimizers_keeps_gradients(program: Program) -> None:
    """The gradients of one of two optimizers are not set to zero."""
    program.module = TwoOptimizers(1)


def replace_head(module: Net) -> None:
    """Replace the last layer."""
    module.net.head = nn.Linear(16, CLASSES, dtype=module.net.head.weight.dtype)


@unseen(TRAINCHECK, unused, module="net.head", step=10)
def layer_replaced_in_the_run(program: Program) -> None:
    """The last layer is replaced during the run, and the optimizer keeps the old one."""
    program.when(replace_head, "on_train_batch_start", 10)


def resumed(**options: Any) -> Program:
    """Return a program that continues from a checkpoint."""
    made = program(**options)
    made.resume = lambda checkpoint: None
    return made


@unseen(
    TRAINCHECK,
    partial(resumed, schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 0.95**step)),
    step=7,
)
def resumed_without_the_schedules_state(program: Program) -> None:
    """A training continues from a checkpoint without the schedule's state, so the schedule begins anew."""
    program.resume = lambda checkpoint: checkpoint.update(lr_schedulers=[])


def swap_states(saved: dict[str, Any]) -> None:
    """Swap the optimizer's states of the weight and the bias of a layer."""
    states = saved["optimizer_states"][0]["state"]
    states[2], states[3] = states[3], states[2]


@unseen(USER, partial(resumed, optimizer=partial(Adam, lr=1e-3)), module="net.norm1", step=7)
def resumed_with_swapped_states(program: Program) -> None:
    """The order of parameters has changed since the checkpoint, so two parameters get each other's states."""
    program.resume = swap_states
