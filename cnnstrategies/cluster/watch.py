"""Notice a host of the run that no longer answers, and say which it is."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cnnstrategies.cluster.beacon import Answer, Peer, ping

MOST_AT_ONCE = 16  # pings under way


class Watch:
    """Pings the other hosts of a run in the background.

    A collective waits for a silent host until the process group's time-out, which is 30 minutes by default, and then
    names nobody. A host whose part of the run has ended is no concern of the watch: its connections are closed, so
    that the others' collectives fail at once.

    Args:
        me: This host's name.
        peers: The other hosts.
        timeout: Seconds without any answer after which a host counts as unreachable.
        on_silent: Called once with a message, in the watch's own thread.
    """

    def __init__(self, me: str, peers: Sequence[Peer], timeout: float, on_silent: Callable[[str], None]) -> None:
        self._me = me
        self._peers = list(peers)
        self._timeout = timeout
        self._on_silent = on_silent
        self._interval = min(2.0, timeout / 4)
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop pinging."""
        self._stopped.set()
        self._thread.join()

    def explain(self) -> str | None:
        """Ask every host once; what is wrong with those that do not answer, or None if all do."""
        lines = []
        for peer, (answer, reason) in self._ask().items():
            if answer == "silent":
                lines.append(f"{self._me} cannot reach {peer}: {reason}")
            elif answer == "refused":
                lines.append(f"on {peer} the run has ended; look for the reason in its output")
        return "; ".join(lines) or None

    def _ask(self) -> dict[Peer, tuple[Answer, str]]:
        with ThreadPoolExecutor(min(MOST_AT_ONCE, len(self._peers))) as pool:
            answers = pool.map(lambda peer: ping(peer, self._interval), self._peers)
            return dict(zip(self._peers, answers, strict=True))

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            answers = self._ask()
            now = time.monotonic()
            for peer, (answer, _) in answers.items():
                if answer != "silent":
                    self._heard[peer] = now
            lost = [peer for peer in self._peers if now - self._heard[peer] > self._timeout]
            if lost and not self._stopped.is_set():
                names = ", ".join(map(str, lost))
                reason = answers[lost[0]][1]
                own = "; no other host answers, so it may be this one's connection" if len(lost) > 1 else ""
                if len(lost) < len(self._peers):
                    own = ""
                self._on_silent(
                    f"{self._me} has not reached {names} for {self._timeout:g} s ({reason}){own}: the run ends here. "
                    "Mend the connection and resume from the last checkpoint; --network.timeout sets how long to wait"
                )
                return
