"""Ranks to which the large tensors of batches are sent with each batch, because operations there have read them.

The large tensors of a loader's first batch are on the ranks of the first stage alone. A loss then brings the masks of
a segmentation to the last stage, and so do its backward and each metric. From the next batch on, such a tensor is
sent to these ranks once, together with the batch, and operations there find it. Tensors that no operation brings to
other ranks, such as the images, stay where they are.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from cnnstrategies.placed import Places


class BatchReaders:
    """The ranks that read the large tensors of one epoch's batches. All ranks have this object, and use it alike.

    A tensor is known by its position among the tensors of its batch. Tensors on GPUs are not sent with the batch,
    because the devices send them to each other faster than the processes.

    Args:
        places: The rules of this rank.
        sources: Ranks of the first stage.
        number: Number of the loader, which is the same on all ranks.

    Attributes:
        keys: By position, the keys of tensors whose rows stay on the ranks that have loaded them; see `DividedRows`.
    """

    def __init__(self, places: Places, sources: Sequence[int], number: int) -> None:
        self._places, self._sources, self._number = places, tuple(sources), number
        self._of_batch: dict[int, frozenset[int]] = {}
        self._labels: list[str] = []
        self.keys: dict[int, str] = {}

    def begin_batch(self) -> None:
        """Take note of the ranks to which tensors of earlier batches have been brought."""
        readers = {index: self._places.readers.get(label) for index, label in enumerate(self._labels)}
        self._of_batch = {index: frozenset(ranks) for index, ranks in readers.items() if ranks}

    def of(self, index: int) -> frozenset[int]:
        """Return the ranks to which the current batch's tensor at a position is sent, without ranks that load."""
        return self._of_batch.get(index, frozenset()).difference(self._sources)

    def place(self, index: int) -> tuple[int, ...]:
        """Return the ranks that have the current batch's tensor at a position, if the tensor is large."""
        return tuple(sorted(self.of(index).union(self._sources)))

    def label(self, index: int) -> str:
        """Return the name of the tensor at a position, and let the rules observe who reads tensors of this name."""
        while len(self._labels) <= index:
            label = f"tensor {len(self._labels)} of a batch of loader {self._number}"
            self._labels.append(label)
            if self._places.devices is None:
                self._places.readers[label] = set()
        return self._labels[index]

    @property
    def sent_keys(self) -> frozenset[str]:
        """Keys of tensors whose rows do not stay on the ranks that have loaded them, because others read them."""
        return frozenset(key for index, key in self.keys.items() if self.of(index))


def map_tensors(function: Callable[[Any, int], Any], batch: Any, kinds: tuple[type, ...]) -> Any:
    """Return a batch with a function's results in place of its tensors.

    Args:
        function: Function of a tensor and its position among the tensors of the batch.
        batch: Nested containers.
        kinds: Classes that count as tensors, besides tensors themselves.
    """
    kinds = (Tensor, *kinds)
    positions = itertools.count()

    def mapped(leaf: Any) -> Any:
        return function(leaf, next(positions)) if isinstance(leaf, kinds) else leaf

    return tree_map(mapped, batch, is_leaf=lambda value: isinstance(value, kinds))
