"""Join the parts of a batch that the replicas of the first stage have loaded.

A part is a result of :func:`~cnnstrategies.strategies.batch_form.take_apart`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.dealing import turns


class DividedRows(NamedTuple):
    """Metadata of a large tensor with a row for each sample, whose rows stay on the replicas that have loaded them.

    Attributes:
        shape: Shape of the rows of a part, or of the whole batch.
        dtype: Dtype of the tensor.
        key: Text that is the same in all parts, and different for each tensor of a part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str


def keep_rows(
    part: Any, samples: int, largest: int, sent: frozenset[str] = frozenset()
) -> tuple[Any, dict[str, Tensor]]:
    """Replace large tensors with a row for each sample by their metadata.

    Args:
        part: The part.
        samples: Number of samples of the part.
        largest: Largest number of bytes of a tensor that is not replaced.
        sent: Keys of tensors that are not replaced, whatever their size.

    Returns:
        The part, and all its tensors with a row for each sample, by the keys of :class:`DividedRows`.
    """
    tensors: dict[str, Tensor] = {}

    def kept(value: Any, path: str) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == samples:
            tensors[path] = value
            is_kept = value.nbytes > largest and path not in sent
            return DividedRows(tuple(value.shape), value.dtype, path) if is_kept else value
        if _is_list(value) and _has_items([value], [samples]):
            return value
        return _with_items(value, lambda item, key: kept(item, f"{path}[{key!r}]"))

    return kept(part, ""), tensors


def count_samples(part: Any) -> int:
    """Return the number of samples of a part; 0 if the part contains neither tensors with dimensions nor lists.

    The number is the size of a tensor's first dimension, or the length of a list. The number is chosen that explains
    most values: a value is explained if it is a tensor with a row for each sample, or inside a list with an item for
    each sample. If two numbers explain equally many values, the number with more such tensors is chosen.
    """
    explained: Counter[int] = Counter()
    tensors: Counter[int] = Counter()
    for value, lengths in _values(part, ()):
        explained.update({*_size(value), *lengths})
        tensors.update(_size(value))
    return max(explained, key=lambda size: (explained[size], tensors[size]), default=0)


def first_rows(part: Any, samples: int, count: int) -> Any:
    """Return a part with its first samples only.

    Args:
        part: The part.
        samples: Number of samples of the part.
        count: Number of samples of the result.
    """
    if isinstance(part, (Tensor, np.ndarray)):
        return part[:count] if part.ndim and len(part) == samples else part
    if _is_list(part) and _has_items([part], [samples]):
        return part[:count]
    return _with_items(part, lambda item, _: first_rows(item, samples, count))


