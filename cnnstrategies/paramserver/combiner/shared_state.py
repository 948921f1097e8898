"""Shared memory through which the workers of a node exchange gradients, parameters' values and progress."""

import mmap
import os
import socket
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError

NEVER = -1  # mark of data that has not been written yet
_ALIGNED = 64  # Gradients and values begin at multiples of this number of bytes, the size of a cache line.
_LED, _BEGUN, _ENDED = range(3)  # indices of the marks that belong to the worker as a whole, not to a parameter
_HEAD = 3  # number of the marks that belong to the worker as a whole
_lock = threading.Lock()


class SharedState:
    """One worker's shared memory: the worker's gradients, the values that it publishes as the node's leader, and marks.

    A mark is a number that shows for which step data is ready: the step's number, or a number computed from it. The
    writer writes the data first and the mark afterwards. A reader reads the mark first and the data afterwards.

    No lock is needed, because the order within a step is fixed. A worker writes its gradients after it has read the
    step's values. The leader writes new values after it has added up the gradients of the previous step. So no worker
    writes data while another worker may read the data.

    Args:
        memory: Shared memory of :func:`size_of` bytes, filled with zeros when it is created.
        parameters: The run's parameters; only the shapes and dtypes are used.

    Attributes:
        gradients: For each parameter: its last gradient, in the parameter's shape.
        values: For each parameter: the last value that the servers have sent, in the parameter's shape.
    """

    def __init__(self, memory: memoryview, parameters: Sequence[Tensor]) -> None:
        count = len(parameters)
        # Each mark is stored as the mark plus 1, so that zero-filled memory means `NEVER`.
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

    # The gradients of this worker

    @property
    def begun(self) -> int:
        """Number of the last step that this worker has begun; :data:`NEVER` before its first step."""
        return self._read(_BEGUN)

    @property
    def ended(self) -> int:
        """Number of the last step that this worker has ended; :data:`NEVER` before the end of the worker's first step.

        All gradients of this step are published.
        """
        return self._read(_ENDED)

    @property
    def samples(self) -> float:
        """Number of samples in this worker's batch of the last begun step."""
        return float(self._samples[0])

    def begin(self, step: int, samples: float) -> None:
        """Begin a step. The gradients that are published from now on belong to this step.

        Args:
            step: Number of the step.
            samples: Number of samples in this worker's batch.
        """
        self._samples[0] = samples
        self._write(_BEGUN, step)

    def publish_gradient(self, index: int, gradient: Tensor, step: int) -> None:
        """Publish a parameter's gradient for the other workers of the node.

        Args:
            index: Index of the parameter.
            gradient: The gradient, which is copied into the shared memory.
            step: Number of the step to which the gradient belongs.
        """
        self.gradients[index].copy_(gradient)
        fence()
        self._gradient_steps[index] = step + 1

    def has_gradient(self, index: int, step: int) -> bool:
        """Return whether this worker has published the gradient of a parameter for a step."""
        if self._gradient_steps[index] != step + 1:
            return False
        fence()
        return True

    def end(self, step: int) -> None:
        """End a step. Parameters whose gradients were not published have no gradient in this step."""
        self._write(_ENDED, step)

    # The leader's values

    @property
    def led(self) -> int:
        """Number of the step with which this worker began to lead the node; :data:`NEVER` if it is not the leader."""
        return self._read(_LED)

    def lead(self, step: int) -> None:
        """Declare this worker the node's leader.

        Args:
            step: Step with which the worker begins to lead; the values for this step are already published.
        """
        self._write(_LED, step)

    def publish_value(self, index: int, value: Tensor, mark: int) -> None:
        """Publish a parameter's value for the other workers of the node.

        Args:
            index: Index of the parameter.
            value: The value.
            mark: Number that shows to which step the value belongs; see :attr:`.CombinedWorker._mark`.
        """
        self.values[index].copy_(value)
        fence()
        self._value_marks[index] = mark + 1

    def has_value(self, index: int, mark: int) -> bool:
        """Return whether this worker has published a parameter's value with the mark `mark` or a larger mark."""
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
    """Return the number of bytes of memory that a :class:`SharedState` of these parameters needs."""
    return _first_place(parameters) + 2 * sum(_padded(parameter.nbytes) for parameter in parameters)


def _first_place(parameters: Sequence[Tensor]) -> int:
    """Return the offset of the first gradient from the start of the memory, in bytes."""
    return _ALIGNED + _padded(16 * len(parameters))


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def fence() -> None:
    """Execute a memory barrier: no memory access is moved across this call.

    Without a barrier, CPUs such as ARM's may reorder memory accesses. The lock is acquired and released twice, because
    only a release that is followed by an acquisition is a barrier in both directions.
    """
    for _ in range(2):
        with _lock:
            pass


class SharedMemory:
    """A worker's shared memory, in an anonymous file (``memfd_create``).

    The kernel frees the memory when all processes that use it have ended, even if they are killed. The size is not
    limited by ``/dev/shm``, which is small in containers.

    Args:
        size: Size in bytes.

    Attributes:
        content: The memory.
        where: Host name, process id and file descriptor, from which :func:`open_shared` opens the memory in the node's
            other processes.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("combiner")
        os.truncate(self._file, size)
        self.content = memoryview(mmap.mmap(self._file, size))
        self.where = [socket.gethostname(), os.getpid(), self._file]

    def opened(self) -> None:
        """Close the file descriptor of the memory. The memory stays mapped.

        Call this when all other workers of the node have opened the memory.
        """
        os.close(self._file)


def open_shared(ranks: Collection[int], where: Mapping[int, list[object]], size: int) -> dict[int, memoryview]:
    """Open the shared memory of other workers on this node.

    Args:
        ranks: Ranks of the workers whose memory to open.
        where: :attr:`SharedMemory.where` of each worker, by rank.
        size: Size of each worker's memory, in bytes.

    Returns:
        Each worker's memory, by rank.

    Raises:
        ConfigurationError: A worker's memory cannot be opened, for example because this worker is in a different
            container or belongs to a different user.
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
                f"`combine_per_node: true` needs the shared memory of worker {rank} (process {process} on {host}), but "
                f"it cannot be opened on this node ({socket.gethostname()}): {error}; run all workers of a node as the "
                "same user and in the same container, or set `combine_per_node: false`"
            ) from error
    return opened
