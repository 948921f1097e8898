"""A run that waits to be told how many steps to make, in a process of its own with limits of its own."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cnnstrategies.planning.tune.program import Program

TRIAL = "CNNSTRATEGIES_TRIAL"  # Environment variable: the socket on which a trial's ranks wait for orders.
LOADS = "CNNSTRATEGIES_TRIAL_LOADS"  # Set where the ranks load as in training, and not one batch again and again.
COMMAND = "cnnstrategies.commands.tune.trial"
# Their losses tell whether a candidate learns the same: the third follows from the gradients of two updates.
COMPARED_STEPS = 3


class TrialError(Exception):
    """A trial has ended or taken too long; the message says why in a few words."""


class Trial:
    """One candidate's run.

    Args:
        folder: Where its socket and its output go.
        name: Of both files.
        words: The command line of ``fit`` for it.
        seconds: How long it may take to start, and then for any order.
        loads: Whether it loads its data as in training, and not one batch again and again.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], seconds: float, loads: bool = False) -> None:
        self._seconds = seconds
        self._ranks: list[Any] = []
        path = folder / f"{name}.sock"
        variables = {**os.environ, TRIAL: str(path), **({LOADS: "1"} if loads else {})}
        self._program = Program([COMMAND, *words], folder / f"{name}.log", path, variables)

    def wait_until_ready(self) -> None:
        """Wait for all ranks.

        Raises:
            TrialError: They do not come.
        """
        self._await(lambda: bool(self._ranks) and len(self._ranks) == self._ranks[0].world, self._accept)

    def steps(self, count: int) -> dict[str, Any]:
        """Have all ranks make some steps.

        Returns:
            Rank 0's report, with ``seconds`` of the slowest rank and ``memory`` (bytes) of the fullest.

        Raises:
            TrialError: It has ended, or has not answered in time.
        """
        for rank in self._ranks:
            rank.send({"steps": count})
        reports: dict[int, dict[str, Any]] = {}
        self._await(lambda: len(reports) == len(self._ranks), lambda: self._hear(reports))
        return {
            **reports[0],
            "seconds": max(report["seconds"] for report in reports.values()),
            "memory": max(report["memory"] for report in reports.values()),
        }

    def close(self) -> None:
        """End the run and all its processes."""
        for rank in self._ranks:
            rank.close()
        self._program.close()

    def _accept(self) -> None:
        try:
            self._program.listener.settimeout(0.2)
            connection, _ = self._program.listener.accept()
        except TimeoutError:
            return
        rank = _Rank(connection)
        self._ranks = sorted([*self._ranks, rank], key=lambda one: one.number)

    def _hear(self, reports: dict[int, dict[str, Any]]) -> None:
        for rank in self._ranks:
            if rank.number not in reports and (report := rank.hear(0.2)) is not None:
                reports[rank.number] = report

    def _await(self, done: Any, work: Any) -> None:
        deadline = time.monotonic() + self._seconds
        while not done():
            if self._program.process.poll() is not None:
                raise TrialError(self._program.cause())
            if time.monotonic() > deadline:
                raise TrialError(f"took more than {self._seconds:.0f} s")
            work()


class _Rank:
    """The connection to one rank of a trial."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._heard = b""
        hello = self.hear(10.0)
        if hello is None:
            raise TrialError("a rank has not said who it is")
        self.number, self.world = int(hello["rank"]), int(hello["world"])

    def send(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # It has ended: whoever waits for its answer sees why.
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def hear(self, seconds: float) -> dict[str, Any] | None:
        self._connection.settimeout(seconds)
        while b"\n" not in self._heard:
            try:
                data = self._connection.recv(65536)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                time.sleep(seconds)
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self.send({"end": True})
        self._connection.close()
