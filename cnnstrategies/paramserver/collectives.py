"""Barrier, broadcast, all-gather and reductions among the workers of a run, through the run's coordinator."""

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
    """Result of a collective.

    Attributes:
        values: By id, the value of each worker that took part.
        joined: Whether this worker has just been admitted to a group that is already training.
        admitted: Ids of the workers that have just been admitted.
        midway: Whether this worker was admitted after the boundary at which the other workers met. They do not wait for
            it.
    """

    values: dict[int, Any]
    joined: bool = False
    admitted: tuple[int, ...] = ()
    midway: bool = False

    @property
    def leader(self) -> int:
        """Lowest id among the workers that took part."""
        return min(self.values)


class Collectives:
    """A worker's side of the coordinator's collectives. Used by one thread.

    Every worker of the group calls the same collectives in the same order. The group does not wait for a worker that
    has died, so that a result contains the values of the live workers only.

    Args:
        membership: Connection to the coordinator.

    Attributes:
        membership: Connection to the coordinator.
        present: Ids of the workers that took part in the last collective; None before the first.
    """

    def __init__(self, membership: Membership) -> None:
        membership.wait_registered()
        self.membership = membership
        self.present: Sequence[int] | None = None

    def gather(self, value: Any, operation: str = "gather") -> Gathered:
        """Return the values of all workers. If workers call different operations, all of them get an error."""
        return self._collect(value, operation)

    def start(self, midway: bool = False) -> Gathered:
        """Wait until the set-up of all workers is finished and training begins.

        A worker that is started later is admitted at a :meth:`boundary` and gets the boundary's values; or, with
        `midway`, after a boundary, while the other workers take chunks of the epoch that began there.
        """
        return self._collect(None, "start", seal=True, **({MIDWAY: True} if midway else {}))

    def boundary(self, value: Any) -> Gathered:
        """Meet at a boundary, at which workers that were started later are admitted and get these values."""
        return self._collect(value, "boundary", boundary=True)

    def barrier(self, name: str = "barrier") -> None:
        """Wait for all workers."""
        self._collect(None, name)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of one worker on all workers; if the worker has died, that of the lowest live id."""
        while True:
            is_source = source == self.membership.address.id
            gathered = self._collect(value if is_source else None, f"broadcast from {source}")
            if source in gathered.values:
                return gathered.values[source]
            source = gathered.leader

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Combine the workers' tensors, which have the same shape; return the same result on every worker.

        Args:
            tensor: This worker's tensor.
            how: Name of one of the :data:`REDUCTIONS`.
        """
        values = self._collect(tensor, f"reduce {how}").values
        stacked = torch.stack([values[number] for number in sorted(values)])
        return REDUCTIONS[how](stacked).to(tensor)

    def put(self, specification: str) -> None:
        """Publish the run's specification; the first one that is published counts."""
        self.membership.ask("put", {}, [specification.encode()])

    def get(self) -> str:
        """Return the run's specification; wait until it is published."""
        (text,) = self.membership.ask("get", {}).frames
        return bytes(text).decode()

    def begin_epoch(self, number: int, samples: int, chunk: int, done: str = "") -> int:
        """Have the coordinator cut an epoch into chunks.

        The first worker that asks decides about the epoch; the arguments of later ones are ignored.

        Args:
            number: Number of the epoch.
            samples: Samples of the epoch.
            chunk: Samples of a chunk.
            done: Chunks that an earlier run has processed, as :meth:`progress` returned them; nobody gets them again.

        Returns:
            Samples of the epoch, as the first worker gave them.
        """
        more = {"done": done} if done else {}
        answer = self.membership.ask("epoch", {"epoch": number, "samples": samples, "chunk": chunk, **more})
        return answer.integer("samples")

    def progress(self, epoch: int, processed: int) -> str:
        """Report to the coordinator how many positions of an epoch this worker has processed.

        Every worker must call this method.

        Returns:
            For worker 0 one bit for each chunk, set if the chunk is processed, in hexadecimal digits; for other workers
            an empty string.
        """
        fields = {"epoch": epoch, "processed": processed}
        self.membership.ask("progress", {**fields, "tell": False})
        self.barrier("progress")
        if self.membership.address.id != 0:
            return ""
        return self.membership.ask("progress", {**fields, "tell": True}).string("done")

    def take(self, epoch: int, processed: int) -> Chunk:
        """Return the next chunk of an epoch for this worker; an empty chunk if none is left.

        Args:
            epoch: Number of the epoch.
            processed: Positions of the epoch that this worker has processed.
        """
        message = self.membership.ask("take", {"epoch": epoch, "processed": processed})
        return Chunk(message.integer("epoch"), message.integer("start"), message.integer("stop"))

    def give_back(self, epoch: int) -> None:
        """Begin an epoch, and give back the chunks of earlier epochs.

        For a worker that was started again: it took such chunks before it knew the epoch of the other workers.
        """
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
