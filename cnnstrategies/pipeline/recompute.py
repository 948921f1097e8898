"""Activation checkpointing: keep a microbatch's inputs only, and run its forward again before its backward."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Checkpointing = Literal["never", "except_last", "always"]
CHECKPOINTING = ("never", "except_last", "always")


@dataclass(init=False, eq=False)
class RandomState:
    """The random numbers at the start of a forward, so that Dropout draws the same when it runs again.

    Args:
        device: Where the stage runs.
    """

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


def is_recomputed(checkpointing: Checkpointing, is_last: bool) -> bool:
    """Whether a microbatch's forward runs twice.

    Args:
        checkpointing: When to recompute.
        is_last: It is the rank's last microbatch of the step, whose backward follows at once.
    """
    return checkpointing == "always" or (checkpointing == "except_last" and not is_last)
