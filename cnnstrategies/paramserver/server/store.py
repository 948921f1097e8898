"""The slices that a server holds: values, versions, optimizers, and whose updates they contain."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.optimizers import ALL_THERE, SharedOptimizer, StateValue, load_optimizer
from cnnstrategies.paramserver.server.changes import Changes, encodings
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Options, Specification

SHARED_BY = 64  # slices that share an optimizer; each of its steps looks at all of them


class Store:
    """The slices of one server, as primary or backup. All memory for values is allocated here, at the start.

    Attributes:
        slices: The same by key.
        values: Each slice's values, in the same memory for ever.
        memory: The same as bytes.
        versions: How many updates each slice has had; -1 before its first value. In sync and local the number of
            steps.
        seen: For each slice the last step of each worker (id, incarnation) that was applied to it.
        decided: In common steps, who makes up the last one that is decided, as a message says it. It goes wherever the
            values go: nobody who has what came of a decision may lack it.
        changes: What workers have of the values, if they are sent changes.
    """

    def __init__(self, specification: Specification, slices: Iterable[Slice]) -> None:
        self.slices = {slice_.key: slice_ for slice_ in slices}
        self.values = {key: torch.zeros(slice_.shape, dtype=slice_.dtype) for key, slice_ in self.slices.items()}
        self.memory = {key: as_bytes(value) for key, value in self.values.items()}
        self.versions = dict.fromkeys(self.slices, -1)
        self.seen: dict[int, dict[tuple[int, int], int]] = {key: {} for key in self.slices}
        self.decided: dict[str, Any] | None = None
        self.changes: Changes | None = None
        if specification.pulls_changes:
            encoding, whole = encodings(specification)
            self.changes = Changes(encoding, specification.compression_ratio, self.values, whole)
        group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
        self._group = {key: group_of[slice_.parts[0].parameter] for key, slice_ in self.slices.items()}
        kind = load_optimizer(specification.optimizer)
        self._optimizers: list[SharedOptimizer] = []
        self._place: dict[int, int] = {}
        for number, group in enumerate(specification.groups):
            keys = [key for key in self.slices if self._group[key] == number]
            for start in range(0, len(keys), SHARED_BY):
                shared = keys[start : start + SHARED_BY]
                self._place.update(dict.fromkeys(shared, len(self._optimizers)))
                values = {key: self.values[key] for key in shared}
                sizes = {key: self.slices[key].sizes for key in shared}
                self._optimizers.append(SharedOptimizer(kind, values, sizes, group.options))

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace a slice's values."""
        self.values[key].copy_(value.view(self.values[key].shape))
        self.versions[key] = version
        if self.changes is not None:
            self.changes.begin(key)

    def apply(
        self, updates: Mapping[int, Tensor | None], options: Options, absent: Mapping[int, int] = ALL_THERE
    ) -> None:
        """One update of some slices.

        Args:
            updates: By slice the gradient, which in mode local is the mean difference; None leaves the values alone.
            options: Each parameter group's hyper-parameters.
            absent: The parts of slices that have no gradient, as bits: their values are left alone, too.
        """
        together: dict[int, dict[int, Tensor]] = {}
        for key, update in updates.items():
            if update is not None:
                together.setdefault(self._place[key], {})[key] = update
        for place, gradients in together.items():
            self._optimizers[place].step(gradients, options[self._group[next(iter(gradients))]], absent)
        for key in updates:
            self.versions[key] += 1

    def state(self, key: int) -> dict[str, StateValue]:
        """A slice's optimizer state."""
        return self._optimizers[self._place[key]].state(key)

    def clear_state(self, key: int) -> None:
        """Forget a slice's optimizer state."""
        self._optimizers[self._place[key]].clear_state(key)

    def set_state(self, key: int, name: str, value: StateValue) -> None:
        """Replace one part of a slice's optimizer state."""
        self._optimizers[self._place[key]].set_state(key, name, value)
