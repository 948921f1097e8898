"""The order of messages of devices and hosts, and whether it can come to an end.

A device is assumed to do one thing at a time, in the order in which its host has posted it: a message that is posted
before its partner is ready keeps the device from everything else. NCCL promises more in parts, for example where a
device runs several kernels. An order that ends under this assumption also ends on a better device.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Message(NamedTuple):
    """A collective, a batch of sends and receives that are posted as one, or a wait of a host for its device.

    Attributes:
        kind: Name of the collective, `P2P`, `END` for the wait of a device for a batch, or `READ`.
        group: Name of the group.
        members: Ranks of the group, in its order.
        pairs: Sender and receiver of each tensor of a batch.
        is_on_device: Whether the group belongs to the devices; otherwise the hosts send the message, and wait for it.
    """

    kind: str
    group: str = ""
    members: tuple[int, ...] = ()
    pairs: frozenset[tuple[int, int]] = frozenset()
    is_on_device: bool = True


P2P, END, READ = "sends and receives", "the end of sends and receives", "a read of the host"


class _Queue:
    """The messages of a host or a device, in their order."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.left: set[tuple[int, int]] = set()  # Tensors of the first message that have not been sent.

    def add(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) == 1:
            self.left = set(message.pairs)

    def pop(self) -> None:
        self.messages.popleft()
        self.left = set(self.messages[0].pairs) if self.messages else set()

    @property
    def first(self) -> Message | None:
        return self.messages[0] if self.messages else None


def check_order(ranks: Sequence[Sequence[Message]]) -> None:
    """Fail if the messages of the ranks can wait for each other without end, or break a rule of NCCL.

    Args:
        ranks: Messages of each rank, in the order in which the rank's host has posted them.
    """
    for rank, messages in enumerate(ranks):
        _check_batches(rank, messages)
    hosts = [deque(message for message in messages if message.kind != END) for messages in ranks]
    devices, senders = [_Queue() for _ in ranks], [_Queue() for _ in ranks]
    while any(hosts) or any(queue.first for queue in (*devices, *senders)):
        went_on = False
        for rank, host in enumerate(hosts):
            while host and not senders[rank].first:
                if host[0].kind == READ and devices[rank].first:
                    break
                message = host.popleft()
                went_on = True
                if message.kind != READ:
                    (devices if message.is_on_device else senders)[rank].add(message)
        went_on |= _deliver(devices)
        went_on |= _deliver(senders)
        waiting = [(device.first, sender.first) for device, sender in zip(devices, senders, strict=True)]
        assert went_on, f"the ranks wait for each other without end: {waiting}"


def _deliver(queues: Sequence[_Queue]) -> bool:
    """Deliver what is first in the queues of all ranks that take part; return whether there was such a message."""
    went_on = False
    for rank, queue in enumerate(queues):
        message = queue.first
        if message is None:
            continue
        if message.kind == P2P:
            for pair in list(queue.left):
                other = queues[pair[0] if pair[1] == rank else pair[1]]
                if other.first is not None and other.first.group == message.group and pair in other.left:
                    queue.left.discard(pair)
                    other.left.discard(pair)
                    went_on = True
        elif all(queues[member].first == message for member in message.members):
            for member in message.members:
                queues[member].pop()
            went_on = True
    for queue in queues:
        if queue.first is not None and queue.first.kind == P2P and not queue.left:
            queue.pop()
            went_on = True
    return went_on


def _check_batches(rank: int, messages: Sequence[Message]) -> None:
    """Check that a rank posts nothing on its device between a batch and its end, and begins a group as NCCL asks."""
    begun: Message | None = None
    groups: set[str] = set()
    for message in messages:
        if message.kind == END:
            begun = None
        elif message.is_on_device and message.kind != READ:
            assert begun is None, f"rank {rank} posts {message} before the end of {begun}"
            assert message.kind != P2P or message.group in groups, (
                f"rank {rank}: {message} is the first message of its group, in which all ranks must take part"
            )
            groups.add(message.group)
            begun = message if message.kind == P2P else None
    assert begun is None, f"rank {rank} does not wait for {begun}"
