"""A process group that is the default group for some time, so that the user's collectives use it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def default_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Return a context in which a group is the default process group."""
    current = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = current
