"""Learning-rate schedules that are made of others, which YAML can name."""

from collections.abc import Sequence

from lightning.pytorch.cli import LRSchedulerCallable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from cnnstrategies.errors import ConfigurationError


class WarmupCosine(SequentialLR):
    """A linear warm-up, then a cosine to the end.

    Lengths are in epochs, or in optimizer steps where the model has ``lr_interval: step``.

    Args:
        optimizer: The optimizer.
        total: Length of the whole schedule, warm-up included; ``${trainer.max_epochs}`` is usual.
        warmup: Length of the warm-up; 0 for none.
        start: Learning rate at the start of the warm-up, as a share of the optimizer's.
        end: Learning rate at the end of the cosine.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    def __init__(
        self, optimizer: Optimizer, total: int, warmup: int = 5, start: float = 0.01, end: float = 0.0
    ) -> None:
        if not 0 <= warmup < total:
            raise ConfigurationError(
                f"warmup={warmup} and total={total}: 0 <= warmup < total is needed, both in epochs, or in steps with "
                "lr_interval: step"
            )
        if not 0 < start <= 1:
            raise ConfigurationError(f"start={start} is outside (0, 1]; 0.01 is usual")
        cosine = CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=end)
        if warmup:
            ramp = LinearLR(optimizer, start_factor=start, total_iters=warmup)
            super().__init__(optimizer, [ramp, cosine], milestones=[warmup])
        else:
            super().__init__(optimizer, [cosine], milestones=[])


class InTurn(SequentialLR):
    """Schedulers one after another: each begins where the one before ends, and counts from 0.

    Args:
        optimizer: The optimizer.
        schedulers: Build the schedulers.
        milestones: Where the second and each further one begins, in epochs, or in optimizer steps where the model has
            ``lr_interval: step``.

    Raises:
        ConfigurationError: There is not a milestone between each two, they do not increase, or a scheduler is one that
            watches a metric.
    """

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRSchedulerCallable], milestones: Sequence[int]
    ) -> None:
        if len(milestones) != len(schedulers) - 1 or sorted({0, *milestones})[1:] != list(milestones):
            raise ConfigurationError(
                f"milestones={list(milestones)} for {len(schedulers)} schedulers: one increasing number, above 0, is "
                "needed between each two"
            )
        made: list[LRScheduler] = []
        for build in schedulers:
            one = build(optimizer)
            if isinstance(one, ReduceLROnPlateau):
                raise ConfigurationError(
                    "ReduceLROnPlateau watches a metric and cannot be one of several schedulers in turn: name it alone"
                )
            made.append(one)
        super().__init__(optimizer, made, list(milestones))
