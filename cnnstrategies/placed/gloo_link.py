"""A link between ranks over gloo."""

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
_LENGTH = 8  # bytes of the message's length, with which the first part begins
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
        # Sends that may not have ended. gloo needs the tensors until then.
        self._sending: list[tuple[Any, Tensor]] = []
        for peer in self._peers:
            self._post(peer)

    def send(self, target: int, message: bytearray) -> None:
        """Begin to send a message."""
        self._sending = [(work, tensor) for work, tensor in self._sending if not work.is_completed()]
        self._begin_first(target, len(message).to_bytes(_LENGTH, "little") + message[: FIRST - _LENGTH])
        if len(message) > FIRST - _LENGTH:
            self._begin(target, message, FIRST - _LENGTH, _REST_TAG)

    def receive(self, source: int) -> bytes | bytearray:
        """Wait for the next message from a rank."""
        length, first = self._first(source)
        if length == _GOODBYE:
            raise LinkError(f"rank {source} has ended its training")
        self._post(source)
        if length <= len(first):
            return first[:length]
        message = bytearray(length)
        message[: len(first)] = first
        with without_modes():
            rest = torch.frombuffer(message, dtype=torch.uint8, offset=len(first))
            try:
                dist.recv(rest, source, group=self._group, tag=_REST_TAG)
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error
        return message

    def close(self) -> None:
        """Send the last message to all ranks, and wait for theirs. All ranks call this."""
        for peer in self._peers:
            self._begin_first(peer, _GOODBYE.to_bytes(_LENGTH, "little"))
        for peer in list(self._posted):  # A peer whose last message has been received has no posted receive.
            if self._first(peer)[0] != _GOODBYE:
                raise LinkError(f"rank {peer} has sent a message that this rank has not received")
        for work, _ in self._sending:
            work.wait()
        self._sending, self._posted, self._group = [], {}, None

    def _begin_first(self, target: int, data: bytes) -> None:
        self._begin(target, bytearray(data.ljust(FIRST, b"\0")), 0, _FIRST_TAG)

    def _begin(self, target: int, data: bytearray, offset: int, tag: int) -> None:
        with without_modes():
            tensor = torch.frombuffer(data, dtype=torch.uint8, offset=offset)
            try:
                self._sending.append((dist.isend(tensor, target, group=self._group, tag=tag), tensor))
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error

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
        return int.from_bytes(data[:_LENGTH], "little"), data[_LENGTH:]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
