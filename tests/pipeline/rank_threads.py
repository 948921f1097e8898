"""Ranks as threads of one process, with a ``torch.distributed`` that detects every deadlock at once.

The engine is unchanged, but the functions of ``torch.distributed`` that the engine calls are replaced. The replacements
guarantee no more than any backend guarantees, so a program that is correct here is correct with every backend:

- A send completes only when the other side receives (NCCL's rendezvous; gloo accepts small messages at once).
- A tensor that is received or reduced holds NaN until its ``wait``, and a sent tensor is read no earlier than its
  ``wait``. Freeing a tensor during its transfer, or writing to a tensor while it is reduced, is an error: on a GPU,
  transfers run on separate streams and may run late.
- With backend ``nccl``, the operations of two ranks in a group run in the order in which each side began them, whatever
  their tags, and the first operation blocks until the other side has begun it as well. The default group is bound to a
  device, like Lightning's default group; in a group that inherits the device, all operations of a rank run in order,
  whatever their peers.
- With backend ``nccl``, operations run on a device, and the host may have to wait for the device at any moment: when a
  kernel is loaded at its first launch, when memory is released, or with CUDA_LAUNCH_BLOCKING=1. With ``drained``, the
  host waits before every operation. If no rank then waits forever, no rank does with fewer waits.

If all threads wait, none can continue. This is a deadlock, and each thread gets an error that says what it waited for.
"""

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cnnstrategies._torch_private import writes
from cnnstrategies.pipeline import engine, transport
from cnnstrategies.pipeline.microbatches import Split

FUNCTIONS = (
    "get_rank",
    "get_world_size",
    "get_backend",
    "new_group",
    "destroy_process_group",
    "isend",
    "irecv",
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "barrier",
)


class DeadlockError(RuntimeError):
    """All ranks wait for each other, or for a rank that failed."""


def divided_once(network: nn.Module, cuts: Sequence[str | int]) -> Any:
    """Return a context in which pipelines divide copies of a network like the network itself.

    The network is traced here because threads cannot trace.
    """
    blueprint = engine.divide(network, cuts)
    return mock.patch.object(engine, "divide", lambda other, _: replace(blueprint, network=other))


class Gate:
    """An event that ranks wait for, with the number of waiting ranks."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.waiters = 0


class Operation:
    """One side of a transfer: a send or a receive.

    Args:
        world: The ranks.
        kind: ``send`` or ``receive``.
        peer: The rank on the other side.
        tag: Tag of the transfer, equal on both sides.
        tensor: The tensor that is sent or received. The operation does not keep the tensor alive.
        description: The operation in words, for errors.
    """

    def __init__(self, world: "World", kind: str, peer: int, tag: int, tensor: Tensor, description: str) -> None:
        self.world = world
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.tensor = weakref.ref(tensor)
        self.description = description
        self.gate = Gate()
        self.other: Operation | None = None
        self.data: Tensor | None = None
        if kind == "receive" and tensor.is_floating_point():
            tensor.fill_(float("nan"))

    def wait(self) -> None:
        self.world.wait(self.gate, self.description)
        with self.world.lock, self.world.undrained():
            sender = self if self.kind == "send" else self.other
            assert sender is not None
            if sender.data is None:  # Read as late as possible, so that an early change of the tensor shows.
                sent = sender.tensor()
                if sent is None:
                    raise AssertionError(f"{sender.description}: the tensor was freed before it was sent")
                sender.data = sent.detach().clone()
            if self.kind == "receive":
                tensor = self.tensor()
                assert tensor is not None, f"{self.description}: the tensor was freed before it was received"
                tensor.detach().copy_(sender.data)


class Meeting:
    """A collective of a group."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.size = size
        self.parts: dict[int, Tensor] = {}
        self.gate = Gate()
        self.result: Any = None


class Member(dist.ProcessGroup):
    """A process group from the view of one of its ranks."""

    def __init__(self, number: int, ranks: Sequence[int], rank: int, backend: str) -> None:
        super().__init__(list(ranks).index(rank), len(ranks))
        self.number = number
        self.ranks = list(ranks)
        self.backend = backend
        self.calls = 0
        self.closed = False


