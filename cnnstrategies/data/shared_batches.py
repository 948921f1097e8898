"""Memory in which workers hand over batches, taken again and again.

torch hands every batch over in new shared memory, whose pages the kernel has to find, clear and charge. For a batch of
ten megabytes that takes thirty times as long as to copy it into memory that is there.
"""

import itertools
import mmap
import multiprocessing
import os
import resource
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FREE, UNDER_WAY, LENT = range(3)
APART = 1 << 36  # bytes from one batch's memory to the next's; what is not written takes no memory
ALIGNMENT = 64  # bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Place(NamedTuple):
    """Where a tensor lies in the memory of its batch."""

    start: int
    stop: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Lent:
    """A batch in shared memory, as it goes through the loader's queue; it becomes tensors when it comes out."""

    def __init__(self, key: int, number: int, places: Sequence[Place]) -> None:
        self.key = key
        self.number = number
        self.places = tuple(places)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.key, self.number, self.places)


class SharedBatches:
    """Memory for some batches of each worker: made before the workers are forked, and freed with this object.

    It is one file that has no name and no size limit but the machine's memory, so that nothing is left behind whoever
    is killed, and a container's small ``/dev/shm`` does not matter. Each batch's memory is free, under way (set by its
    worker, the only one that writes there) or lent (set by the training process, which alone sets it free again): no
    locks. It is lent until the last tensor, view or array of the batch is gone.

    Args:
        each: Batches of each that can be there at the same time.
    """

    def __init__(self, workers: int, each: int) -> None:
        self.each = each
        self._key = next(_keys)
        self._states = mmap.mmap(-1, workers * each)
        self._maps: dict[int, mmap.mmap] = {}
        self._begun = False
        self._file = os.memfd_create("batches")
        weakref.finalize(self, os.close, self._file).atexit = False
        os.truncate(self._file, workers * each * APART)
        _living[self._key] = self

    @property
    def states(self) -> list[int]:
        """What is with each batch's memory: FREE, UNDER_WAY or LENT."""
        return list(self._states[:])

    def lend(self, batch: Sequence[Tensor], worker: int) -> Lent | None:
        """Copy a batch into memory that is free.

        Returns:
            What is to be put into the loader's queue; None where none is free, or where a tensor is not laid out as
            this can keep it: dense, on the CPU.
        """
        first = worker * self.each
        if not self._begun:
            # What those under way held that came here before and have ended: nobody will receive it.
            for number in range(first, first + self.each):
                if self._states[number] == UNDER_WAY:
                    self._states[number] = FREE
            self._begun = True
        number = self._states.find(bytes([FREE]), first, first + self.each)
        if number < 0 or not all(map(_is_plain, batch)):
            return None
        places, stop = [], 0
        for tensor in batch:
            start = -(-stop // ALIGNMENT) * ALIGNMENT
            stop = start + tensor.nbytes
            places.append(Place(start, stop, tensor.dtype, tuple(tensor.shape), tensor.stride()))
        if stop > APART:
            return None
        self._states[number] = UNDER_WAY
        memory = self._memory(number, stop)
        for tensor, place in zip(batch, places, strict=True):
            _tensor(memory, place).copy_(tensor)
        return Lent(self._key, number, places)

    def receive(self, number: int, places: Sequence[Place]) -> list[Tensor]:
        """The tensors of a batch that was lent, in the training process."""
        memory = self._memory(number, places[-1].stop)
        self._states[number] = LENT
        # Each tensor holds a slice of this array, and so does all that is made of it without a copy.
        weakref.finalize(memory, _release, self._states, number, os.getpid()).atexit = False
        return [_tensor(memory, place) for place in places]

    def _memory(self, number: int, size: int) -> Bytes:
        kept = self._maps.get(number)
        if kept is None or len(kept) < size:
            kept = self._maps[number] = mmap.mmap(self._file, max(size, 1), offset=number * APART)
        return np.frombuffer(kept, np.uint8)


def shared_batches(workers: int, each: int, context: BaseContext | None) -> SharedBatches | None:
    """Memory for workers that are forked from this process.

    Returns:
        None where there are no workers, where they begin without this process's memory, and where the system gives
        none: then torch's own way remains.
    """
    if not workers or sys.platform != "linux":
        return None
    if (context or multiprocessing).get_start_method() != "fork":
        return None
    # A mapped batch keeps a descriptor, and there are other loaders and other uses.
    if 4 * workers * each > resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 0:
        return None
    try:
        return SharedBatches(workers, each)
    except OSError:
        return None


_keys = itertools.count()
_living: weakref.WeakValueDictionary[int, SharedBatches] = weakref.WeakValueDictionary()


def _receive(key: int, number: int, places: Sequence[Place]) -> list[Tensor] | None:
    shared = _living.get(key)
    # Without its loader nobody takes the batch: only the loader's thread has not ended yet.
    return None if shared is None else shared.receive(number, places)


def _release(states: mmap.mmap, number: int, process: int) -> None:
    # A process that is forked meanwhile has a copy of the batch's objects, and the same states.
    if os.getpid() == process:
        states[number] = FREE


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return not tensor.requires_grad and tensor.permute(order).is_contiguous()


def _tensor(memory: Bytes, place: Place) -> Tensor:
    part = torch.from_numpy(memory[place.start : place.stop])
    return part.view(place.dtype).as_strided(place.size, place.stride)
