"""Barrier, broadcast, all-gather and reductions among the workers of a run, through its coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.codec import decode, encode
from cnnstrategies.paramserver.coordinator.collective_rounds import MIDWAY
from cnnstrategies.paramserver.coordinator.dispatch import Chunk
from cnnstrategies.paramserver.membership import Membership

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.sum(0) / len(stacked),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


@dataclass(frozen=True)
class Gathered:
    """What a collective brought together: the value of each worker that took part, by its number.

    Attributes:
        joined: Whether this worker has just been let into a group that is already training.
        admitted: The workers that have just been let in.
        midway: Whether this worker was let in after the others had met, who do not wait for it.
    """

    values: dict[int, Any]
    joined: bool = False
    admitted: tuple[int, ...] = ()
    midway: bool = False

    @property
    def leader(self) -> int:
        """The lowest number that took part."""
        return min(self.values)


class Collectives:
    """A worker's side of the coordinator's collectives. Used by one thread.

    Every worker of the group calls the same ones in the same order. One that dies is no longer waited for, so the
    results are those of the workers that are there.

    Attributes:
        present: Numbers of the workers that took part in the last one; None before the first.
    """

    def __init__(self, membership: Membership) -> None:
        membership.wait_registered()
        self.membership = membership
        self.present: Sequence[int] | None = None

    def gather(self, value: Any, operation: str = "gather") -> Gathered:
        """Bring the values of all workers together; those that meet under different names are told so."""
        return self._collect(value, operation)

    def start(self, midway: bool = False) -> Gathered:
        """The end of the set-up: training begins when all are here.

        A worker that is started later is let in at a :meth:`boundary`, whose values it then gets; or, if it comes
        `midway`, after one, while the others take chunks of the epoch that began there.
        """
        return self._collect(None, "start", seal=True, **({MIDWAY: True} if midway else {}))

    def boundary(self, value: Any) -> Gathered:
        """Stand still together for a moment in which workers that were started later are let in, with these values."""
        return self._collect(value, "boundary", boundary=True)

    def barrier(self, name: str = "barrier") -> None:
        """Wait for all workers."""
        self._collect(None, name)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one worker, on all; if it died, that of the lowest number."""
        while True:
            mine = source == self.membership.address.id
            gathered = self._collect(value if mine else None, f"broadcast from {source}")
            if source in gathered.values:
                return gathered.values[source]
            source = gathered.leader

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Combine tensors of the same shape, in one of the :data:`REDUCTIONS`; the same on every worker."""
        values = self._collect(tensor, f"reduce {how}").values
        stacked = torch.stack([values[number] for number in sorted(values)])
        return REDUCTIONS[how](stacked).to(tensor)

    def put(self, specification: str) -> None:
        """Tell all the run's specification; the first to do so decides."""
        self.membership.ask("put", {}, [specification.encode()])

    def get(self) -> str:
        """The run's specification; waits until it is told."""
        (text,) = self.membership.ask("get", {}).frames
        return bytes(text).decode()

    def begin_epoch(self, number: int, samples: int, chunk: int, done: str = "") -> int:
        """Have the coordinator cut an epoch into chunks, as the first who asks says; how many samples that has said.

        What is `done`, as :meth:`progress` has told a run before, is not given out.
        """
        more = {"done": done} if done else {}
        answer = self.membership.ask("epoch", {"epoch": number, "samples": samples, "chunk": chunk, **more})
        return answer.integer("samples")

    def progress(self, epoch: int, processed: int) -> str:
        """What all have worked on of an epoch; every worker says how many positions it has processed.

        Returns:
            For worker 0 a bit for each chunk, in hexadecimal digits; else nothing.
        """
        fields = {"epoch": epoch, "processed": processed}
        self.membership.ask("progress", {**fields, "tell": False})
        self.barrier("progress")
        if self.membership.address.id != 0:
            return ""
        return self.membership.ask("progress", {**fields, "tell": True}).string("done")

    def take(self, epoch: int, processed: int) -> Chunk:
        """The next chunk of an epoch for this worker, of which it has processed so many positions.

        An empty one when there are no more.
        """
        message = self.membership.ask("take", {"epoch": epoch, "processed": processed})
        return Chunk(message.integer("epoch"), message.integer("start"), message.integer("stop"))

    def give_back(self, epoch: int) -> None:
        """Begin with an epoch, and leave to others what was taken of earlier ones before that was known."""
        self.membership.ask("give_back", {"epoch": epoch})

    def _collect(
        self, value: Any, operation: str, seal: bool = False, boundary: bool = False, **more: bool
    ) -> Gathered:
        fields = {"operation": operation, "seal": seal, "boundary": boundary, **more}
        message = self.membership.ask("collect", fields, encode(value))
        if seal or boundary:
            self.membership.views.wait_newer(message.integer("view") - 1, self.membership.address.timeout)
        ids, sizes = message.fields["ids"], message.fields["sizes"]
        self.present = ids
        values, position = {}, 0
        for number, size in zip(ids, sizes, strict=True):
            values[number] = decode(message.frames[position : position + size])
            position += size
        midway = MIDWAY in message.fields
        return Gathered(values, message.flag("joined"), tuple(message.fields["admitted"]), midway)
