"""One stage's traffic with the others: inputs and outputs of its forwards, gradients of its backwards."""

import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.pipeline.stage import IMAGES, Division
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import BACKWARD, FORWARD, Pending, Transport
from cnnstrategies.pipeline.values import Header, TensorSpec, memory_format_of, on_the_wire, pack

GRADIENTS_UNDER_WAY = 2  # sends of gradients to one rank that are not waited for
EVALUATIONS_UNDER_WAY = 4  # sends of one evaluated microbatch's values that are not waited for


class Channels:
    """Sends and receives for the rank that runs a stage.

    Receives are posted before they are needed, so that data flows while the rank computes. Sends are waited for when
    the answer shows that they have arrived, so that no rank waits for another to post a receive.

    Args:
        division: The divided graph.
        placement: The numbering of the ranks.
        stage: The rank's stage.
        transport: Sends and receives tensors.
        device: Where the tensors live.
        ask_for_all: Ask for the gradients of all floating-point tensors: a forward without autograd, which runs again
            later, does not know which it will need.
    """

    def __init__(
        self,
        division: Division,
        placement: Placement,
        stage: int,
        transport: Transport,
        device: torch.device,
        ask_for_all: bool,
    ) -> None:
        self.division = division
        self.placement = placement
        self.stage = stage
        self.transport = transport
        self.device = device
        self.ask_for_all = ask_for_all
        routes = division.routes
        self.sources = sorted({route.source for route in routes if stage in route.targets})
        self.targets = sorted({target for route in routes if route.source == stage for target in route.targets})
        self.names_from = {
            source: [route.name for route in routes if route.source == source and stage in route.targets]
            for source in self.sources
        }
        self.names_to = {
            target: [route.name for route in routes if route.source == stage and target in route.targets]
            for target in self.targets
        }
        self._received_headers: dict[Hashable, Header] = {}
        self._sent_headers: dict[Hashable, Header] = {}
        # Ranks from and to which every value's gradient goes. To others it is told with each message which have one,
        # as at first to all: a parameter that no gradient reaches has none, as on one device.
        self._reached: set[tuple[str, int]] = set()
        self._reached_now: dict[tuple[str, int], list[bool]] = {}
        self._coming: dict[int, list[tuple[int, Header, list[_Arriving]]]] = {}
        self._gradients_coming: dict[int, dict[int, list[_Arriving | None]]] = {}
        self._leaving: dict[int, list[Pending]] = {}
        self._gradients_leaving: dict[int, deque[list[Pending]]] = {}

    def expect_forward(self, microbatch: int, size: Hashable, headers_known_only: bool) -> bool:
        """Post the receives of a forward's inputs; those of one source in the order in which it sends.

        Args:
            microbatch: The microbatch.
            size: What its shapes depend on.
            headers_known_only: Do nothing where a header would have to be waited for: its sender may be waiting for
                what this rank does first.

        Returns:
            Whether they are posted.
        """
        keys = [(source, self.placement.rank_of(source, microbatch), size) for source in self.sources]
        if microbatch in self._coming:
            return True
        if headers_known_only and any(key not in self._received_headers for key in keys):
            return False
        coming = []
        for source, key in zip(self.sources, keys, strict=True):
            rank = key[1]
            what = f"the activations of microbatch {microbatch}"
            if key not in self._received_headers:
                self._received_headers[key] = self.transport.receive_object(rank, what).on(self.device)
            header = self._received_headers[key]
            coming.append((source, header, [self._receive(spec, rank, FORWARD, what) for spec in header.tensors]))
        self._coming[microbatch] = coming
        return True

    def receive_forward(self, microbatch: int, size: Hashable) -> tuple[dict[str, Any], dict[int, list[Tensor]]]:
        """The inputs of a forward.

        Returns:
            The values by name, and for each source the tensors whose gradients it wants, as leaves of autograd.
        """
        self.expect_forward(microbatch, size, headers_known_only=False)
        values: dict[str, Any] = {}
        leaves: dict[int, list[Tensor]] = {}
        for source, header, pending in self._coming.pop(microbatch):
            tensors = [one.wait() for one in pending]
            if torch.is_grad_enabled():
                for tensor, spec in zip(tensors, header.tensors, strict=True):
                    tensor.requires_grad_(spec.needs_gradient)
                leaves[source] = [
                    tensor for tensor, spec in zip(tensors, header.tensors, strict=True) if spec.needs_gradient
                ]
            values |= zip(self.names_from[source], header.unpack(tensors), strict=True)
        return values, leaves

    def send_forward(
        self, microbatch: int, size: Hashable, values: dict[str, Any], training: bool
    ) -> dict[int, list[Tensor]]:
        """Send a forward's outputs.

        Args:
            microbatch: The microbatch.
            size: What its shapes depend on.
            values: The stage's outputs by name.
            training: Whether gradients will come back.

        Returns:
            For each target the tensors whose gradients it will send back.
        """
        copies: dict[tuple[int, torch.memory_format], Tensor] = {}  # One of a tensor, however many stages use it.
        roots: dict[int, list[Tensor]] = {}
        leaving = []
        for target in self.targets:
            rank = self.placement.rank_of(target, microbatch)
            header, tensors = pack(tuple(values[name] for name in self.names_to[target]), self.ask_for_all)
            what = f"the activations of microbatch {microbatch}"
            key = (target, rank, size)
            if key not in self._sent_headers:
                self._sent_headers[key] = header
                # Not waited for: its receiver may wait for what others do only when this rank has gone on.
                leaving += self.transport.send_object(header, rank, what)
            assert self._sent_headers[key] == header, "the header of a size does not change"
            for tensor, spec in zip(tensors, self._sent_headers[key].tensors, strict=True):
                one = (id(tensor), spec.memory_format)
                if one not in copies:
                    copies[one] = on_the_wire(tensor, spec.memory_format)
                leaving.append(self.transport.send(copies[one], rank, FORWARD, what))
            roots[target] = [
                tensor for tensor, spec in zip(tensors, header.tensors, strict=True) if spec.needs_gradient
            ]
        self._leaving[microbatch] = leaving
        # In training two ranks could wait for each other: one for its activations to leave, one for its gradients.
        if not training and len(self._leaving) > EVALUATIONS_UNDER_WAY:
            self._sent(next(iter(self._leaving)))
        return roots

    def roots(self, values: dict[str, Any]) -> dict[int, list[Tensor]]:
        """For each target the tensors whose gradients it sends back, of a forward that ran again."""
        roots = {}
        for target, names in self.names_to.items():
            header, tensors = pack(tuple(values[name] for name in names), self.ask_for_all)
            roots[target] = [
                tensor for tensor, spec in zip(tensors, header.tensors, strict=True) if spec.needs_gradient
            ]
        return roots

    def expect_backward(self, microbatch: int, size: Hashable, known_only: bool) -> bool:
        """Post the receives of the gradients that a backward starts from.

        Args:
            microbatch: The microbatch.
            size: What its shapes depend on.
            known_only: Do nothing where it is not known yet which there are.

        Returns:
            Whether they are posted.
        """
        ranks = {target: self.placement.rank_of(target, microbatch) for target in self.targets}
        if microbatch in self._gradients_coming:
            return True
        if known_only and any(("from", rank) not in self._reached for rank in ranks.values()):
            return False
        coming = self._gradients_coming[microbatch] = {}
        for target, rank in ranks.items():
            what = f"the gradients of microbatch {microbatch}"
            wanted = [spec for spec in self._sent_headers[target, rank, size].tensors if spec.needs_gradient]
            reached = [True] * len(wanted)
            if ("from", rank) not in self._reached:
                reached = self.transport.receive_object(rank, what)
                self._note(("from", rank), reached)
            coming[target] = [
                self._receive(spec, rank, BACKWARD, what) if has else None
                for spec, has in zip(wanted, reached, strict=True)
            ]
        return True

    def receive_backward(self, microbatch: int, size: Hashable) -> dict[int, list[Tensor | None]]:
        """For each target the gradients of what :meth:`send_forward` returned; None for what it does not train."""
        self.expect_backward(microbatch, size, known_only=False)
        coming = self._gradients_coming.pop(microbatch)
        gradients = {
            target: [None if one is None else one.wait() for one in arriving] for target, arriving in coming.items()
        }
        self._sent(microbatch)  # Who has sent its gradients has had the activations.
        return gradients

    def send_backward(self, microbatch: int, leaves: dict[int, list[Tensor]]) -> None:
        """Send the gradients of the inputs back to their sources."""
        for source, tensors in leaves.items():
            rank = self.placement.rank_of(source, microbatch)
            what = f"the gradients of microbatch {microbatch}"
            sends = []
            reached = [True] * len(tensors)
            if ("to", rank) not in self._reached:
                reached = [tensor.grad is not None for tensor in tensors]
                self._note(("to", rank), reached)
                sends += self.transport.send_object(reached, rank, what)
            for tensor in itertools.compress(tensors, reached):
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                sends.append(self.transport.send(on_the_wire(gradient, memory_format_of(tensor)), rank, BACKWARD, what))
            under_way = self._gradients_leaving.setdefault(rank, deque())
            under_way.append(sends)
            while len(under_way) > GRADIENTS_UNDER_WAY:
                for one in under_way.popleft():
                    one.wait()

    @contextmanager
    def sending_early(self, microbatch: int, leaves: dict[int, list[Tensor]]) -> Iterator[None]:
        """Send each source its gradients as soon as the backward inside has computed all of them.

        Args:
            microbatch: The microbatch.
            leaves: As for :meth:`send_backward`; what has been sent is taken out.
        """
        missing = {source: len(tensors) for source, tensors in leaves.items()}

        def there(source: int) -> None:
            missing[source] -= 1
            if not missing[source]:
                self.send_backward(microbatch, {source: leaves.pop(source)})

        handles = [
            tensor.register_post_accumulate_grad_hook(lambda _, source=source: there(source))  # type: ignore[no-untyped-call]
            for source, tensors in leaves.items()
            for tensor in tensors
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def finish(self) -> None:
        """Wait until everything has left."""
        for microbatch in list(self._leaving):
            self._sent(microbatch)
        for under_way in self._gradients_leaving.values():
            for sends in under_way:
                for one in sends:
                    one.wait()
        self._gradients_leaving.clear()
        self._reached |= {key for key, reached in self._reached_now.items() if all(reached)}
        self._reached_now.clear()
        assert not {**self._coming, **self._gradients_coming}, "everything that was expected was also received"

    def forget_reached(self) -> None:
        """Find out anew which values have a gradient; every rank must."""
        self._reached.clear()

    def forget_headers(self) -> None:
        """Have the next message of each kind begin with a header again; every rank must."""
        self._received_headers.clear()
        self._sent_headers.clear()

    def inputs(self, values: dict[str, Any], images: Any) -> tuple[Any, ...]:
        """The stage's arguments in order."""
        return tuple(
            images if name == IMAGES and self.stage == 0 else values[name]
            for name in self.division.stages[self.stage].inputs
        )

    def _note(self, key: tuple[str, int], reached: list[bool]) -> None:
        """Take note of what a message of this step has."""
        before = self._reached_now.get(key, [False] * len(reached))
        self._reached_now[key] = [one or other for one, other in zip(before, reached, strict=True)]

    def _receive(self, spec: TensorSpec, rank: int, tag: int, what: str) -> "_Arriving":
        tensor = spec.empty(self.device)
        return _Arriving(tensor, self.transport.receive(on_the_wire(tensor, spec.memory_format), rank, tag, what))

    def _sent(self, microbatch: int) -> None:
        for one in self._leaving.pop(microbatch, []):
            one.wait()


class _Arriving:
    """A tensor that is being received.

    Args:
        tensor: The tensor.
        pending: The transfer.
    """

    def __init__(self, tensor: Tensor, pending: Pending) -> None:
        self.tensor = tensor
        self.pending = pending

    def wait(self) -> Tensor:
        """The tensor, when it is there."""
        self.pending.wait()
        return self.tensor
