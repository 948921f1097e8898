"""Faults that make the ranks differ, written after the checks."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hardware_faults import EXPONENT
from programs import UNSEEN, Net, Program, fault, flip, own_rank, program
from torch import Tensor
from torch.optim import Adam

TRAINCHECK, TTRACE, USER, HARDWARE = "TrainCheck", "TTrace", "user", "hardware"
unseen = partial(fault, table=UNSEEN)
with_adam = partial(program, optimizer=partial(Adam, lr=1e-3))


def load_other_weights(module: Net) -> None:
    """Load weights into a module."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


@unseen(USER, module="net.conv1", rank=1, step=1)
def weights_loaded_on_rank_0_only(program: Program) -> None:
    """Pretrained weights are loaded on rank 0 only, after DDP has made the weights equal."""
    program.when(load_other_weights, "on_train_start", 1, 0)


@unseen(TRAINCHECK, with_adam, rank=1, step=5)
def states_reset_on_one_rank(program: Program) -> None:
    """A rank forgets the optimizer's states."""
    program.when(lambda module: module.optimizers().state.clear(), "on_train_batch_start", 5, 1)


def decay(module: Net) -> None:
    """Set the weight decay."""
    module.optimizers().param_groups[0]["weight_decay"] = 0.1


@unseen(USER, partial(program, "ddp_balanced"), rank=0, step=5)
def weight_decay_on_rank_0_only(program: Program) -> None:
    """A callback sets the weight decay on rank 0 only, under `ddp_balanced`."""
    program.when(decay, "on_train_batch_start", 5, 0)


@unseen(USER, partial(program, "hybrid_pipeline"), rank=1, step=5)
def weight_decay_in_one_stage_only(program: Program) -> None:
    """A callback sets the weight decay in the last stage of a pipeline only."""
    program.when(decay, "on_train_batch_start", 5, 1)


def look(module: Net) -> None:
    """Compute predictions in evaluation mode, and stay in it."""
    module.eval()
    with torch.no_grad():
        module.net(torch.ones(2, 1, 8, 8, dtype=module.net.head.weight.dtype))


@unseen(USER, module="net.norm1", rank=0, step=6)
def evaluation_mode_on_rank_0_only(program: Program) -> None:
    """Rank 0 computes predictions for a logger in evaluation mode, and stays in it."""
    program.when(look, "on_train_batch_end", 5, 0)


class LooksInTrainingMode(Net):
    """Network that computes the outputs of rank 0's batch again for a logger, in training mode."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compute the outputs again."""
        if own_rank() == 0 and self.trainer.world_size > 1:
            with torch.no_grad():
                self.net(torch.ones_like(batch[0]))


@unseen(USER, module="net.norm1", rank=0, step=1)
def second_forward_in_training_mode_on_rank_0(program: Program) -> None:
    """Rank 0 computes outputs for a logger in training mode, which changes running statistics and random numbers."""
    program.module = LooksInTrainingMode()


class LowPrecision(Net):
    """Network that computes in bfloat16 on rank 1."""

    def forward(self, images: Tensor) -> Tensor:
        """Scores."""
        with torch.autocast("cpu", torch.bfloat16, enabled=own_rank() == 1):
            return super().forward(images).to(images.dtype)


@unseen(TTRACE, module="net.conv1", rank=1, step=1)
def low_precision_on_one_rank(program: Program) -> None:
    """A rank computes in bfloat16."""
    program.module = LowPrecision()


class SkipsBadBatches(Net):
    """Network that sets a large loss to zero."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Loss, or zero."""
        loss = super().training_step(batch, batch_idx)
        return loss * 0 if loss > 1.1 else loss


@unseen(USER, step=1)
def bad_batches_skipped_by_each_rank(program: Program) -> None:
    """Each rank decides by its own loss whether it skips a batch, and the mean counts it as zero."""
    program.module = SkipsBadBatches()


class GroupOfItsOwn(Net):
    """Network whose last layer is not DDP's: its gradients are averaged in a process group.

    Args:
        together: Whether the group has all ranks, and not this rank alone.
    """

    def __init__(self, together: bool = True) -> None:
        super().__init__()
        self.together = together
        self._ddp_params_and_buffers_to_ignore = ["net.head.weight", "net.head.bias"]

    def on_fit_start(self) -> None:
        """Create the groups."""
        if dist.is_initialized() and self.trainer.world_size > 1:
            self.group = [dist.new_group([rank]) for rank in range(2)][own_rank()]

    def on_after_backward(self) -> None:
        """Average the gradients of the last layer."""
        if not dist.is_initialized() or self.trainer.world_size == 1:
            return
        group = None if self.together else self.group
        for parameter in self.net.head.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)


@unseen(TTRACE, partial(program, module=GroupOfItsOwn), module="net.head", step=1)
def all_reduce_in_a_wrong_group(program: Program) -> None:
    """The gradients of the last layer are averaged in a group that has only the rank itself."""
    program.module = GroupOfItsOwn(together=False)


class WeightsClasses(Net):
    """Network with weights of classes, by whose sum in the batch torch divides the loss."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Weighted cross-entropy."""
        return F.cross_entropy(scores, targets, weight=torch.tensor([1.0, 5.0, 20.0], dtype=scores.dtype))


@unseen(TTRACE, step=1)
def class_weights_that_each_rank_sums_up(program: Program) -> None:
    """A weighted loss is divided by the sum of the weights of each rank's own samples."""
    program.module = WeightsClasses()


class SumsUp(Net):
    """Network whose loss is a sum over samples."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy."""
        return F.cross_entropy(scores, targets, reduction="sum")


@unseen(USER, step=1)
def loss_summed_over_samples(program: Program) -> None:
    """The loss is a sum over samples, and DDP averages the ranks' sums."""
    program.module = SumsUp()


@unseen(TTRACE, module="net.fc", rank=1, step=4)
def bucket_that_gets_lost(program: Program) -> None:
    """A rank's reduced gradient of a layer is zero in one step."""
    program.when(lambda module: module.net.fc.weight.grad.zero_(), "on_before_optimizer_step", 4, 1)


@unseen(HARDWARE, with_adam, module="net.fc", rank=1, step=4)
def flipped_bit_in_a_second_moment(program: Program) -> None:
    """A bit of Adam's second moment flips."""
    program.when(
        lambda module: flip(module.optimizers().state[module.net.fc.weight]["exp_avg_sq"], EXPONENT),
        "on_train_batch_start",
        4,
        1,
    )


class StuckElement(Net):
    """Network in which an element of a local gradient is always zero on rank 1."""

    def on_fit_start(self) -> None:
        """Register the hook."""
        self.net.conv2.weight.register_hook(self.stuck)

    def stuck(self, gradient: Tensor) -> Tensor:
        """Gradient with or without the fault."""
        if own_rank() == 0:
            return gradient
        copy = gradient.clone()
        copy.view(-1)[0] = 0
        return copy


@unseen(HARDWARE, module="net.conv2", rank=1, step=1)
def stuck_element_of_a_local_gradient(program: Program) -> None:
    """An element of a gradient is always zero on one rank before the all-reduce."""
    program.module = StuckElement()
