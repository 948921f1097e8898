"""A worker's gradients, values and progress in memory that the workers of a node share."""

import mmap
import os
import socket
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError

NEVER = -1
_ALIGNED = 64  # bytes of a cache line
_LED, _BEGUN, _ENDED = range(3)  # places of the marks that are not per parameter
_HEAD = 3  # number of these marks
_lock = threading.Lock()


class SharedState:
    """A worker's gradients, the parameters' values if the worker leads its node, and marks that say which are ready.

    A mark is written after the data that it stands for, and read before the data. Data is never written while other
    workers may read it: the gradients of a step follow the values of the step, and these follow the sum of the
    gradients of the step before.

    Args:
        memory: :func:`size_of` bytes, zero at first; the same memory in all processes that use it.
        parameters: The run's parameters, for their shapes and types.

    Attributes:
        gradients: The last gradient of each parameter, of its shape.
        values: The last value of each parameter that the servers have sent, of its shape.
    """

    def __init__(self, memory: memoryview, parameters: Sequence[Tensor]) -> None:
        count = len(parameters)
        # A mark is stored plus one, so that zeros mean: never.
        self._head = np.frombuffer(memory, np.int64, _HEAD)
        self._samples = np.frombuffer(memory, np.float64, 1, offset=8 * _HEAD)
        self._gradient_steps = np.frombuffer(memory, np.int64, count, offset=_ALIGNED)
        self._value_marks = np.frombuffer(memory, np.int64, count, offset=_ALIGNED + 8 * count)
        self.gradients: list[Tensor] = []
        self.values: list[Tensor] = []
        place = _first_place(parameters)
        for area in (self.gradients, self.values):
            for parameter in parameters:
                flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=place)
                area.append(flat.view(parameter.shape))
                place += _padded(parameter.nbytes)

    # Gradients of this worker

    @property
    def begun(self) -> int:
        """Last step that this worker has begun; :data:`NEVER` before the first."""
        return self._read(_BEGUN)

    @property
    def ended(self) -> int:
        """Last step whose gradients are complete; :data:`NEVER` before the first."""
        return self._read(_ENDED)

    @property
    def samples(self) -> float:
        """Number of samples of which the gradients of the last begun step are means."""
        return float(self._samples[0])

    def begin(self, step: int, samples: float) -> None:
        """Begin a step, whose gradients follow."""
        self._samples[0] = samples
        self._write(_BEGUN, step)

    def give(self, index: int, gradient: Tensor, step: int) -> None:
        """Publish a parameter's gradient of the begun step."""
        self.gradients[index].copy_(gradient)
        fence()
        self._gradient_steps[index] = step + 1

    def has_given(self, index: int, step: int) -> bool:
        """Return whether a parameter's gradient of a step is published."""
        if self._gradient_steps[index] != step + 1:
            return False
        fence()
        return True

    def end(self, step: int) -> None:
        """End a step: a parameter whose gradient was not published does not have one in this step."""
        self._write(_ENDED, step)

    # Values, if this worker leads its node

    @property
    def led(self) -> int:
        """Step with which this worker began to lead; :data:`NEVER` if it does not lead."""
        return self._read(_LED)

    def lead(self, step: int) -> None:
        """Begin to lead: the values with which a step begins are published, and kept up to date from now on."""
        self._write(_LED, step)

    def show(self, index: int, value: Tensor, mark: int) -> None:
        """Publish a parameter's value with a mark."""
        self.values[index].copy_(value)
        fence()
        self._value_marks[index] = mark + 1

    def shows(self, index: int, mark: int) -> bool:
        """Return whether a parameter's value is published with this mark or a later one."""
        if self._value_marks[index] <= mark:
            return False
        fence()
        return True

    def _read(self, place: int) -> int:
        mark = int(self._head[place]) - 1
        fence()
        return mark

    def _write(self, place: int, mark: int) -> None:
        fence()
        self._head[place] = mark + 1


def size_of(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of a :class:`SharedState`."""
    return _first_place(parameters) + 2 * sum(_padded(parameter.nbytes) for parameter in parameters)


def _first_place(parameters: Sequence[Tensor]) -> int:
    """Return the offset of the first gradient, in bytes."""
    return _ALIGNED + _padded(16 * len(parameters))


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def fence() -> None:
    """Order memory accesses: all accesses before this call come before all accesses after it.

    Processors such as ARM's may reorder them otherwise. The release of the lock in the first turn and its acquisition
    in the second cannot change places.
    """
    for _ in range(2):
        with _lock:
            pass


class SharedMemory:
    """A worker's shared memory: a file without a name, limited only by the machine's memory.

    A killed process leaves nothing behind, and a container's small ``/dev/shm`` does not matter.

    Args:
        size: Bytes.

    Attributes:
        own: The memory.
        where: Host, process and file descriptor, with which :func:`open_shared` opens the memory in other processes.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("combiner")
        os.truncate(self._file, size)
        self.own = memoryview(mmap.mmap(self._file, size))
        self.where = [socket.gethostname(), os.getpid(), self._file]

    def opened(self) -> None:
        """Close the file when all other workers have opened it; the memory stays."""
        os.close(self._file)


def open_shared(ranks: Collection[int], where: Mapping[int, list[object]], size: int) -> dict[int, memoryview]:
    """Open the shared memory of other workers of this node.

    Args:
        ranks: Ranks of the workers.
        where: By rank, :attr:`SharedMemory.where` of each worker.
        size: Bytes of each memory.

    Raises:
        ConfigurationError: The memory cannot be opened: the workers are not on one machine, or not of the same user.
    """
    opened = {}
    for rank in ranks:
        host, process, number = where[rank]
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                if os.fstat(file).st_size != size:
                    raise OSError("the file descriptor belongs to another file")
                opened[rank] = memoryview(mmap.mmap(file, size))
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigurationError(
                f"combine_per_node: true: worker {rank} (process {process} on {host}) counts as one of this node "
                f"({socket.gethostname()}), but its memory cannot be opened here ({error}): processes of a node must "
                "be the same user's, in one container; else set combine_per_node: false"
            ) from error
    return opened
