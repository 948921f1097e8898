"""Faults of a training program that are the same on all ranks: gradients, schedules, modes, states and checkpoints."""

from functools import partial
from typing import Any

import torch
from programs import Net, Program, fault, program
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

TRAINCHECK, TTRACE, USER = "TrainCheck", "TTrace", "user"
unused = partial(program, "ddp_find_unused_parameters_true")
decaying = partial(program, schedule=partial(ExponentialLR, gamma=0.9))


class KeepsGradients(Net):
    """Network whose gradients are not set to zero."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Keep the gradients."""


@fault(TRAINCHECK, step=2)
def missing_zero_grad(program: Program) -> None:
    """Gradients are not set to zero, so each step repeats all earlier ones."""
    program.module = KeepsGradients()


def clipping() -> Program:
    """Return a program that clips gradients."""
    made = program()
    made.trainer["gradient_clip_val"] = 0.05
    return made


class ClipsNothing(Net):
    """Network that clips gradients after the step, so that clipping has no effect."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Do nothing before the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Clip after the step."""
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@fault(TRAINCHECK, clipping, step=1)
def clipping_after_the_step(program: Program) -> None:
    """Gradients are clipped after the optimizer's step."""
    program.module = ClipsNothing()


class ClipsScaled(Net):
    """Network that scales its loss, and clips gradients before it removes the scale."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Scaled loss."""
        return super().training_step(batch, batch_idx) * 1024

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip, and then remove the scale."""
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad /= 1024


@fault(USER, step=1)
def clipping_before_unscaling(program: Program) -> None:
    """Gradients are clipped before their scale is removed, so steps are 1,024 times too small."""
    program.module = ClipsScaled()


class StepsTwice(Net):
    """Network that steps its schedule, as Lightning does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step the schedule."""
        self.lr_schedulers().step()


@fault(USER, decaying, step=2)
def schedule_stepped_twice(program: Program) -> None:
    """The schedule makes two steps in each step of the optimizer."""
    program.module = StepsTwice(schedule=program.module.make_schedule)


class NeverSteps(Net):
    """Network whose schedule never makes a step."""

    def lr_scheduler_step(self, *_: Any) -> None:
        """Do nothing."""


@fault(USER, decaying, step=2)
def schedule_never_stepped(program: Program) -> None:
    """The schedule never makes a step."""
    program.module = NeverSteps(schedule=program.module.make_schedule)


@fault(USER, partial(program, schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / 1000)), step=2)
def schedule_that_rounds_to_zero(program: Program) -> None:
    """An integer division makes the learning rate zero after the first step."""
    program.module = Net(schedule=lambda optimizer: LambdaLR(optimizer, lambda step: (1000 - step) // 1000))


class ReplacesALayer(Net):
    """Network whose last layer is replaced after its optimizer was made."""

    def configure_optimizers(self) -> Any:
        """Optimizer of the old layers."""
        optimizer = super().configure_optimizers()
        self.net.head = nn.Linear(16, 3)
        return optimizer


@fault(TRAINCHECK, unused, module="net.head", step=1)
def optimizer_built_before_a_layer(program: Program) -> None:
    """A layer is replaced after the optimizer was built, so the optimizer trains the old layer."""
    program.module = ReplacesALayer()


class Detaches(Net):
    """Network with a branch that does not pass gradients."""

    def forward(self, images: Tensor) -> Tensor:
        """Scores."""
        return self.net[4:](self.net[:4](images).detach())


@fault(USER, unused, module="net.conv2", step=1)
def detached_branch(program: Program) -> None:
    """A branch is detached, so the layers before it do not learn."""
    program.module = Detaches()


class StaysInEvaluation(Net):
    """Network that stays in evaluation mode after its validation."""

    def on_validation_model_train(self) -> None:
        """Leave the network in evaluation mode."""


def validated(**options: Any) -> Program:
    """Return a program that validates after each third step."""
    made = program(**options)
    made.trainer["val_check_interval"] = 3
    return made


@fault(TRAINCHECK, validated, module="net.norm1", step=4)
def evaluation_mode_left_on(program: Program) -> None:
    """The network stays in evaluation mode after a validation."""
    program.module = StaysInEvaluation()


class DropsInEvaluation(Net):
    """Network that stays in training mode in validations."""

    def on_validation_model_eval(self) -> None:
        """Leave the network in training mode."""


@fault(TRAINCHECK, validated, module="net.norm1", step=3)
def dropout_in_evaluation(program: Program) -> None:
    """Validations run in training mode, with dropout and with statistics of the batch."""
    program.module = DropsInEvaluation()


class NaNs(Net):
    """Network whose loss is NaN from a step on."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Loss with a logarithm of a negative number."""
        broken = self.training and self.global_step >= 3
        return super().loss(scores * (torch.log(-torch.ones_like(scores)) if broken else 1), targets)


