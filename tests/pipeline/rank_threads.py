"""Ranks as threads of one process, with a ``torch.distributed`` that finds every deadlock at once.

The engine runs as it is; the functions of ``torch.distributed`` that it calls are replaced. What the replacement does
is the least that a backend promises, so that what is right here is right on any:

- a send takes nothing until the other side receives (NCCL's rendezvous; gloo takes small messages at once);
- a tensor that is received or reduced holds NaN until its ``wait``, a sent one is read as late as that, and one under
  way that nobody holds any more, or that is written to while it is reduced, is an error: on a GPU, transfers run on
  streams of their own, as late as they like;
- as ``nccl``, the operations of a pair in a group run in the order in which each side began them, whatever their tags,
  and the first one blocks until the other side has come, too. The default group is bound to a device, as Lightning's
  is; in a group that inherits this, all of a rank's operations run in order, whoever the peer is;
- as ``nccl`` they run on a device, for which the host may have to wait at any moment: when a kernel is loaded, at its
  first launch, or memory is given back, or with CUDA_LAUNCH_BLOCKING=1. If that is done everywhere (``drained``) and
  nobody waits for ever, then nobody does if it is done anywhere.

When all threads wait, none can ever go on: that is a deadlock, and each gets an error that says what it waited for.
"""

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
    """All ranks wait for each other, or one that failed."""


def divided_once(network: nn.Module, cuts: Sequence[str | int]) -> Any:
    """While it lasts, pipelines of copies of a network divide them as it was divided here; threads cannot trace."""
    blueprint = engine.divide(network, cuts)
    return mock.patch.object(engine, "divide", lambda other, _: blueprint.of(other))


