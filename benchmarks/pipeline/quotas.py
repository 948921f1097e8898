"""Processor quotas for groups of processes, by the cpu controller of cgroups, version 1 or 2. Needs root."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD = 10_000  # microseconds: short, so that a process is slow rather than stopped for long
MOST_SHARES = {"cpu.shares": 262_144, "cpu.weight": 10_000}  # before what else the machine does


def missing() -> str | None:
    """Why there are no quotas here; None where there are."""
    try:
        with quotas(1, "cnnprobe") as groups:
            groups[0].limit(0.5)
    except OSError as error:
        return f"the cpu controller of cgroups cannot be used: {error}"
    return None


class Group:
    """Processes that share a quota.

    Args:
        name: Of the group.
    """

    def __init__(self, name: str) -> None:
        self._old = (ROOT / "cpu").is_dir()
        self.folder = (ROOT / "cpu" if self._old else ROOT) / name
        self.folder.mkdir(exist_ok=True)
        name = "cpu.shares" if self._old else "cpu.weight"
        (self.folder / name).write_text(str(MOST_SHARES[name]))

    def limit(self, cores: float) -> None:
        """Let its processes use so many cores together."""
        quota = round(cores * PERIOD)
        if self._old:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD}")

    def enter(self) -> None:
        """Put the calling process into it; those that it starts follow."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def end(self) -> None:
        """Kill its processes, those that they start meanwhile too, and wait until there are none."""
        while processes := (self.folder / "cgroup.procs").read_text().split():
            for process in map(int, processes):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)


@contextmanager
def quotas(count: int, name: str = "cnnbench") -> Iterator[list[Group]]:
    """So many groups, without a limit at first; they are removed at the end, when their processes must have ended."""
    groups = [Group(f"{name}{number}") for number in range(count)]
    try:
        yield groups
    finally:
        for group in groups:
            group.folder.rmdir()
