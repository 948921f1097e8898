"""Save the batches that the ranks load, and build global batches from them, with which one device repeats the run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.batches import NoBatch


class BatchKeeper(Precision):
    """Precision plugin that saves each batch as the loader returns it.

    Lightning passes each batch to the precision plugin before the module's hooks and the strategy can change it, on
    every rank and under every strategy.
    """

    folder: Path | None = None  # Folder in which batches are saved; None if they are not saved.
    count = 0  # Number of saved batches.
    generator = torch.empty(0, dtype=torch.uint8)  # State of torch's CPU random generator when the last batch arrived.

    @override
    def convert_input(self, data: Any) -> Any:
        self.generator = torch.get_rng_state()
        if self.folder is not None and not isinstance(data, NoBatch):
            torch.save(data, self.folder / f"{self.count}.pt")
            self.count += 1
        return super().convert_input(data)


class DoubleBatchKeeper(BatchKeeper, DoublePrecision):
    """Precision plugin for float64 that saves each batch like :class:`BatchKeeper`."""


class GlobalBatches:
    """Data loader of global batches. A global batch is joined from the saved batches of all ranks, in rank order.

    Args:
        folders: Folder of each rank's batches, in rank order.
        ends: For each epoch, the number of batches that a rank has loaded from the start of the run to the epoch's end.
        length: Number of batches in an epoch; None if the number is not known. Learning rate schedules may need it.
    """

    def __init__(self, folders: Sequence[Path], ends: Sequence[int], length: int | None) -> None:
        self._folders = folders
        self._ends = ends
        self._length = length
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        while (parts := [folder / f"{self._next}.pt" for folder in self._folders])[0].exists():
            self._next += 1
            yield joined([torch.load(part, weights_only=False) for part in parts])
            if self._next in self._ends:
                return

    def __len__(self) -> int:
        if self._length is None:
            # Lightning expects a TypeError from a loader of unknown length.
            raise TypeError("the ranks' loaders have no length")
        return self._length


def joined(parts: Sequence[Any]) -> Any:
    """Join the batches of several ranks into one batch.

    Args:
        parts: Batches of the ranks, with equal structures. A batch consists of tensors with samples as their first
            dimension, lists with an item for each sample (such as file names, or the boxes of each image), and mappings
            and tuples of such tensors and lists.

    Raises:
        ConfigurationError: A batch contains a value of an unsupported type.
    """
    return parts[0] if len(parts) == 1 else _joined(parts, [_count(part) for part in parts])


def _joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        fields = {name: _joined([part[name] for part in parts], counts) for name in first}
        return type(first)(fields)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        if _have_items(parts, counts):
            return type(first)(item for part in parts for item in part)
        items = [_joined(pair, counts) for pair in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if isinstance(first, (str, int, float, type(None))) and all(part == first for part in parts):
        return first
    raise ConfigurationError(
        f"a batch contains a {type(first).__name__}, and verify cannot combine the ranks' values into one batch: use "
        "tensors, or lists, tuples and mappings of tensors; a number or text must be equal on all ranks"
    )


def _count(batch: Any) -> int:
    """Return the number of samples of a batch.

    If the batch contains a list of mappings, such as the boxes of each image, return the length of this list. Otherwise
    return the size of the first tensor's first dimension.
    """
    for listed in _lists(batch):
        if listed and all(isinstance(item, Mapping) for item in listed):
            return len(listed)
    return next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), 0)


def _have_items(lists: Sequence[Any], counts: Sequence[int]) -> bool:
    """Whether lists contain one item for each sample. If not, each item contains data of all samples.

    Args:
        lists: Corresponding lists or tuples from the ranks' batches.
        counts: Number of samples of each rank's batch.
    """
    if all(isinstance(item, (str, int, float)) for item in lists[0]):
        return True
    pairs = list(zip(lists, counts, strict=True))
    if hasattr(lists[0], "_fields") or any(len(listed) != count for listed, count in pairs):
        return False
    return any(tensor.ndim and len(tensor) != count for listed, count in pairs for tensor in _tensors(listed))


def _lists(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (list, tuple)):
        yield batch
    if isinstance(batch, (Mapping, list, tuple)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lists(item)


def samples(folder: Path) -> tuple[int, set[bytes]]:
    """Return the number of samples that a rank has loaded, and the set of distinct samples among them.

    In the set, a sample is represented by the bytes of its row in the batch's first tensor.

    Args:
        folder: Folder of the rank's batches.
    """
    count, seen = 0, set()
    for file in folder.glob("*.pt"):
        for sample in next(_tensors(torch.load(file, weights_only=False)), torch.empty(0)):
            count += 1
            seen.add(sample.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return count, seen


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)
