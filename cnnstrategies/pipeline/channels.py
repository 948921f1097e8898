"""One stage's traffic with the others: inputs and outputs of its forwards, gradients of its backwards.

What crosses a cut is taken apart into tensors that are sent as they lie in memory, and put together again.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cnnstrategies.pipeline.stage import IMAGES, StageGraph
from cnnstrategies.pipeline.timetable import Kind, Task
from cnnstrategies.pipeline.transport import BACKWARD, FORWARD, REACHED, Pending, Transport

GRADIENTS_UNDER_WAY = 2  # sends of gradients to one rank that are not waited for
EVALUATIONS_UNDER_WAY = 4  # sends of one evaluated microbatch's values that are not waited for

Order = tuple[int, Kind, int, int]  # of messages: the turn and kind of the task that sends it, from and to which rank


class Channels:
    """Sends and receives for the rank that runs a stage.

    Messages are begun between the rank's tasks (:meth:`exchange`), so that data flows while it computes. Sends are
    waited for when the answer shows that they have arrived, so that no rank waits for another to post a receive.

    Args:
        turn: The clock of the tasks of all ranks.
        ask_for_all: Ask for the gradients of all floating-point tensors: a forward without autograd, which runs again
            later, does not know which it will need.
    """

    def __init__(
        self,
        graph: StageGraph,
        turn: Callable[[Task], int],
        transport: Transport,
        ask_for_all: bool,
    ) -> None:
        self.turn = turn
        self.transport = transport
        self.stage = transport.place.stage
        self.device = transport.device
        self.graph = graph
        self.ask_for_all = ask_for_all
        self._received_headers: dict[Hashable, TensorHeader] = {}
        self._sent_headers: dict[Hashable, TensorHeader] = {}
        self._awaited: deque[tuple[Order, Task, Hashable]] = deque()
        self._prepared: list[tuple[Order, Pending]] = []
        self._coming: dict[Task, list[Pending | Tensor]] = {}
        self._leaving: dict[int, list[Pending]] = {}
        self._gradients_leaving: dict[int, deque[list[Pending]]] = {}

    def plan(self, tasks: Iterable[Task], size: Callable[[int], Hashable]) -> None:
        """See which messages this rank's tasks need, by what the shapes of a microbatch depend on."""
        awaited = []
        for task in tasks:
            for stage in self.graph.names_from if task.kind == "forward" else self.graph.names_to:
                sender = Task(task.kind, stage, task.microbatch)
                rank = self.transport.placement.rank_of(stage, task.microbatch)
                awaited.append((self.order(sender, rank, self.transport.rank), sender, size(task.microbatch)))
        self._awaited = deque(sorted(awaited, key=itemgetter(0)))

    def exchange(self, now: float, until: float) -> None:
        """Begin the sends that were prepared, and receives.

        All ranks begin their messages in one order, that of the turns of the tasks that send them. The first of those
        that are not done has nothing to wait for. So no rank waits for ever, even where a message has to be done before
        its rank goes on: a GPU's host may have to wait at any moment until all that was begun there is done, as when a
        kernel is loaded or memory is given back.

        Args:
            now: The turn of the rank's next task.
            until: What is sent before this turn is received; what comes after ``now`` only if its shape is known.
        """
        while self._awaited and self._awaited[0][0][0] < until:
            order, sender, size = self._awaited[0]
            if not self._expect(order, sender, size, due=order[0] < now):
                break
            self._awaited.popleft()
        self.begin()

    def begin(self, before: Order | None = None) -> None:
        """Begin what was prepared, in the order of all ranks; only what comes before a message, where one is given."""
        self._prepared.sort(key=itemgetter(0))
        while self._prepared and (before is None or self._prepared[0][0] < before):
            self._prepared.pop(0)[1].begin()

    def receive_forward(self, microbatch: int, size: Hashable) -> tuple[dict[str, Any], dict[int, list[Tensor]]]:
        """The inputs of a forward.

        Returns:
            The values by name, and for each source the tensors whose gradients it wants, as leaves of autograd.
        """
        values: dict[str, Any] = {}
        leaves: dict[int, list[Tensor]] = {}
        for source in self.graph.names_from:
            header = self._received_headers[source, self.transport.placement.rank_of(source, microbatch), size]
            tensors = self._arrived(Task("forward", source, microbatch))
            if torch.is_grad_enabled():
                for tensor, spec in zip(tensors, header.tensors, strict=True):
                    tensor.requires_grad_(spec.needs_gradient)
                leaves[source] = header.wanted(tensors)
            values |= zip(self.graph.names_from[source], header.unpack(tensors), strict=True)
        return values, leaves

    def send_forward(
        self, microbatch: int, size: Hashable, values: dict[str, Any], training: bool
    ) -> dict[int, list[Tensor]]:
        """Prepare to send a forward's outputs, by name; what is the first message of its size is sent at once.

        Returns:
            For each target the tensors whose gradients it will send back, in training.
        """
        copies: dict[tuple[int, torch.memory_format], Tensor] = {}  # One of a tensor, however many stages use it.
        roots: dict[int, list[Tensor]] = {}
        leaving = []
        for target in self.graph.names_to:
            rank = self.transport.placement.rank_of(target, microbatch)
            header, tensors = pack(tuple(values[name] for name in self.graph.names_to[target]), self.ask_for_all)
            order = self.order(Task("forward", self.stage, microbatch), self.transport.rank, rank)
            what = f"the activations of microbatch {microbatch}"
            known = self._sent_headers.setdefault((target, rank, size), header)
            assert known == header, "the header of a size does not change"
            wires = []
            for tensor, spec in zip(tensors, known.tensors, strict=True):
                one = (id(tensor), spec.memory_format)
                if one not in copies:
                    copies[one] = on_the_wire(tensor, spec.memory_format)
                wires.append(copies[one])
            if known is header:
                # Not waited for: its receiver may wait for what others do only when this rank has gone on.
                leaving += self.transport.send_object((header, wires), rank, what)
            else:
                leaving += [self._prepare(order, self.transport.send(wire, rank, FORWARD, what)) for wire in wires]
            roots[target] = header.wanted(tensors)
        self._leaving[microbatch] = leaving
        # In training two ranks could wait for each other: one for its activations to leave, one for its gradients.
        if not training and len(self._leaving) > EVALUATIONS_UNDER_WAY:
            self._sent(next(iter(self._leaving)))
        return roots

    def roots(self, values: dict[str, Any]) -> dict[int, list[Tensor]]:
        """For each target the tensors whose gradients it sends back, of a forward that ran again."""
        roots = {}
        for target, names in self.graph.names_to.items():
            header, tensors = pack(tuple(values[name] for name in names), self.ask_for_all)
            roots[target] = header.wanted(tensors)
        return roots

    def receive_backward(self, microbatch: int) -> dict[int, list[Tensor | None]]:
        """For each target the gradients of what :meth:`send_forward` returned; None for what it does not train."""
        gradients: dict[int, list[Tensor | None]] = {}
        for target in self.graph.names_to:
            sender = Task("backward", target, microbatch)
            reached, *tensors = self._arrived(sender) or [torch.empty(0)]
            gradients[target] = [one if has else None for one, has in zip(tensors, reached.tolist(), strict=True)]
        self._sent(microbatch)  # Who has sent its gradients has had the activations.
        return gradients

    def send_backward(self, microbatch: int, leaves: dict[int, list[Tensor]]) -> None:
        """Prepare to send the gradients of the inputs back to their sources."""
        for source, tensors in leaves.items():
            rank = self.transport.placement.rank_of(source, microbatch)
            order = self.order(Task("backward", self.stage, microbatch), self.transport.rank, rank)
            what = f"the gradients of microbatch {microbatch}"
            sends = []
            if tensors:
                # A parameter that no gradient reaches has none, as on one device, where zeros would have it decay.
                reached = torch.tensor([tensor.grad is not None for tensor in tensors])
                sends.append(self._prepare(order, self.transport.send(reached, rank, REACHED, what)))
            for tensor in tensors:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                wire = on_the_wire(gradient, memory_format_of(tensor))
                sends.append(self._prepare(order, self.transport.send(wire, rank, BACKWARD, what)))
            under_way = self._gradients_leaving.setdefault(rank, deque())
            under_way.append(sends)
            while len(under_way) > GRADIENTS_UNDER_WAY:
                for one in under_way.popleft():
                    one.wait()

    def finish(self) -> None:
        """Wait until everything has left."""
        for microbatch in list(self._leaving):
            self._sent(microbatch)
        for under_way in self._gradients_leaving.values():
            for sends in under_way:
                for one in sends:
                    one.wait()
        self._gradients_leaving.clear()
        assert not self._coming, "everything that was expected was also received"

    def forget_headers(self) -> None:
        """Have the next message of each kind begin with a header again; every rank must."""
        self._received_headers.clear()
        self._sent_headers.clear()

    def inputs(self, values: dict[str, Any], images: Any) -> tuple[Any, ...]:
        """The stage's arguments in order."""
        return tuple(images if name == IMAGES and self.stage == 0 else values[name] for name in self.graph.inputs)

    def order(self, sender: Task, source: int, target: int) -> Order:
        """Where a message stands in the order in which all ranks begin them."""
        return self.turn(sender), sender.kind, source, target

    def _expect(self, order: Order, sender: Task, size: Hashable, due: bool) -> bool:
        """Prepare to receive what a task sends, if that is due or its shape is known."""
        rank = order[2]
        place = (sender.stage, rank, size)
        if sender.kind == "forward":
            what = f"the activations of microbatch {sender.microbatch}"
            if place not in self._received_headers:
                if due:
                    self.begin(before=order)  # Others may wait for that.
                    self._coming[sender] = self._receive_first(place, what)
                return due
            specs, tag = self._received_headers[place].tensors, FORWARD
        else:
            what = f"the gradients of microbatch {sender.microbatch}"
            if place not in self._sent_headers:
                return False
            specs, tag = [spec for spec in self._sent_headers[place].tensors if spec.needs_gradient], BACKWARD
        self._coming[sender] = []
        if specs and tag == BACKWARD:
            reached = torch.empty(len(specs), dtype=torch.bool)
            self._coming[sender].append(self._prepare(order, self.transport.receive(reached, rank, REACHED, what)))
        for spec in specs:
            tensor = spec.empty(self.device)
            transfer = self.transport.receive(on_the_wire(tensor, spec.memory_format), rank, tag, what)
            transfer.tensor = tensor  # Whose memory it is; on the wire it may be in another order.
            self._coming[sender].append(self._prepare(order, transfer))
        return True

    def _receive_first(self, place: tuple[int, int, Hashable], what: str) -> list[Pending | Tensor]:
        """The first message of a size, which tells what the others will look like."""
        header, sent = self.transport.receive_object(place[1], what)
        header = self._received_headers[place] = header.on(self.device)
        arrived: list[Pending | Tensor] = []
        for spec, wire in zip(header.tensors, sent, strict=True):
            tensor = spec.empty(self.device)
            on_the_wire(tensor, spec.memory_format).copy_(wire)
            arrived.append(tensor)
        return arrived

    def _arrived(self, sender: Task) -> list[Tensor]:
        return [one.wait() if isinstance(one, Pending) else one for one in self._coming.pop(sender)]

    def _prepare(self, order: Order, transfer: Pending) -> Pending:
        self._prepared.append((order, transfer))
        return transfer

    def _sent(self, microbatch: int) -> None:
        for one in self._leaving.pop(microbatch, []):
            one.wait()


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor on its way, how it and its gradient lie in memory, and whether that is sent back."""

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    memory_format: torch.memory_format = field(compare=False)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


@dataclass(frozen=True)
class TensorHeader:
    """What a message holds, with tensors' specs in their places; it travels once for each size of a microbatch."""

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @property
    def tensors(self) -> list[TensorSpec]:
        """The tensors of the message, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def wanted(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of the tensors of the message those whose gradients are sent back."""
        return [tensor for tensor, spec in zip(tensors, self.tensors, strict=True) if spec.needs_gradient]

    def on(self, device: torch.device) -> "TensorHeader":
        """The same where it arrives: a device that the network has read off its tensors is there another one."""
        leaves = tuple(device if isinstance(leaf, torch.device) else leaf for leaf in self.leaves)
        return TensorHeader(leaves, self.tree)

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The values, from the tensors of the message."""
        arrived = iter(tensors)
        leaves = [next(arrived) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        values: tuple[Any, ...] = tree_unflatten(leaves, self.tree)
        return values


def pack(values: tuple[Any, ...], ask_for_all: bool) -> tuple[TensorHeader, list[Tensor]]:
    """Take apart what a stage sends to another one: the header, and the tensors, still part of their autograd graph."""
    leaves, tree = tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    specs = tuple(
        TensorSpec(
            leaf.shape,
            leaf.dtype,
            leaf.requires_grad or (ask_for_all and leaf.is_floating_point()),
            memory_format_of(leaf),
        )
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    )
    return TensorHeader(specs, tree), tensors


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """``channels_last`` where a tensor lies so and not in the order of its dimensions as well."""
    last = CHANNELS_LAST.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def on_the_wire(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A contiguous view of a tensor in a memory format; a copy where it lies in another one."""
    laid_out = tensor.detach().contiguous(memory_format=memory_format)
    return laid_out if memory_format == torch.contiguous_format else laid_out.movedim(1, -1)
