"""What a rank's loader, its samples and its link do when nothing else happens."""

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

SUMMED = 1 << 22  # bytes, at most: a slow link takes seconds for more
SUMS = 3
SAMPLE_SECONDS = 0.4
MADE = 300


def sum_alone(module: nn.Module, accumulated: int) -> dict[str, Any]:
    """Seconds of a sum of all gradients over the ranks, and their bytes; a collective. No seconds without a group.

    Args:
        accumulated: Batches that have one sum; both are for each of them.
    """
    size = sum(one.numel() * one.element_size() for one in module.parameters() if one.requires_grad)
    if not dist.is_initialized() or not size:
        return {"seconds": None, "bytes": size / accumulated}
    device = next(one.device for one in module.parameters() if one.requires_grad)
    some = torch.zeros(max(1, min(size, SUMMED) // 4), device=device)
    taken = []
    for _ in range(1 + SUMS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(some)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - began)
    seconds = min(taken[1:]) * size / (some.numel() * some.element_size())
    return {"seconds": seconds / accumulated, "bytes": size / accumulated}


def one_sample(loader: Any) -> dict[str, Any]:
    """How the dataset makes a sample, in this process and without the loader's; nothing where it has no indices."""
    makers = _makers(loader)
    if len(makers) < 5:
        return {}
    makers[0]()  # It may open files.
    # Alone before and after the two threads: the speed of a machine varies.
    before, *both, after = (makers[place::4] for place in range(1, 5))
    alone = [_make(before)]
    with ThreadPoolExecutor(2) as pool:
        two = [sum(of_both) for of_both in zip(*pool.map(_make, both), strict=True)]
    alone.append(_make(after))
    made, seconds, processor = (sum(of_both) for of_both in zip(*alone, strict=True))
    if not made or not two[0]:
        return {}
    # Other threads of the process compute, too, as a worker's that talk to servers.
    return {"seconds": seconds / made, "processor": min(seconds, processor) / made, "two": two[1] / two[0]}


def _processor_seconds() -> float:
    """In which this process has computed, and its main thread has waited for a core: on a busy machine that is long."""
    try:
        queued = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.process_time() + queued


def _make(makers: Sequence[Callable[[], int]]) -> tuple[int, float, float]:
    """Make as many samples as there is time for: how many, in how many seconds, and in how many of the processor."""
    began, computed, made = time.perf_counter(), _processor_seconds(), 0
    for maker in makers:
        made += maker()
        if time.perf_counter() - began > SAMPLE_SECONDS:
            break
    return made, time.perf_counter() - began, _processor_seconds() - computed


def _makers(loader: Any) -> list[Callable[[], int]]:
    """What makes a sample, or a whole batch where the dataset does; of other indices each, as files are cached."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        return []

    def one(index: Any) -> int:
        dataset[index]
        return 1

    def batch(request: Any) -> int:
        return count_samples(dataset[request])

    if loader.batch_sampler is None:
        return [partial(batch, request) for request in itertools.islice(loader.sampler, MADE)]
    indices = itertools.chain.from_iterable(loader.batch_sampler)
    return [partial(one, index) for index in itertools.islice(indices, MADE)]


def prefetched(loader: Any) -> int:
    """Batches that a loader's workers have ready."""
    return int(getattr(loader, "num_workers", 0) or 0) * int(getattr(loader, "prefetch_factor", 0) or 0)


def load_alone(loader: Any, seconds: float) -> dict[str, Any]:
    """Samples/s of a loader when nothing is trained; its iterator before is of no use any more."""
    ready = 1 + prefetched(loader)
    samples, began = 0, None
    for number, batch in enumerate(loader):
        if began is not None:
            samples += count_samples(batch)
        elif number + 1 >= ready:  # What the workers have ready was made before.
            began = time.perf_counter()
            deadline = began + seconds
        if began is not None and time.perf_counter() > deadline:
            break
    taken = 0.0 if began is None else time.perf_counter() - began
    return {"rate": samples / taken if samples and taken else None}
