"""Facts about a user's training loader: how many samples it loads in an epoch, and whether it may repeat samples."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from cnnstrategies.data.division import has_map, samplers_of
from cnnstrategies.divided_batches import DividedBatches
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
