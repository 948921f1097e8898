"""Messages of one stage: inputs and outputs of its forwards, and gradients of its backwards.

Values that cross a cut are taken apart into tensors. Each tensor is sent in its own memory layout, and the receiver
assembles the values again.
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

GRADIENTS_UNDER_WAY = 2  # microbatches whose gradients may be on their way to one rank
EVALUATIONS_UNDER_WAY = 4  # evaluated microbatches whose outputs may be on their way

# Sort key of a message: turn and kind of the task that sends it, sending rank, receiving rank.
Order = tuple[int, Kind, int, int]


class Channels:
    """Sends and receives of the rank that runs a stage.

    Messages are begun between the rank's tasks (:meth:`exchange`), so that data travels while the rank computes. A send
    of activations is waited for when their gradients have come back, which shows that the activations have arrived, so
    no rank waits for another rank to begin a receive.

    Args:
        graph: Graph of the stage.
        turn: Function from a task to its turn, equal on all ranks; see :func:`.timetable.turns`.
        transport: Transport of this rank.
        ask_for_all: Whether to request the gradients of all floating-point tensors. A forward without autograd that is
            recomputed later does not know which gradients it will need.
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
        self._receives: dict[Task, list[Pending | Tensor]] = {}
        self._sends: dict[int, list[Pending]] = {}
        self._gradient_sends: dict[int, deque[list[Pending]]] = {}

    def plan(self, tasks: Iterable[Task], size: Callable[[int], Hashable]) -> None:
        """Determine the messages that this rank's tasks need.

        Args:
            tasks: Tasks of the rank.
            size: Function from a microbatch to a key that determines the shapes and types of its values.
        """
        awaited = []
        for task in tasks:
            for stage in self.graph.names_from if task.kind == "forward" else self.graph.names_to:
                sender = Task(task.kind, stage, task.microbatch)
                rank = self.transport.placement.rank_of(stage, task.microbatch)
                awaited.append((self.order(sender, rank, self.transport.rank), sender, size(task.microbatch)))
        self._awaited = deque(sorted(awaited, key=itemgetter(0)))

    def exchange(self, now: float, until: float) -> None:
        """Begin the prepared sends, and receives.

        All ranks begin their messages in the same order, the order of the turns of the sending tasks. The first message
        in this order that is not complete has nothing to wait for. So no rank waits forever, even if a message must be
        complete before its rank continues: the host of a GPU may have to wait at any moment until everything that was
        begun on the GPU is complete, for example when a kernel is loaded or memory is released.

        Args:
            now: Turn of the rank's next task.
            until: Begin to receive messages that are sent before this turn. Messages that are sent at ``now`` or later
                are received only if their shapes are known.
        """
        while self._awaited and self._awaited[0][0][0] < until:
            order, sender, size = self._awaited[0]
            if not self._expect(order, sender, size, due=order[0] < now):
                break
            self._awaited.popleft()
        self.begin()

    def begin(self, before: Order | None = None) -> None:
        """Begin the prepared transfers in order, or only the transfers before a message in this order."""
        self._prepared.sort(key=itemgetter(0))
        while self._prepared and (before is None or self._prepared[0][0] < before):
            self._prepared.pop(0)[1].begin()

    def receive_forward(self, microbatch: int, size: Hashable) -> tuple[dict[str, Any], dict[int, list[Tensor]]]:
        """Return the inputs of a forward.

        Args:
            microbatch: The microbatch.
            size: Key that determines the shapes and types of the values.

        Returns:
            The values by name, and for each source stage the tensors whose gradients it needs, as leaves of autograd.
        """
        values: dict[str, Any] = {}
        leaves: dict[int, list[Tensor]] = {}
        for source in self.graph.names_from:
            header = self._received_headers[source, self.transport.placement.rank_of(source, microbatch), size]
            tensors = self._received(Task("forward", source, microbatch))
            if torch.is_grad_enabled():
                for tensor, spec in zip(tensors, header.tensors, strict=True):
                    tensor.requires_grad_(spec.needs_gradient)
                leaves[source] = header.with_gradient(tensors)
            values |= zip(self.graph.names_from[source], header.unpack(tensors), strict=True)
        return values, leaves

    def send_forward(
        self, microbatch: int, size: Hashable, values: dict[str, Any], training: bool
    ) -> dict[int, list[Tensor]]:
        """Prepare to send the outputs of a forward. The first message of a size is sent immediately.

        Args:
            microbatch: The microbatch.
            size: Key that determines the shapes and types of the values.
            values: The outputs by name.
            training: Whether gradients will be sent back.

        Returns:
            For each target stage the tensors whose gradients it will send back in training.
        """
        copies: dict[tuple[int, torch.memory_format], Tensor] = {}  # One copy serves all stages that use a tensor.
        roots: dict[int, list[Tensor]] = {}
        sends = []
        for target in self.graph.names_to:
            rank = self.transport.placement.rank_of(target, microbatch)
            header, tensors = pack(tuple(values[name] for name in self.graph.names_to[target]), self.ask_for_all)
            order = self.order(Task("forward", self.stage, microbatch), self.transport.rank, rank)
            content = f"the activations of microbatch {microbatch}"
            known_header = self._sent_headers.setdefault((target, rank, size), header)
            assert known_header == header, "the header of a size does not change"
            wires = []
            for tensor, spec in zip(tensors, known_header.tensors, strict=True):
                key = (id(tensor), spec.memory_format)
                if key not in copies:
                    copies[key] = on_the_wire(tensor, spec.memory_format)
                wires.append(copies[key])
            if known_header is header:
                # This send is not waited for: its receiver may first wait for messages that this rank sends later.
                sends += self.transport.send_object((header, wires), rank, content)
            else:
                sends += [self._prepare(order, self.transport.send(wire, rank, FORWARD, content)) for wire in wires]
            roots[target] = header.with_gradient(tensors)
        self._sends[microbatch] = sends
        # In training two ranks could wait for each other here: one for its activations, the other for its gradients.
        if not training and len(self._sends) > EVALUATIONS_UNDER_WAY:
            self._wait_for_sends(next(iter(self._sends)))
        return roots

    def roots(self, values: dict[str, Any]) -> dict[int, list[Tensor]]:
        """Return, for a recomputed forward, the tensors whose gradients each target stage sends back."""
        roots = {}
        for target, names in self.graph.names_to.items():
            header, tensors = pack(tuple(values[name] for name in names), self.ask_for_all)
            roots[target] = header.with_gradient(tensors)
        return roots

    def receive_backward(self, microbatch: int) -> dict[int, list[Tensor | None]]:
        """Return for each target stage the gradients of the tensors that :meth:`send_forward` returned.

        A tensor that no gradient reaches has None.
        """
        gradients: dict[int, list[Tensor | None]] = {}
        for target in self.graph.names_to:
            sender = Task("backward", target, microbatch)
            reached, *tensors = self._received(sender) or [torch.empty(0)]
            gradients[target] = [
                tensor if has_gradient else None for tensor, has_gradient in zip(tensors, reached.tolist(), strict=True)
            ]
        self._wait_for_sends(microbatch)  # The gradients show that the activations have arrived.
        return gradients

    def send_backward(self, microbatch: int, leaves: dict[int, list[Tensor]]) -> None:
        """Prepare to send the gradients of a microbatch's inputs back to the stages that sent the inputs."""
        for source, tensors in leaves.items():
            rank = self.transport.placement.rank_of(source, microbatch)
            order = self.order(Task("backward", self.stage, microbatch), self.transport.rank, rank)
            content = f"the gradients of microbatch {microbatch}"
            sends = []
            if tensors:
                # The receiver learns which gradients do not exist: a gradient of zeros would let weight decay change
                # parameters that one device would leave alone.
                reached = torch.tensor([tensor.grad is not None for tensor in tensors])
                sends.append(self._prepare(order, self.transport.send(reached, rank, REACHED, content)))
            for tensor in tensors:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                wire = on_the_wire(gradient, memory_format_of(tensor))
                sends.append(self._prepare(order, self.transport.send(wire, rank, BACKWARD, content)))
            under_way = self._gradient_sends.setdefault(rank, deque())
            under_way.append(sends)
            while len(under_way) > GRADIENTS_UNDER_WAY:
                for send in under_way.popleft():
                    send.wait()

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        for microbatch in list(self._sends):
            self._wait_for_sends(microbatch)
        for under_way in self._gradient_sends.values():
            for sends in under_way:
                for send in sends:
                    send.wait()
        self._gradient_sends.clear()
        assert not self._receives, "everything that was expected was also received"

    def forget_headers(self) -> None:
        """Let the next message of each kind begin with a header again. Every rank must call this method."""
        self._received_headers.clear()
        self._sent_headers.clear()

    def inputs(self, values: dict[str, Any], images: Any) -> tuple[Any, ...]:
        """Return the stage's arguments in order."""
        return tuple(images if name == IMAGES and self.stage == 0 else values[name] for name in self.graph.inputs)

    def order(self, sender: Task, source: int, target: int) -> Order:
        """Return the sort key of a message, in the order in which all ranks begin messages."""
        return self.turn(sender), sender.kind, source, target

    def _expect(self, order: Order, sender: Task, size: Hashable, due: bool) -> bool:
        """Prepare to receive a task's message if the message is due or its shapes are known.

        Returns:
            Whether the receive was prepared.
        """
        rank = order[2]
        key = (sender.stage, rank, size)
        if sender.kind == "forward":
            content = f"the activations of microbatch {sender.microbatch}"
            if key not in self._received_headers:
                if due:
                    self.begin(before=order)  # Other ranks may be waiting for earlier messages.
                    self._receives[sender] = self._receive_first(key, content)
                return due
            specs, tag = self._received_headers[key].tensors, FORWARD
        else:
            content = f"the gradients of microbatch {sender.microbatch}"
            if key not in self._sent_headers:
                return False
            specs, tag = [spec for spec in self._sent_headers[key].tensors if spec.needs_gradient], BACKWARD
        self._receives[sender] = []
        if specs and tag == BACKWARD:
            reached = torch.empty(len(specs), dtype=torch.bool)
            self._receives[sender].append(self._prepare(order, self.transport.receive(reached, rank, REACHED, content)))
        for spec in specs:
            tensor = spec.empty(self.device)
            transfer = self.transport.receive(on_the_wire(tensor, spec.memory_format), rank, tag, content)
            transfer.tensor = tensor  # The tensor that owns the memory; the transfer may use a permuted view of it.
            self._receives[sender].append(self._prepare(order, transfer))
        return True

    def _receive_first(self, key: tuple[int, int, Hashable], content: str) -> list[Pending | Tensor]:
        """Receive the first message of a size, whose header describes all later messages of this size."""
        header, wires = self.transport.receive_object(key[1], content)
        header = self._received_headers[key] = header.on(self.device)
        tensors: list[Pending | Tensor] = []
        for spec, wire in zip(header.tensors, wires, strict=True):
            tensor = spec.empty(self.device)
            on_the_wire(tensor, spec.memory_format).copy_(wire)
            tensors.append(tensor)
        return tensors

    def _received(self, sender: Task) -> list[Tensor]:
        return [item.wait() if isinstance(item, Pending) else item for item in self._receives.pop(sender)]

    def _prepare(self, order: Order, transfer: Pending) -> Pending:
        self._prepared.append((order, transfer))
        return transfer

    def _wait_for_sends(self, microbatch: int) -> None:
        for send in self._sends.pop(microbatch, []):
            send.wait()


