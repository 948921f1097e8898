"""Send tensors and objects between ranks in the background. If a rank is lost, the error messages name the rank."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

# This import must run before a default group exists, because functions of the imported module keep a reference to the
# default group that exists at the time of the import. Otherwise torch imports the module in an optimizer's first step,
# and the group's threads then run until the interpreter ends, which can abort the process.
import torch.distributed.nn.functional
from torch import Tensor

from cnnstrategies._torch_private import abort_all_groups
from cnnstrategies.codec import decode, encode
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.runtime.groups import PeerError, bytes_as_tensor, new_group

# Tags of messages. A tag says what the message contains: activations, gradients of activations, a part of an object, or
# flags that say which tensors have a gradient.
FORWARD, BACKWARD, OBJECT, REACHED = 1, 2, 3, 4
ENDS_WELL = -1  # A rank that ends without an error sends this number in place of the number of a lost rank.
# Time-out of the group in which `RankWatch` waits for a message during the whole run. It is longer than any run,
# because gloo closes a group after a time-out.
FOREVER = timedelta(days=365)
# After a transfer has failed, seconds to wait until `RankWatch` knows which rank is lost, so that the error message can
# name the rank.
NAMING = 2.0


class Pending:
    """A send or receive of a tensor. The transfer begins with :meth:`begin`.

    If the transfer fails, the error message names both ranks.
    """

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
        """Begin the transfer, and return this object."""
        with self._naming():
            self._work = self._transfer()
        assert self._work is not None
        return self

    def wait(self) -> Tensor:
        """Return the tensor. If the transfer has begun, first wait until it has ended.

        With NCCL, only the current CUDA stream waits for the transfer, and the method returns at once.
        """
        if self._work is not None:
            with self._naming():
                self._work.wait()
            self._work = None
        return self.tensor


class Transport:
    """The connections of one rank to all other ranks, for point-to-point messages.

    Under gloo, sends and receives are matched by tag. NCCL has no tags, and it processes the transfers of a group one
    after the other. In one group, activations and gradients would wait for each other, so each of the two has its own
    NCCL group. If the default group was created with a device, as under Lightning, each group needs only one
    communicator for all peers. All other messages are sent with gloo from CPU to CPU.

    Attributes:
        placement: Numbering of the ranks, and the microbatches of each rank.
        device: Device of this rank's stage.
        timeout: Time-out of groups.
        rank: This rank.
        place: Stage and replica of this rank.
        has_tags: Whether the backend matches sends and receives by tag.
        control: Group of all ranks with the backend gloo; None after :meth:`close`.
    """

    def __init__(self, placement: Placement, timeout: timedelta, device: torch.device = CPU) -> None:
        self.placement = placement
        self.device = device
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.place = placement.place(self.rank)
        self.has_tags = dist.get_backend() == "gloo"
        self.control: dist.ProcessGroup | None = dist.group.WORLD
        # Keys are tags, values are groups for messages with the tag. Messages with other tags use the group `control`.
        self._groups: dict[int, dist.ProcessGroup | None] = {}
        self._watch: RankWatch | None = None
        if not self.has_tags:
            # torch warns that a group sends its messages one after the other. This is intended here, so the warning is
            # suppressed.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            ranks = range(placement.world_size)
            self.control = new_group(ranks, timeout, backend="gloo")
            self._groups = {tag: new_group(ranks, timeout) for tag in (FORWARD, BACKWARD)}
            watched = new_group(ranks, FOREVER, backend="gloo") if len(ranks) > 1 else None
            self._watch = RankWatch(watched, placement.describe) if watched is not None else None

    def send(self, tensor: Tensor, target: int, tag: int, content: str) -> Pending:
        """Prepare to send a contiguous tensor. The transfer begins when the caller calls :meth:`Pending.begin`.

        Args:
            tensor: The tensor.
            target: Receiving rank.
            tag: Tag of the message.
            content: Description of the tensor, for error messages.
        """
        return self._transfer(dist.isend, tensor, target, tag, f"sending {content} to")

    def receive(self, tensor: Tensor, source: int, tag: int, content: str) -> Pending:
        """Prepare to receive into a contiguous tensor. The transfer begins with :meth:`Pending.begin`.

        Args:
            tensor: Tensor that is overwritten.
            source: Sending rank.
            tag: Tag of the message.
            content: Description of the tensor, for error messages.
        """
        return self._transfer(dist.irecv, tensor, source, tag, f"waiting for {content} from")

    def check_peers(self) -> None:
        """Raise an error if this rank already knows that another rank is lost.

        Raises:
            PeerError: A rank is lost.
        """
        lost = self._watch.lost() if self._watch is not None else None
        if lost is not None:
            raise PeerError(f"{self.me}: {lost} has ended")

    def send_object(self, value: Any, target: int, content: str) -> list[Pending]:
        """Begin to send nested containers of tensors and plain data, and return the transfers.

        Tensors are sent without a copy if possible, so the caller must not change them before the transfers have ended.

        Args:
            value: The containers.
            target: Receiving rank.
            content: Description of the value, for error messages.
        """
        frames = [bytes_as_tensor(frame) for frame in encode(value)]
        parts = (torch.tensor([len(frames)]), torch.tensor([len(frame) for frame in frames]), *frames)
        return [self.send(part, target, OBJECT, content).begin() for part in parts if part.numel()]

    def receive_object(self, source: int, content: str, allocate: Callable[[int], Tensor] | None = None) -> Any:
        """Receive the nested containers that another rank sends with :meth:`send_object`. All tensors are on the CPU.

        Args:
            source: Sending rank.
            content: Description of the value, for error messages.
            allocate: Function that takes a number of bytes and returns a uint8 tensor of this size, into which a part
                of the message is received. By default, the tensor is allocated in CPU memory.
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
        """Return a context for a collective operation. If the operation fails, the error message names this rank.

        Args:
            action: Text that says what the ranks do, for example "sharing a batch".
        """
        with self._naming(f"{self.me}, {action} with the other ranks", "; a rank has ended or does not answer"):
            yield

    @contextmanager
    def _naming(self, action: str, guess: str = "") -> Iterator[None]:
        """Turn errors of torch.distributed inside the context into a `PeerError`.

        Args:
            action: Text for the error message. It names this rank, says what it does, and names the other rank or ranks
                that take part.
            guess: Text for the end of the error message if no rank is known to be lost.
        """
        try:
            yield
        # If all groups were aborted before, torch raises a ValueError instead of a RuntimeError.
        except (RuntimeError, ValueError) as error:
            lost = self._watch.lost(NAMING) if self._watch is not None else None
            if lost is None and isinstance(error, ValueError):
                raise
            reason = f"{str(error).splitlines()[0]}{guess}" if lost is None else f"{lost} has ended"
            raise PeerError(f"{action}: {reason}") from error

    def close(self) -> None:
        """Close the connections. All ranks must call this, after all transfers have ended."""
        if self._watch is not None:
            self._watch.close()
        groups = [*self._groups.values(), *([] if self.control is dist.group.WORLD else [self.control])]
        for group in groups:
            dist.destroy_process_group(group)
        # The threads of a group only end when nothing refers to the group, so the references are dropped.
        self._groups, self.control = {}, None

    @property
    def me(self) -> str:
        """Text that names this rank with its stage and replica, for error messages."""
        return self.placement.describe(self.rank)

    def _transfer(
        self, function: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int, action: str
    ) -> Pending:
        begin = partial(function, tensor, peer, group=self._groups.get(tag, self.control), tag=tag)
        return Pending(begin, tensor, partial(self._naming, f"{self.me}, {action} {self.placement.describe(peer)}"))


