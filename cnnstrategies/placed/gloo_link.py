"""A link between ranks over gloo."""

from collections import deque
from typing import Any, NamedTuple

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


class FirstPart(NamedTuple):
    """Memory for the first part of a message.

    Attributes:
        memory: The bytes.
        tensor: A tensor of the same bytes.
    """

    memory: bytearray
    tensor: Tensor

    @classmethod
    def new(cls) -> "FirstPart":
        """Allocate memory."""
        memory = bytearray(FIRST)
        with without_modes():
            return cls(memory, torch.frombuffer(memory, dtype=torch.uint8))


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
        # The memory of first parts is used again, because its allocation takes as long as gloo's own work.
        self._free: list[FirstPart] = []
        # By peer: the posted receive, and the memory into which it receives.
        self._posted: dict[int, tuple[Any, FirstPart]] = {}
        # By peer: sends that may not have ended, with the number of their message. gloo needs the tensors until then,
        # and cannot tell whether a send has ended. A message that a peer has received has been sent.
        self._sending: dict[int, deque[tuple[int, Any, FirstPart | Tensor]]] = {peer: deque() for peer in self._peers}
        self._sent, self._received = dict.fromkeys(self._peers, 0), dict.fromkeys(self._peers, 0)
        for peer in self._peers:
            self._post(peer)

    def send(self, target: int, message: bytearray) -> None:
        """Begin to send a message."""
        self._begin_first(target, len(message), message[:_IN_FIRST])
        if len(message) > _IN_FIRST:
            with without_modes():
                rest = torch.frombuffer(message, dtype=torch.uint8, offset=_IN_FIRST)
            self._begin(target, rest, rest, _REST_TAG)
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
                self._works.recv([rest], source, _REST_TAG).wait()
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

    @property
    def _works(self) -> dist.ProcessGroup:
        """The group. Its methods take a third of the time of the functions of `torch.distributed`."""
        assert self._group is not None
        return self._group

    def _begin_first(self, target: int, length: int, data: bytes | bytearray) -> None:
        part = self._free.pop() if self._free else FirstPart.new()
        part.memory[:_NUMBER] = length.to_bytes(_NUMBER, "little")
        part.memory[_NUMBER : 2 * _NUMBER] = self._received[target].to_bytes(_NUMBER, "little")
        part.memory[2 * _NUMBER : 2 * _NUMBER + len(data)] = data
        self._begin(target, part, part.tensor, _FIRST_TAG)

    def _begin(self, target: int, kept: "FirstPart | Tensor", tensor: Tensor, tag: int) -> None:
        with without_modes():
            try:
                work = self._works.send([tensor], target, tag)
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error
        self._sending[target].append((self._sent[target], work, kept))

    def _post(self, peer: int) -> None:
        part = self._free.pop() if self._free else FirstPart.new()
        with without_modes():
            try:
                self._posted[peer] = (self._works.recv([part.tensor], peer, _FIRST_TAG), part)
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error

    def _first(self, source: int) -> tuple[int, bytes]:
        """Wait for the first part of a rank's next message. Return the message's length, and the part's bytes."""
        work, part = self._posted.pop(source)
        with without_modes():
            try:
                work.wait()
            except RuntimeError as error:
                raise LinkError(_first_line(error)) from error
            data = bytes(part.memory)
            self._free.append(part)
            known, sends = int.from_bytes(data[_NUMBER : 2 * _NUMBER], "little"), self._sending[source]
            while sends and sends[0][0] < known:
                _, work, kept = sends.popleft()
                work.wait()
                if isinstance(kept, FirstPart):
                    self._free.append(kept)
        return int.from_bytes(data[:_NUMBER], "little"), data[2 * _NUMBER :]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
