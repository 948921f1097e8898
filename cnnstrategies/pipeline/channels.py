"""Send and receive the messages of one stage.

The messages are the inputs and outputs of its forward passes, and the gradients of its backward passes. Values that
cross a cut can be nested containers.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.pipeline.stage import IMAGES, StageGraph
from cnnstrategies.pipeline.tensor_headers import TensorHeader, memory_format_of, on_the_wire, pack
from cnnstrategies.pipeline.timetable import Kind, Task
from cnnstrategies.pipeline.transport import BACKWARD, FORWARD, REACHED, Pending, Transport

# Under gloo, a receive begins this number of turns (see `timetable.turns`) before the task that needs its message. This
# is early enough even for messages of a stage that runs ahead. Under gloo, a receive that only begins when its message
# arrives is slow: the receive holds the lock of the connection, and gloo's thread waits for the lock in a loop, which
# takes milliseconds if there are too few cores.
# Under NCCL, receives do not begin early. A receive occupies the device until its message arrives, and this process may
# have to wait at any moment until the device has completed all its work. An early receive could therefore block the
# process; see `Channels.exchange`.
AHEAD = 4
# Largest number of microbatches whose gradients a rank sends to another rank at the same time. When the limit is
# exceeded, the sender waits for the oldest send.
MOST_GRADIENT_SENDS = 2
# Largest number of microbatches whose outputs a rank sends at the same time in evaluation. When the limit is exceeded,
# the sender waits for the oldest send.
MOST_EVALUATION_SENDS = 4

# Sort key of a message: the turn (see `timetable.turns`) and the kind of the task that sends the message, the sending
# rank, and the receiving rank.
Order = tuple[int, Kind, int, int]


class Channels:
    """The sends and receives of one rank.

    Transfers begin between the rank's tasks (:meth:`exchange`), so that data travels while the rank computes. In
    training, the rank waits for a send of activations only after the gradients of these activations have arrived. The
    receiver must have the activations by then, so this wait never blocks.

    Args:
        graph: Graph of the stage.
        turn: Function that returns the turn of a task; see :func:`.timetable.turns`. All ranks use the same function.
        transport: Transport of this rank.
        ask_for_all: Whether to ask for the gradients of all floating-point outputs. This is needed if forwards are
            recomputed, because the first forward may run without autograd and then does not show which outputs require
            a gradient.
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
        """Determine which messages this rank will receive for its tasks, and in which order.

        Args:
            tasks: Tasks of the rank.
            size: Function that returns the size key of a microbatch. Microbatches with equal keys have values of equal
                shapes and dtypes.
        """
        awaited = []
        for task in tasks:
            for stage in self.graph.names_from if task.kind == "forward" else self.graph.names_to:
                sender = Task(task.kind, stage, task.microbatch)
                rank = self.transport.placement.rank_of(stage, task.microbatch)
                awaited.append((self.order(sender, rank, self.transport.rank), sender, size(task.microbatch)))
        self._awaited = deque(sorted(awaited, key=itemgetter(0)))

    def exchange(self, now: float, until: float) -> None:
        """Begin the prepared sends, and the receives of the messages that the next tasks need.

        The turn of a message is the turn of the task that sends the message. All ranks begin their transfers in the
        order of these turns. This rules out deadlocks: the first unfinished transfer in this order waits for no other
        transfer, so it always ends. There is no deadlock even if a rank stops until all its transfers have ended. This
        can happen on a GPU, where a process may wait for all its work to end before it loads a kernel or frees memory.

        Args:
            now: Turn of the rank's next task.
            until: Begin only the receives of messages whose turn is less than ``until``. The receive of a message whose
                turn is ``now`` or greater begins only if the shapes of the message's tensors are already known.
        """
        while self._awaited and self._awaited[0][0][0] < until:
            order, sender, size = self._awaited[0]
            if not self._prepare_receive(order, sender, size, due=order[0] < now):
                break
            self._awaited.popleft()
        self.begin()

    def begin(self, before: Order | None = None) -> None:
        """Begin the prepared transfers, smallest sort key first.

        Args:
            before: Begin only the transfers with a smaller sort key; None for all transfers.
        """
        self._prepared.sort(key=itemgetter(0))
        while self._prepared and (before is None or self._prepared[0][0] < before):
            self._prepared.pop(0)[1].begin()

    def receive_forward(self, microbatch: int, size: Hashable) -> tuple[dict[str, Any], dict[int, list[Tensor]]]:
        """Wait for the inputs of a forward, and return them.

        Args:
            microbatch: The microbatch.
            size: Size key of the microbatch; see :meth:`plan`.

        Returns:
            Two dictionaries. The first dictionary has the inputs by name. The second dictionary has, for each stage
            that sent inputs, the received tensors whose gradients must be sent back. These tensors are autograd leaves.
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
        """Prepare to send the outputs of a forward.

        The first message with a size key also contains the header, and is sent immediately.

        Args:
            microbatch: The microbatch.
            size: Size key of the microbatch; see :meth:`plan`.
            values: The outputs by name.
            training: Whether the receivers will send gradients back.

        Returns:
            For each receiving stage, the sent tensors whose gradients the stage will send back in training.
        """
        # Tensors that are ready to be sent. A key has the id of the original tensor, and the memory format for the
        # transfer. If several stages receive a tensor, the tensor is converted only once.
        copies: dict[tuple[int, torch.memory_format], Tensor] = {}
        roots: dict[int, list[Tensor]] = {}
        sends = []
        for target in self.graph.names_to:
            rank = self.transport.placement.rank_of(target, microbatch)
            header, tensors = pack(tuple(values[name] for name in self.graph.names_to[target]), self.ask_for_all)
            order = self.order(Task("forward", self.stage, microbatch), self.transport.rank, rank)
            content = f"the activations of microbatch {microbatch}"
            known_header = self._sent_headers.setdefault((target, rank, size), header)
            assert known_header == header, "messages with equal size keys have equal headers"
            wires = []
            for tensor, spec in zip(tensors, known_header.tensors, strict=True):
                key = (id(tensor), spec.memory_format)
                if key not in copies:
                    copies[key] = on_the_wire(tensor, spec.memory_format)
                wires.append(copies[key])
            if known_header is header:
                # Do not wait for this send here, because its receiver may first need messages that this rank sends
                # later.
                sends += self.transport.send_object((header, wires), rank, content)
            else:
                sends += [self._prepare(order, self.transport.send(wire, rank, FORWARD, content)) for wire in wires]
            roots[target] = header.with_gradient(tensors)
        self._sends[microbatch] = sends
        # Wait in evaluation only. In training, two ranks could wait for each other here forever: rank A until rank B
        # has received A's activations, and rank B until rank A has received B's gradients.
        if not training and len(self._sends) > MOST_EVALUATION_SENDS:
            self._wait_for_sends(next(iter(self._sends)))
        return roots

    def roots(self, values: dict[str, Any]) -> dict[int, list[Tensor]]:
        """Return the outputs of a recomputed forward whose gradients the receiving stages will send back.

        Nothing is sent, because :meth:`send_forward` sent the outputs of the first forward.

        Args:
            values: The recomputed outputs by name.

        Returns:
            For each receiving stage, the tensors whose gradients the stage will send back.
        """
        roots = {}
        for target, names in self.graph.names_to.items():
            header, tensors = pack(tuple(values[name] for name in names), self.ask_for_all)
            roots[target] = header.with_gradient(tensors)
        return roots

    def receive_backward(self, microbatch: int) -> dict[int, list[Tensor | None]]:
        """Wait for the gradients of the outputs that were sent for a microbatch, and return them.

        Returns:
            For each receiving stage, the gradients of the tensors that :meth:`send_forward` returned for the stage. A
            gradient is None if the receiving stage has not computed a gradient for the tensor.
        """
        gradients: dict[int, list[Tensor | None]] = {}
        for target in self.graph.names_to:
            sender = Task("backward", target, microbatch)
            reached, *tensors = self._received(sender) or [torch.empty(0)]
            gradients[target] = [
                tensor if has_gradient else None for tensor, has_gradient in zip(tensors, reached.tolist(), strict=True)
            ]
        # The gradients have arrived, so the receivers must have received the activations, and this call does not block.
        self._wait_for_sends(microbatch)
        return gradients

    def send_backward(self, microbatch: int, leaves: dict[int, list[Tensor]]) -> None:
        """Prepare to send the gradients of a microbatch's inputs back to the stages that sent the inputs.

        Args:
            microbatch: The microbatch.
            leaves: Tensors that :meth:`receive_forward` returned for each stage that sent inputs.
        """
        for source, tensors in leaves.items():
            rank = self.transport.placement.rank_of(source, microbatch)
            order = self.order(Task("backward", self.stage, microbatch), self.transport.rank, rank)
            content = f"the gradients of microbatch {microbatch}"
            sends = []
            if tensors:
                # `reached` tells the receiver which tensors have no gradient. If the receiver used zeros as gradients,
                # weight decay would change parameters that stay unchanged when the network runs on one device.
                reached = torch.tensor([tensor.grad is not None for tensor in tensors])
                sends.append(self._prepare(order, self.transport.send(reached, rank, REACHED, content)))
            for tensor in tensors:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                wire = on_the_wire(gradient, memory_format_of(tensor))
                sends.append(self._prepare(order, self.transport.send(wire, rank, BACKWARD, content)))
            under_way = self._gradient_sends.setdefault(rank, deque())
            under_way.append(sends)
            while len(under_way) > MOST_GRADIENT_SENDS:
                for send in under_way.popleft():
                    send.wait()

    def finish(self) -> None:
        """Wait until all sends of this rank have ended."""
        for microbatch in list(self._sends):
            self._wait_for_sends(microbatch)
        for under_way in self._gradient_sends.values():
            for sends in under_way:
                for send in sends:
                    send.wait()
        self._gradient_sends.clear()
        assert not self._receives, "the tasks have used all received messages"

    def forget_headers(self) -> None:
        """Forget the headers of all sent and received messages. All ranks must call this.

        The next message with each size key then contains a header again.
        """
        self._received_headers.clear()
        self._sent_headers.clear()

    def inputs(self, values: dict[str, Any], images: Any) -> tuple[Any, ...]:
        """Return the arguments of the stage's forward.

        Args:
            values: Received values by name.
            images: Images of the microbatch, in stage 0.
        """
        return tuple(images if name == IMAGES and self.stage == 0 else values[name] for name in self.graph.inputs)

    def order(self, sender: Task, source: int, target: int) -> Order:
        """Return the sort key of a message. All ranks begin their transfers in the order of these keys.

        Args:
            sender: Task that sends the message.
            source: Sending rank.
            target: Receiving rank.
        """
        return self.turn(sender), sender.kind, source, target

    def _prepare_receive(self, order: Order, sender: Task, size: Hashable, due: bool) -> bool:
        """Prepare the receive of a message, if the message is due or the shapes of its tensors are known.

        Args:
            order: Sort key of the message.
            sender: Task that sends the message.
            size: Size key of the microbatch.
            due: Whether the sending task has an earlier turn than this rank's next task.

        Returns:
            Whether the receive was prepared.
        """
        rank = order[2]
        key = (sender.stage, rank, size)
        if sender.kind == "forward":
            content = f"the activations of microbatch {sender.microbatch}"
            if key not in self._received_headers:
                if due:
                    # This receive blocks the rank. The transfers with smaller sort keys begin first, because the sender
                    # of this message may need them before it can send the message.
                    self.begin(before=order)
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
            transfer.tensor = tensor  # Otherwise `wait` could return a permuted view of the tensor.
            self._receives[sender].append(self._prepare(order, transfer))
        return True

    def _receive_first(self, key: tuple[int, int, Hashable], content: str) -> list[Pending | Tensor]:
        """Receive the first message with a size key. Its header also describes all later messages with this key.

        Args:
            key: Sending stage, sending rank and size key.
            content: Description of the message, for error messages.
        """
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
