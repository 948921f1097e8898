"""Learning-rate schedule with warm-up and cosine decay, which a configuration can name."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from cnnstrategies.errors import ConfigurationError


class WarmupCosine(SequentialLR):
    """Learning-rate schedule: a linear warm-up, followed by a cosine decay.

    Lengths are in epochs, or in optimizer steps if the model has ``lr_interval: step``.

    Args:
        optimizer: The optimizer.
        total: Length of the whole schedule, including the warm-up; ``${trainer.max_epochs}`` is usual.
        warmup: Length of the warm-up; 0 for no warm-up.
        start: Learning rate at the start of the warm-up, as a fraction of the optimizer's learning rate.
        end: Learning rate at the end of the cosine decay.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    def __init__(
        self, optimizer: Optimizer, total: int, warmup: int = 5, start: float = 0.01, end: float = 0.0
    ) -> None:
        if not 0 <= warmup < total:
            raise ConfigurationError(
                f"warmup={warmup} and total={total}: set 0 <= warmup < total, both in epochs, or in steps if the model "
                "has `lr_interval: step`"
            )
        if not 0 < start <= 1:
            raise ConfigurationError(f"start={start} is outside (0, 1]; 0.01 is usual")
        cosine = CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=end)
        if warmup:
            ramp = LinearLR(optimizer, start_factor=start, total_iters=warmup)
            super().__init__(optimizer, [ramp, cosine], milestones=[warmup])
        else:
            super().__init__(optimizer, [cosine], milestones=[])
