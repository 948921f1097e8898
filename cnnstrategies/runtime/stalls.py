"""Find the rank that keeps the other ranks of a run waiting, and the line of the user's code at which it is.

A thread on each rank knows when the rank last began or ended a batch. If that is too long ago on one rank, all ranks
write the stack of their training thread to a file, and their place to a torch store, and one rank prints a line. A rank
that does not answer is stopped, or its machine cannot be reached. Workers and servers of a parameter server report only
themselves.
"""

import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]

from cnnstrategies.runtime.failure_watch import within
from cnnstrategies.runtime.process_ids import state_and_start
from cnnstrategies.runtime.records import parsed, printable, record

POLL = 1.0  # Seconds between two looks of the thread.
ANSWER = 5.0  # Seconds within which the ranks answer.
# Seconds without a begin or end of a batch after which a rank asks: in the first batches, in which programs are
# compiled; and later, when the time is also at least a multiple of the longest time so far.
BEGINNING, SHORTEST, MULTIPLE = 600.0, 60.0, 20.0
FIRST = 6  # Number of begins and ends of batches that belong to the beginning.
STOPPED = "tT"  # States of a process that was stopped by a signal or by a debugger.
LONGEST, LARGEST = 300, 2**32  # Most characters of a text in an answer, and first number that is too large.
_STANDARD = tuple(sysconfig.get_paths()[kind] + os.sep for kind in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_paths()[kind] + os.sep for kind in ("purelib", "platlib"))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Parts of the paths of files whose functions wait for other ranks. The backward pass waits for DDP's all-reduce.
# Workers wait for servers in zmq.
_WAITING = (
    *(os.path.join("torch", part) for part in ("distributed", "autograd", os.path.join("nn", "parallel"))),
    os.path.join(os.sep, "zmq", ""),
)


