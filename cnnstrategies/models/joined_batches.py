"""Join the batches of several ranks into one batch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError


def joined(parts: Sequence[Any]) -> Any:
    """Join the batches of several ranks into one batch.

    Args:
        parts: Batches of the ranks, with equal structures. A batch consists of tensors with samples as their first
            dimension, lists with an item for each sample (such as file names, or the boxes of each image), and mappings
            and tuples of such tensors and lists. A tensor that does not have one row for each sample and is equal on
            all ranks, such as class weights, is part of the joined batch once.

    Raises:
        ConfigurationError: A batch contains a value of an unsupported type, or a tensor whose rows do not belong to
            samples and differ between the ranks.
    """
    return parts[0] if len(parts) == 1 else _joined(parts, [_count(part) for part in parts])


def _joined(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return _joined_tensors(parts, counts)
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
        f"a batch contains a {type(first).__name__}, and the ranks' values cannot be combined into one batch: use "
        "tensors, or lists, tuples and mappings of tensors; a number or text must be equal on all ranks"
    )


def _joined_tensors(parts: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    first = parts[0]
    if not first.ndim or len(first) != counts[0]:
        if all(torch.equal(part, first) for part in parts):
            return first
        # A batch may have several rows for each sample, such as two views of each image.
        pairs = zip(parts, counts, strict=True)
        if not first.ndim or any(len(part) * counts[0] != len(first) * count for part, count in pairs):
            raise ConfigurationError(
                f"a batch of {counts[0]} samples contains a tensor of shape {tuple(first.shape)} that differs between "
                "the ranks, so the ranks' tensors cannot be combined into one batch: use tensors with a row for each "
                "sample, or lists with an item for each sample"
            )
    return torch.cat(list(parts))


def _count(batch: Any) -> int:
    """Return the number of samples of a batch.

    If the batch contains a list of mappings, such as the boxes of each image, return the length of this list. Otherwise
    return the size of the first tensor's first dimension.
    """
    for listed in _lists(batch):
        if listed and all(isinstance(item, Mapping) for item in listed):
            return len(listed)
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 0)


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
    if len({type(item[0]) if isinstance(item, (list, tuple)) and item else None for item in lists[0]}) > 1:
        return False  # Items of different kinds are not samples, such as the images and the boxes of two images.
    # Three images (3, H, W) look like three views with a row for each of three samples, which would be (3, C, H, W).
    if all(isinstance(item, Tensor) and item.ndim == 3 for item in lists[0]):
        return True
    return any(tensor.ndim and len(tensor) != count for listed, count in pairs for tensor in tensors_in(listed))


def _lists(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (list, tuple)):
        yield batch
    if isinstance(batch, (Mapping, list, tuple)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lists(item)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, which may be nested in mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(item)
