"""What a worker shows the others of its node, in memory that they share."""

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
_LED, _BEGUN, _ENDED = range(3)  # places of the marks that there is one of
_HEAD = 3
_lock = threading.Lock()


class SharedState:
    """A worker's own gradients, the parameters' values if it leads its node, and marks that tell what is there.

    A mark is written after what it stands for, and read before. Nothing is written while others may read it: gradients
    of a step come after its values, which come after the gradients of the step before were added up.

    Args:
        memory: Zeros at first, of :func:`size_of` bytes; the same in all processes that look at it.
        parameters: The run's, for their shapes and types.

    Attributes:
        gradients: The last gradient of each parameter, of its shape.
        values: The last value of each parameter that the servers have sent, of its shape.
    """

    def __init__(self, memory: memoryview, parameters: Sequence[Tensor]) -> None:
        count = len(parameters)
        # Marks are kept one higher, so that memory of zeros says: never.
        self._head = np.frombuffer(memory, np.int64, _HEAD)
        self._samples = np.frombuffer(memory, np.float64, 1, offset=8 * _HEAD)
        self._given = np.frombuffer(memory, np.int64, count, offset=_ALIGNED)
        self._there = np.frombuffer(memory, np.int64, count, offset=_ALIGNED + 8 * count)
        self.gradients: list[Tensor] = []
        self.values: list[Tensor] = []
        place = _first_place(parameters)
        for area in (self.gradients, self.values):
            for parameter in parameters:
                flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=place)
                area.append(flat.view(parameter.shape))
                place += _padded(parameter.nbytes)

    # Of one that gives gradients

    @property
    def begun(self) -> int:
        """The step whose gradients are being given; :data:`NEVER` before the first."""
        return self._read(_BEGUN)

    @property
    def ended(self) -> int:
        """The last step of which no more gradients come; :data:`NEVER` before the first."""
        return self._read(_ENDED)

    @property
    def samples(self) -> float:
        """How many samples the gradients of the step that was begun are means of."""
        return float(self._samples[0])

    def begin(self, step: int, samples: float) -> None:
        """Gradients of a step follow."""
        self._samples[0] = samples
        self._write(_BEGUN, step)

    def give(self, index: int, gradient: Tensor, step: int) -> None:
        """Show a gradient of a step that was begun."""
        self.gradients[index].copy_(gradient)
        fence()
        self._given[index] = step + 1

    def has_given(self, index: int, step: int) -> bool:
        """Whether a step's gradient of a parameter is there."""
        if self._given[index] != step + 1:
            return False
        fence()
        return True

    def end(self, step: int) -> None:
        """What was not given has no gradient in the step."""
        self._write(_ENDED, step)

    # Of the one that leads the node

    @property
    def led(self) -> int:
        """The step with which it began to lead; :data:`NEVER` if it does not."""
        return self._read(_LED)

    def lead(self, step: int) -> None:
        """The values are there that a step begins with: from now on they are kept up to date."""
        self._write(_LED, step)

    def show(self, index: int, value: Tensor, mark: int) -> None:
        """Show a parameter's value."""
        self.values[index].copy_(value)
        fence()
        self._there[index] = mark + 1

    def shows(self, index: int, mark: int) -> bool:
        """Whether a value is there that was shown with a mark, or a later one."""
        if self._there[index] <= mark:
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
    """Bytes of a board."""
    return _first_place(parameters) + 2 * sum(_padded(parameter.nbytes) for parameter in parameters)


def _first_place(parameters: Sequence[Tensor]) -> int:
    """Where the first gradient begins."""
    return _ALIGNED + _padded(16 * len(parameters))


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def fence() -> None:
    """Keep reads and writes before it before those after it, also on processors that reorder them (such as ARM's).

    The release of the first turn and the acquisition of the second cannot change places.
    """
    for _ in range(2):
        with _lock:
            pass


class SharedMemory:
    """One worker's part: a file without a name and without a limit but the machine's memory.

    So nothing is left behind whoever is killed, and a container's small ``/dev/shm`` does not matter.

    Attributes:
        own: The memory.
        where: Tells the other workers of the node how to open it, as :func:`open_shared` takes it.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("combiner")
        os.truncate(self._file, size)
        self.own = memoryview(mmap.mmap(self._file, size))
        self.where = [socket.gethostname(), os.getpid(), self._file]

    def opened(self) -> None:
        """All others have opened it."""
        os.close(self._file)


def open_shared(ranks: Collection[int], where: Mapping[int, list[object]], size: int) -> dict[int, memoryview]:
    """Open the memory of other workers of this node.

    Raises:
        ConfigurationError: It cannot be opened: they are not on one machine, or not the same user's.
    """
    opened = {}
    for rank in ranks:
        host, process, number = where[rank]
        try:
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                if os.fstat(file).st_size != size:
                    raise OSError("it is another file")
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