@dataclass(frozen=True)
class RankPosition:
    """Answer of a rank: where its training thread is.

    Attributes:
        rank: The rank.
        host: Name of the rank's machine.
        process: Id of the rank's process.
        place: File, line and function of the user's innermost code.
        waits: Whether the rank is in a function that waits for other ranks.
    """

    rank: int
    host: str
    process: int
    place: str
    waits: bool

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Return the answer from the JSON that another rank has written.

        Raises:
            ValueError: The text is not an answer.
        """
        return record(cls, parsed(text), LONGEST, LARGEST)


def position_in(stack: Sequence[traceback.FrameSummary]) -> tuple[str, bool]:
    """Return the place of the user's innermost code in a stack, and whether the stack waits for other ranks.

    Args:
        stack: Frames, the outermost first.
    """
    frames = [frame for frame in stack if not _is_standard(frame.filename)] or [*stack]
    users = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, _OURS))]
    place = _place(frames[-1])
    if users and users[-1] is not frames[-1]:
        place = f"{place}, called at {_place(users[-1])}"
    last = frames[-1].filename
    return place, last.startswith(_OURS) or any(part in last for part in _WAITING)


def _place(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def line_about(
    answers: Mapping[int, RankPosition], members: Mapping[int, RankPosition], seconds: float, folder: Path
) -> str:
    """Return the line of output about a stall.

    Args:
        answers: Answers of the ranks. Keys are the ranks.
        members: Answers of all ranks at the start of the run, whose places do not count.
        seconds: Time since the rank that asked has begun or ended a batch.
        folder: Folder with the stacks.
    """
    silent = [member for rank, member in sorted(members.items()) if rank not in answers]
    busy = [answer for _, answer in sorted(answers.items()) if not answer.waits]
    waiting = [answer for _, answer in sorted(answers.items()) if answer.waits]
    texts = [_about_silent(member) for member in silent]
    texts += [f"{_name(answer)} is not in a collective, but at {answer.place}" for answer in busy if waiting or silent]
    if not texts:
        places = ", ".join(f"rank {answer.rank} at {answer.place}" for answer in [*busy, *waiting])
        verb = "wait in collectives that do not match" if waiting else "work on one batch"
        texts = [f"all ranks {verb}: {places}"]
    return f"no batch has begun or ended for {seconds:.0f} s: {'; '.join(texts)}; stacks of the ranks: {folder}"


def _about_silent(member: RankPosition) -> str:
    fields = state_and_start(member.process) if member.host == socket.gethostname() else None
    if fields is not None and fields[0] in STOPPED:
        return f"{_name(member)} is stopped by a signal: continue it with kill -CONT {member.process}"
    return (
        f"{_name(member)} does not answer: its machine cannot be reached, or it is in a function that does not let "
        "other threads run"
    )


def _name(member: RankPosition) -> str:
    return f"rank {member.rank} (process {member.process} on {member.host})"


class MoveWatch(ABC):
    """Thread that knows when the training thread of this process has last begun or ended a batch.

    Args:
        rank: This rank, or the id of this server.
        folder: Folder in which the rank writes its stack if the run stalls.
    """

    kind = "rank"

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._folder = folder
        self._training_thread = threading.get_ident()
        self._moved = time.monotonic()
        self._count = 0
        self._longest = 0.0
        self._reported = -1  # Value of `_count` in the stall that this rank has asked about, answered or reported.
        self._closing = threading.Event()

    def start(self) -> Self:
        """Start the thread, and return this object."""
        threading.Thread(target=self._watch, name="stall watch", daemon=True).start()
        return self

    def move(self) -> None:
        """Record that this rank begins or ends a batch."""
        now = time.monotonic()
        if self._count >= FIRST:
            self._longest = max(self._longest, now - self._moved)
        self._moved = now
        self._count += 1

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    @abstractmethod
    def _watch(self) -> None:
        """Look for stalls until the thread is ended."""

    def _is_late(self, seconds: float) -> bool:
        """Return whether the last begin or end of a batch is too long ago, and was not reported yet."""
        limit = BEGINNING if self._count <= FIRST else max(SHORTEST, MULTIPLE * self._longest)
        return seconds > limit and self._reported != self._count

    def _stack(self) -> traceback.StackSummary:
        return traceback.extract_stack(sys._current_frames().get(self._training_thread))  # noqa: SLF001  # Python documents it.

    def _write(self, stack: traceback.StackSummary) -> None:
        """Write the stack of the training thread to this rank's file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{self.kind}-{self._rank}.txt").write_text("".join(traceback.format_list(stack)))


class WorkerStallWatch(MoveWatch):
    """Thread that reports a stall of this worker of parameter servers, if the worker does not wait for others.

    The coordinator notices processes that are stopped. A worker that hangs in the user's code still sends heartbeats,
    and only the worker itself knows where it is.
    """

    def _watch(self) -> None:
        while not self._closing.wait(POLL):
            seconds, count = time.monotonic() - self._moved, self._count
            if self._is_late(seconds):
                stack = self._stack()
                place, waits = position_in(stack)
                if not waits:
                    self._reported = count
                    self._write(stack)
                    self.tell(place, seconds)

    def tell(self, place: str, seconds: float) -> None:
        """Print the line about the stall."""
        worker = f"worker {self._rank} (process {os.getpid()} on {socket.gethostname()})"
        print(
            f"no batch has begun or ended for {seconds:.0f} s: {worker} does not wait for other processes, but is at "
            f"{place}; its stack: {self._folder}",
            file=sys.stderr,
            flush=True,
        )


