"""Asynchronous copies of gradients to CPU memory and of new values to the GPU, while the GPU computes."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor


class StagedCopies:
    """Copies between a GPU and pinned CPU memory, on a separate CUDA stream.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized tensor in pinned CPU memory, with the shape and dtype of `tensor`.

        The memory is pinned because a copy to or from CPU memory that is not pinned blocks the calling thread.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def begin(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Queue a copy from `source` to `target`, and return an event that marks the end of the copy.

        The copy starts after all work that is queued on the current stream, because this work may still compute the
        gradient or read the old values.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def before_use(self, event: torch.cuda.Event) -> None:
        """Make the current stream wait for the end of a copy. The calling thread does not wait.

        Args:
            event: The event that :meth:`begin` returned for the copy.
        """
        torch.cuda.current_stream(self._device).wait_event(event)


class Staging:
    """Buffers in pinned CPU memory for the gradients and the new values of parameters on a GPU.

    Copies do not delay backward. They delay forward only where forward needs a new value that has not been copied yet.

    Each parameter has one buffer for its gradient and one buffer for its value. No locks are needed. The gradient's
    buffer is free again when the parameter's new value arrives, because the servers then have the gradient. The value's
    buffer is also free then: the copy of the last value to the GPU was queued before the copy of the gradient, copies
    end in the order in which they were queued, and the copy of the gradient has ended.

    Args:
        parameters: Parameters on one GPU.
        copies: Copies to and from that GPU.
    """

    def __init__(self, parameters: Sequence[Tensor], copies: StagedCopies) -> None:
        self._parameters = parameters
        self._copies = copies
        self._gradients = [copies.host(parameter) for parameter in parameters]
        # Queued copies of gradients: the parameter's index, the gradient on the GPU, and the event at the end of the
        # copy. The reference to the gradient ensures that its memory is not reused before the copy has ended.
        self._to_host: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()
        # By parameter index: the event that marks the end of the last copy of the parameter's value to the GPU.
        self._to_device: dict[int, torch.cuda.Event] = {}

    @cached_property
    def values(self) -> list[Tensor]:
        """Buffers in pinned CPU memory into which new values are written, one for each parameter.

        The buffers are created at the first access, and then contain the parameters' values on the GPU.
        """
        values = [self._copies.host(parameter) for parameter in self._parameters]
        self._take(values)
        return values

    def take_values(self) -> None:
        """Copy the parameters' current values from the GPU to :attr:`values`, and wait for the copies."""
        self._take(self.values)

    def fetch(self, index: int, gradient: Tensor) -> None:
        """Queue a copy of a parameter's gradient to CPU memory, without waiting for the copy.

        Args:
            index: Index of the parameter.
            gradient: The gradient on the GPU.
        """
        event = self._copies.begin(self._gradients[index], gradient.detach())
        self._to_host.append((index, gradient, event))

    def fetched(self, wait: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield the gradients that have been copied to CPU memory, in the order of the calls of :meth:`fetch`.

        Args:
            wait: Whether to wait for all queued copies, and yield all gradients.

        Yields:
            Index of a parameter, and the parameter's gradient as a tensor in CPU memory. The next call of :meth:`fetch`
            with this index overwrites the tensor.
        """
        while self._to_host and (wait or self._to_host[0][2].query()):  # type: ignore[no-untyped-call]
            index, _, event = self._to_host.popleft()
            event.synchronize()
            yield index, self._gradients[index]

    def put(self, index: int, value: Tensor) -> None:
        """Write a parameter's new value into :attr:`values`, and queue a copy of the value to the GPU.

        Args:
            index: Index of the parameter.
            value: The new value, in CPU memory.
        """
        self.values[index].copy_(value)
        self.bring(index)

    def bring(self, index: int) -> None:
        """Queue a copy of a parameter's value from :attr:`values` to the GPU, without waiting for the copy."""
        self._to_device[index] = self._copies.begin(self._parameters[index], self.values[index])

    def before_use(self, index: int) -> None:
        """Make later work on the GPU's current stream wait until a parameter's new value has been copied to the GPU."""
        event = self._to_device.get(index)
        if event is not None:
            self._copies.before_use(event)

    def settle(self) -> None:
        """Wait for all queued copies of values to the GPU.

        Call this before another object begins to copy values of the same parameters.
        """
        for event in self._to_device.values():
            event.synchronize()
        self._to_device.clear()

    def _take(self, values: list[Tensor]) -> None:
        for event in [self._copies.begin(*pair) for pair in zip(values, self._parameters, strict=True)]:
            event.synchronize()


def staging_for(parameters: Sequence[Tensor]) -> Staging | None:
    """Return a :class:`Staging` if all parameters are on one GPU. Return None otherwise.

    Parameters on the CPU need no staging. Parameters on several GPUs are copied synchronously when they are used.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return Staging(parameters, StagedCopies(device))
    return None
