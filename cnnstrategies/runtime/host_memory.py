"""The memory that processes on this host may use."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# Files in a process's own control group with the group's limit: version 2, and version 1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def host_memory(cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that this host or this container has.

    A container's limit is read from its control group.

    Args:
        cgroups: Directory in which the control groups are mounted.
    """
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _LIMITS:
        try:
            sizes.append(int((cgroups / name).read_text()))
        except (OSError, ValueError):  # The file does not exist, or has the text "max" because there is no limit.
            continue
    return min(sizes)
