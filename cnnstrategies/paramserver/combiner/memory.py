"""Memory that the workers of a node share, each writing its own part."""

import mmap
import os
import socket
from collections.abc import Collection, Mapping

from cnnstrategies.errors import ConfigurationError


class SharedMemory:
    """One worker's part: a file without a name and without a limit but the machine's memory.

    So nothing is left behind whoever is killed, and a container's small ``/dev/shm`` does not matter.

    Args:
        size: Bytes, all zeros.

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

    Args:
        ranks: Theirs.
        where: What :attr:`SharedMemory.where` says on each.
        size: Bytes of each.

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
                f"combine: true: worker {rank} (process {process} on {host}) counts as one of this node "
                f"({socket.gethostname()}), but its memory cannot be opened here ({error}): processes of a node must "
                "be the same user's, in one container; else set combine: false"
            ) from error
    return opened
