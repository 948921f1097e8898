"""Faults of the forward that are the same on all ranks, written after the checks."""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from programs import CLASSES, UNSEEN, Net, Program, fault, program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TTRACE, USER = "TTrace", "user"
unseen = partial(fault, table=UNSEEN)
unused = partial(program, "ddp_find_unused_parameters_true")


class Averages(Net):
    """Network that learns from an average of its weights.

    Args:
        of_another: Whether the average is that of a copy, which is not trained.
        is_shared: Whether the average is the network itself, as with `copy.copy`.
    """

    def __init__(self, of_another: bool = False, is_shared: bool = False) -> None:
        super().__init__()
        self.source = [copy.deepcopy(self.net) if of_another else self.net]  # In a list, it is not a submodule.
        self.average = self.net if is_shared else copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Loss, and the distance from the scores of the average."""
        with torch.no_grad():
            scores = self.average(batch[0])
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), scores)

    def on_train_batch_end(self, *_: Any) -> None:
        """Update the average."""
        pairs = zip(self.average.parameters(), self.source[0].parameters(), strict=True)
        for mean, value in pairs:
            mean.data.lerp_(value.data.to(mean.dtype), 0.1)


@unseen(USER, partial(program, module=Averages), module="average.conv1", step=1)
def average_of_another_network(program: Program) -> None:
    """The average of weights follows a copy of the network, which is not trained."""
    program.module = Averages(of_another=True)


@unseen(TTRACE, partial(program, module=Averages), module="net.conv1", step=1)
def teacher_that_is_the_student(program: Program) -> None:
    """The averaged teacher shares its weights with the student, as after `copy.copy`."""
    program.module = Averages(is_shared=True)


@unseen(USER, module="net.norm1", step=1)
def statistics_of_the_last_batch(program: Program) -> None:
    """Running statistics are those of the last batch, because the momentum is 1."""
    program.module.net.norm1.momentum = 1.0


class Auxiliary(Net):
    """Network with an auxiliary classifier.

    Args:
        as_number: Whether its loss is added as a number.
    """

    def __init__(self, as_number: bool = False) -> None:
        super().__init__()
        self.as_number = as_number
        self.auxiliary = nn.Linear(32, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Sum of both losses."""
        loss = self.loss(self.auxiliary(self.net[:8](batch[0])), batch[1])
        return super().training_step(batch, batch_idx) + 0.3 * (loss.item() if self.as_number else loss)


@unseen(USER, partial(unused, Auxiliary), module="auxiliary", step=1)
def auxiliary_loss_as_a_number(program: Program) -> None:
    """The loss of an auxiliary classifier is added with `.item()`, so it has no gradients."""
    program.module = Auxiliary(as_number=True)


class DropsByFunction(Net):
    """Network with a function for dropout.

    Args:
        always: Whether values are also dropped in validations.
    """

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def forward(self, images: Tensor) -> Tensor:
        """Scores."""
        return self.net[9:](F.dropout(self.net[:8](images), 0.3, self.training or self.always))


@unseen(USER, partial(program, module=DropsByFunction), module="net.drop", step=1)
def dropout_function_in_validations(program: Program) -> None:
    """`F.dropout` is called without `training=self.training`, so it drops values in validations."""
    program.module = DropsByFunction(always=True)


class TwoSoftmaxes(Net):
    """Network that applies softmax before the cross-entropy."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of probabilities."""
        return super().loss(scores.softmax(1), targets)


@unseen(USER, step=1)
def softmax_twice(program: Program) -> None:
    """Softmax is applied before the cross-entropy, which applies it again."""
    program.module = TwoSoftmaxes()


class Recomputes(Net):
    """Network whose activations are computed again in the backward.

    Args:
        layers: Number of the layers that are computed again.
        **options: Options of the recomputation.
    """

    def __init__(self, layers: int = 12, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = layers, {"use_reentrant": False, **options}

    def forward(self, images: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.net[self.layers :](checkpoint(self.net[: self.layers], images, **self.options))
        return scores


@unseen(TTRACE, partial(program, module=Recomputes), module="net.drop", step=1)
def recomputation_with_other_random_numbers(program: Program) -> None:
    """Activations are computed again in the backward with another mask of the dropout."""
    program.module = Recomputes(preserve_rng_state=False)


@unseen(USER, partial(unused, Recomputes), module="net.conv2", step=1)
def recomputation_without_gradients(program: Program) -> None:
    """Reentrant recomputation gets images that need no gradient, so its layers get no gradients."""
    program.module = Recomputes(4, use_reentrant=True)