class ServerStallWatch(MoveWatch):
    """Thread that reports a server whose main loop does not come round, although the server still sends heartbeats.

    The workers wait for this server. Its main loop calls :meth:`move` in each round, at least a few times a second.
    """

    kind = "server"

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closing.wait(POLL):
            before, looked = looked, time.monotonic()
            seconds, count = looked - self._moved, self._count
            if looked - before > POLL + SHORTEST / 2:
                self._moved = looked  # This process itself was stopped, which the coordinator has reported.
            elif self._is_late(seconds):
                self._reported = count
                stack = self._stack()
                self._write(stack)
                self.tell(position_in(stack)[0], seconds)

    def tell(self, place: str, seconds: float) -> None:
        """Print the line about the stall."""
        print(
            f"server {self._rank} (process {os.getpid()} on {socket.gethostname()}) has answered no worker for "
            f"{seconds:.0f} s, and is at {place}; its stack: {self._folder.absolute()}",
            file=sys.stderr,
            flush=True,
        )


class StallWatch(MoveWatch):
    """Thread that reports a stall of the run.

    Args:
        store: Store that all ranks use, and no other object.
        rank: This rank.
        world_size: Number of ranks.
        folder: Folder in which each rank writes its stack if the run stalls.
    """

    def __init__(self, store: Store, rank: int, world_size: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self._store = store
        self._world_size = world_size
        self._members: dict[int, RankPosition] = {}

    def _watch(self) -> None:
        # The store is lost if the process that serves it has ended, and `FailureWatch` reports that.
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.set(f"member {self._rank}", self._encoded("", False))
            number = 0  # Number of stalls so far.
            began = time.monotonic()
            while not self._closing.wait(POLL):
                if len(self._members) < self._world_size:
                    self._members = self._read("member")
                seconds = time.monotonic() - self._moved
                is_late = self._is_late(seconds)
                # A store that was stopped never replies. Usually rank 0 serves it.
                is_asked = within(ANSWER, partial(self._store.check, [f"asked {number}"]), None)
                before, began = began, time.monotonic()
                if began - before > POLL + ANSWER + SHORTEST / 2:
                    self._moved = began  # This process itself was stopped, and the other ranks have reported that.
                elif is_asked is None and is_late and self._rank == 1:
                    self._reported = self._count
                    self._answer()
                    # The other ranks cannot be asked. Most likely they wait for rank 0, as this rank does.
                    others = {rank: replace(member, waits=True) for rank, member in self._members.items() if rank != 0}
                    self.tell(others, seconds)
                elif is_asked or (is_late and is_asked is not None):
                    self._reported = self._count
                    asking = str(self._rank).encode()
                    is_first = self._store.compare_set(f"asked {number}", "", str(self._rank)) == asking
                    self._store.set(f"answer {number} {self._rank}", self._answer())
                    if is_first:
                        self.tell(self._answers(number), seconds)
                    number += 1

    def _answers(self, number: int) -> dict[int, RankPosition]:
        deadline = time.monotonic() + ANSWER
        while len(answers := self._read(f"answer {number}")) < self._world_size and time.monotonic() < deadline:
            time.sleep(POLL / 10)
        return answers

    def tell(self, answers: Mapping[int, RankPosition], seconds: float) -> None:
        """Print the line about a stall."""
        print(line_about(answers, self._members, seconds, self._folder), file=sys.stderr, flush=True)

    def _read(self, key: str) -> dict[int, RankPosition]:
        ranks = [rank for rank in range(self._world_size) if self._store.check([f"{key} {rank}"])]
        return {rank: RankPosition.decode(self._store.get(f"{key} {rank}")) for rank in ranks}

    def _answer(self) -> str:
        """Write the stack of the training thread to this rank's file, and return the answer of this rank."""
        stack = self._stack()
        self._write(stack)
        return self._encoded(*position_in(stack))

    def _encoded(self, place: str, waits: bool) -> str:
        host = printable(socket.gethostname(), LONGEST)
        return json.dumps(asdict(RankPosition(self._rank, host, os.getpid(), printable(place, LONGEST), waits)))


def _is_standard(name: str) -> bool:
    return name.startswith("<") or (name.startswith(_STANDARD) and not name.startswith(_INSTALLED))
