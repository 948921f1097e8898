"""Facts about a user's loaders: how many samples they load in an epoch, and whether reading changes the samples."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from cnnstrategies.data.division import has_map, samplers_of
from cnnstrategies.divided_batches import DividedBatches
from cnnstrategies.guarding.digests import digests
from cnnstrategies.models.samples import count_samples
from cnnstrategies.runtime.seeds import restores_random_numbers
from cnnstrategies.shares.samplers import DealtBatches, OrderedBatches

MOST_COUNTED = 1 << 16  # Largest number of batches of a stream that are counted.


def drawn_samples(loader: Any) -> dict[str, Any] | None:
    """Return the samples that a loader's DistributedSampler gives to this rank in an epoch.

    Returns:
        The sampler's indices, the number of samples in the data set, and the number of samples that the sampler may
        leave out because of its option ``drop_last``. None if the loader does not have a DistributedSampler, or if this
        package's own samplers divide the data.
    """
    sampler = next((sampler for sampler in samplers_of(loader) if isinstance(sampler, DistributedSampler)), None)
    if sampler is None or isinstance(sampler, (DealtBatches, DividedBatches, DistributedSamplerWrapper)):
        return None
    allowed = sampler.num_replicas - 1 if sampler.drop_last else 0
    return {"indices": list(sampler), "size": len(sampler.dataset), "allowed": allowed}  # type: ignore[arg-type]


def epoch_samples(loader: Any) -> int | None:
    """Return the number of samples that a loader with indices loads in an epoch, before incomplete batches are dropped.

    The result is None if the number is not known, or if this package's own samplers divide the data.
    """
    package_samplers = (DealtBatches, DividedBatches, OrderedBatches)
    if not has_map(loader) or any(isinstance(sampler, package_samplers) for sampler in samplers_of(loader)):
        return None
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return None
    return sized_len(loader.sampler)


def loader_of_one_process(make: Callable[[], Any]) -> Any:
    """Return a user's training loader in a run of one process.

    Args:
        make: Function that returns the loader.

    Returns:
        The loader. None if it cannot be made, for example because it needs a process group.
    """
    try:
        # Making the loader must not change the random numbers of the run.
        with restores_random_numbers():
            return make()
    except Exception:
        return None


def whole_epoch(loader: Any, reads: bool) -> int | None:
    """Return the number of samples that a user's training loader loads in an epoch in a run of one process.

    Args:
        loader: The loader.
        reads: Whether to read a whole stream to count its samples.

    Returns:
        The number. None if it is not known.
    """
    try:
        with restores_random_numbers():
            count = epoch_samples(loader)
            if count is None and reads and isinstance(getattr(loader, "dataset", None), IterableDataset):
                count = sum(count_samples(batch) for batch in islice(iter(loader), MOST_COUNTED))
    except Exception:
        return None
    return count


DEEPEST = 4  # Number of data sets inside each other that are looked at, such as a Subset's.


def lines_about_samples(train: Any, validations: Any) -> list[str]:
    """Return lines for the user about a run's samples; there are none if nothing is wrong, or if a read fails.

    Only sample 0 of a data set with indices is read. Random numbers of the run are restored.

    Args:
        train: The training loader.
        validations: The validation loader, a list of loaders, or None.
    """
    lines = []
    if changes_itself(getattr(train, "dataset", None)):
        lines.append("samples: reading sample 0 of the training data changes the stored data: copy before you write")
    loaders = [validations] if hasattr(validations, "dataset") else tree_leaves(validations)
    if any(is_random(getattr(loader, "dataset", None)) for loader in loaders):
        lines.append(
            "samples: sample 0 of the validation data has other values each time: give validations their own transform"
        )
    return lines


def changes_itself(dataset: Any) -> bool:
    """Return whether a second read of sample 0 changes a tensor or an array that the data set holds.

    The first read may fill a cache.
    """
    with suppress(Exception), restores_random_numbers():
        dataset[0]
        before = _held(dataset)
        dataset[0]
        return before != _held(dataset)
    return False


def is_random(dataset: Any) -> bool:
    """Return whether two reads of sample 0 give different values."""
    with suppress(Exception), restores_random_numbers():
        first, second = (digests([*_tensors(dataset[0])]).tolist() for _ in range(2))
        return bool(first != second)
    return False


def _held(dataset: Any) -> list[int]:
    """Return the checksums of the tensors and arrays that a data set holds."""
    result: list[int] = []
    for _ in range(DEEPEST):
        values = [value for value in vars(dataset).values() if isinstance(value, Tensor | np.ndarray | list | tuple)]
        result += digests([*_tensors(values)]).tolist()
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            break
    return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value
