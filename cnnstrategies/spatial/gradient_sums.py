"""Gradients of parameters, summed over the ranks in few messages while the backward goes on."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cnnstrategies._torch_private import backward_number, call_after_backward, is_hooked, parameter_of_gradient
from cnnstrategies.spatial.rows_tensor import in_memory_order

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts

# A message begins when its gradients have so many bytes. It is smaller than the 25 MiB of DistributedDataParallel,
# because the gradients exist twice while they are joined.
MESSAGE_BYTES = 8 << 20


def sum_gradients(parts: "SpatialParts", node: str, gradients: Mapping[int, Tensor]) -> dict[int, Tensor | None]:
    """Return the sums of gradients over the ranks.

    A result is None if a parameter gets the sum at the end of the running backward, together with the sums of other
    layers. This is the case if the backward adds the gradient to the attribute ``grad`` of a parameter without hooks,
    and does nothing else with the gradient.

    Args:
        parts: The rules of this rank.
        node: Name of the operation's node in autograd's graph.
        gradients: This rank's contributions, by their positions among the results of the operation.
    """
    sums: dict[int, Tensor | None] = {}
    if parts.count > 1:
        for place, gradient in gradients.items():
            parameter = parameter_of_gradient(node, place)
            if parameter is not None and not _has_hooks(parts, parameter):
                _running(parts).add(parameter, gradient)
                sums[place] = None
    others = {place: gradient for place, gradient in gradients.items() if place not in sums}
    return sums | dict(zip(others, parts.sums(list(others.values())), strict=True))


def agree_on_hooks(parts: "SpatialParts", parameters: Sequence[Tensor]) -> None:
    """Let all ranks sum by itself the gradient of each parameter that has hooks on any rank. All ranks must call this.

    Otherwise messages would not match if a program registers hooks on some ranks only, and the processes would abort.
    """
    are_hooked = torch.tensor([is_hooked(parameter) for parameter in parameters], dtype=torch.uint8)
    parts.operation = "the comparison of hooks"
    flags = parts.reduce(are_hooked, "max").tolist() if parameters else []
    parts.hooked = {id(parameter) for parameter, flag in zip(parameters, flags, strict=True) if flag}


def _has_hooks(parts: "SpatialParts", parameter: Tensor) -> bool:
    return is_hooked(parameter) or id(parameter) in parts.hooked


def _running(parts: "SpatialParts") -> "GradientSums":
    """Return the sums of the running backward."""
    number = backward_number()
    sums = parts.gradient_sums.get(number)
    if sums is None:
        sums = parts.gradient_sums[number] = GradientSums(parts.begin_sum)
        # Nothing else keeps the sums alive, so a backward that fails leaves none.
        call_after_backward(sums.finish)
    return sums


class _Message(NamedTuple):
    """A sum that has begun.

    Attributes:
        gradients: The parameters, with the shapes and the strides of their gradients.
        total: The gradients in the order of the parameters. They are summed after `wait`.
        wait: Function that waits for the sum.
    """

    gradients: list[tuple[Tensor, torch.Size, tuple[int, ...]]]
    total: Tensor
    wait: Callable[[], None]


class GradientSums:
    """The sums of one backward. All ranks run the same backward, so they begin the same messages in the same order.

    Args:
        begin: Function that begins to sum a tensor over the ranks in place, and returns a function that waits.
    """

    def __init__(self, begin: Callable[[Tensor], Callable[[], None]]) -> None:
        self._begin = begin
        self._gradients: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        self._messages: list[_Message] = []

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient of this rank, and begin a message if there are enough gradients.

        Args:
            parameter: The parameter.
            gradient: This rank's contribution to the gradient, with the shape and the dtype of the parameter. It is
                overwritten.
        """
        kind = gradient.dtype, gradient.device
        gradients = self._gradients.setdefault(kind, [])
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)  # Autograd, too, gives gradients these strides.
        gradients.append((parameter, gradient))
        if sum(values.nbytes for _, values in gradients) >= MESSAGE_BYTES:
            self._send(self._gradients.pop(kind))

    def finish(self) -> None:
        """Wait for the sums, and add them to the gradients of the parameters."""
        for gradients in self._gradients.values():
            self._send(gradients)
        self._gradients.clear()
        with torch.no_grad():
            for message in self._messages:
                message.wait()
                offset = 0
                for parameter, shape, strides in message.gradients:
                    total = message.total.as_strided(shape, strides, offset)
                    offset += total.numel()
                    if parameter.grad is None:
                        parameter.grad = total
                    else:
                        parameter.grad.add_(total)
        self._messages.clear()

    def _send(self, gradients: list[tuple[Tensor, Tensor]]) -> None:
        values = [in_memory_order(gradient) for _, gradient in gradients]
        total = values[0] if len(values) == 1 else torch.cat(values)
        forms = [(parameter, gradient.shape, gradient.stride()) for parameter, gradient in gradients]
        self._messages.append(_Message(forms, total, self._begin(total)))