@dataclass(frozen=True)
class TensorSpec:
    """Description of a tensor in a message.

    Attributes:
        shape: Shape of the tensor.
        dtype: Type of the tensor.
        needs_gradient: Whether the tensor's gradient is sent back.
        memory_format: Memory layout of the tensor and of its gradient.
    """

    shape: torch.Size
    dtype: torch.dtype
    needs_gradient: bool
    memory_format: torch.memory_format = field(compare=False)

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=self.memory_format)


@dataclass(frozen=True)
class TensorHeader:
    """Structure of a message: its values, with specs in place of tensors.

    The header is sent once for each size of a microbatch.

    Attributes:
        leaves: Leaves of the values: plain data, and a spec for each tensor.
        tree: Structure of the values, from which the leaves are taken.
    """

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @property
    def tensors(self) -> list[TensorSpec]:
        """Specs of the message's tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def with_gradient(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the message's tensors whose gradients are sent back."""
        return [tensor for tensor, spec in zip(tensors, self.tensors, strict=True) if spec.needs_gradient]

    def on(self, device: torch.device) -> "TensorHeader":
        """Return the header with the receiver's device in place of devices that the network has read from tensors."""
        leaves = tuple(device if isinstance(leaf, torch.device) else leaf for leaf in self.leaves)
        return TensorHeader(leaves, self.tree)

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the values, assembled from the message's tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        values: tuple[Any, ...] = tree_unflatten(leaves, self.tree)
        return values


def pack(values: tuple[Any, ...], ask_for_all: bool) -> tuple[TensorHeader, list[Tensor]]:
    """Return a header and the tensors of the values that one stage sends to another.

    The tensors are still part of their autograd graph.
    """
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
    """Return the memory format of a tensor: ``channels_last`` only if the tensor is not contiguous as well."""
    last = CHANNELS_LAST.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def on_the_wire(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a contiguous view of a tensor in a memory format, or of a copy if the tensor has another format."""
    formatted = tensor.detach().contiguous(memory_format=memory_format)
    return formatted if memory_format == torch.contiguous_format else formatted.movedim(1, -1)
