"""Numbers of calls and precisions of layers in a step, which should be equal on ranks that run the same network."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from cnnstrategies.guarding.agreement import ComparedValue
from cnnstrategies.guarding.modes import SWITCHED

RECORDED = 4  # Number of batches after a check that are recorded. All of them must agree, because steps may be random.
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ForwardRecords:
    """Hook that records layers in the first batches after a check, until the next batch begins.

    Only calls in training mode count: in evaluation mode, a further call changes neither statistics nor random numbers.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, SWITCHED) or (not any(layer.children()) and any(True for _ in layer.parameters()))
        }
        self._names = {id(layer): name for name, layer in layers.items()}
        self._counted = {name for name, layer in layers.items() if isinstance(layer, SWITCHED)}
        self._handle: RemovableHandle | None = None
        self._batches: list[Counter[str]] = []  # Numbers of calls in each recorded batch.
        self._precisions: dict[str, set[torch.dtype]] = {}

    def begin_batch(self) -> None:
        """Record the next batch, or end the records."""
        if len(self._batches) == RECORDED:
            self.end()
            return
        self._batches.append(Counter())
        self._handle = self._handle or register_module_forward_hook(self._add)

    def end(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _add(self, layer: nn.Module, arguments: Any, output: Any) -> None:
        name = self._names.get(id(layer))
        if name is None or not layer.training:
            return
        self._batches[-1][name] += 1
        if isinstance(output, Tensor):
            self._precisions.setdefault(name, set()).add(output.dtype)

    def take(self) -> Iterator[ComparedValue]:
        """Yield each layer's precision and its number of calls, and begin again. A value of 0 is not compared."""
        self.end()
        batches, precisions = self._batches, self._precisions
        self._batches, self._precisions = [], {}
        for name in self._names.values():
            known = precisions.get(name, set()) if len(batches) == RECORDED else set()
            single = next(iter(known)) if len(known) == 1 else None
            yield ComparedValue("precision", name, PRECISIONS.index(single) + 1 if single in PRECISIONS else 0)
            if name in self._counted:
                counts = {batch[name] for batch in batches}
                yield ComparedValue("calls", name, counts.pop() if len(counts) == 1 and known else 0)
