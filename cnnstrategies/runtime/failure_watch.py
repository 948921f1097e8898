"""A thread that ends this process within seconds after a rank of the run has failed.

Usually the processes end by themselves: the failed rank ends, its connections break, and the other ranks get an error
from the collective in which they wait. The thread is needed if this does not happen: if a failed rank waits in a hook
for ranks that never come, or if a backend does not notice a broken connection, as NCCL.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from cnnstrategies.runtime.failure_store import FailureStore, RankFailure

POLL = 0.25  # Seconds between two checks of the store.
# Seconds after the first failure within which all processes should end by themselves. A failed rank runs the hooks
# `on_exception` of callbacks, and closes its loggers, in this time.
PATIENCE = 20.0
# Seconds within which the other processes should end by themselves after a failed rank has left its trainer.
GRACE = 5.0
# Longest time in seconds for which rank 0, which usually serves the store, waits until no other rank uses the store.
SERVING = 2.0
ANSWER = 2.0  # Longest time in seconds to wait for a reply of the store.

T = TypeVar("T")
End = Callable[[RankFailure, BaseException | None], None]


class Countdown:
    """The time at which a process must end after a failure.

    Args:
        patience: Seconds after the first failure within which this process should end by itself.

    Attributes:
        deadline: The time; None if the process need not end.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._failed: float | None = None
        self._left: float | None = None
        self.deadline: float | None = None

    def update(self, now: float, left: bool, together: bool) -> None:
        """Compute the deadline again, after a rank has failed.

        Args:
            now: The time in seconds.
            left: Whether a failed rank has left its trainer.
            together: Whether all ranks have failed, and save a checkpoint together. This may take long.
        """
        self._failed = now if self._failed is None else self._failed
        self._left = now if left and self._left is None else self._left
        limits = [] if together else [self._failed + self._patience]
        if self._left is not None:
            limits.append(self._left + (self._patience if together else GRACE))
        self.deadline = min(limits, default=None)


class FailureWatch:
    """A thread that reads the reports of failed ranks, and ends this process if it does not end by itself.

    Args:
        store: Reports of the failed ranks.
        rank: This rank.
        end: Function that ends this process and the ranks that it has started. Its arguments are the report of the rank
            that has failed first, and this process's own exception, which has not been printed yet; None if this
            process has not failed itself.

    Attributes:
        first: Report of the rank that has failed first; None if no rank has failed.
    """

    def __init__(self, store: FailureStore, rank: int, end: End) -> None:
        self.first: RankFailure | None = None
        self._store = store
        self._rank = rank
        self._end = end
        self._exception: BaseException | None = None
        self._finished = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure watch", daemon=True)
        self._thread.start()

    def report(self, exception: BaseException, failure: RankFailure) -> None:
        """Report that this rank has failed, unless a report of another rank is known.

        Args:
            exception: The exception of this rank.
            failure: The report about the exception.
        """
        self._exception = exception
        if self.first is None:
            self.first = within(ANSWER, partial(self._store.report, failure), None)
        self.first = self.first or failure

    def fail_together(self, point: str, seconds: float) -> bool:
        """Return whether all ranks have failed at the same point; see :meth:`.FailureStore.fail_together`."""
        if self._finished:
            return False
        return within(seconds + ANSWER, partial(self._store.fail_together, point, seconds), False)

    def close(self) -> None:
        """End the thread, because this process leaves its trainer.

        Rank 0 first waits up to `SERVING` seconds for the other ranks. If rank 0 serves the store, and ended while
        another rank uses it, the other rank would not learn of a failure, and torch would print a stack trace there.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        within(SERVING + ANSWER, self._leave, None)
        self._store.close()

    def _leave(self) -> None:
        self._thread.join()
        self._finish()
        deadline = time.monotonic() + SERVING
        while self._rank == 0 and not self._store.all_have_finished() and time.monotonic() < deadline:
            time.sleep(POLL / 5)

    def _finish(self) -> None:
        """Use the store for the last time, unless this rank has already finished."""
        if not self._finished:
            self._finished = True
            if self._exception is not None:
                self._store.leave()
            self._store.finish()

    def _watch(self) -> None:
        with _lost_store_ignored():
            while self.first is None and not self._closing.wait(POLL):
                self.first = self._store.first() or self.first
        # The other ranks wait longer than the rank that has failed first. They may be its parent process, and would end
        # it before it has printed its exception.
        is_first = self.first is not None and self.first.rank == self._rank
        countdown = Countdown(PATIENCE if is_first else PATIENCE + GRACE)
        together = False
        while self.first is not None and not self._closing.wait(POLL):
            if not self._finished:
                together = self._look()
            now = time.monotonic()
            countdown.update(now, self._finished, together)
            if countdown.deadline is not None and now > countdown.deadline:
                with _lost_store_ignored():
                    self._finish()
                self._end(self.first, self._exception)
                return

    def _look(self) -> bool:
        """Return whether all ranks work together after their failures. Finish if a failed rank has left its trainer."""
        with _lost_store_ignored():
            together = self._store.work_together()
            if self._store.has_left():
                self._finished = True
                self._store.finish()
            return together
        self._finished = True  # The rank that served the store has left.
        return False


def within(seconds: float, function: Callable[[], T], default: T) -> T:
    """Return the result of a function that uses the store. Return a default value if it is not there in time.

    If the process that serves the store is stopped, for example by SIGSTOP, the store never replies.

    Args:
        seconds: Longest time to wait.
        function: The function, which runs in a thread.
        default: Result if the function does not return in time, or if the store is lost.
    """
    results = [default]

    def run() -> None:
        with _lost_store_ignored():
            results.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[-1]


def _lost_store_ignored() -> contextlib.suppress:
    """Return a context that ignores torch's errors if the process that serves the store has ended."""
    return contextlib.suppress(RuntimeError)
