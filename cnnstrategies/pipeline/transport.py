"""Messages between ranks: tensors in the background, objects, and errors that name the silent peer."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its functions refer to the default group from the moment of its import. torch imports it in the first step of an
# optimizer, and then that group's threads would go on until the interpreter's end, which can abort the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from cnnstrategies.pipeline.connections import Edge, connection_rounds
from cnnstrategies.pipeline.timetable import Placement

FORWARD, BACKWARD, OBJECT, TARGETS = 1, 2, 3, 4  # tags


def new_group(ranks: Iterable[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup | None:
    """A group of some ranks; every rank of the world takes part in making it, and None is returned to the others."""
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def unbound() -> Iterator[None]:
    """Have the groups that are made inside connect each pair of ranks by itself, when the pair first needs it.

    Where the default group was told its device (Lightning does so), torch makes NCCL groups at once, by splitting the
    default one, and sends all point-to-point messages of such a group one after the other.
    """
    default = dist.group.WORLD
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


@contextmanager
def cpu_group(timeout: timedelta) -> Iterator[dist.ProcessGroup | None]:
    """A group of all ranks for tensors on the CPU: the default one where it can send them, else one for a while."""
    if dist.get_backend() == "gloo":
        yield dist.group.WORLD
        return
    group = new_group(range(dist.get_world_size()), timeout, backend="gloo")
    yield group
    dist.destroy_process_group(group)


class PeerError(RuntimeError):
    """A rank did not answer, or its connection broke: the message names both sides and what was waited for."""


class Pending:
    """A transfer under way.

    Args:
        work: torch's handle.
        tensor: What is sent or received; held until the transfer is done.
        what: What it is, for the error message.
    """

    def __init__(self, work: dist.Work, tensor: Tensor, what: str) -> None:
        self.work: dist.Work | None = work
        self.tensor = tensor
        self.what = what

    def wait(self) -> Tensor:
        """Wait for the end of the transfer (on a GPU: have the current stream wait).

        Raises:
            PeerError: The peer is gone, or did not answer within the time-out.
        """
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                raise PeerError(f"{self.what}: {str(error).splitlines()[0]}") from error
            self.work = None
        return self.tensor


class Transport:
    """Point-to-point messages of one rank.

    Under gloo, messages of a pair are matched by tag. NCCL has no tags and runs the operations of a communicator in
    order, so there activations and gradients have a group each, in which torch makes a communicator for each pair of
    ranks that uses it. In each of them one side sends and the other receives, in the same order, and no two wait for
    each other. NCCL's first use of a communicator blocks until the other side comes: so all are used once here, in an
    order in which nobody waits for ever. Objects always go over gloo.

    Args:
        placement: The numbering of the ranks.
        pairs: Pairs of ranks that exchange activations, the same on every rank.
        device: Where the tensors live.
        timeout: How long to wait for a peer.
    """

    def __init__(self, placement: Placement, pairs: Iterable[Edge], device: torch.device, timeout: timedelta) -> None:
        self.placement = placement
        self.rank = dist.get_rank()
        self.has_tags = dist.get_backend() == "gloo"
        self.control: dist.ProcessGroup | None = dist.group.WORLD
        self._ways: dict[int, dist.ProcessGroup | None] = {}
        self._owed: list[Pending] = []
        if not self.has_tags:
            everyone = range(placement.world_size)
            self.control = new_group(everyone, timeout, backend="gloo")
            with unbound():
                self._ways = {tag: new_group(everyone, timeout) for tag in (FORWARD, BACKWARD)}
            self._connect(pairs, device)

    def _connect(self, pairs: Iterable[Edge], device: torch.device) -> None:
        nothing = torch.zeros(1, device=device)
        for edges in connection_rounds(pairs):
            for source, target in edges:
                tag = FORWARD if (source, target) in pairs else BACKWARD
                if source == self.rank:
                    self.send(nothing, target, tag, "a first message").wait()
                elif target == self.rank:
                    self.receive(nothing, source, tag, "a first message").wait()

    def send(self, tensor: Tensor, target: int, tag: int, what: str) -> Pending:
        """Start to send a contiguous tensor."""
        what = f"{self.me}, sending {what} to {self.placement.describe(target)}"
        return self._start(dist.isend, tensor, target, self._way(tag), tag, what)

    def receive(self, tensor: Tensor, source: int, tag: int, what: str) -> Pending:
        """Start to receive into a contiguous tensor."""
        what = f"{self.me}, waiting for {what} from {self.placement.describe(source)}"
        return self._start(dist.irecv, tensor, source, self._way(tag), tag, what)

    def owe(self, transfer: Pending) -> None:
        """Keep a transfer that nobody has to wait for now, until :meth:`settle`."""
        self._owed.append(transfer)

    def settle(self) -> None:
        """Wait for the transfers that were left for later."""
        for one in self._owed:
            one.wait()
        self._owed.clear()

    def send_object(self, value: Any, target: int, what: str) -> list[Pending]:
        """Start to send nested containers of tensors and plain data; tensors go as they are."""
        leaves, tree = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]
        data = bytearray(pickle.dumps((plain, tree)))
        payload = torch.frombuffer(data, dtype=torch.uint8)
        parts = (torch.tensor([len(data)]), payload, *(tensor.detach().cpu().contiguous() for tensor in tensors))
        what = f"{self.me}, sending {what} to {self.placement.describe(target)}"
        return [self._start(dist.isend, part, target, self.control, OBJECT, what) for part in parts if part.numel()]

    def receive_object(self, source: int, what: str) -> Any:
        """Receive what :meth:`send_object` sent; tensors arrive on the CPU."""
        length = self._control_receive(torch.empty(1, dtype=torch.int64), source, what)
        data = self._control_receive(torch.empty(int(length), dtype=torch.uint8), source, what)
        plain, tree = pickle.loads(data.numpy().tobytes())
        leaves = [
            value if shape is None else self._control_receive(torch.empty(shape, dtype=value), source, what)
            for shape, value in plain
        ]
        return tree_unflatten(leaves, tree)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Name this rank where a collective of several ranks fails inside.

        Args:
            what: What the ranks do together, for the error message.
        """
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"{self.me}, {what} with the other ranks: {str(error).splitlines()[0]}; one of them is gone or silent"
            ) from error

    def close(self) -> None:
        """Give the connections back; no rank may wait for a message any more."""
        assert not self._owed, "everything has been settled"
        groups = [*self._ways.values(), *([] if self.control is dist.group.WORLD else [self.control])]
        for group in groups:
            dist.destroy_process_group(group)
        self._ways, self.control = {}, None  # A group's threads end with the last that refers to it.

    @property
    def me(self) -> str:
        """This rank in words."""
        return self.placement.describe(self.rank)

    def _control_receive(self, tensor: Tensor, source: int, what: str) -> Tensor:
        what = f"{self.me}, waiting for {what} from {self.placement.describe(source)}"
        if tensor.numel():
            self._start(dist.irecv, tensor, source, self.control, OBJECT, what).wait()
        return tensor

    @staticmethod
    def _start(
        transfer: Callable[..., dist.Work | None],
        tensor: Tensor,
        peer: int,
        group: dist.ProcessGroup | None,
        tag: int,
        what: str,
    ) -> Pending:
        try:
            work = transfer(tensor, peer, group=group, tag=tag)
        except RuntimeError as error:
            raise PeerError(f"{what}: {str(error).splitlines()[0]}") from error
        assert work is not None
        return Pending(work, tensor, what)

    def _way(self, tag: int) -> dist.ProcessGroup | None:
        """The group of an activation (forward), a target (forward, before the activations) or a gradient (back)."""
        return self._ways[BACKWARD if tag == BACKWARD else FORWARD] if self._ways else None
