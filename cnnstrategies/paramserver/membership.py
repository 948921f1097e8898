"""A process's membership in a run: a thread that sends heartbeats to the coordinator and receives views from it."""

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

WARN_SECONDS = 60.0  # While a request has no reply, a warning is printed to stderr each time this many seconds pass.


class Bell:
    """A file descriptor that any thread can make readable, to wake a thread that polls it."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the file descriptor, which is readable after :meth:`ring`."""
        return self._descriptor

    def ring(self) -> None:
        """Make the file descriptor readable. Any thread may call this method."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Reset the file descriptor, so that it is not readable until the next call of :meth:`ring`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._descriptor)


class Views(Bell):
    """Source of views for one reader; see :class:`~cnnstrategies.paramserver.core.view.ViewSource`.

    Each reader has its own source, which records the views that this reader has seen. The file descriptor is readable
    if :meth:`current` would return a view that it has not returned before, or if the run has ended.

    Args:
        newest: Function that returns a pair: the newest view, and the error to raise if the run has ended. The second
            item is None while the run goes on.
        on_news: Function that is called whenever :meth:`current` returns a view that it has not returned before.

    Attributes:
        seen: Number of the newest view that :meth:`current` has returned; -1 before the first view.
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
            self.ring()  # Keeps the file descriptor readable, so that later waits also end at once.
            raise RunEnded(str(ended), ended.clean, ended.stranger)
        if view.number > self.seen:
            self.seen = view.number
            self._on_news()
        return view

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait until a view with a number above `number` has arrived, and return the newest view.

        Args:
            number: Number of the newest view that the caller has.
            timeout: Longest time to wait, in seconds.

        Raises:
            TimeoutError: No view with a number above `number` arrived in time.
            RunEnded: The run is over.
        """
        deadline = time.monotonic() + timeout
        while (view := self.current()).number <= number:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"no view with a number above {number} arrived within {timeout:g} s")
            poll = select.poll()  # `select.select` cannot wait for file descriptors above 1023.
            poll.register(self, select.POLLIN)
            poll.poll(1000 * remaining)
        return view


def unchanging(view: View) -> Views:
    """Return a source that always returns the same view. It is meant for scripts without a coordinator."""
    return Views(lambda: (view, None), lambda: None)


class Membership:
    """A process's membership in a run.

    A thread of its own runs the role :class:`Participant`, and sends the heartbeats. A process therefore does not count
    as dead during a long computation. The process counts as dead if it is killed, or stopped for longer than the
    time-out.

    Args:
        address: This process's role and id, the coordinator's endpoint, and time-outs.
        endpoint: Endpoint at which other processes reach this process, if it is a server; otherwise empty.
        keys: The run's CURVE keys; None without encryption.

    Attributes:
        address: This process's role and id, the coordinator's endpoint, and time-outs.
        keys: This process's own CURVE keys, which it uses for its connections; None without encryption. The views
            contain the public key.
        participant: This process's role in the protocol with the coordinator.
        views: Source of views for the collectives. Every other reader gets its own source from :meth:`source`.
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
            "run": address.run,
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
        """Create a source of views for one more reader, for example for this process's server.

        The process tells the coordinator that it has seen a view once all readers of the created sources have seen the
        view. Before the first call of this method, the process waits for the reader of :attr:`views` instead.
        """
        with self._changed:
            self._sources.append(Views(self._newest, lambda: self._call(None)))
            return self._sources[-1]

    def _newest(self) -> tuple[View, RunEnded | None]:
        view = self.participant.view
        return view if view is not None else View(-1, (), ()), self._ended

    def wait_registered(self) -> None:
        """Wait until the coordinator has registered this process.

        Raises:
            RunEnded: The coordinator does not reply, or does not expect this process.
        """
        self.views.wait_newer(-1, self.address.appear + self.address.timeout)

    def ask(self, kind: str, fields: Mapping[str, object], frames: Sequence[Buffer] = ()) -> Message:
        """Send a request to the coordinator, and wait for the reply.

        Args:
            kind: Kind of the request, such as ``collect`` or ``leave``.
            fields: Fields of the request, as values that JSON can represent.
            frames: Buffers to send with the request.

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
            raise RunEnded(str(ended), ended.clean, ended.stranger)
        raise RunEnded(f"{self._name}: the coordinator has refused `{kind}`: {result}")

    def specification(self, number: int) -> str:
        """Wait until a worker has published the run's specification, and return the specification as JSON.

        Args:
            number: Lowest number of the specification.
        """
        (text,) = self.ask("get", {"number": number}).frames
        return bytes(text).decode()

    def end(self, message: str, clean: bool = False) -> None:
        """Ask the coordinator to end all processes of the run.

        Args:
            message: Reason for the end, which all processes report.
            clean: Whether the run ends without an error.
        """
        self._call(Call(0, "end", {"message": message, "clean": clean}))

    def stop_all(self, signal: int) -> None:
        """Tell all processes of the run that this process has received a signal to stop. Do not wait for replies.

        Args:
            signal: Number of the signal.
        """
        self._call(Call(0, "signal", {"signal": signal}))

    def give_up(self, reason: str) -> None:
        """Make all waits of this process raise :class:`.RunEnded`. Other processes do not learn of this.

        Args:
            reason: Error message of the :class:`.RunEnded`.
        """
        self._set_ended(End(reason, clean=True))

    @property
    def stop_signal(self) -> int | None:
        """Number of the first signal that a process has reported with :meth:`stop_all`; None without such a report."""
        return self.participant.signal or None

    def report_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Send this process's figures, such as its step, to the coordinator with each heartbeat.

        Args:
            figures: Function that returns the figures by name; see :func:`.status.figures_of`. The heartbeat thread
                calls the function.
        """
        self.participant.figures = figures

    @property
    def members(self) -> tuple[int, int]:
        """Number of workers and number of servers in the newest view."""
        view, _ = self._newest()
        return len(view.workers), len(view.servers)

    @property
    def losses(self) -> int:
        """Number of processes that the run has lost, according to the coordinator's last message."""
        return self.participant.losses

    def close(self, leave: bool = True, done: Mapping[str, object] | None = None) -> None:
        """Stop the heartbeat thread.

        Args:
            leave: Whether to report to the coordinator first that this process leaves as planned.
            done: This process's progress, which is reported when it leaves: ``epoch`` is the number of the epoch, and
                ``processed`` the number of samples that the process has processed in this epoch. None if there is no
                progress to report.
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
        """Pass a call to the role in the heartbeat thread.

        Args:
            call: The call; None to report to the coordinator the newest view that all readers have seen.
        """
        self._calls.put(call)
        self._wake.ring()

    def run(self) -> None:
        """Run the role until this process leaves. This is the main function of the heartbeat thread."""
        with Line(self.address, self.participant.peer, self.keys, self._run_keys) as line:
            try:
                self._serve(line)
            except Exception as error:  # Whatever the error is, the main thread must learn of it and end.
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
                self._ended = RunEnded(end.reason, end.clean, end.stranger)
                self._announce()
                self._changed.notify_all()

    def _announce(self) -> None:
        for views in (self.views, *self._sources):
            views.ring()
