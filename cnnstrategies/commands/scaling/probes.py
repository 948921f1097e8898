"""Separate measurements of parts of a training: the all-reduce, the dataset and the data loader."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset

from cnnstrategies.models.samples import count_samples
from cnnstrategies.paramserver.process_group import BACKEND

# Largest size in bytes of a measured all-reduce, because a larger one would take seconds on a slow network. For larger
# gradients, the measured time is multiplied by the ratio of the sizes.
SUMMED = 1 << 22
SUMS = 3  # Number of measured all-reduces.
SAMPLE_SECONDS = 0.4  # Duration of one measurement of the dataset, in seconds.
MADE = 300  # Largest number of samples or batches to read in a measurement.


def sum_alone(module: nn.Module, accumulated: int) -> dict[str, Any]:
    """Measure how long an all-reduce of all gradients takes. All ranks must call this.

    Args:
        module: The module that is trained.
        accumulated: Number of batches whose gradients are accumulated before an all-reduce.

    Returns:
        A dictionary with two keys. ``seconds`` is the duration of the all-reduce divided by `accumulated`, or None
        without a process group that sums gradients. ``bytes`` is the size of the gradients divided by `accumulated`.
    """
    size = sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters() if parameter.requires_grad
    )
    if not dist.is_initialized() or dist.get_backend() == BACKEND or not size:
        return {"seconds": None, "bytes": size / accumulated}
    device = next(parameter.device for parameter in module.parameters() if parameter.requires_grad)
    summed = torch.zeros(max(1, min(size, SUMMED) // 4), device=device)
    durations = []
    for _ in range(1 + SUMS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(summed)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        durations.append(time.perf_counter() - began)
    seconds = min(durations[1:]) * size / (summed.numel() * summed.element_size())
    return {"seconds": seconds / accumulated, "bytes": size / accumulated}


def one_sample(loader: Any) -> dict[str, Any]:
    """Measure how long a dataset takes to return a sample, in this process and without the loader's workers.

    Args:
        loader: The DataLoader of the dataset.

    Returns:
        A dictionary with three durations, each in seconds per sample that a thread reads:

        - ``seconds``: elapsed time if one thread reads samples
        - ``processor``: CPU time if one thread reads samples
        - ``two``: elapsed time of each thread if two threads read samples at the same time

        The dictionary is empty if the dataset is an IterableDataset or has too few samples.
    """
    makers = _makers(loader)
    if len(makers) < 5:
        return {}
    makers[0]()  # The first sample is not measured, because reading it may open files.
    # One thread is measured before and after the two threads. The mean of these two measurements is compared with the
    # two threads, so that a slow change of the machine's speed does not matter.
    before, *threads, after = (makers[place::4] for place in range(1, 5))
    without_threads = [_make(before)]
    with ThreadPoolExecutor(2) as pool:
        with_threads = [sum(totals) for totals in zip(*pool.map(_make, threads), strict=True)]
    without_threads.append(_make(after))
    made, seconds, processor = (sum(totals) for totals in zip(*without_threads, strict=True))
    if not made or not with_threads[0]:
        return {}
    # The CPU time is limited to the elapsed time, because other threads of this process may also use CPU time.
    return {
        "seconds": seconds / made,
        "processor": min(seconds, processor) / made,
        "two": with_threads[1] / with_threads[0],
    }


def _cpu_seconds() -> float:
    """Return the CPU time of this process plus the time for which its main thread has waited for a core, in seconds.

    The rest of the elapsed time is then the time of waiting for data, for example for a disk.
    """
    try:
        queued = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.process_time() + queued


def _make(makers: Sequence[Callable[[], int]]) -> tuple[int, float, float]:
    """Call functions that read samples, one after another, until all are called or ``SAMPLE_SECONDS`` have passed.

    Return the number of samples, the elapsed time in seconds and the CPU time in seconds.
    """
    began, computed, made = time.perf_counter(), _cpu_seconds(), 0
    for maker in makers:
        made += maker()
        if time.perf_counter() - began > SAMPLE_SECONDS:
            break
    return made, time.perf_counter() - began, _cpu_seconds() - computed


def _makers(loader: Any) -> list[Callable[[], int]]:
    """Return functions that the measurement calls. Each function reads a sample of the dataset, and returns 1.

    If the sampler yields batches, each function reads a batch, and returns the batch's number of samples. The functions
    read different samples, because a sample that is read again comes from the operating system's file cache.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return []

    def make_sample(index: Any) -> int:
        dataset[index]
        return 1

    def make_batch(request: Any) -> int:
        return count_samples(dataset[request])

    if loader.batch_sampler is None:
        return [partial(make_batch, request) for request in itertools.islice(loader.sampler, MADE)]
    indices = itertools.chain.from_iterable(loader.batch_sampler)
    return [partial(make_sample, index) for index in itertools.islice(indices, MADE)]


def prefetched(loader: Any) -> int:
    """Return the number of batches that the workers of a DataLoader load in advance."""
    return int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)


def load_alone(loader: Any, seconds: float) -> dict[str, Any]:
    """Measure how many samples per second a loader loads while nothing trains.

    With persistent workers, iterators that the loader has returned before become invalid.

    Args:
        loader: The DataLoader.
        seconds: Duration of the measurement.

    Returns:
        A dictionary with the key ``rate``: samples per second, or None if there were too few batches.
    """
    ready = 1 + prefetched(loader)
    samples, began = 0, None
    for number, batch in enumerate(loader):
        if began is not None:
            samples += count_samples(batch)
        elif number + 1 >= ready:  # Start the clock after the batches that were loaded in advance.
            began = time.perf_counter()
            deadline = began + seconds
        if began is not None and time.perf_counter() > deadline:
            break
    taken = 0.0 if began is None else time.perf_counter() - began
    return {"rate": samples / taken if samples and taken else None}
