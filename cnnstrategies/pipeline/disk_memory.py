"""Memory of a file, for the state of other stages that may not fit into the memory of a rank."""

import mmap
import os
import tempfile

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError

SMALL = 1 << 20  # Smaller numbers of bytes are not worth a file.


def memory_on_disk(size: int) -> Tensor:
    """Return bytes of a temporary file, which the system writes to the disk and drops when memory is short.

    Args:
        size: Number of bytes.

    Returns:
        A tensor of the dtype uint8 (size,). A tensor with few bytes is in memory.

    Raises:
        ConfigurationError: The directory for temporary files does not have room for the bytes.
    """
    if size < SMALL:
        return torch.empty(size, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        try:
            # Without this call, the process would end at the first write that has no room.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ConfigurationError(
                f"{tempfile.gettempdir()} has no room for {size} bytes of another stage, which a checkpoint needs: "
                f"{error.strerror}; set TMPDIR to a directory on a larger disk"
            ) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
