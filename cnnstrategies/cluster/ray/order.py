"""What is to run on Ray, what it prints, how it ends and how long that is waited for."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cnnstrategies.cluster.job import UNLIMITED, WAIT_SECONDS
from cnnstrategies.cluster.ray.node import Place

REFUSED = 2  # Exit code of a mistake in the configuration, which the next start would find again.
LOST = 1
PATIENCE = 10.0  # Seconds in which the other nodes may say why they end too, after the first that failed.
# Seconds until Ray has said whether a node that does not answer is lost: its five checks may take 65 by default.
LOSS = 90.0


@dataclass(frozen=True)
class Order:
    """What is to run.

    Attributes:
        nodes: How many.
        needed: Of each node, as Ray counts it.
        script: Of the shell; starts a node's program.
        probe: Of the shell; fails where the package is not installed.
        config: The configuration that the program reads.
        name: Of the run, by which a program that is started again finds its last checkpoint.
        directory: Working directory of the program.
        variables: For the program, on every node.
        max_restarts: How often all is started again.
        wait: Seconds to wait for nodes.
        grace: Seconds in which a run that was asked to stop ends.
        goes_on: Whether the run goes on after the first node has ended well.
    """

    nodes: int
    needed: dict[str, float]
    script: str
    probe: str
    config: str
    name: str
    directory: str
    variables: dict[str, str]
    max_restarts: int
    wait: float
    grace: float
    goes_on: bool


@dataclass
class Ends:
    """How the programs of one start have ended.

    Attributes:
        codes: Exit codes by node.
        lost: Nodes whose actor has died.
        silent: Nodes that have not answered since another's program has failed, and of which Ray says nothing.
    """

    codes: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a node was lost, or a program has failed."""
        return bool(self.lost) or any(self.codes.values())

    @property
    def code(self) -> int:
        """The run's exit code."""
        if self.lost or self.silent:
            return LOST  # A program that waits for such a node in vain says that it was started wrongly.
        codes = [abs(code) if code >= 0 else 128 - code for code in self.codes.values() if code]
        return REFUSED if REFUSED in codes else (codes[0] if codes else 0)

    def why(self, places: list[Place]) -> str:
        """What has failed, in words: first the cause, if it is known."""
        gone = [f"{_named(node, places)} was lost" for node in self.lost]
        gone += [f"{_named(node, places)} does not answer" for node in self.silent]
        then = " then" if gone else ""
        failed = [f"node {node}{then} ended with code {code}" for node, code in self.codes.items() if code]
        return "; ".join(gone + failed)


def _named(node: int, places: list[Place]) -> str:
    return f"node {node} ({places[node].host}, {places[node].address})"


class Lines:
    """Prints whole lines, those of other nodes than the first with their node, and keeps them in a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._begun: dict[int, str] = {}

    def add(self, node: int, text: str) -> None:
        """Print what a node has said; the beginning of a line waits for its end."""
        *whole, self._begun[node] = (self._begun.get(node, "") + text).split("\n")
        for line in whole:
            self.say(f"[node {node}] {line}" if node else line)

    def flush(self) -> None:
        """Print what has been begun, since nothing follows."""
        for node, rest in list(self._begun.items()):
            if rest:
                self.add(node, "\n")

    def say(self, line: str) -> None:
        """Print a line of the driver's own."""
        print(line, flush=True)
        self._file.write(f"{line}\n")

    def close(self) -> None:
        """Print the rest and close the file."""
        self.flush()
        self._file.close()
        sys.stdout.flush()


class Clock(Protocol):
    """As much of ``time`` as a driver uses."""

    def monotonic(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class Patience:
    """Says when the driver follows one start of a run no longer.

    A program may fail because a node with others is lost, before Ray knows of that. So after a failure each of the
    others is waited for until it has answered a question that was put since, or Ray has said that it is lost.
    """

    def __init__(self, order: Order, places: list[Place], lines: Lines, clock: Clock) -> None:
        self._order, self._places, self._lines, self._clock = order, places, lines, clock
        self._alive: set[int] = set()
        self._stopped: float | None = None
        self._ended: float | None = None
        self._failed: float | None = None
        self._told = False

    def answers(self, node: int) -> None:
        """A node has answered what it was asked after the first failure."""
        self._alive.add(node)

    def unheard(self, running: Collection[int]) -> list[int]:
        """Those of the nodes that are followed which may be lost."""
        return sorted(set(running) - self._alive)

    def over(self, ends: Ends, running: Collection[int], stopping: bool) -> bool:
        """Whether it has waited long enough."""
        now = self._clock.monotonic()
        if stopping:
            self._stopped = now if self._stopped is None else self._stopped
            return now >= self._stopped + self._order.grace + PATIENCE
        if ends.lost:
            return True
        if ends.failed:
            self._failed = now if self._failed is None else self._failed
            unheard = self.unheard(running) if now >= self._failed + PATIENCE else []
            if unheard and not self._told:
                self._told = True
                names = ", ".join(f"node {node} ({self._places[node].host})" for node in unheard)
                self._lines.say(f"Waiting up to {LOSS:g} s for Ray to say whether it has lost {names}: no answer")
            return now >= self._failed + (LOSS if unheard else PATIENCE)
        if ends.codes:
            self._ended = now if self._ended is None else self._ended
        seconds = UNLIMITED if self._order.goes_on else WAIT_SECONDS
        return bool(seconds) and self._ended is not None and now >= self._ended + seconds
