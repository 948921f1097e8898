"""Measurements of a rank's loader, its dataset and its connection while nothing else runs."""

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

SUMMED = 1 << 22  # Largest number of bytes that are summed: a slow connection would take seconds for more.
SUMS = 3
SAMPLE_SECONDS = 0.4
MADE = 300  # largest number of samples or batches to make


def sum_alone(module: nn.Module, accumulated: int) -> dict[str, Any]:
    """Measure an all-reduce as large as all gradients. All ranks must call this function.

    Args:
        module: Module with the parameters.
        accumulated: Number of batches whose gradients are accumulated before one all-reduce.

    Returns:
        ``seconds`` of the sum for each batch, None without a process group, and ``bytes`` of the gradients for each
        batch.
    """
    size = sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters() if parameter.requires_grad
    )
    if not dist.is_initialized() or not size:
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
    """Measure how long the dataset takes for a sample, in this process and without the loader's processes.

    Returns:
        ``seconds`` for each sample, ``processor`` seconds for each sample, and ``two``, the seconds for each sample
        while two threads make samples. Empty if the dataset has no indices, or too few samples.
    """
    makers = _makers(loader)
    if len(makers) < 5:
        return {}
    makers[0]()  # The first sample may open files.
    # One thread is measured before and after the two threads, because the speed of a machine varies.
    before, *threads, after = (makers[place::4] for place in range(1, 5))
    without_threads = [_make(before)]
    with ThreadPoolExecutor(2) as pool:
        with_threads = [sum(totals) for totals in zip(*pool.map(_make, threads), strict=True)]
    without_threads.append(_make(after))
    made, seconds, processor = (sum(totals) for totals in zip(*without_threads, strict=True))
    if not made or not with_threads[0]:
        return {}
    # Other threads of the process may compute as well, such as a worker's threads that talk to servers.
    return {
        "seconds": seconds / made,
        "processor": min(seconds, processor) / made,
        "two": with_threads[1] / with_threads[0],
    }


def _processor_seconds() -> float:
    """Return this process's CPU time, plus the time in which its main thread has waited for a core, in seconds.

    On a busy machine a thread waits long for a core, and this waiting is not waiting for data.
    """
    try:
        queued = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.process_time() + queued


def _make(makers: Sequence[Callable[[], int]]) -> tuple[int, float, float]:
    """Make samples for :data:`SAMPLE_SECONDS`; return their number, the seconds, and the CPU time in seconds."""
    began, computed, made = time.perf_counter(), _processor_seconds(), 0
    for maker in makers:
        made += maker()
        if time.perf_counter() - began > SAMPLE_SECONDS:
            break
    return made, time.perf_counter() - began, _processor_seconds() - computed


def _makers(loader: Any) -> list[Callable[[], int]]:
    """Return functions that each make one sample and return 1, or make one batch and return its number of samples.

    The functions make batches if the dataset is indexed with the indices of whole batches. Each function has its own
    indices, because the operating system caches files that have been read.
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
    """Return the number of batches that a loader's workers prepare ahead."""
    return int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)


def load_alone(loader: Any, seconds: float) -> dict[str, Any]:
    """Measure a loader's samples/s without training. Iterators that the loader returned before become invalid."""
    ready = 1 + prefetched(loader)
    samples, began = 0, None
    for number, batch in enumerate(loader):
        if began is not None:
            samples += count_samples(batch)
        elif number + 1 >= ready:  # Batches that the workers had prepared do not count.
            began = time.perf_counter()
            deadline = began + seconds
        if began is not None and time.perf_counter() > deadline:
            break
    taken = 0.0 if began is None else time.perf_counter() - began
    return {"rate": samples / taken if samples and taken else None}
