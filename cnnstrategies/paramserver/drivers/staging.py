"""Gradients that come from a GPU, and values that go to it, while it computes."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor


class StagedCopies:
    """Copies on a stream of their own, from and to pinned memory, as NCCL and DDP's reducer do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host(self, tensor: Tensor) -> Tensor:
        """Pinned memory: from and to other memory a copy waits for the device, and the caller for the copy."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def begin(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy after what is on the present stream: a gradient is made there, and old values are used there."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    def before_use(self, event: torch.cuda.Event) -> None:
        """Have the present stream wait; the caller goes on."""
        torch.cuda.current_stream(self._device).wait_event(event)


class Staging:
    """The host's side of parameters that are on a device: what is sent lies here, and what is received.

    No copy of a gradient or a value has backward or forward wait, unless it needs the value. Each parameter has two
    places: one for its gradient, which is free again when the new value has come, and one for its value. That may be
    written while the one before is on its way: all copies are made one after the other, the gradients that were
    computed with it have come by then, and it follows itself.
    """

    def __init__(self, parameters: Sequence[Tensor], copies: StagedCopies) -> None:
        self._parameters = parameters
        self._copies = copies
        self._gradients = [copies.host(parameter) for parameter in parameters]
        # The source of each copy is kept until it is over: else its memory would be used again.
        self._coming: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()
        self._going: dict[int, torch.cuda.Event] = {}

    @cached_property
    def values(self) -> list[Tensor]:
        """On the host, to be written to; at first those that the device has."""
        values = [self._copies.host(parameter) for parameter in self._parameters]
        self._take(values)
        return values

    def take_values(self) -> None:
        """Bring the values here that the device has now."""
        self._take(self.values)

    def fetch(self, index: int, gradient: Tensor) -> None:
        """Bring a gradient here, without waiting for it."""
        event = self._copies.begin(self._gradients[index], gradient.detach())
        self._coming.append((index, gradient, event))

    def fetched(self, wait: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Gradients that have come since the last time, or all (`wait`), in the order in which they were asked for.

        Yields:
            Parameter and gradient, which stays as it is until the parameter's next one is fetched.
        """
        while self._coming and (wait or self._coming[0][2].query()):  # type: ignore[no-untyped-call]
            index, _, event = self._coming.popleft()
            event.synchronize()
            yield index, self._gradients[index]

    def put(self, index: int, value: Tensor) -> None:
        """Take a value that lies elsewhere on the host, and bring it to the device."""
        self.values[index].copy_(value)
        self.bring(index)

    def bring(self, index: int) -> None:
        """Bring a value to the device, without waiting for it."""
        self._going[index] = self._copies.begin(self._parameters[index], self.values[index])

    def before_use(self, index: int) -> None:
        """Have what the device is told from here on use the new value of a parameter."""
        event = self._going.get(index)
        if event is not None:
            self._copies.before_use(event)

    def settle(self) -> None:
        """Wait for the values that are on their way: others are brought by somebody else."""
        for event in self._going.values():
            event.synchronize()
        self._going.clear()

    def _take(self, values: list[Tensor]) -> None:
        for event in [self._copies.begin(*both) for both in zip(values, self._parameters, strict=True)]:
            event.synchronize()


def staging_for(parameters: Sequence[Tensor]) -> Staging | None:
    """For parameters on one GPU; None for others, which are copied where they are needed."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return Staging(parameters, StagedCopies(device))
    return None
