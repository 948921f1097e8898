"""Copies of gradients from a GPU and of values to it, made while the GPU computes."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor


class StagedCopies:
    """Copies from and to pinned memory on a separate CUDA stream, as in NCCL and DDP's reducer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host(self, tensor: Tensor) -> Tensor:
        """Return pinned memory of a tensor's shape and type.

        With other memory a copy would wait for the device, and the caller for the copy.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def begin(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Begin a copy, and return an event that marks its end.

        The copy waits for the work on the present stream, which computes the gradient and still uses the old values.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def before_use(self, event: torch.cuda.Event) -> None:
        """Have the present stream wait for a copy; the caller does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)


class Staging:
    """Host memory for the gradients and values of parameters on a device.

    Copies do not delay backward; they delay forward only where it needs a value. Each parameter has two buffers: one
    for its gradient, which is free again when the new value has arrived, and one for its value. A new value may be
    written while the copy of the value before is still queued: by then the gradients that were computed with that value
    have arrived, and all copies are made one after the other.

    Args:
        parameters: Parameters on one device.
        copies: Copies to and from that device.
    """

    def __init__(self, parameters: Sequence[Tensor], copies: StagedCopies) -> None:
        self._parameters = parameters
        self._copies = copies
        self._gradients = [copies.host(parameter) for parameter in parameters]
        # The source of each copy is kept until the copy is over: otherwise its memory could be reused.
        self._to_host: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()
        self._to_device: dict[int, torch.cuda.Event] = {}

    @cached_property
    def values(self) -> list[Tensor]:
        """Values on the host, into which new values are written; at first the device's values."""
        values = [self._copies.host(parameter) for parameter in self._parameters]
        self._take(values)
        return values

    def take_values(self) -> None:
        """Copy the device's present values to the host."""
        self._take(self.values)

    def fetch(self, index: int, gradient: Tensor) -> None:
        """Begin to copy a gradient to the host, without waiting for the copy."""
        event = self._copies.begin(self._gradients[index], gradient.detach())
        self._to_host.append((index, gradient, event))

    def fetched(self, wait: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield the gradients that have arrived on the host, in the order of :meth:`fetch`.

        Args:
            wait: Wait for all gradients that are on their way.

        Yields:
            Index of the parameter, and its gradient, which is not changed until the parameter's next one is fetched.
        """
        while self._to_host and (wait or self._to_host[0][2].query()):  # type: ignore[no-untyped-call]
            index, _, event = self._to_host.popleft()
            event.synchronize()
            yield index, self._gradients[index]

    def put(self, index: int, value: Tensor) -> None:
        """Take a value from other memory on the host, and copy it to the device."""
        self.values[index].copy_(value)
        self.bring(index)

    def bring(self, index: int) -> None:
        """Begin to copy a value to the device, without waiting for the copy."""
        self._to_device[index] = self._copies.begin(self._parameters[index], self.values[index])

    def before_use(self, index: int) -> None:
        """Have later work on the device wait for the new value of a parameter."""
        event = self._to_device.get(index)
        if event is not None:
            self._copies.before_use(event)

    def settle(self) -> None:
        """Wait for all copies of values to the device; later values will be copied by another object."""
        for event in self._to_device.values():
            event.synchronize()
        self._to_device.clear()

    def _take(self, values: list[Tensor]) -> None:
        for event in [self._copies.begin(*pair) for pair in zip(values, self._parameters, strict=True)]:
            event.synchronize()


def staging_for(parameters: Sequence[Tensor]) -> Staging | None:
    """Return the staging of parameters that are on one GPU; None for others, which are copied where they are needed."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return Staging(parameters, StagedCopies(device))
    return None
