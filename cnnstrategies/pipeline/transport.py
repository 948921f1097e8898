"""Messages between ranks: tensors and objects, sent in the background, with errors that name a lost peer."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

# Functions of this module refer to the default group of the moment of its import. torch imports the module in the first
# step of an optimizer; the group's threads would then run until the interpreter ends, which can abort the process.
import torch.distributed.nn.functional
from torch import Tensor

from cnnstrategies._torch_private import abort_all_groups
from cnnstrategies.codec import decode, encode, from_bytes, to_bytes
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.timetable import Placement

FORWARD, BACKWARD, OBJECT, REACHED = 1, 2, 3, 4  # tags; REACHED marks flags that tell which values have a gradient
ENDS_WELL = -1  # sent in place of a lost rank's number
FOREVER = timedelta(days=365)  # gloo closes a group in which a wait has timed out
NAMING = 2.0  # seconds in which all ranks learn which rank is lost


def new_group(ranks: Iterable[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup | None:
    """Create a group of some ranks, in which every rank of the world takes part.

    Returns:
        The group; None on ranks that do not belong to it.
    """
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def cpu_group(timeout: timedelta) -> Iterator[dist.ProcessGroup | None]:
    """Provide a group of all ranks for tensors on the CPU.

    This is the default group if its backend is gloo, else a temporary group.
    """
    if dist.get_backend() == "gloo":
        yield dist.group.WORLD
        return
    group = new_group(range(dist.get_world_size()), timeout, backend="gloo")
    yield group
    dist.destroy_process_group(group)


def broadcast_value(value: Any, source: int, device: torch.device = CPU, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of one rank on all ranks of a group; a collective. Nothing is pickled.

    Args:
        value: On the source rank a value that the codec can encode; ignored on other ranks.
        source: The source rank.
        device: Device of the group's tensors.
        group: The group; by default all ranks.

    Raises:
        CodecError: The value cannot be encoded. The error is raised on the source rank only.
    """
    is_source = dist.get_rank() == source
    message = _bytes_as_tensor(to_bytes(value)) if is_source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)], device=device)
    dist.broadcast(length, source, group=group)
    message = message.to(device) if is_source else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, source, group=group)
    return from_bytes(message.cpu().numpy().tobytes())


def _bytes_as_tensor(data: Any) -> Tensor:
    """Return bytes as a tensor, which shares the memory of a writable buffer."""
    if isinstance(data, bytes):
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


class PeerError(RuntimeError):
    """A rank did not answer, or its connection broke. The message names both ranks and the expected message."""