def _is_list(value: Any) -> bool:
    """Whether a value is a list or a tuple, but not a record such as a NamedTuple."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _with_items(value: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return a container with the results of a function of each item and its key or index; another value as it is."""
    if isinstance(value, dict):
        return {key: function(item, key) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    items = [function(item, index) for index, item in enumerate(value)]
    return type(value)(items) if _is_list(value) else type(value)(*items)


def join_parts(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """Return the whole batch, with the samples in the order in which a single process would load them.

    The replicas' samples take turns. Tensors and arrays with a row for each sample, and lists with an item for each
    sample, are joined. All other values must be equal in all parts.

    Args:
        parts: The parts of the replicas that have samples, in the order of the replicas.
        counts: Number of samples of each part.

    Raises:
        ConfigurationError: The parts have different structures, or a value that does not belong to single samples
            differs.
    """
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, counts, [place for places in turns(counts) for place in places], "batch")


def _joined(parts: Sequence[Any], counts: Sequence[int], positions: Sequence[int], path: str) -> Any:
    first = parts[0]
    if any(isinstance(part, DividedRows) for part in parts):
        return _divided(parts, counts, path)
    if any(type(part) is not type(first) for part in parts):
        raise _refusal(path, f"are of different types ({_texts(type(part).__name__ for part in parts)})")
    if isinstance(first, (Tensor, np.ndarray)):
        return _joined_rows(parts, counts, positions, path)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise _refusal(path, f"have different keys ({_texts(list(part) for part in parts)})")
        return {key: _joined([part[key] for part in parts], counts, positions, f"{path}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        is_record = not _is_list(first)
        if not is_record and _has_items(parts, counts):
            items = [item for part in parts for item in part]
            ordered = list(items)
            for position, item in zip(positions, items, strict=True):
                ordered[position] = item
            return type(first)(ordered)
        if any(len(part) != len(first) for part in parts):
            raise _refusal(path, f"have different lengths ({_texts(map(len, parts))})")
        columns = [
            _joined(column, counts, positions, path if is_record else f"{path}[{index}]")
            for index, column in enumerate(zip(*parts, strict=True))
        ]
        return type(first)(*columns) if is_record else type(first)(columns)
    if any(part != first and (part == part or first == first) for part in parts):  # NaN is not equal to itself.
        raise _refusal(path, f"differ ({_texts(map(repr, parts))})")
    return first


def _divided(parts: Sequence[Any], counts: Sequence[int], path: str) -> DividedRows:
    """Return the metadata of a whole tensor. A replica with few samples may have sent its rows."""
    if any(not isinstance(part, (Tensor, DividedRows)) for part in parts):
        raise _refusal(path, f"are of different types ({_texts(_type_name(part) for part in parts)})")
    divided: DividedRows = next(part for part in parts if isinstance(part, DividedRows))
    if any(part.dtype != divided.dtype for part in parts):
        raise _refusal(path, f"have different dtypes ({_texts(part.dtype for part in parts)})")
    shapes = [tuple(part.shape) for part in parts]
    if any(shape[:1] != (count,) for shape, count in zip(shapes, counts, strict=True)):
        raise _refusal(path, f"differ, and do not have a row for each of {_texts(counts)} samples ({_texts(shapes)})")
    if any(shape[1:] != divided.shape[1:] for shape in shapes):
        raise _refusal(path, f"have different sizes ({_texts(shape[1:] for shape in shapes)})")
    return divided._replace(shape=(sum(counts), *divided.shape[1:]))


def _type_name(value: Any) -> str:
    return "Tensor" if isinstance(value, DividedRows) else type(value).__name__


def _joined_rows(parts: Sequence[Any], counts: Sequence[int], positions: Sequence[int], path: str) -> Any:
    """Join tensors or arrays that have a row for each sample. Otherwise return the first one, if all are equal."""
    first = parts[0]
    if any(part.dtype != first.dtype for part in parts):
        raise _refusal(path, f"have different dtypes ({_texts(part.dtype for part in parts)})")
    if not all(part.ndim and len(part) == count for part, count in zip(parts, counts, strict=True)):
        same = torch.equal if isinstance(first, Tensor) else np.array_equal
        if not all(same(part, first) for part in parts):
            shapes = _texts(tuple(part.shape) for part in parts)
            raise _refusal(path, f"differ, and do not have a row for each of {_texts(counts)} samples ({shapes})")
        return first
    if any(part.shape[1:] != first.shape[1:] for part in parts):
        raise _refusal(path, f"have different sizes ({_texts(tuple(part.shape[1:]) for part in parts)})")
    joined: Any = torch.cat(list(parts)) if isinstance(first, Tensor) else np.concatenate(parts)
    result: Any = torch.empty_like(joined) if isinstance(joined, Tensor) else np.empty_like(joined)
    result[list(positions)] = joined
    return result


def _has_items(lists: Sequence[Any], counts: Sequence[int]) -> bool:
    """Whether lists have an item for each sample. Otherwise each item has data of all samples.

    A list of tensors that have a row for each sample, such as a list of two views of the images, is not a list of
    samples, although its length may be the number of samples.
    """
    if any(len(part) != count or not _is_homogeneous(part) for part, count in zip(lists, counts, strict=True)):
        return False
    # Three images (3, H, W) look like three views with a row for each of three samples, which would be (3, C, H, W).
    if all(isinstance(item, Tensor) and item.ndim == 3 for part in lists for item in part):
        return True
    sizes = [
        size == count
        for part, count in zip(lists, counts, strict=True)
        for value, _ in _values(part, ())
        for size in _size(value)
    ]
    return not (sizes and all(sizes))


def _is_homogeneous(items: Sequence[Any]) -> bool:
    """Whether all items of a list are of one kind, as the items of samples are."""
    return len({_kind(item) for item in items}) <= 1


def _kind(item: Any) -> Any:
    """Return the kind of an item. Lists of images and lists of the images' boxes are of different kinds."""
    if isinstance(item, DividedRows):
        return Tensor, item.dtype, len(item.shape)
    if isinstance(item, (Tensor, np.ndarray)):
        return type(item), item.dtype, item.ndim
    if isinstance(item, dict):
        return type(item), *item
    if _is_list(item) and item:
        return type(item), _kind(item[0])
    return (type(item),)


def _values(part: Any, lengths: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield each value of a part, with the lengths of the homogeneous lists that contain the value."""
    if isinstance(part, DividedRows):
        yield part, lengths
    elif isinstance(part, dict):
        for item in part.values():
            yield from _values(item, lengths)
    elif isinstance(part, (list, tuple)):
        is_list = _is_list(part) and _is_homogeneous(part)
        for item in part:
            yield from _values(item, (*lengths, len(part)) if is_list else lengths)
    else:
        yield part, lengths


def _size(value: Any) -> tuple[int, ...]:
    """Return the size of a tensor's first dimension, as a tuple; an empty tuple for other values."""
    if isinstance(value, DividedRows):
        return value.shape[:1]
    return (len(value),) if isinstance(value, (Tensor, np.ndarray)) and value.ndim else ()


def _texts(values: Any) -> str:
    return " and ".join(map(str, values))


def _refusal(path: str, fault: str) -> ConfigurationError:
    return ConfigurationError(
        f"the values of {path} that the replicas of the first stage load for one step {fault}: let collate_fn return a "
        "row or an item for each sample, or values that are equal on all replicas; or give the first stage one replica "
        "(trainer.strategy.replicas)"
    )
