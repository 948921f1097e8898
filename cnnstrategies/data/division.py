"""Find out whether the processes' loaders have the same data, or whether the user's code has divided the data already.

A loader can divide the data by its sampler, by its data set, or while it yields batches. The functions of this module
describe what one process loads by numbers. The processes exchange these numbers and compare them.
"""

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from cnnstrategies.divided_batches import DividedBatches
from cnnstrategies.runtime.seeds import restores_random_numbers, seed_all

LEAVES = 6  # Number of leaves of a batch or an item that are compared. A leaf is a tensor, a number or a text.
DRAWN = 1 << 16  # Largest number of items of a sampler that are compared.
BYTES = 1 << 18  # The checksum of a leaf covers this many bytes from the start of its values.
ENOUGH = 64  # Number of equal elements of a leaf after which two processes are considered to have the same data.
SEED = 0  # Seed with which all processes draw the samplers' items and load items for the comparison.

Row = list[float]


def has_map(loader: Any) -> bool:
    """Whether a loader is a torch DataLoader of a data set with indices, whose samples can be compared by index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of a loader: its batch sampler, its sampler, and the samplers inside these two."""
    pending = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    seen: set[int] = set()
    while pending:
        sampler = pending.pop(0)
        if sampler is None or id(sampler) in seen:
            continue
        seen.add(id(sampler))
        yield sampler
        pending += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]


def shuffles(loader: Any) -> bool:
    """Return whether each epoch of a loader should have an order of its own."""
    return any(
        isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) for sampler in samplers_of(loader)
    )


def yields_each_once(loader: Any) -> bool:
    """Return whether a loader promises to load each sample at most once in an epoch.

    Samplers of torch do so, unless they draw with replacement. A sampler of unknown kind may repeat samples by design.
    """
    samplers = [sampler for sampler in samplers_of(loader) if type(sampler) is not BatchSampler]
    once = (SequentialSampler, RandomSampler, DistributedSampler)
    return has_map(loader) and all(
        isinstance(sampler, once)
        and not isinstance(sampler, DividedBatches)
        and not getattr(sampler, "replacement", False)
        for sampler in samplers
    )


def divided_among(loader: Any) -> tuple[str, int] | None:
    """Return the sampler's class name and the number of processes among which it divides the samples.

    Any sampler with an integer ``num_replicas`` counts, whether or not it derives from torch's ``DistributedSampler``.
    The result is None if the loader does not have such a sampler.
    """
    for sampler in samplers_of(loader):
        number = getattr(sampler, "num_replicas", None)
        if isinstance(number, int):
            return type(sampler).__name__, number
    return None


def describe_loader(loader: DataLoader[Any]) -> Row:
    """Describe the samples of a loader by numbers that are equal in all processes unless the data are divided.

    All processes draw the sampler's items and load two items of the data set with equal random seeds, so that random
    orders and random augmentation do not count as different data. The loader, its sampler and its data set are not
    changed: copies are used, which share the data but not the attributes.

    Returns:
        The number of samples, a checksum of the drawn items, and the checksums of the leaves of two items. The number
        of samples is -1 if it is not known. A checksum is 0 if it is not known, or if the value differs when it is
        loaded twice.
    """
    drawn = _drawn_items(loader)
    checksums = [checksum(drawn), *_probes(loader, drawn)]
    samples = sized_len(loader.dataset)
    return [float(-1 if samples is None else samples), *map(float, checksums)]


