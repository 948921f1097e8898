"""Barrier, broadcast, all-gather and all-reduce among the workers of a run, through the run's coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.codec import decode, encode
from cnnstrategies.paramserver.coordinator.collective_rounds import MIDWAY
from cnnstrategies.paramserver.coordinator.contributions import unpack
from cnnstrategies.paramserver.coordinator.dispatch import Chunk
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.runtime.waiting import waiting

# By name: function that reduces the workers' tensors, stacked along a new first dimension, to one tensor.
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.sum(0) / len(stacked),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


# Size in bytes up to which a reduction sends each worker's tensor to all workers. Larger tensors go only to one worker.
SMALL_BYTES = 1 << 10


@dataclass(frozen=True)
class Gathered:
    """Result of a collective.

    Attributes:
        values: By worker id: the value of each worker that took part; None if this worker does not receive the values.
        joined: Whether this collective admitted this worker to a group that was already training.
        admitted: Ids of the workers that this collective admitted.
        midway: Whether this worker was admitted between two boundaries, and not at a boundary. A boundary is a
            collective between two steps that admits waiting workers.
    """

    values: dict[int, Any]
    joined: bool = False
    admitted: tuple[int, ...] = ()
    midway: bool = False

    @property
    def leader(self) -> int:
        """Lowest id among the workers that took part in the collective."""
        return min(self.values)


class Collectives:
    """A worker's interface to collectives that the coordinator carries out. Only one thread may use the interface.

    All workers of the group must call the same collectives in the same order. The group does not wait for a worker that
    has died, so a result contains only the values of live workers.

    Args:
        membership: This process's membership in the run. The collectives use its connection to the coordinator.

    Attributes:
        membership: The argument `membership`.
        present: Ids of the workers that took part in the last collective; None before the first collective.
    """

    def __init__(self, membership: Membership) -> None:
        membership.wait_registered()
        self.membership = membership
        self.present: Sequence[int] | None = None

    def gather(self, value: Any, operation: str = "gather") -> Gathered:
        """Return the values of all workers.

        Args:
            value: This worker's value. See :func:`cnnstrategies.codec.encode` for the allowed types.
            operation: Name of the collective. If the workers pass different names, all of them get an error.
        """
        return self._collect(value, operation)

    def start(self, midway: bool = False) -> Gathered:
        """Wait until all workers have finished their set-up, so that training can begin.

        A worker that is started later waits until the next :meth:`boundary` admits it. It then gets the values that the
        other workers have gathered at this boundary.

        Args:
            midway: Whether this worker may be admitted before the next boundary. If so, the worker gets the values of
                the last boundary, and takes chunks of the epoch that the other workers are already processing.
        """
        return self._collect(None, "start", seal=True, **({MIDWAY: True} if midway else {}))

    def boundary(self, value: Any) -> Gathered:
        """Gather the values of all workers, and admit the workers that wait in :meth:`start`. Call this between steps.

        The admitted workers receive the gathered values as the result of :meth:`start`.

        Args:
            value: This worker's value. See :func:`cnnstrategies.codec.encode` for the allowed types.
        """
        return self._collect(value, "boundary", boundary=True)

    def barrier(self, name: str = "barrier") -> None:
        """Wait until all workers have called this method.

        Args:
            name: Name of the barrier. If the workers pass different names, all of them get an error.
        """
        self._collect(None, name)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return one worker's value on all workers.

        Args:
            value: The value to send. Only the source's value is used.
            source: Id of the worker whose value to return. If the source has died, the value of the live worker with
                the lowest id is returned instead.
        """
        while True:
            is_source = source == self.membership.address.id
            gathered = self._collect(value if is_source else None, f"broadcast from {source}")
            if source in gathered.values:
                return gathered.values[source]
            source = gathered.leader

    def reduce(self, tensor: Tensor, how: str) -> Tensor:
        """Reduce the workers' tensors element by element, and return the result on every worker (all-reduce).

        If a tensor has at most `SMALL_BYTES`, each worker receives the tensors of all workers. Larger tensors go only
        to the worker with the lowest id, which sends the result to the other workers. Each of the other workers then
        receives only one tensor.

        Args:
            tensor: This worker's tensor, of the same shape on all workers.
            how: Name of the reduction: ``sum``, ``mean``, ``max``, ``min`` or ``product``.
        """
        if tensor.nbytes <= SMALL_BYTES:
            values = self._collect(tensor, f"reduce {how}").values
            return _reduced(values, how).to(tensor)
        while True:
            contributions = self._collect(tensor, f"reduce {how}", leader_only=True)
            leader, is_leader = contributions.leader, contributions.leader == self.membership.address.id
            result = _reduced(contributions.values, how) if is_leader else None
            results = self._collect(result, f"result of reduce {how}").values
            if (
                leader in results
            ):  # Otherwise the leader has died, and the remaining workers reduce their tensors again.
                reduced: Tensor = results[leader]
                return reduced.to(tensor)

    def put(self, specification: str, number: int = 0) -> None:
        """Publish the run's specification. Only the first call of a run with each number has an effect.

        Args:
            specification: The specification as JSON.
            number: Number of the specification. With a number above 0 it replaces the specification with the number
                before, and all servers begin again without values.
        """
        self.membership.ask("put", {"number": number}, [specification.encode()])

    def get(self, number: int = 0) -> str:
        """Wait until a worker has published the run's specification with :meth:`put`.

        Args:
            number: Lowest number of the specification.

        Returns:
            The specification as JSON.
        """
        return self.membership.specification(number)

    def begin_epoch(self, number: int, samples: int, chunk: int, done: str = "") -> int:
        """Ask the coordinator to cut an epoch into chunks.

        All workers call this method for each epoch. The coordinator uses the arguments of the call that arrives first,
        and ignores the arguments of the other calls.

        Args:
            number: Number of the epoch.
            samples: Number of samples in the epoch.
            chunk: Number of samples in a chunk.
            done: Chunks that an earlier run has already processed, as a bit mask in hexadecimal digits that
                :meth:`progress` has returned; an empty string for no chunks. No worker gets these chunks.

        Returns:
            Number of samples according to the call that arrived first; 0 if the epoch is over or its size is not valid.
        """
        more = {"done": done} if done else {}
        answer = self.membership.ask("epoch", {"epoch": number, "samples": samples, "chunk": chunk, **more})
        return answer.integer("samples")

    def progress(self, epoch: int, processed: int) -> str:
        """Report this worker's progress in an epoch. In worker 0, return the progress of the whole group.

        All workers must call this method.

        Args:
            epoch: Number of the epoch.
            processed: Number of samples that this worker has processed in this epoch.

        Returns:
            For worker 0 a bit mask in hexadecimal digits: bit i is set if chunk i is processed. For other workers an
            empty string.
        """
        fields = {"epoch": epoch, "processed": processed}
        self.membership.ask("progress", {**fields, "tell": False})
        self.barrier("progress")
        if self.membership.address.id != 0:
            return ""
        return self.membership.ask("progress", {**fields, "tell": True}).string("done")

    def take(self, epoch: int, processed: int) -> Chunk:
        """Request the next chunk of an epoch from the coordinator. The returned chunk is empty if no chunk is left.

        Args:
            epoch: Number of the epoch.
            processed: Number of samples that this worker has processed in this epoch.
        """
        message = self.membership.ask("take", {"epoch": epoch, "processed": processed})
        return Chunk(message.integer("epoch"), message.integer("start"), message.integer("stop"))

    def give_back(self, epoch: int) -> None:
        """Return this worker's chunks of earlier epochs to the coordinator.

        A worker that was started again calls this method, because it may have taken chunks of an earlier epoch before
        it learned which epoch the other workers process.

        Args:
            epoch: Number of the epoch that the other workers process.
        """
        self.membership.ask("give_back", {"epoch": epoch})

    def _collect(
        self, value: Any, operation: str, seal: bool = False, boundary: bool = False, **more: bool
    ) -> Gathered:
        fields = {"operation": operation, "seal": seal, "boundary": boundary, **more}
        payload = encode(value)
        with waiting(operation):
            message = self.membership.ask("collect", fields, payload)
            if seal or boundary:
                self.membership.views.wait_newer(message.integer("view") - 1, self.membership.address.timeout)
        # If only the leader receives the contributions, the other workers receive ids without frames.
        values = {worker: decode(frames) if frames else None for worker, frames in unpack(message.frames).items()}
        self.present = list(values)
        midway = MIDWAY in message.fields
        return Gathered(values, message.flag("joined"), tuple(message.fields["admitted"]), midway)


def _reduced(values: dict[int, Tensor], how: str) -> Tensor:
    return REDUCTIONS[how](torch.stack([values[worker] for worker in sorted(values)]))