@fault(USER, step=4)
def loss_that_is_nan(program: Program) -> None:
    """The loss is NaN from a step on."""
    program.module = NaNs()


class Overflows(Net):
    """Network whose gradient overflows in a step."""

    def on_after_backward(self) -> None:
        """Multiply a gradient by a scale that is too large."""
        if self.global_step == 4 and self.net.conv1.weight.grad is not None:
            self.net.conv1.weight.grad *= float("inf")


@fault(TRAINCHECK, module="net.conv1", step=5)
def infinite_gradient(program: Program) -> None:
    """A gradient overflows in a step."""
    program.module = Overflows()


class Unnormalised(Net):
    """Network without batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.net.norm1, self.net.norm2 = nn.Identity(), nn.Identity()


class BreaksABatch(Unnormalised):
    """Network that gets a broken batch in a step: all its pixels are a million."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Batch with or without the fault."""
        is_broken = self.training and self.global_step == 230
        return (torch.full_like(batch[0], 1e6) if is_broken else batch[0]), batch[1]


@fault(USER, partial(program, module=Unnormalised), step=231, steps=260)
def broken_batch(program: Program) -> None:
    """All pixels of a batch are a million in step 231."""
    program.module = BreaksABatch()


@fault(TRAINCHECK, partial(program, optimizer=partial(Adam, lr=1e-3)), step=4)
def updates_rounded_away(program: Program) -> None:
    """Weights are kept in bfloat16, which rounds small updates away."""

    def rounded(module: Net) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)

    program.module = Net(partial(Adam, lr=1e-6))
    program.when(rounded, "on_train_batch_end", 1, again=True)


class ForgetsStates(Net):
    """Network whose checkpoints have no states of optimizers."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the states."""
        checkpoint["optimizer_states"] = []


@fault(TRAINCHECK, validated, step=6)
def checkpoint_without_optimizer_states(program: Program) -> None:
    """Checkpoints are saved without the states of the optimizers."""
    program.module = ForgetsStates()


@fault(USER, module="net.norm1", step=1)
def batch_normalisation_without_momentum(program: Program) -> None:
    """Running statistics never move, because the momentum is zero."""
    program.module.net.norm1.momentum = 0.0


@fault(TTRACE, module="net.conv2", step=1)
def weights_tied_by_accident(program: Program) -> None:
    """Two layers share a weight by accident."""
    program.module.net.norm2.bias = program.module.net.norm2.weight


def resumed() -> Program:
    """Return a program that continues from a checkpoint."""
    made = program(optimizer=partial(Adam, lr=1e-3))
    made.resume = lambda checkpoint: None
    return made


@fault(TRAINCHECK, resumed, step=7)
def resumed_without_optimizer_states(program: Program) -> None:
    """A training continues from a checkpoint without states of the optimizer, which Lightning loads silently."""
    program.resume = lambda checkpoint: checkpoint.update(optimizer_states=[])
