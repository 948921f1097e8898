"""Run a program with its tensors at places, and compare it with the same program on one device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.placed import ForeignTensor, Place, Places
from tests.placed.turns import on_ranks

Program = Callable[..., Any]


def place_all(places: Places, value: Any, at: Sequence[Place]) -> Any:
    """Return nested containers with each tensor at a place. The places repeat if there are more tensors."""
    count = iter(range(1_000_000))

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = at[next(count) % len(at)]
        requires_grad = leaf.requires_grad
        tensor = leaf.detach().clone()
        if place is not None:
            tensor = places.give(tensor, place)
        return tensor.requires_grad_(requires_grad)

    return tree_map(placed, value)


def check(program: Program, operands: Any, at: Sequence[Place], world_size: int = 3, strides: bool = True) -> None:
    """Check that a program gives on all ranks what it gives on one device.

    Ranks that have a tensor must have its values, and other ranks its class, shape, strides and dtype. Other values
    must be equal on all ranks, and so must the state of the random number generator after the program.

    Args:
        program: Function of the operands, which it may change.
        operands: Nested containers of tensors and other values; the program gets one argument for each item.
        at: Places of the tensors.
        world_size: Number of ranks.
        strides: Whether strides are compared.
    """
    state = torch.get_rng_state()
    expected_operands = tree_map(
        lambda leaf: (
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else copy.deepcopy(leaf)
        ),
        operands,
    )
    expected = program(*expected_operands)
    after = torch.get_rng_state()
    torch.set_rng_state(state)

    def on_rank(places: Places) -> None:
        arguments = place_all(places, operands, at)
        results = program(*arguments)
        assert torch.equal(torch.get_rng_state(), after), "the generator has another state than on one device"
        compare(places, results, expected, strides)
        compare(places, arguments, expected_operands, strides)

    on_ranks(world_size, on_rank)
    torch.set_rng_state(after)


def compare(places: Places, results: Any, expected: Any, strides: bool = True) -> None:
    """Compare results on one rank with those of one device."""
    leaves, wanted = tree_leaves(results), tree_leaves(expected)
    assert len(leaves) == len(wanted), f"{results} and {expected}"
    for result, value in zip(leaves, wanted, strict=True):
        if not isinstance(value, Tensor):
            assert type(result) is type(value), f"{result} and {value}"
            assert result == value or (result != result and value != value), f"{result} and {value}"
            continue
        place = places.place_of(result)
        assert isinstance(result, ForeignTensor) == (place is not None and places.rank not in place)
        assert isinstance(result, torch.nn.Parameter) == isinstance(value, torch.nn.Parameter)
        assert (result.shape, result.dtype) == (value.shape, value.dtype), f"{result.shape} and {value.shape}"
        assert result.requires_grad == value.requires_grad
        if strides:
            assert result.stride() == value.stride(), f"strides {result.stride()} and {value.stride()}"
        if not isinstance(result, ForeignTensor):
            with places.local():
                torch.testing.assert_close(
                    result.detach(), value.detach(), rtol=1e-12, atol=1e-12, equal_nan=True, check_stride=False
                )
        if value.grad is not None:
            assert result.grad is not None
            compare(places, result.grad, value.grad, strides=False)
