"""A process's membership in a run: heartbeats from a separate thread, and the views that come back."""

import contextlib
import itertools
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from cnnstrategies.paramserver.coordinator.participant import VIEW, Participant
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.node import Buffer, Call, End, Message, Return
from cnnstrategies.paramserver.core.view import RunEnded, View
from cnnstrategies.paramserver.drivers.control import Line, Loop
from cnnstrategies.paramserver.security import KeyPair, process_number

WARN_SECONDS = 60.0  # seconds between two lines about the same wait


class Bell:
    """A file descriptor that any thread can make readable."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def ring(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


class Views(Bell):
    """Views of the membership for one user: a :class:`~cnnstrategies.paramserver.core.view.ViewSource`.

    Every user has its own object, because a view counts as seen by the user to which :meth:`current` has returned it.
    The descriptor is readable when there is a view that :meth:`current` has not returned, or the run has ended.

    Args:
        newest: Function that returns the newest view, and the run's end if it has ended.
        on_news: Function to call when the user has received a newer view.

    Attributes:
        seen: Number of the newest view that the user has received.
    """

    def __init__(self, newest: Callable[[], tuple[View, RunEnded | None]], on_news: Callable[[], None]) -> None:
        super().__init__()
        self._newest = newest
        self._on_news = on_news
        self.seen = -1
        self.ring()

    def current(self) -> View:
        """Return the newest view.

        Raises:
            RunEnded: The run is over.
        """
        self.clear()
        view, ended = self._newest()
        if ended is not None:
            self.ring()  # The descriptor stays readable, so that a later wait does not block.
            raise RunEnded(str(ended), ended.clean)
        if view.number > self.seen:
            self.seen = view.number
            self._on_news()
        return view

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait for a view with a higher number.

        Raises:
            TimeoutError: No newer view arrived in time.
        """
        deadline = time.monotonic() + timeout
        while (view := self.current()).number <= number:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"no view newer than {number} within {timeout:g} s")
            poll = select.poll()  # Unlike `select`, `poll` takes descriptors of any number.
            poll.register(self, select.POLLIN)
            poll.poll(1000 * remaining)
        return view


def unchanging(view: View) -> Views:
    """Return views that never change, for scripts without a coordinator."""
    return Views(lambda: (view, None), lambda: None)