class World:
    """The ranks and their communication.

    Args:
        size: Number of ranks.
        backend: Backend that the engine sees: ``gloo`` or ``nccl``.
        drained: Before each operation of torch, each transfer and each collective, a rank waits until its device has
            done all operations that were begun on the device.

    Attributes:
        calls: For each rank, the number of calls by kind (``send``, ``all_reduce`` and so on) and the group's backend.
        groups: For each rank, the groups that the rank made and has not destroyed.
    """

    def __init__(self, size: int, backend: str = "gloo", drained: bool = False) -> None:
        self.size = size
        self.backend = backend
        self.drained = drained
        self.lock = threading.RLock()
        self.calls: list[Counter[tuple[str, str]]] = [Counter() for _ in range(size)]
        self.groups: list[list[Member]] = [[] for _ in range(size)]
        self._local = threading.local()
        self._running = size
        self._waiting: dict[Gate, list[str]] = {}
        self._failure: str | None = None
        self._default = [Member(0, range(size), rank, backend) for rank in range(size)]
        if backend == "nccl":
            for member in self._default:
                member.bound_device_id = torch.device("cuda", 0)
        self._made: list[tuple[tuple[int, ...], str]] = [(tuple(range(size)), backend)]
        self._next_group = [1] * size
        self._queues: dict[Any, deque[Operation]] = defaultdict(deque)
        self._first: dict[Any, tuple[set[int], Gate]] = defaultdict(lambda: (set(), Gate()))
        self._meetings: dict[tuple[int, int], Meeting] = {}

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Run a function on all ranks and return its result for each rank.

        Raises:
            DeadlockError: The ranks wait for each other.
        """
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException]] = []

        def main(rank: int) -> None:
            self._local.rank = rank
            self._local.begun, self._local.undrained = [], False
            try:
                with _Drained(self) if self.drained else nullcontext():
                    results[rank] = function(rank)
            except BaseException as error:
                errors.append((rank, error))
                with self.lock:
                    self._fail(f"rank {rank} has failed: {error!r}")
            finally:
                with self.lock:
                    self._running -= 1
                    self._look()

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        replaced: dict[str, Any] = {name: self._called(getattr(self, name)) for name in FUNCTIONS}
        # Up to Python 3.11, cached_property holds a lock: a rank that waits while it computes the positions would block
        # the other ranks.
        unlocked = mock.patch.object(vars(Split)["positions"], "lock", nullcontext(), create=True)
        unwatched = mock.patch.object(transport, "RankWatch", _Unwatched)
        with unlocked, unwatched, mock.patch.multiple(dist, group=_Group(self), **replaced):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise min(errors, key=lambda failure: isinstance(failure[1], DeadlockError))[1]
        return results

    # Waiting

    def wait(self, gate: Gate, description: str) -> None:
        """Wait until the gate is open."""
        with self.lock:
            if not gate.event.is_set():
                gate.waiters += 1
                self._running -= 1
                self._waiting.setdefault(gate, []).append(f"rank {self.rank}: {description}")
                self._look()
        gate.event.wait()
        if self._failure is not None:
            raise DeadlockError(self._failure)

    @contextmanager
    def undrained(self) -> Iterator[None]:
        """Mark torch operations as operations of this file, for which the device is not drained."""
        before, self._local.undrained = self._local.undrained, True
        try:
            yield
        finally:
            self._local.undrained = before

    def drain(self, before: str) -> None:
        """Wait until the rank's device has done all operations that were begun on the device."""
        if not self._local.undrained:
            begun, self._local.begun = self._local.begun, []
            for gate, description in begun:
                self.wait(gate, f"{description}, before {before}")

    def _open(self, gate: Gate) -> None:
        if not gate.event.is_set():
            self._running += gate.waiters
            self._waiting.pop(gate, None)
            gate.event.set()

    def _look(self) -> None:
        if self._running == 0 and self._waiting:
            self._fail("all wait: " + "; ".join(sorted(text for texts in self._waiting.values() for text in texts)))

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        for gate in list(self._waiting):
            self._open(gate)

    # Functions that the engine calls

    @property
    def rank(self) -> int:
        """Rank of the calling thread."""
        rank: int = self._local.rank
        return rank

    def member(self, group: Any) -> Member:
        """Return a group from the view of the calling rank."""
        member = self._default[self.rank] if group is None else group
        assert isinstance(member, Member)
        assert not member.closed, "a group is used after its end"
        assert self.rank == member.ranks[member.rank()], "another rank's group"
        return member

    def get_rank(self, group: Any = None) -> int:
        return self.member(group).rank()

    def get_world_size(self, group: Any = None) -> int:
        return self.member(group).size()

    def get_backend(self, group: Any = None) -> str:
        return self.member(group).backend

    def new_group(self, ranks: Sequence[int], timeout: Any = None, backend: str | None = None) -> Any:
        wanted = (tuple(ranks), backend or self.backend)
        with self.lock:
            number = self._next_group[self.rank]
            self._next_group[self.rank] += 1
            if number == len(self._made):
                self._made.append(wanted)
            assert self._made[number] == wanted, f"ranks make different groups: {wanted} and {self._made[number]}"
        self._count("new_group", wanted[1])
        if self.rank not in wanted[0]:
            return None
        member = Member(number, *wanted[:1], self.rank, wanted[1])
        if wanted[1] == "nccl":
            member.bound_device_id = self._default[self.rank].bound_device_id
        self.groups[self.rank].append(member)
        return member

    def destroy_process_group(self, group: Any = None) -> None:
        member = self.member(group)
        member.closed = True
        if member in self.groups[self.rank]:
            self.groups[self.rank].remove(member)

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Operation:
        assert tensor.is_contiguous()
        return self._transfer("send", tensor, dst, group, tag)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Operation:
        return self._transfer("receive", tensor, src, group, tag)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        def combine(parts: list[Tensor]) -> Tensor:
            stacked = torch.stack(parts)
            return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)

        return self._collective("all_reduce", tensor.detach().clone(), tensor, combine, group, async_op)

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        async_op: bool = False,
    ) -> Any:
        source = self.member(group).ranks.index(src) if src is not None else group_src
        assert source is not None
        part = tensor.detach().clone()
        return self._collective("broadcast", part, tensor, lambda parts: parts[source], group, async_op)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return self._collective("all_gather", tensor.detach().clone(), output, torch.cat, group, async_op)

    def barrier(self, group: Any = None) -> None:
        self._collective("barrier", torch.zeros(0), torch.zeros(0), lambda parts: parts[0], group)

    # Implementation

    def _count(self, kind: str, backend: str) -> None:
        self.calls[self.rank][kind, backend] += 1

    def _called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.drained:
                self.drain(function.__name__)
            with self.undrained():
                return function(*args, **kwargs)

        return call

    def _transfer(self, kind: str, tensor: Tensor, peer: int, group: Any, tag: int) -> Operation:
        member = self.member(group)
        assert peer != self.rank
        assert peer in member.ranks
        self._count(kind, member.backend)
        description = f"{kind} {'to' if kind == 'send' else 'from'} rank {peer}, tag {tag}, group {member.number}"
        operation = Operation(self, kind, peer, tag, tensor, description)
        ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
        lane: Any = (member.number, *ends, tag)
        if member.backend == "nccl":
            lane = (member.number, *sorted(ends))
            self._connect(lane, description)
            if member.bound_device_id is not None:
                lane = member.number
        with self.lock:
            self._queues[lane, self.rank].append(operation)
            self._match(lane)
        if member.backend == "nccl":
            self._local.begun.append((operation.gate, operation.description))
        return operation

    def _match(self, lane: Any) -> None:
        """Complete the operations that both ends have reached, and the operations that follow."""
        ranks = [self.rank]
        while ranks:
            rank = ranks.pop()
            queue = self._queues[lane, rank]
            if not queue or not (others := self._queues[lane, queue[0].peer]):
                continue
            here, there = queue[0], others[0]
            if there.peer != rank or there.kind == here.kind:
                continue
            ranks += [rank, here.peer]
            queue.popleft()
            others.popleft()
            assert here.tag == there.tag, f"{here.description} meets {there.description}"
            a, b = here.tensor(), there.tensor()
            assert a is not None, f"{here.description}: the tensor was freed on its way"
            assert b is not None, f"{there.description}: the tensor was freed on its way"
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{here.description}: {a.shape} meets {b.shape}"
            here.other, there.other = there, here
            self._open(here.gate)
            self._open(there.gate)

    def _connect(self, lane: Any, description: str) -> None:
        with self.lock:
            come, gate = self._first[lane]
            come.add(self.rank)
            if len(come) == 2:
                self._open(gate)
        self.wait(gate, f"{description} (its first use)")

    def _collective(
        self,
        kind: str,
        part: Tensor,
        output: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
        group: Any,
        async_op: bool = False,
    ) -> Any:
        member = self.member(group)
        self._count(kind, member.backend)
        member.calls += 1
        with self.lock:
            key = (member.number, member.calls)
            meeting = self._meetings.setdefault(key, Meeting(kind, member.size()))
            assert meeting.kind == kind, f"one rank is at {meeting.kind}, another at {kind}"
            meeting.parts[member.rank()] = part
            if len(meeting.parts) == meeting.size:
                meeting.result = combine([meeting.parts[rank] for rank in range(meeting.size)])
                del self._meetings[key]
                self._open(meeting.gate)
        if output.is_floating_point():
            output.fill_(float("nan"))
        description, written = f"{kind} in group {member.number}", writes(output)

        def wait() -> None:
            self.wait(meeting.gate, description)
            assert writes(output) == written, f"{description}: the tensor was written to on its way"
            with self.undrained():
                output.copy_(meeting.result)

        if member.backend == "nccl":
            self._local.begun.append((meeting.gate, description))

        if async_op:
            return SimpleNamespace(wait=wait)
        with torch.no_grad():
            wait()
        return None


class _Drained(TorchDispatchMode):
    """A mode in which a rank waits for its device before each operation of torch."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.world.drain(str(func))
        return func(*args, **(kwargs or {}))


class _Unwatched:
    """A replacement for the rank watch, whose thread would not belong to a rank."""

    def __init__(self, group: Any, _: Any) -> None:
        self.group = group

    def lost(self, _: float = 0.0) -> None:
        return None

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class _Group:
    """A replacement for ``dist.group`` whose ``WORLD`` is the calling rank's default group."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def WORLD(self) -> Member:  # noqa: N802
        return self._world.member(None)
