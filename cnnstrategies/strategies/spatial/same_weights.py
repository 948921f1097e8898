"""The ranks of a group compare their parameters now and then, because each rank runs the optimizer itself."""

import sys

import torch
from torch import Tensor, nn

from cnnstrategies.strategies.spatial.groups import ImageGroups

INTERVAL = 100  # Steps from one comparison to the next. A comparison reads each parameter once.
# Largest relative difference of two ranks' norms of a parameter. Kernels of GPUs that add in any order differ by less.
TOLERANCE = 1e-6


class SameWeights:
    """Comparison of the parameters of the ranks of a group, after the first step and every 100 steps.

    A hook or a callback on some ranks only would otherwise train different weights without a message. Norms are
    compared, which costs one message with two numbers for each parameter.

    Args:
        module: The module that trains.
        groups: The groups of ranks.
    """

    def __init__(self, module: nn.Module, groups: ImageGroups) -> None:
        self._module, self._groups = module, groups
        self._steps = 0
        self._differ = False

    def before_step(self) -> None:
        """Compare if it is time. All ranks of the group must call this before each step."""
        if self._steps % INTERVAL == 1:
            self.compare()
        self._steps += 1

    def compare(self) -> None:
        """Print a line that names the first parameter that differs, once. All ranks of the group must call this."""
        named = [(name, value) for name, value in self._module.named_parameters() if value.is_floating_point()]
        if self._differ or self._groups.parts.count == 1 or not named:
            return
        norms = torch.stack([_norm(value).to(self._groups.device) for _, value in named])
        self._groups.parts.operation = "the comparison of weights"
        largest, negative = self._groups.parts.reduce(torch.stack([norms, -norms]), "max").tolist()
        for (name, _), high, low in zip(named, largest, negative, strict=True):
            if high + low > TOLERANCE * high:
                self._differ = True
                if self._groups.part == 0:
                    print(_line(name, self._steps, -low, high), file=sys.stderr, flush=True)
                return


def _norm(parameter: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float64)
    return norm


def _line(name: str, steps: int, low: float, high: float) -> str:
    count = "1 batch" if steps == 1 else f"{steps} batches"
    return (
        f"spatial: after {count}, the ranks that have parts of the same images have different weights {name} "
        f"(norms from {low:.9g} to {high:.9g}): register hooks, change weights and gradients, and seed random numbers "
        "on all of these ranks alike"
    )
