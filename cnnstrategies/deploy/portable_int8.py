"""The graph of an int8 network in torch's own operators, so that loading it needs torch alone.

Quantising and dequantising are operators that torchao brings; here they become what they compute. Weights stay int8.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.fx import GraphModule


def in_own_operators(graph: "GraphModule") -> "GraphModule":
    """Replace the operators that torchao brings."""
    replaced = {
        torch.ops.quantized_decomposed.quantize_per_tensor.default: _quantize,
        torch.ops.quantized_decomposed.dequantize_per_tensor.default: _dequantize,
        torch.ops.quantized_decomposed.dequantize_per_channel.default: _dequantize_channels,
    }
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in replaced:
            node.target = replaced[node.target]
    graph.recompile()
    return graph


def _quantize(values: Tensor, scale: float, zero: int, least: int, most: int, dtype: torch.dtype) -> Tensor:
    return torch.clamp(torch.round(values * (1.0 / scale)) + zero, least, most).to(dtype)


def _dequantize(values: Tensor, scale: float, zero: int, least: int, most: int, dtype: torch.dtype) -> Tensor:
    return (values.to(torch.float32) - zero) * scale


def _dequantize_channels(
    values: Tensor, scales: Tensor, zeros: Tensor | None, axis: int, least: int, most: int, dtype: torch.dtype
) -> Tensor:
    shape = [-1 if dimension == axis else 1 for dimension in range(values.dim())]
    result = values.to(torch.float32)
    if zeros is not None:
        result = result - zeros.reshape(shape)
    return result * scales.reshape(shape)