class Gate:
    """What a rank waits for."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.waiters = 0


class Operation:
    """A send or a receive, one side of it.

    Args:
        world: Where it happens.
        kind: ``send`` or ``receive``.
        peer: The rank on the other side.
        tag: What the two sides agree on.
        tensor: What is sent or received; not kept alive.
        what: For errors.
    """

    def __init__(self, world: "World", kind: str, peer: int, tag: int, tensor: Tensor, what: str) -> None:
        self.world = world
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.tensor = weakref.ref(tensor)
        self.what = what
        self.gate = Gate()
        self.other: Operation | None = None
        self.data: Tensor | None = None
        if kind == "receive" and tensor.is_floating_point():
            tensor.fill_(float("nan"))

    def wait(self) -> None:
        self.world.wait(self.gate, self.what)
        with self.world.lock, self.world.undrained():
            sender = self if self.kind == "send" else self.other
            assert sender is not None
            if sender.data is None:  # As late as possible: what is changed before has been changed too early.
                sent = sender.tensor()
                if sent is None:
                    raise AssertionError(f"{sender.what}: the tensor was freed before it had left")
                sender.data = sent.detach().clone()
            if self.kind == "receive":
                tensor = self.tensor()
                assert tensor is not None, f"{self.what}: the tensor was freed before it had come"
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
    """A group, as one of its ranks sees it."""

    def __init__(self, number: int, ranks: Sequence[int], rank: int, backend: str) -> None:
        super().__init__(list(ranks).index(rank), len(ranks))
        self.number = number
        self.ranks = list(ranks)
        self.backend = backend
        self.calls = 0
        self.closed = False


class World:
    """The ranks and what passes between them.

    Args:
        size: Number of ranks.
        backend: What the engine is told: ``gloo`` or ``nccl``.
        drained: Before each operation of torch, each transfer and each collective a rank waits until its device has
            done all that was begun on it.

    Attributes:
        calls: For each rank how often it called what: ``send``, ``all_reduce`` and so on, with the group's backend.
        groups: For each rank the groups that it made and has not destroyed.
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
        """What the function returns on each rank.

        Raises:
            DeadlockError: They wait for each other.
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
        # Up to Python 3.11 a rank that is drained while it computes them would hold a lock, for which others wait.
        unlocked = mock.patch.object(vars(Split)["positions"], "lock", nullcontext(), create=True)
        unwatched = mock.patch.object(transport, "RankWatch", _Unwatched)
        with unlocked, unwatched, mock.patch.multiple(dist, group=_Group(self), **replaced):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise min(errors, key=lambda one: isinstance(one[1], DeadlockError))[1]
        return results

    # Waiting

    def wait(self, gate: Gate, what: str) -> None:
        """Wait until the gate is open."""
        with self.lock:
            if not gate.event.is_set():
                gate.waiters += 1
                self._running -= 1
                self._waiting.setdefault(gate, []).append(f"rank {self.rank}: {what}")
                self._look()
        gate.event.wait()
        if self._failure is not None:
            raise DeadlockError(self._failure)

    @contextmanager
    def undrained(self) -> Iterator[None]:
        """Inside, operations of torch are this file's own."""
        before, self._local.undrained = self._local.undrained, True
        try:
            yield
        finally:
            self._local.undrained = before

    def drain(self, before: str) -> None:
        """Wait until the rank's device has done what was begun on it."""
        if not self._local.undrained:
            begun, self._local.begun = self._local.begun, []
            for gate, what in begun:
                self.wait(gate, f"{what}, before {before}")

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

    # What the engine calls

    @property
    def rank(self) -> int:
        """The calling thread's."""
        rank: int = self._local.rank
        return rank

    def member(self, group: Any) -> Member:
        """The group as the calling rank sees it."""
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
            assert self._made[number] == wanted, f"ranks make other groups: {wanted} and {self._made[number]}"
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

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, group: Any = None) -> Any:
        return self._collective("all_gather", tensor.detach().clone(), output, torch.cat, group)

    def barrier(self, group: Any = None) -> None:
        self._collective("barrier", torch.zeros(0), torch.zeros(0), lambda parts: parts[0], group)

    # How it is done

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
        what = f"{kind} {'to' if kind == 'send' else 'from'} rank {peer}, tag {tag}, group {member.number}"
        one = Operation(self, kind, peer, tag, tensor, what)
        ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
        lane: Any = (member.number, *ends, tag)
        if member.backend == "nccl":
            lane = (member.number, *sorted(ends))
            self._connect(lane, what)
            if member.bound_device_id is not None:
                lane = member.number
        with self.lock:
            self._queues[lane, self.rank].append(one)
            self._match(lane)
        if member.backend == "nccl":
            self._local.begun.append((one.gate, one.what))
        return one

    def _match(self, lane: Any) -> None:
        """Let what both ends have come to pass, and what comes after it."""
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
            assert here.tag == there.tag, f"{here.what} meets {there.what}"
            a, b = here.tensor(), there.tensor()
            assert a is not None, f"{here.what}: the tensor was freed on its way"
            assert b is not None, f"{there.what}: the tensor was freed on its way"
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{here.what}: {a.shape} meets {b.shape}"
            here.other, there.other = there, here
            self._open(here.gate)
            self._open(there.gate)

    def _connect(self, lane: Any, what: str) -> None:
        with self.lock:
            come, gate = self._first[lane]
            come.add(self.rank)
            if len(come) == 2:
                self._open(gate)
        self.wait(gate, f"{what} (its first use)")

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
        what, written = f"{kind} in group {member.number}", writes(output)

        def wait() -> None:
            self.wait(meeting.gate, what)
            assert writes(output) == written, f"{what}: the tensor was written to on its way"
            with self.undrained():
                output.copy_(meeting.result)

        if member.backend == "nccl":
            self._local.begun.append((meeting.gate, what))

        if async_op:
            return SimpleNamespace(wait=wait)
        with torch.no_grad():
            wait()
        return None


class _Drained(TorchDispatchMode):
    """Has a rank wait before each operation of torch."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.world.drain(str(func))
        return func(*args, **(kwargs or {}))


class _Unwatched:
    """In place of a rank watch, whose thread would be no rank's."""

    def __init__(self, group: Any, _: Any) -> None:
        self.group = group

    def lost(self, _: float = 0.0) -> None:
        return None

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class _Group:
    """``dist.group``: its ``WORLD`` is the calling rank's."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def WORLD(self) -> Member:  # noqa: N802
        return self._world.member(None)
