"""Numbers of calls and precisions of layers in a step, which should be equal on ranks that run the same network."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.guarding.agreement import ComparedValue
from cnnstrategies.guarding.modes import SWITCHED
from cnnstrategies.recording.steps import StepReader

RECORDED = 4  # Number of batches after a check that are recorded. All of them must agree, because steps may be random.
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ForwardRecords(StepReader):
    """Reader that records layers in the first batches after a check, until the next batch begins.

    Only calls in training mode count: in evaluation mode, a further call changes neither statistics nor random numbers.

    Args:
        module: The module that is trained.
    """

    follows_to_next = True  # Hooks of the user may call layers after a batch.

    def __init__(self, module: nn.Module) -> None:
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, SWITCHED) or (not any(layer.children()) and any(True for _ in layer.parameters()))
        }
        self._names = {id(layer): name for name, layer in layers.items()}
        self._counted = {name for name, layer in layers.items() if isinstance(layer, SWITCHED)}
        self._batches: list[Counter[str]] = []  # Numbers of calls in each recorded batch.
        self._precisions: dict[str, set[torch.dtype]] = {}

    @override
    def begin_batch(self, batch: Any, index: int) -> None:
        self.follows_calls = len(self._batches) < RECORDED
        if self.follows_calls:
            self._batches.append(Counter())

    @override
    def after_call(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or not module.training or not self._batches:
            return
        self._batches[-1][name] += 1
        if isinstance(output, Tensor):
            self._precisions.setdefault(name, set()).add(output.dtype)

    def take(self) -> Iterator[ComparedValue]:
        """Yield each layer's precision and its number of calls, and begin again. A value of 0 is not compared."""
        batches, precisions = self._batches, self._precisions
        self._batches, self._precisions = [], {}
        for name in self._names.values():
            known = precisions.get(name, set()) if len(batches) == RECORDED else set()
            single = next(iter(known)) if len(known) == 1 else None
            yield ComparedValue("precision", name, PRECISIONS.index(single) + 1 if single in PRECISIONS else 0)
            if name in self._counted:
                counts = {batch[name] for batch in batches}
                yield ComparedValue("calls", name, counts.pop() if len(counts) == 1 and known else 0)