class Pending:
    """A transfer of a tensor that has not begun or is in progress. Errors of the transfer name both ranks."""

    def __init__(
        self,
        transfer: Callable[[], dist.Work | None],
        tensor: Tensor,
        naming: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.tensor = tensor
        self._transfer = transfer
        self._naming = naming
        self._work: dist.Work | None = None

    def begin(self) -> Self:
        """Begin the transfer."""
        with self._naming():
            self._work = self._transfer()
        assert self._work is not None
        return self

    def wait(self) -> Tensor:
        """Wait for the end of a transfer that was begun, and return the tensor. On a GPU the current stream waits."""
        if self._work is not None:
            with self._naming():
                self._work.wait()
            self._work = None
        return self.tensor


class Transport:
    """Point-to-point messages of one rank.

    Under gloo, the messages of two ranks are matched by tag. NCCL has no tags and runs the messages of a group in the
    order in which they were begun, so activations and gradients have separate groups under NCCL: in one group they
    would wait for each other. If the default group knows its device, as under Lightning, each group is one
    communicator, however many peers a rank has. All other messages travel over gloo, between CPUs.

    Attributes:
        placement: Numbering of the ranks.
        device: Device of this rank's stage.
        rank: This rank.
        place: Stage and replica of this rank.
        has_tags: Whether the backend matches messages by tag.
        control: Group of all ranks over gloo.
    """

    def __init__(self, placement: Placement, timeout: timedelta, device: torch.device = CPU) -> None:
        self.placement = placement
        self.device = device
        self.rank = dist.get_rank()
        self.place = placement.place(self.rank)
        self.has_tags = dist.get_backend() == "gloo"
        self.control: dist.ProcessGroup | None = dist.group.WORLD
        self._groups: dict[int, dist.ProcessGroup | None] = {}  # by tag
        self._watch: RankWatch | None = None
        if not self.has_tags:
            # torch warns once that a group sends all messages one after the other, which is intended here.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            ranks = range(placement.world_size)
            self.control = new_group(ranks, timeout, backend="gloo")
            self._groups = {tag: new_group(ranks, timeout) for tag in (FORWARD, BACKWARD)}
            watched = new_group(ranks, FOREVER, backend="gloo") if len(ranks) > 1 else None
            self._watch = RankWatch(watched, placement.describe) if watched is not None else None

    def send(self, tensor: Tensor, target: int, tag: int, content: str) -> Pending:
        """Return the transfer that sends a contiguous tensor; it has not begun. `content` describes it in errors."""
        return self._transfer(dist.isend, tensor, target, tag, f"sending {content} to")

    def receive(self, tensor: Tensor, source: int, tag: int, content: str) -> Pending:
        """Return the transfer that receives into a contiguous tensor; it has not begun. See :meth:`send`."""
        return self._transfer(dist.irecv, tensor, source, tag, f"waiting for {content} from")

    def check_peers(self) -> None:
        """Check that no rank is known to be lost.

        Raises:
            PeerError: A rank is lost.
        """
        lost = self._watch.lost() if self._watch is not None else None
        if lost is not None:
            raise PeerError(f"{self.me}: {lost} has ended")

    def send_object(self, value: Any, target: int, content: str) -> list[Pending]:
        """Begin to send nested containers of tensors and plain data. Tensors are sent without a copy if possible."""
        frames = [_bytes_as_tensor(frame) for frame in encode(value)]
        parts = (torch.tensor([len(frames)]), torch.tensor([len(frame) for frame in frames]), *frames)
        return [self.send(part, target, OBJECT, content).begin() for part in parts if part.numel()]

    def receive_object(self, source: int, content: str, allocate: Callable[[int], Tensor] | None = None) -> Any:
        """Receive an object that :func:`send_object` sends. Tensors arrive on the CPU.

        Args:
            source: Sending rank.
            content: Description of the object, for errors.
            allocate: Function from a number of bytes to a uint8 tensor for them; by default ordinary memory.
        """
        allocate = allocate or partial(torch.empty, dtype=torch.uint8)

        def received(tensor: Tensor) -> Tensor:
            return self.receive(tensor, source, OBJECT, content).begin().wait() if tensor.numel() else tensor

        count = received(torch.empty(1, dtype=torch.int64))
        sizes = received(torch.empty(int(count), dtype=torch.int64))
        frames = [received(allocate(size)) for size in sizes.tolist()]
        return decode([frames[0].numpy().tobytes(), *frames[1:]])

    @contextmanager
    def collective(self, action: str) -> Iterator[None]:
        """Let errors of a collective inside this context name this rank and the action of the ranks."""
        with self._naming(f"{self.me}, {action} with the other ranks", "; one of them is gone or silent"):
            yield

    @contextmanager
    def _naming(self, action: str, guess: str = "") -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch raises a ValueError after all groups were aborted.
            lost = self._watch.lost(NAMING) if self._watch is not None else None
            if lost is None and isinstance(error, ValueError):
                raise
            reason = f"{str(error).splitlines()[0]}{guess}" if lost is None else f"{lost} has ended"
            raise PeerError(f"{action}: {reason}") from error

    def close(self) -> None:
        """Close the connections, when no rank waits for a message."""
        if self._watch is not None:
            self._watch.close()
        groups = [*self._groups.values(), *([] if self.control is dist.group.WORLD else [self.control])]
        for group in groups:
            dist.destroy_process_group(group)
        self._groups, self.control = {}, None  # A group's threads end with the last reference to the group.

    @property
    def me(self) -> str:
        """Description of this rank, for messages."""
        return self.placement.describe(self.rank)

    def _transfer(
        self, function: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int, action: str
    ) -> Pending:
        begin = partial(function, tensor, peer, group=self._groups.get(tag, self.control), tag=tag)
        return Pending(begin, tensor, partial(self._naming, f"{self.me}, {action} {self.placement.describe(peer)}"))


class RankWatch:
    """Thread that detects the end of the next rank's process, by a connection over gloo, which then breaks.

    The thread tells the previous rank, which passes the news on, and aborts all NCCL operations of this process,
    because the host may be waiting for them. A host that is cut off from the network or stopped is not detected, since
    its connections stay open.

    Args:
        group: Group of all ranks for this watch alone, with the time-out :data:`FOREVER`.
        describe: Function from a rank to its description.
    """

    def __init__(self, group: dist.ProcessGroup, describe: Callable[[int], str]) -> None:
        self._group: dist.ProcessGroup | None = group
        self._describe = describe
        self._me = dist.get_rank()
        self._next, self._before = ((self._me + step) % dist.get_world_size() for step in (1, -1))
        self._lost: int | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def lost(self, seconds: float = 0.0) -> str | None:
        """Return a description of the lost rank, or None if no lost rank is known after some seconds."""
        self._known.wait(seconds)
        return None if self._lost is None else self._describe(self._lost)

    def close(self) -> None:
        """End the watch; a collective."""
        self.tell(ENDS_WELL)
        self._thread.join()
        dist.destroy_process_group(self._group)
        self._group = None

    def _watch(self) -> None:
        news = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(news, self._next, group=self._group)
            lost = int(news)
        except RuntimeError:
            lost = self._next
        if lost == ENDS_WELL:
            return
        self._lost = lost
        self._known.set()
        print(f"{self._describe(self._me)}: {self._describe(lost)} has ended", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # The previous rank may also have ended.
            self.tell(lost)
        abort_all_groups()

    def tell(self, news: int) -> None:
        """Send the previous rank the number of the lost rank, or :data:`ENDS_WELL` if this rank ends regularly."""
        dist.send(torch.tensor([news]), self._before, group=self._group)