class Membership:
    """A :class:`Participant` that runs in a thread, and its newest view.

    The thread has its own socket, so a long computation or a blocked step does not look like a death. A stopped or
    killed process does.

    Args:
        address: This process's place and the coordinator's endpoint.
        endpoint: Where a server can be reached.
        keys: The run's CURVE keys; None without encryption.

    Attributes:
        keys: This process's own CURVE keys, which it uses for its connections and which the views show to the others;
            None without encryption.
        participant: The role.
        views: Views for the collectives; see :meth:`source` for other users.
    """

    def __init__(self, address: Address, endpoint: str = "", keys: KeyPair | None = None) -> None:
        self.address = address
        self._run_keys = keys
        self.keys = None if keys is None else KeyPair.create()
        hello = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "endpoint": endpoint,
            "public_key": "" if self.keys is None else self.keys.public,
        }
        self.participant = Participant(address, process_number(self.keys), hello)
        self._changed = threading.Condition()
        self._ended: RunEnded | None = None
        self._results: dict[int, Message | str] = {}
        self._numbers = itertools.count(1)
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._closing = False
        self._wake = Bell()
        self.views = Views(self._newest, lambda: self._call(None))
        self._sources: list[Views] = []
        self._thread = threading.Thread(target=self.run, name="heartbeats", daemon=True)
        self._thread.start()

    # Views

    def source(self) -> Views:
        """Return views for another user than the collectives: a worker or a server of the data plane.

        From then on the coordinator counts a view as seen once this user has seen it.
        """
        with self._changed:
            self._sources.append(Views(self._newest, lambda: self._call(None)))
            return self._sources[-1]

    def _newest(self) -> tuple[View, RunEnded | None]:
        view = self.participant.view
        return view if view is not None else View(-1, (), ()), self._ended

    # The run

    def wait_registered(self) -> None:
        """Wait until the coordinator knows this process.

        Raises:
            RunEnded: The coordinator does not answer, or does not expect this process.
        """
        self.views.wait_newer(-1, self.address.appear + self.address.timeout)

    def ask(self, kind: str, fields: Mapping[str, object], frames: Sequence[Buffer] = ()) -> Message:
        """Send a request to the coordinator, and return its answer.

        Raises:
            RunEnded: The run is over, or the coordinator has refused the request.
        """
        number = next(self._numbers)
        self._call(Call(number, kind, fields, frames))
        with self._changed:
            waited = 0.0
            while not self._changed.wait_for(lambda: number in self._results or self._ended, WARN_SECONDS):
                waited += WARN_SECONDS
                operation = fields.get("operation", kind)
                print(f"{self._name} has waited in `{operation}` for {waited:.0f} s", file=sys.stderr, flush=True)
            result = self._results.pop(number, None)
            if isinstance(result, Message):
                return result
            ended = self._ended
        if ended is not None:
            raise RunEnded(str(ended), ended.clean)
        raise RunEnded(f"{self._name}: the coordinator has refused `{kind}`: {result}")

    def end(self, message: str, clean: bool = False) -> None:
        """Let every process of the run end, with a message."""
        self._call(Call(0, "end", {"message": message, "clean": clean}))

    def stop_all(self, signal: int) -> None:
        """Tell every process of the run that this one has received a signal to end, without waiting for answers."""
        self._call(Call(0, "signal", {"signal": signal}))

    @property
    def stop_signal(self) -> int | None:
        """The first signal to end that a process has received and passed on; None if there is none."""
        return self.participant.signal or None

    def report_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Send the results of a function with each heartbeat; see :data:`.status.FIGURES`. Another thread calls it."""
        self.participant.figures = figures

    @property
    def members(self) -> tuple[int, int]:
        """The numbers of workers and servers in the newest view."""
        view, _ = self._newest()
        return len(view.workers), len(view.servers)

    @property
    def losses(self) -> int:
        """The number of processes that the run has lost, as far as is known here."""
        return self.participant.losses

    def close(self, leave: bool = True, done: Mapping[str, object] | None = None) -> None:
        """Stop the thread.

        Args:
            leave: Whether to tell the coordinator before that this process leaves on purpose.
            done: This process's progress: ``epoch``, and the number of positions ``processed`` in it.
        """
        if self._closing:
            return
        if leave:
            self._calls.put(Call(0, "leave", done or {}))
        self._closing = True
        self._wake.ring()
        self._thread.join(self.address.timeout + 1.0)
        if not self._thread.is_alive():
            for views in (self.views, *self._sources):
                views.close()
            self._wake.close()

    @property
    def _name(self) -> str:
        return f"{self.address.role} {self.address.id}"

    def _call(self, call: Call | None) -> None:
        """Let the thread call the role; None stands for a report of the view that this process follows."""
        self._calls.put(call)
        self._wake.ring()

    # The thread

    def run(self) -> None:
        """Serve until this process leaves; the thread runs this method."""
        with Line(self.address, self.participant.peer, self.keys, self._run_keys) as line:
            try:
                self._serve(line)
            except Exception as error:  # The main thread must hear of any failure.
                traceback.print_exc()
                reason = f"{self._name}: the heartbeat thread failed: {type(error).__name__}: {error}"
                self._set_ended(End(reason, clean=False))

    def _serve(self, line: Line) -> None:
        loop = Loop(self.participant, lambda to, message: line.send(message), self._take_result, self._set_ended)
        loop.start()
        closing_until = None
        while True:
            closing = self._closing
            while not self._calls.empty():
                call = self._calls.get()
                call = Call(0, "seen", {"number": self._seen}) if call is None else call
                loop.act(self.participant.on_call(time.monotonic(), call))
            if closing:
                now = time.monotonic()
                closing_until = closing_until or now + self.address.timeout
                if self.participant.idle or now > closing_until:
                    return
            received = line.receive(loop.until_next(0.05 if closing else 1.0), self._wake.fileno())
            self._wake.clear()
            loop.hear(received)

    @property
    def _seen(self) -> int:
        with self._changed:
            return max(0, min(views.seen for views in self._sources or [self.views]))

    def _take_result(self, result: Return) -> None:
        with self._changed:
            if result.call == VIEW and isinstance(result.value, Message):
                self._announce()
            elif result.call:
                self._results[result.call] = result.value
                self._changed.notify_all()

    def _set_ended(self, end: End) -> None:
        with self._changed:
            if self._ended is None:
                self._ended = RunEnded(end.reason, end.clean)
                self._announce()
                self._changed.notify_all()

    def _announce(self) -> None:
        for views in (self.views, *self._sources):
            views.ring()
