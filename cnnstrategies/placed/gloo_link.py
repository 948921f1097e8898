"""A link between ranks over gloo."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies._torch_private import without_modes
from cnnstrategies.placed.messages import LinkError

# Bytes of a message's first part. Values, shapes and small tensors fit into the first part.
FIRST = 512
# Tags of a message's first part and of its other part. With one tag, the receive that is posted early for the next
# message would get the other part.
_FIRST_TAG, _REST_TAG = 0, 1
# Bytes of a number. A first part begins with the message's length, and the number of messages that its sender has
# received from the receiver.
_NUMBER = 8
_IN_FIRST = FIRST - 2 * _NUMBER  # Bytes of a message in its first part.
_GOODBYE = 2**63 - 1  # The last message of a link has this length, and no bytes.


class GlooLink:
    """Messages of bytes over a gloo group.

    The receive of the first part of each rank's next message is posted early, because gloo needs milliseconds for a
    message whose receive is posted late.

    Args:
        group: Gloo group of all ranks, which nothing else uses. Its time-out limits each wait for a message.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peers = [peer for peer in range(world_size) if peer != rank]
        # By peer: the posted receive, and the tensor into which it receives.
        self._posted: dict[int, tuple[Any, Tensor]] = {}
        # By peer: sends that may not have ended, with the number of their message. gloo needs the tensors until then,
        # and cannot tell whether a send has ended. A message that a peer has received has been sent.
        self._sending: dict[int, deque[tuple[int, Any, Tensor]]] = {peer: deque() for peer in self._peers}
        self._sent, self._received = dict.fromkeys(self._peers, 0), dict.fromkeys(self._peers, 0)
        for peer in self._peers:
            self._post(peer)

    def send(self, target: int, message: bytearray) -> None:
        """Begin to send a message."""
        self._begin_first(target, len(message), message[:_IN_FIRST])
        if len(message) > _IN_FIRST:
            self._begin(target, message, _IN_FIRST, _REST_TAG)
        self._sent[target] += 1

    def receive(self, source: int) -> bytes | bytearray:
        """Wait for the next message from a rank."""
        length, first = self._first(source)
        if length == _GOODBYE:
            raise LinkError(f"rank {source} has ended its training")
        self._post(source)
        if length <= len(first):
            self._received[source] += 1
            return first[:length]
        message = bytearray(length)
        message[: len(first)] = first
        with without_modes():
            rest = torch.frombuffer(message, dtype=torch.uint8, offset=len(first))
            try:
                dist.recv(rest, source, group=self._group, tag=_REST_TAG)
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error
        self._received[source] += 1
        return message

    def close(self) -> None:
        """Send the last message to all ranks, and wait for theirs. All ranks call this."""
        for peer in self._peers:
            self._begin_first(peer, _GOODBYE, b"")
        for peer in list(self._posted):  # A peer whose last message has been received has no posted receive.
            if self._first(peer)[0] != _GOODBYE:
                raise LinkError(f"rank {peer} has sent a message that this rank has not received")
        for sends in self._sending.values():
            for _, work, _ in sends:
                work.wait()
        self._sending, self._posted, self._group = {}, {}, None

    def _begin_first(self, target: int, length: int, data: bytes | bytearray) -> None:
        numbers = length.to_bytes(_NUMBER, "little") + self._received[target].to_bytes(_NUMBER, "little")
        self._begin(target, bytearray((numbers + data).ljust(FIRST, b"\0")), 0, _FIRST_TAG)

    def _begin(self, target: int, data: bytearray, offset: int, tag: int) -> None:
        with without_modes():
            tensor = torch.frombuffer(data, dtype=torch.uint8, offset=offset)
            try:
                work = dist.isend(tensor, target, group=self._group, tag=tag)
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error
        self._sending[target].append((self._sent[target], work, tensor))

    def _post(self, peer: int) -> None:
        with without_modes():
            tensor = torch.empty(FIRST, dtype=torch.uint8)
            try:
                self._posted[peer] = (dist.irecv(tensor, peer, group=self._group, tag=_FIRST_TAG), tensor)
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error

    def _first(self, source: int) -> tuple[int, bytes]:
        """Wait for the first part of a rank's next message. Return the message's length, and the part's bytes."""
        work, tensor = self._posted.pop(source)
        with without_modes():
            try:
                work.wait()
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error
            data = tensor.numpy().tobytes()
            known, sends = int.from_bytes(data[_NUMBER : 2 * _NUMBER], "little"), self._sending[source]
            while sends and sends[0][0] < known:
                sends.popleft()[1].wait()
        return int.from_bytes(data[:_NUMBER], "little"), data[2 * _NUMBER :]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