class RankWatch:
    """A thread, for runs with NCCL, that notices when the process of the next rank ends.

    The next rank is the rank with the next number; the last rank is followed by rank 0. The thread waits for a message
    from the next rank with gloo. If the next rank's process ends, the connection breaks. The thread then tells the
    previous rank, so that the news travels from rank to rank. The thread also aborts all NCCL operations of its own
    process, because another thread may be waiting for them. A machine that is stopped or cut off from the network is
    not noticed, because its connections stay open.

    Args:
        group: Group of all ranks with the time-out :data:`FOREVER`, which only this class uses.
        describe: Function that returns a text that names a rank.
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
        """Return a text that names the lost rank.

        Args:
            seconds: Longest time in seconds to wait until a rank is known to be lost.

        Returns:
            The text; None if no rank is known to be lost.
        """
        self._known.wait(seconds)
        return None if self._lost is None else self._describe(self._lost)

    def close(self) -> None:
        """End the thread. All ranks must call this."""
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
        with suppress(RuntimeError):  # The send fails if the previous rank has also ended.
            self.tell(lost)
        abort_all_groups()

    def tell(self, news: int) -> None:
        """Tell the previous rank which rank is lost, or that this rank ends without an error.

        Args:
            news: Number of the lost rank; :data:`ENDS_WELL` if this rank ends without an error.
        """
        dist.send(torch.tensor([news]), self._before, group=self._group)
