"""The random numbers that a step draws, from whichever library."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cnnstrategies.pipeline.step import RandomState


@dataclass(init=False, eq=False)
class RandomNumbers:
    """Where the generators of torch, Python and numpy stand.

    Args:
        device: Where the steps run.
    """

    pytorch: RandomState
    python: Any
    numpy: Any

    def __init__(self, device: torch.device) -> None:
        self.pytorch = RandomState(device)
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def restore(self, device: torch.device) -> None:
        """Go back to it, on a rank that has perhaps another device."""
        self.pytorch.device = device
        self.pytorch.restore()
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def __eq__(self, other: object) -> bool:
        """Whether the same numbers come next."""
        if not isinstance(other, RandomNumbers):
            return NotImplemented
        one, two = self.pytorch.accelerator, other.pytorch.accelerator
        return (
            torch.equal(self.pytorch.cpu, other.pytorch.cpu)
            and (one is None or two is None or torch.equal(one, two))
            and self.python == other.python
            and bool((self.numpy[1] == other.numpy[1]).all())
            and self.numpy[2:] == other.numpy[2:]
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Draws:
    """The random numbers of a step that draws some before it calls the network.

    Attributes:
        start: When it starts.
        at_call: When it calls the network.
    """

    start: RandomNumbers
    at_call: RandomNumbers
