"""Barrier, broadcast, all-gather and reductions among the workers of a run, through its coordinator."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from torch import Tensor

from cnnstrategies.paramserver.codec import decode, encode
from cnnstrategies.paramserver.control import Buffer, ControlError, Message, parse, send, waiting
from cnnstrategies.paramserver.dispatch import Chunk
from cnnstrategies.paramserver.membership import Address, Membership
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.view import RunEnded

PROBE_SECONDS = 1.0  # without an answer before the coordinator is asked what has become of a request
WARN_SECONDS = 60.0
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "mean": lambda stacked: stacked.sum(0) / len(stacked),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


@dataclass(frozen=True)
class Gathered:
    """What a collective brought together.

    Attributes:
        values: The value of each worker that took part, by its number.
        joined: Whether this worker has just been let into a group that is already training.
        admitted: The workers that have just been let in.
    """

    values: dict[int, Any]
    joined: bool = False
    admitted: tuple[int, ...] = ()

    @property
    def leader(self) -> int:
        """The lowest number that took part."""
        return min(self.values)


class Collectives:
    """A worker's side of the coordinator's collectives. Used by one thread.

    Every worker of the group calls the same ones in the same order. One that dies is no longer waited for, so the
    results are those of the workers that are there.

    Args:
        membership: This worker's; its errors come through all methods here.
        keys: The run's CURVE keys.

    Attributes:
        present: Numbers of the workers that took part in the last one; None before the first.
    """

    def __init__(self, membership: Membership, keys: KeyPair | None = None) -> None:
        membership.wait_registered()
        self.membership = membership
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = membership.address.connect(self._context, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(membership.fileno(), zmq.POLLIN)
        self._sequence = 0
        self._taken = 0  # chunks asked for in the present epoch
        self.present: Sequence[int] | None = None

    def gather(self, value: Any, operation: str = "gather") -> Gathered:
        """Bring the values of all workers together.

        Args:
            value: What :func:`~cnnstrategies.paramserver.codec.encode` takes.
            operation: A name; workers that meet under different names are told so.
        """
        return self._collect(value, operation)

    def start(self) -> Gathered:
        """The end of the set-up: training begins when all are here.

        A worker that is started later is let in at a :meth:`boundary`, whose values it then gets.
        """
        return self._collect(None, "start", seal=True)

    def boundary(self, value: Any) -> Gathered:
        """Stand still together for a moment in which workers that were started later are let in.

        Args:
            value: What such a worker needs in order to go on from here.
        """
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
        """Combine tensors of the same shape.

        Args:
            tensor: This worker's.
            how: ``sum``, ``mean``, ``max``, ``min`` or ``product``.

        Returns:
            The result, the same on every worker, on the tensor's device and with its type.
        """
        values = self._collect(tensor, f"reduce {how}").values
        stacked = torch.stack([values[number] for number in sorted(values)])
        return REDUCTIONS[how](stacked).to(tensor)

    def put(self, name: str, frames: list[Buffer]) -> None:
        """Publish buffers under a name, for :func:`get`; the first to do so decides."""
        message = self.membership.address.message("put", {"name": name}, frames)
        self._request(message, "kept", lambda answer: answer.string("name") == name)

    def get(self, name: str) -> list[Buffer]:
        """The buffers that were published under a name; waits for them."""
        message = self.membership.address.message("get", {"name": name})
        return list(self._request(message, "value", lambda answer: answer.string("name") == name).frames)

    def begin_epoch(self, number: int, samples: int, chunk: int) -> None:
        """Have the coordinator cut an epoch into chunks."""
        address = self.membership.address
        fields = {**address.fields(), "epoch": number, "samples": samples, "chunk": chunk}
        self._request(address.message("epoch", fields), "epoch", lambda answer: answer.integer("epoch") == number)
        self._taken = 0

    def take(self, epoch: int, processed: int) -> Chunk:
        """The next chunk of an epoch for this worker; an empty one when there are no more.

        Args:
            epoch: The epoch.
            processed: Positions that this worker has processed in it.
        """
        address = self.membership.address
        self._taken += 1
        ordinal = self._taken
        fields = {**address.fields(), "epoch": epoch, "processed": processed, "ordinal": ordinal}
        message = self._request(address.message("take", fields), "chunk", lambda one: one.integer("ordinal") == ordinal)
        return Chunk(message.integer("epoch"), message.integer("start"), message.integer("stop"))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    def _collect(self, value: Any, operation: str, seal: bool = False, boundary: bool = False) -> Gathered:
        address = self.membership.address
        fields = {
            **address.fields(),
            "sequence": self._sequence,
            "operation": operation,
            "seal": seal,
            "boundary": boundary,
        }
        message = self._request(
            address.message("collect", fields, encode(value)),
            "result",
            # One that is let in later answers its `start` with a later collective.
            lambda one: seal or one.integer("sequence") == self._sequence,
            address.message("collect", {**fields, "asks": True}),
        )
        self._sequence = message.integer("sequence") + 1
        if seal or boundary:
            self.membership.wait_newer(message.integer("view") - 1, self.membership.address.timeout)
        ids, sizes = message.fields["ids"], message.fields["sizes"]
        self.present = ids
        values, position = {}, 0
        for number, size in zip(ids, sizes, strict=True):
            values[number] = decode(message.frames[position : position + size])
            position += size
        return Gathered(values, message.flag("joined"), tuple(message.fields["admitted"]))

    def _request(
        self, message: Message, kind: str, wanted: Callable[[Message], bool], asks: Message | None = None
    ) -> Message:
        """Send a request, and again what of it may have been lost, until it is answered.

        Args:
            message: The request.
            kind: Of the answer.
            wanted: Whether an answer of that kind is the one.
            asks: Asks what has become of the request; by default it is sent again as a whole.

        Raises:
            RunEnded: The run is over, or the coordinator does not hear this request.
        """
        wait = Wait(self.membership.address)
        send(self._socket, message)
        while True:
            self.membership.current()  # Raises when the run is over.
            self._poller.poll(int(1000 * PROBE_SECONDS))
            while waiting(self._socket):
                try:
                    answer = parse(self._socket.recv_multipart(), routed=False)
                    wait.hear(answer)
                    if answer.kind == kind and wanted(answer):
                        return answer
                    if answer.kind == "again" and answer.integer("sequence") == message.fields.get("sequence"):
                        send(self._socket, message)
                    if answer.kind == "ended":
                        raise RunEnded(answer.string("message"), answer.flag("clean"))
                except ControlError:
                    continue
            if wait.asks(str(message.fields.get("operation", message.kind))):
                send(self._socket, message if asks is None else asks)


class Wait:
    """A wait for the coordinator's answer: when to ask again, when to warn, and when to give up.

    Args:
        address: Of who waits.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._begun = self._heard = self._asked = self._looked = self._warned = time.monotonic()
        self._blamed: list[str] = []

    def hear(self, answer: Message) -> None:
        """The coordinator has answered, if only with whom it waits for."""
        self._heard = time.monotonic()
        if answer.kind == "waiting":
            self._blamed = [str(name) for name in answer.fields.get("for", [])]

    def asks(self, what: str) -> bool:
        """Whether it is time to ask again; to be called about once a second.

        Args:
            what: Is waited for.

        Raises:
            RunEnded: The coordinator has not answered for too long.
        """
        now = time.monotonic()
        if now - self._looked > 2 * PROBE_SECONDS:
            self._heard = now  # This process was stopped, or busy.
        self._looked = now
        address = self._address
        if now - self._heard > max(address.timeout, 3 * PROBE_SECONDS):
            raise RunEnded(
                f"{address.role} {address.id}: the coordinator at {address.coordinator} has not answered `{what}` for "
                f"{now - self._heard:.0f} s, although it hears this process's heartbeats"
            )
        if now - self._warned > WARN_SECONDS:
            self._warned = now
            names = ", ".join(self._blamed) or "the coordinator"
            text = f"{address.role} {address.id} has waited in `{what}` for {names} for {now - self._begun:.0f} s"
            print(text, file=sys.stderr, flush=True)
        if now - self._asked < PROBE_SECONDS:
            return False
        self._asked = now
        return True


def get(membership: Membership, name: str, keys: KeyPair | None = None) -> list[Buffer]:
    """What a worker published under a name, for a process that takes no part in collectives."""
    collectives = Collectives(membership, keys)
    try:
        return collectives.get(name)
    finally:
        collectives.close()
