"""Messages between ranks: tensors in the background, objects, and errors that name the silent or lost peer."""

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

# Its functions refer to the default group from the moment of its import. torch imports it in the first step of an
# optimizer, and then that group's threads would go on until the interpreter's end, which can abort the process.
import torch.distributed.nn.functional
from torch import Tensor

from cnnstrategies._torch_private import abort_all_groups
from cnnstrategies.codec import decode, encode, from_bytes, to_bytes
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.timetable import Placement

FORWARD, BACKWARD, OBJECT, REACHED = 1, 2, 3, 4  # tags; the last tells which values have a gradient
ENDS_WELL = -1  # in place of a lost rank's number
FOREVER = timedelta(days=365)  # A wait over gloo that runs into its time-out breaks the group.
NAMING = 2.0  # seconds in which every rank has heard which one is lost


def new_group(ranks: Iterable[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup | None:
    """A group of some ranks; every rank of the world takes part in making it, and None is returned to the others."""
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def cpu_group(timeout: timedelta) -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks for tensors on the CPU: the default one where it can send them, else one for a while."""
    if dist.get_backend() == "gloo":
        yield dist.group.WORLD
        return
    group = new_group(range(dist.get_world_size()), timeout, backend="gloo")
    yield group
    dist.destroy_process_group(group)


def broadcast_value(value: Any, source: int, device: torch.device = CPU, group: dist.ProcessGroup | None = None) -> Any:
    """A rank's value, which the codec must take, on all ranks of a group whose tensors are on a device; a collective.

    Nothing is pickled. Where it cannot be sent, that is raised on its rank alone.
    """
    mine = dist.get_rank() == source
    message = _bytes_as_tensor(to_bytes(value)) if mine else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(message)], device=device)
    dist.broadcast(length, source, group=group)
    message = message.to(device) if mine else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(message, source, group=group)
    return from_bytes(message.cpu().numpy().tobytes())


def _bytes_as_tensor(data: Any) -> Tensor:
    """Of what can be written to it shares the memory."""
    if isinstance(data, bytes):
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


class PeerError(RuntimeError):
    """A rank did not answer, or its connection broke: the message names both sides and what was waited for."""


class Pending:
    """A transfer that is to be begun, or under way; its tensor is held, and errors name both sides."""

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
        """Wait for the end of the transfer, which was begun (on a GPU: have the current stream wait)."""
        if self._work is not None:
            with self._naming():
                self._work.wait()
            self._work = None
        return self.tensor


class Transport:
    """Point-to-point messages of one rank.

    Under gloo, messages of a pair are matched by tag. NCCL has no tags and runs what is begun in a group in order, so
    there activations and gradients have a group each: one would wait for the other. Where the default group was told
    its device, as Lightning does, a group is one communicator, however many peers a rank has. All else always goes over
    gloo, from and to the CPU.

    Attributes:
        place: Stage and replica of this rank.
        control: The ranks over gloo.
    """

    def __init__(self, placement: Placement, timeout: timedelta, device: torch.device = CPU) -> None:
        self.placement = placement
        self.device = device
        self.rank = dist.get_rank()
        self.place = placement.place(self.rank)
        self.has_tags = dist.get_backend() == "gloo"
        self.control: dist.ProcessGroup | None = dist.group.WORLD
        self._ways: dict[int, dist.ProcessGroup | None] = {}  # for each tag
        self._watch: RankWatch | None = None
        if not self.has_tags:
            # torch warns, once, that a group sends all messages one after the other: that is what is wanted here.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            everyone = range(placement.world_size)
            self.control = new_group(everyone, timeout, backend="gloo")
            self._ways = {tag: new_group(everyone, timeout) for tag in (FORWARD, BACKWARD)}
            watched = new_group(everyone, FOREVER, backend="gloo") if len(everyone) > 1 else None
            self._watch = RankWatch(watched, placement.describe) if watched is not None else None

    def send(self, tensor: Tensor, target: int, tag: int, what: str) -> Pending:
        """The sending of a contiguous tensor, to be begun."""
        return self._transfer(dist.isend, tensor, target, tag, f"sending {what} to")

    def receive(self, tensor: Tensor, source: int, tag: int, what: str) -> Pending:
        """The receiving into a contiguous tensor, to be begun."""
        return self._transfer(dist.irecv, tensor, source, tag, f"waiting for {what} from")

    def check_peers(self) -> None:
        """Refuse to go on where a rank is known to be lost, by a PeerError."""
        lost = self._watch.lost() if self._watch is not None else None
        if lost is not None:
            raise PeerError(f"{self.me}: {lost} has ended")

    def send_object(self, value: Any, target: int, what: str) -> list[Pending]:
        """Start to send nested containers of tensors and plain data; tensors go as they are."""
        frames = [_bytes_as_tensor(frame) for frame in encode(value)]
        parts = (torch.tensor([len(frames)]), torch.tensor([len(frame) for frame in frames]), *frames)
        return [self.send(part, target, OBJECT, what).begin() for part in parts if part.numel()]

    def receive_object(self, source: int, what: str, allocate: Callable[[int], Tensor] | None = None) -> Any:
        """Receive what :func:`send_object` sent, into memory that may be of another kind; tensors arrive on the CPU."""
        allocate = allocate or partial(torch.empty, dtype=torch.uint8)

        def received(tensor: Tensor) -> Tensor:
            return self.receive(tensor, source, OBJECT, what).begin().wait() if tensor.numel() else tensor

        count = received(torch.empty(1, dtype=torch.int64))
        sizes = received(torch.empty(int(count), dtype=torch.int64))
        frames = [received(allocate(size)) for size in sizes.tolist()]
        return decode([frames[0].numpy().tobytes(), *frames[1:]])

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Name this rank, and what the ranks do together, where a collective of several ranks fails inside."""
        with self._naming(f"{self.me}, {what} with the other ranks", "; one of them is gone or silent"):
            yield

    @contextmanager
    def _naming(self, what: str, guess: str = "") -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # The latter where all groups were ended.
            lost = self._watch.lost(NAMING) if self._watch is not None else None
            if lost is None and isinstance(error, ValueError):
                raise
            reason = f"{str(error).splitlines()[0]}{guess}" if lost is None else f"{lost} has ended"
            raise PeerError(f"{what}: {reason}") from error

    def close(self) -> None:
        """Give the connections back; no rank may wait for a message any more."""
        if self._watch is not None:
            self._watch.close()
        groups = [*self._ways.values(), *([] if self.control is dist.group.WORLD else [self.control])]
        for group in groups:
            dist.destroy_process_group(group)
        self._ways, self.control = {}, None  # A group's threads end with the last that refers to it.

    @property
    def me(self) -> str:
        """This rank in words."""
        return self.placement.describe(self.rank)

    def _transfer(
        self, function: Callable[..., dist.Work | None], tensor: Tensor, peer: int, tag: int, what: str
    ) -> Pending:
        begin = partial(function, tensor, peer, group=self._ways.get(tag, self.control), tag=tag)
        return Pending(begin, tensor, partial(self._naming, f"{self.me}, {what} {self.placement.describe(peer)}"))


class RankWatch:
    """A thread that waits for a word of the next rank, over gloo, whose connections break when a process ends.

    It then tells the rank before, and ends what NCCL is doing in this process: the host may be waiting for that. A host
    that is cut off or stopped is not noticed: its connections stand. The group is for the watch alone, with the
    time-out :data:`FOREVER`.
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
        """The rank that is lost, in words; None where none is known after so many seconds."""
        self._known.wait(seconds)
        return None if self._lost is None else self._describe(self._lost)

    def close(self) -> None:
        """Watch no more; a collective."""
        self.tell(ENDS_WELL)
        self._thread.join()
        dist.destroy_process_group(self._group)
        self._group = None

    def _watch(self) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(word, self._next, group=self._group)
            lost = int(word)
        except RuntimeError:
            lost = self._next
        if lost == ENDS_WELL:
            return
        self._lost = lost
        self._known.set()
        print(f"{self._describe(self._me)}: {self._describe(lost)} has ended", file=sys.stderr, flush=True)
        with suppress(RuntimeError):  # That one may be gone, too.
            self.tell(lost)
        abort_all_groups()

    def tell(self, word: int) -> None:
        """Tell the rank before which one is lost, or that this one ends well."""
        dist.send(torch.tensor([word]), self._before, group=self._group)
