"""Comparison of a function of divided tensors with the same function on one process."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.spatial import RowsTensor, SpatialParts
from tests.placed.turns import generator_states, set_generators
from tests.spatial.parts_in_turn import on_parts


def differentiable(tensor: Tensor) -> Tensor:
    """Return a leaf with the values of a tensor."""
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def results_and_gradients(function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the results of a function of tensors, and the gradients of a weighted sum of these results."""
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    results = function(*tensors)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    total: Any = 0.0
    for result in results:
        if result.requires_grad:
            total = (
                total + (result * torch.linspace(1, 2, result.numel(), dtype=torch.float64).view(result.shape)).sum()
            )
    gradients = torch.autograd.grad(total, leaves, materialize_grads=True) if isinstance(total, Tensor) else []
    return results, list(gradients)


def check(function: Callable[..., Any], inputs: Sequence[Tensor], axes: Sequence[int | None], count: int) -> set[str]:
    """Check that all ranks get the results and gradients of one process. Return the operations that gathered rows.

    Args:
        function: A function of tensors that returns a tensor or several tensors.
        inputs: The tensors.
        axes: For each tensor, the dimension that is divided, or None for a tensor that all ranks have.
        count: Number of ranks.
    """
    state = generator_states()
    expected = results_and_gradients(function, [differentiable(tensor) for tensor in inputs])
    set_generators(state)

    def main(parts: SpatialParts) -> Any:
        tensors = [
            differentiable(tensor) if axis is None else parts.scatter(tensor, axis)
            for tensor, axis in zip(inputs, axes, strict=True)
        ]
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
        results, gradients = results_and_gradients(function, tensors)
        gathered = {operation for operation, _ in parts.gathers}
        strides = [tensor.stride() for tensor in (*results, *gradients)]
        values = [[parts.gather(tensor.detach(), "test") for tensor in group] for group in (results, gradients)]
        return values, gathered, strides

    reports = on_parts(count, main)
    # torch chooses operations by strides, and all ranks must run the same ones.
    assert all(strides == reports[0][2] for _, _, strides in reports)
    for groups, _, _ in reports:
        for group, wanted in zip(groups, expected, strict=True):
            magnitudes = [
                float(tensor.detach().abs().max()) for tensor in wanted if tensor.is_floating_point() and tensor.numel()
            ]
            for tensor, expected_tensor in zip(group, wanted, strict=True):
                assert type(tensor) is Tensor
                bound = 1e-12 * max(magnitudes, default=1.0)
                torch.testing.assert_close(tensor, expected_tensor.detach(), rtol=1e-12, atol=max(bound, 1e-12))
    return set(reports[0][1])


def check_training(
    network: nn.Module, images: Tensor, targets: Tensor, loss: Callable[..., Tensor], count: int, has_maps: bool
) -> set[tuple[str, str]]:
    """Check loss, gradients and buffers of a network after a backward. Return what was gathered, and where."""
    single = copy.deepcopy(network)
    expected = loss(single(images), targets)
    torch.autograd.backward(expected)
    networks = [copy.deepcopy(network) for _ in range(count)]

    def main(parts: SpatialParts) -> Any:
        outputs = networks[parts.rank](parts.scatter(images, -2))
        assert isinstance(outputs, RowsTensor) == has_maps
        value = loss(outputs, parts.scatter(targets, -2) if has_maps else targets)
        torch.autograd.backward(value)
        return value.detach(), set(parts.gathers)

    scale = max(float(parameter.grad.abs().max()) for parameter in single.parameters() if parameter.grad is not None)
    reports = on_parts(count, main)
    for (value, _), divided in zip(reports, networks, strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        for (name, parameter), expected_parameter in zip(divided.named_parameters(), single.parameters(), strict=True):
            assert type(parameter.grad) is Tensor, name
            torch.testing.assert_close(
                parameter.grad, expected_parameter.grad, rtol=1e-12, atol=1e-12 * scale, msg=name
            )
        for (name, buffer), single_buffer in zip(divided.named_buffers(), single.buffers(), strict=True):
            torch.testing.assert_close(buffer, single_buffer, rtol=1e-12, atol=1e-12, msg=name)
    return set(reports[0][1])
