"""A clock for a coordinator and its members in several processes, which waits for whoever is slow.

It goes on by a step when every one of them has looked at it, and the members have heard of the coordinator lately. So
nobody is taken for dead because the machine was busy; whoever is killed or stopped is not waited for.
"""

import os
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.drivers import loop
from cnnstrategies.paramserver.membership import Membership

PLACES = 64
MEMBERS = 4  # of a process, at most
LOOK = 0.004  # seconds between two looks of a process at the clock
NOBODY, LEFT = 0, -1


class VirtualTime:
    """To be made before the processes are forked; in each of them :meth:`use` is called.

    Args:
        heartbeat: Of the members, in seconds.
    """

    def __init__(self, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        # Without locks: a process that is stopped may hold one.
        self._now = RawValue("d", 0.0)
        self._processes = RawArray("l", PLACES)
        self._looked = RawArray("d", PLACES)
        self._heard = RawArray("d", PLACES)
        self._coordinator = RawValue("l", 0)
        self._free: Iterator[int] = iter(())
        self._held = RawValue("i", 0)
        self._conductor = os.fork()
        if self._conductor == 0:
            self._conduct(os.getppid())

    def use(self, number: int) -> None:
        """Have this process use the clock.

        Args:
            number: Of the process; no other one has the same.
        """
        self._free = iter(range(number * MEMBERS, (number + 1) * MEMBERS))
        loop.time = SimpleNamespace(monotonic=lambda: self._now.value)  # type: ignore[attr-defined]
        start, fire, until_next, run = loop.Loop.start, loop.Loop.fire, loop.Loop.until_next, Membership.run
        place: dict[object, int] = {}

        def begin(self_: loop.Loop) -> None:
            if isinstance(self_.role, Coordinator | Participant):
                place[self_.role] = next(self._free)
            start(self_)
            if isinstance(self_.role, Coordinator):
                self._coordinator.value = os.getpid()
            self._tell(place, self_.role)

        def look(self_: loop.Loop) -> None:
            fire(self_)
            self._tell(place, self_.role)

        def serve(self_: Membership) -> None:
            try:
                run(self_)
            finally:
                self._processes[place[self_.participant]] = LEFT

        loop.Loop.start, loop.Loop.fire = begin, look  # type: ignore[method-assign]
        loop.Loop.until_next = lambda self_, most: min(until_next(self_, most), LOOK)  # type: ignore[method-assign]
        Membership.run = serve  # type: ignore[method-assign]

    def hold(self) -> None:
        """Have the clock stand still, from any of the processes."""
        self._held.value = 1

    def go_on(self, coordinator: int) -> None:
        """Have it go on, once a process is the coordinator."""
        while self._coordinator.value != coordinator:
            time.sleep(LOOK)
        self._held.value = 0

    def _tell(self, place: dict[object, int], role: Any) -> None:
        mine = place.get(role)
        if mine is None:
            return
        now = self._now.value
        waits = isinstance(role, Participant) and role.view is not None and role.ended is None
        self._heard[mine] = role.heard if waits else float("inf")
        self._looked[mine] = now
        self._processes[mine] = os.getpid()

    def _conduct(self, parent: int) -> None:
        while os.getppid() == parent:
            if not self._held.value and self._all_have_looked():
                self._now.value += self._heartbeat / 2
            time.sleep(LOOK / 4)
        os._exit(0)

    def _all_have_looked(self) -> bool:
        now, answers = self._now.value, is_running(self._coordinator.value)
        for place, process in enumerate(self._processes):
            if process in (NOBODY, LEFT):
                continue
            late = self._looked[place] < now
            unheard = answers and self._heard[place] < now - 3 * self._heartbeat
            if (late or unheard) and is_running(process):
                return False
        return True

    def close(self) -> None:
        """End the clock."""
        os.kill(self._conductor, 9)
        os.waitpid(self._conductor, 0)


def is_running(process: int) -> bool:
    """Whether a process is there and not stopped."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "TZX"
