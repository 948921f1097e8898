"""What a member remembers of the coordinator, to tell one that is started again: that one has no file."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cnnstrategies.paramserver.coordinator.chunks import places
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Message

EPOCHS = 3  # of data dispatch; what a worker left behind that died comes in the next but one at the latest
ROUND, VALUE = "round ", "value "  # what an item's name begins with
MIDWAY = "midway"  # in the answer to a worker that is let in after a boundary: number of that collective


@dataclass
class Taken:
    """What a worker was given of an epoch.

    Attributes:
        samples: Of the epoch.
        chunk: Samples of a chunk.
        processed: Positions that were processed when it last asked.
        asked: How often it was answered.
        chunks: Epoch, start and stop of each chunk, one after the other.
        done: What was worked on before the run began, as `Dispatcher.progress` tells it.
    """

    samples: int
    chunk: int
    processed: int = 0
    asked: int = 0
    chunks: "array[int]" = field(default_factory=lambda: array("q"))
    done: str = ""


class Report(NamedTuple):
    """What a member tells.

    Attributes:
        number: Of the newest view that it knows.
        newest: The message of it, as JSON.
        seen: Number of the view that it has taken up.
        sequence: Of its next collective.
        rounds: The collectives whose results it has.
        values: The names whose values it has, and whether it was told them.
        notices: What was told to all.
        epochs: What it was given of each.
    """

    number: int
    newest: bytes
    seen: int
    sequence: int
    rounds: Sequence[int]
    values: Mapping[str, bool]
    notices: Mapping[str, int]
    epochs: Mapping[int, Taken]

    @property
    def items(self) -> set[str]:
        """What it can give."""
        return {f"{ROUND}{one}" for one in self.rounds} | {f"{VALUE}{one}" for one in self.values}

    @classmethod
    def of(cls, message: Message) -> "Report | None":
        """The one in a member's hello; None if a process has just begun.

        Raises:
            ControlError: It has other fields.
        """
        if message.fields.get("report") is None:
            return None
        told = Message("report", message.object("report"))
        if len(message.frames) != 2 or len(message.frames[1]) % array("q").itemsize:
            raise ControlError("report: buffers of another form")
        chunks = array("q", bytes(message.frames[1]))
        listed = told.table("epochs", int, int, int, int, int, str, int)
        if sum(one[-1] for one in listed) != len(chunks) or min([0, *chunks]) < 0:
            raise ControlError("report: other chunks")
        epochs, first = {}, 0
        for number, samples, chunk, processed, asked, done, length in listed:
            epochs[number] = Taken(samples, chunk, processed, asked, chunks[first : first + length], done)
            places(done)  # checks it
            first += length
        return cls(
            told.integer("number", -1),
            bytes(message.frames[0]),
            told.integer("seen"),
            told.integer("sequence"),
            told.integers("rounds"),
            {name: got is True for name, got in told.object("values").items()},
            told.numbers("notices"),
            epochs,
        )


class Memory:
    """What a member was told."""

    def __init__(self) -> None:
        self._keeps = True
        self._number = -1
        self._newest: Mapping[str, Any] = {}
        self._setup: dict[int, Message] = {}
        self._last: Message | None = None
        self._sealed = False
        self._values: dict[str, tuple[bool, Sequence[Buffer]]] = {}
        self._epochs: dict[int, Taken] = {}

    def keep(self, keeps: bool) -> None:
        """Whether the coordinator may be started again: if not, only the newest view is kept.

        Until that is known all is: a member may take part before its registration is answered.
        """
        self._keeps = keeps
        if not keeps:
            self._setup, self._last, self._values, self._epochs = {}, None, {}, {}

    def viewed(self, number: int, fields: Mapping[str, Any]) -> None:
        """A newer view has come."""
        self._number = number
        self._newest = {name: fields[name] for name in ("view", "roster") if name in fields}

    def answered(self, asked: Message, reply: Message) -> None:
        """A request was answered."""
        if not self._keeps:
            return
        kind = asked.kind
        if kind == "collect":
            self._told(asked, reply)
        elif kind in ("put", "get"):
            name = asked.string("name")
            if kind == "get":
                self._values[name] = True, reply.frames
            else:
                self._values.setdefault(name, (False, asked.frames))
        elif kind == "give_back":
            self._epochs = {one: it for one, it in self._epochs.items() if one >= asked.integer("epoch")}
        elif kind == "epoch":
            number = asked.integer("epoch")
            begun = Taken(asked.integer("samples"), asked.integer("chunk"), done=asked.fields.get("done", ""))
            self._epochs.setdefault(number, begun)
            self._epochs = {one: self._epochs[one] for one in sorted(self._epochs)[-EPOCHS:]}
        elif kind == "take" and asked.integer("epoch") in self._epochs:
            taken = self._epochs[asked.integer("epoch")]
            taken.asked += 1
            taken.processed = asked.integer("processed")
            chunk = [reply.integer(name) for name in ("epoch", "start", "stop")]
            if chunk[1] < chunk[2]:
                taken.chunks.extend(chunk)

    def _told(self, asked: Message, reply: Message) -> None:
        """Keep the results of the set-up, for workers that are started again, and the last one of all.

        One that was let in after a boundary was told of that what the others had been told, and more. Who joins the run
        has nothing to hand over: it may have been told of one that was not the last.
        """
        if MIDWAY in reply.fields:
            self._sealed = True
            if MIDWAY in asked.fields:
                self._last = Message(reply.kind, {**reply.fields, "admitted": []}, reply.frames)
            return
        for name in ("ids", "sizes", "admitted"):
            reply.integers(name)  # It may have to be handed over.
        reply.integer("view")
        self._last = reply
        if not self._sealed and not reply.flag("joined"):
            self._setup[reply.integer("sequence")] = reply
        self._sealed = self._sealed or asked.flag("seal")

    @property
    def _results(self) -> dict[int, Message]:
        last = {} if self._last is None else {self._last.integer("sequence"): self._last}
        return self._setup | last

    def report(self, seen: int, sequence: int, notices: Mapping[str, int]) -> tuple[dict[str, Any], list[bytes]]:
        """The field and the buffers of a hello to a coordinator that was started again."""
        epochs = [
            [number, one.samples, one.chunk, one.processed, one.asked, one.done, len(one.chunks)]
            for number, one in self._epochs.items()
        ]
        report = {
            "number": self._number,
            "seen": seen,
            "sequence": sequence,
            "rounds": sorted(self._results),
            "values": {name: got for name, (got, _) in self._values.items()},
            "notices": dict(notices),
            "epochs": epochs,
        }
        chunks = b"".join(one.chunks.tobytes() for one in self._epochs.values())
        return report, [json.dumps(self._newest).encode(), chunks]

    def item(self, name: str) -> tuple[dict[str, Any], Sequence[Buffer]] | None:
        """The contents of what the coordinator lacks, if they are here."""
        if name.startswith(VALUE) and name.removeprefix(VALUE) in self._values:
            return {}, self._values[name.removeprefix(VALUE)][1]
        for sequence, result in self._results.items():
            if name == f"{ROUND}{sequence}":
                fields = ("sequence", "ids", "sizes", "view", "admitted")
                return {field: result.fields[field] for field in fields}, result.frames
        return None