def same_loaders(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two results of :func:`describe_loader` describe the same data. Unknown checksums are not compared."""
    pairs = zip(first[1:], second[1:], strict=True)
    return first[0] == second[0] and all(left == right for left, right in pairs if left and right)


def is_divided(
    loader: Any, processes: int, gather: Callable[[Row], Sequence[Row]], loading: Sequence[int] = (0,)
) -> bool | None:
    """Whether the user's code has divided a loader's data among all processes. All processes must call this.

    Args:
        loader: This process's loader.
        processes: Number of processes.
        gather: Function that sends a row of numbers to all processes, and returns the rows of all processes.
        loading: Processes that load in any case. The data of other processes must differ from the data of all of these.

    Returns:
        None if only the batches can show it, because the samples do not have indices.
    """
    declared = divided_among(loader)
    if declared is not None:
        return declared[1] == processes != len(loading)
    if processes == len(loading):
        return False
    if not has_map(loader):
        return None
    rows = gather(describe_loader(loader))
    return any(not any(same_loaders(rows[source], row) for source in loading) for row in rows)


def _drawn_items(loader: DataLoader[Any]) -> Any:
    """Return the items that a sampler draws in an epoch, in a fixed order; None if the items are not known.

    If the sampler draws each sample of its data once, the result is the number of samples.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    size = sized_len(loader.dataset)
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    if type(sampler) is SequentialSampler or whole:
        return size
    try:
        with restores_random_numbers():
            seed_all(SEED)
            # The copy of the sampler refers to the original data set, which may be large.
            drawn = copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
            items = list(islice(iter(drawn), DRAWN))
    except Exception:  # A sampler that cannot be copied, or that needs what only its own process has.
        return None
    if all(isinstance(item, (list, tuple)) for item in items):
        items = [index for item in items for index in item]
    # An endless sampler is compared by the order of its first items, and other samplers by the set of their items.
    return sorted(items, key=repr) if len(items) < DRAWN else items


def _probes(loader: DataLoader[Any], drawn: Any) -> list[int]:
    """Return the checksums of the leaves of two items of the data set, which is loaded with equal seeds."""
    indices = [0, drawn - 1] if isinstance(drawn, int) else [drawn[0], drawn[-1]] if drawn else []
    checksums = []
    for index in indices:
        loaded = [_item_checksums(loader.dataset, index) for _ in range(2)]
        checksums += [first if first == second else 0 for first, second in zip(*loaded, strict=True)]
    return checksums + [0] * (2 * LEAVES - len(checksums))


def _item_checksums(dataset: Any, index: Any) -> list[int]:
    try:
        with restores_random_numbers():
            seed_all(SEED)
            leaves = tree_leaves(_shallow(dataset)[index])[:LEAVES]
    except Exception:  # The data set may work only in the loader's worker processes.
        leaves = []
    checksums = [checksum(leaf) for leaf in leaves]
    return checksums + [0] * (LEAVES - len(checksums))


def _shallow(dataset: Any) -> Any:
    """Return a copy of a data set that shares the data, including copies of the data sets inside the data set.

    A data set may open a file when its first item is loaded, and store the file in an attribute. The workers of the
    loader are forked later, and must not share such a file.
    """
    shallow = copy.copy(dataset)
    if isinstance(dataset, ConcatDataset):
        shallow.datasets = [_shallow(part) for part in dataset.datasets]
    elif hasattr(vars(dataset).get("dataset"), "__getitem__"):
        shallow.dataset = _shallow(dataset.dataset)
    return shallow


def checksum(value: Any) -> int:
    """Return a checksum above 0 of a value, or 0 for a value of an unsupported type."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return 0
        element_count = max(1, BYTES // max(1, value.element_size()))
        data = value.detach().flatten()[:element_count].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype != object:
        data = value.tobytes()[:BYTES]
    elif isinstance(value, bytes):
        data = value[:BYTES]
    elif isinstance(value, (str, int, float, list, tuple)):
        data = repr(value).encode()
    elif hasattr(value, "tobytes"):  # Images of PIL.
        data = value.tobytes()[:BYTES]
    else:
        return 0
    return zlib.crc32(data) or 1


def describe_batch(batch: Any) -> Row:
    """Describe a batch by numbers, for :class:`StreamComparison`.

    Returns:
        1 if there is a batch and 0 if the batch is None. Then, for each of the first :data:`LEAVES` leaves: the
        checksum, the number of elements, and 1 if the elements differ from each other. Missing leaves have zeros.
    """
    if batch is None:
        return [0.0] * (1 + 3 * LEAVES)
    row = [1.0]
    for leaf in tree_leaves(batch)[:LEAVES]:
        elements = leaf.numel() if isinstance(leaf, Tensor) else 1
        varies = isinstance(leaf, Tensor) and elements > 1 and bool((leaf != leaf.flatten()[0]).any())
        row += [float(checksum(leaf)), float(elements), float(varies)]
    return row + [0.0] * (1 + 3 * LEAVES - len(row))


class StreamComparison:
    """Comparison of the first batches of processes whose loaders do not have samples with indices.

    Two processes have the same data if a leaf of their batches, such as the targets, has been equal for at least
    :data:`ENOUGH` elements that are not all the same. Other leaves may differ, because each process draws its own
    random augmentation. Two processes have different data as soon as all leaves have differed.

    Args:
        sources: Processes whose data are used in any case.
        others: Processes whose data are used only if the data differ from the data of all sources.
    """

    def __init__(self, sources: Sequence[int], others: Sequence[int]) -> None:
        self._sources = sources
        self._others = others
        self._history: list[Sequence[Row]] = []

    def add(self, rows: Sequence[Row]) -> bool | None:
        """Take the next batches of all processes into account.

        Args:
            rows: Results of :func:`describe_batch` of all processes, in rank order.

        Returns:
            Whether the data are divided among all processes; None if this is not known yet.
        """
        if not any(row[0] for row in rows):
            return None  # The absence of batches does not make data differ that have been equal before.
        self._history.append(rows)
        verdicts = [[self._compare(source, other) for source in self._sources] for other in self._others]
        if any(all(verdict is False for verdict in row) for row in verdicts):
            return True
        return False if all(any(row) for row in verdicts) else None

    def decide(self) -> bool:
        """Decide without further batches whether the data are divided among all processes.

        Equal batches count as the same data, although they are few or constant. Batches that differ in some leaves
        count as divided data, because it would be worse to leave out a part of the data.
        """
        pairs = ((source, other) for other in self._others for source in self._sources)
        equal = dict.fromkeys(self._others, False)
        for source, other in pairs:
            equal[other] |= all(self._rows(source, batch) == self._rows(other, batch) for batch in self._batches)
        return not all(equal.values())

    @property
    def _batches(self) -> range:
        return range(len(self._history))

    def _rows(self, rank: int, batch: int) -> list[float]:
        return list(self._history[batch][rank])

    def _compare(self, source: int, other: int) -> bool | None:
        """Whether two processes have the same data; None if this is not known yet."""
        if any(self._rows(source, batch)[0] != self._rows(other, batch)[0] for batch in self._batches):
            return False
        undecided = False
        for leaf in range(LEAVES):
            cells = [
                [tuple(self._rows(rank, batch)[1 + 3 * leaf : 4 + 3 * leaf]) for rank in (source, other)]
                for batch in self._batches
            ]
            if any(not first[0] or first != second for first, second in cells):
                continue
            varied = any(first[2] for first, _ in cells) or len({first[0] for first, _ in cells}) > 1
            if varied and sum(first[1] for first, _ in cells) >= ENOUGH:
                return True
            undecided = True
        return None if undecided else False
