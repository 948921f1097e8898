"""The slices that a server holds: values, versions, optimizers, and whose updates they contain."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.optimizers import SliceOptimizer, StateValue, load_optimizer
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification

Options = list[dict[str, Any]]


class Store:
    """The slices of one server, as primary or backup. All memory for values is allocated here, at the start.

    Args:
        specification: What all processes of the run agree on.
        slices: The slices to hold.

    Attributes:
        slices: The same by key.
        values: Each slice's values.
        versions: How many updates each slice has had; -1 before its first value. In sync and local the number of
            steps.
        seen: For each slice the last step of each worker (id, incarnation) that was applied to it.
    """

    def __init__(self, specification: Specification, slices: Iterable[Slice]) -> None:
        self.slices = {slice_.key: slice_ for slice_ in slices}
        self.values = {key: torch.zeros(slice_.shape, dtype=slice_.dtype) for key, slice_ in self.slices.items()}
        self.versions = dict.fromkeys(self.slices, -1)
        self.seen: dict[int, dict[tuple[int, int], int]] = {key: {} for key in self.slices}
        group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
        self._group = {key: group_of[slice_.parameter] for key, slice_ in self.slices.items()}
        kind = load_optimizer(specification.optimizer)
        self._averages = specification.mode == "local"
        self._optimizers = {
            key: SliceOptimizer(kind, value, specification.groups[self._group[key]].options)
            for key, value in self.values.items()
        }

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace a slice's values."""
        self.values[key].copy_(value.view(self.values[key].shape))
        self.versions[key] = version

    def apply(self, key: int, update: Tensor | None, options: Options) -> None:
        """One update.

        Args:
            key: The slice.
            update: The gradient, or in mode local the mean of the weights; None leaves the values as they are.
            options: Each parameter group's hyper-parameters.
        """
        if update is not None and self._averages:
            self.values[key].copy_(update.view(self.values[key].shape))
        elif update is not None:
            self._optimizers[key].step(update, options[self._group[key]])
        self.versions[key] += 1

    def state(self, key: int) -> dict[str, StateValue]:
        """A slice's optimizer state."""
        return self._optimizers[key].state

    def set_state(self, key: int, name: str, value: StateValue) -> None:
        """Replace one part of a slice's optimizer state."""
        self._optimizers[key].set_state(name, value)

    def contents(self) -> dict[str, Any]:
        """Everything in it, as tensors and plain values."""
        return {
            "values": self.values,
            "versions": self.versions,
            "seen": {key: [[*who, step] for who, step in seen.items()] for key, seen in self.seen.items()},
            "states": {key: self.state(key) for key in self.slices},
        }

    def restore(self, contents: Mapping[str, Any]) -> None:
        """Take over what :meth:`contents` gave."""
        for key, value in contents["values"].items():
            self.put(key, value, contents["versions"][key])
            self.seen[key] = {(worker, incarnation): step for worker, incarnation, step in contents["seen"][key]}
            for name, part in contents["states"][key].items():
                self.set_state(key, name, part)
