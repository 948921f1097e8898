"""Notice within seconds that a rank has ended, where NCCL would wait for it until its time-out."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from cnnstrategies._torch_private import abort_all_groups

ENDS_WELL = -1  # in place of a lost rank's number
FOREVER = timedelta(days=365)  # A wait over gloo that runs into its time-out breaks the group.
NAMING = 2.0  # seconds in which every rank has heard which one is lost


class RankWatch:
    """A thread that waits for a word of the next rank, over gloo, whose connections break when a process ends.

    It then tells the rank before, and ends what NCCL is doing in this process: the host may be waiting for that. A host
    that is cut off or stopped is not noticed: its connections stand.

    Args:
        group: The ranks, over gloo, with the time-out :data:`FOREVER`; for the watch alone.
        describe: A rank in words.
    """

    def __init__(self, group: dist.ProcessGroup, describe: Callable[[int], str]) -> None:
        self._group: dist.ProcessGroup | None = group
        self._describe = describe
        self._me = dist.get_rank()
        self._next, self._before = ((self._me + step) % dist.get_world_size() for step in (1, -1))
        self._lost: int | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def lost(self, seconds: float = 0.0) -> str | None:
        """The rank that is lost, in words; None where none is known.

        Args:
            seconds: How long to wait for that.
        """
        self._known.wait(seconds)
        return None if self._lost is None else self._describe(self._lost)

    def close(self) -> None:
        """Watch no more; a collective."""
        self.tell(ENDS_WELL)
        self._thread.join()
        dist.destroy_process_group(self._group)
        self._group = None

    def _watch(self) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(word, self._next, group=self._group)
            lost = int(word)
        except RuntimeError:
            lost = self._next
        if lost == ENDS_WELL:
            return
        self._lost = lost
        self._known.set()
        print(f"{self._describe(self._me)}: {self._describe(lost)} has ended", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # That one may be gone, too.
            self.tell(lost)
        abort_all_groups()

    def tell(self, word: int) -> None:
        """Tell the rank before which one is lost, or that this one ends well."""
        dist.send(torch.tensor([word]), self._before, group=self._group)
