"""Gradients whose sums over a place are computed when the program needs them, compared with one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.placed import Places
from tests.placed.placements import compare
from tests.placed.turns import on_ranks

pytestmark = pytest.mark.light
PLACE = (0, 2)
SHARES = {0: 0.25, 2: 0.75}
Function = Callable[[Tensor], Tensor]


class Program:
    """One of the programs, with a function of a tensor whose gradient is computed in parts."""

    def __init__(self, places: Places | None) -> None:
        self.places = places
        self.sums: list[int] = []  # Number of tensors in each sum that was computed.
        weight = torch.arange(1.0, 7, dtype=torch.float64).reshape(2, 3)
        other = torch.ones(3, dtype=torch.float64)
        self.weight, self.other = (
            tensor if places is None else places.give(tensor, PLACE) for tensor in (weight, other)
        )
        self.weight.requires_grad_()
        self.other.requires_grad_()
        if places is not None:
            places.sums.watch(self)

    @property
    def parameters(self) -> list[Any]:
        return [self.weight, self.other]

    def add_up(self, tensors: Any) -> None:
        assert self.places is not None
        self.sums.append(len(tensors))
        for tensor in tensors:
            parts = self.places.exchange(tensor.clone(), PLACE, "sum")
            tensor.copy_(torch.stack(parts).sum(0))

    def value(self) -> Tensor:
        """Return the sum of the weight's squares, and of the other parameter."""
        return InParts.apply(self, self.weight, self.other)


class InParts(torch.autograd.Function):
    """A function whose gradients are sums of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, program: Program, weight: Tensor, other: Tensor) -> Tensor:
        ctx.program = program
        ctx.save_for_backward(weight, other)
        return weight.square().sum() + other.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, other = ctx.saved_tensors
        program, whole = ctx.program, [2 * weight * gradient, torch.ones_like(other) * gradient]
        if program.places is None or program.places.rank not in PLACE:
            return None, *whole
        with program.places.local():
            parts = [part * SHARES[program.places.rank] for part in whole]
            return None, *(program.places.sums.defer(part, PLACE, program.add_up) for part in parts)


def accumulated(program: Program) -> Any:
    for _ in range(3):
        program.value().backward()
    assert program.weight.grad is not None
    assert program.other.grad is not None
    return program.weight.grad * 1, program.other.grad * 1


def twice_in_a_step(program: Program) -> Any:
    (program.value() + 2 * program.value()).backward()
    return accumulated(program)


def with_a_penalty(program: Program) -> Any:
    for _ in range(2):
        (program.value() + program.weight.pow(3).sum() + program.other.mean()).backward()
    return accumulated(program)


def read_between(program: Program) -> Any:
    values = []
    for _ in range(2):
        program.value().backward()
        assert program.weight.grad is not None
        values.append(program.weight.grad.norm().item())
        values.append(program.weight.grad.tolist())
    return *values, program.weight.grad * 1


def hooked(program: Program) -> Any:
    program.weight.register_hook(lambda gradient: gradient.clamp(max=5))
    return accumulated(program)


def kept(program: Program) -> Any:
    seen: list[Tensor] = []
    program.weight.register_hook(seen.append)
    result = accumulated(program)
    return *result, *(gradient * 1 for gradient in seen), seen[0][1, 1:] * 1


def set_to_zero(program: Program) -> Any:
    program.value().backward()
    for parameter in program.parameters:
        parameter.grad.zero_()
    return accumulated(program)


def changed_between(program: Program) -> Any:
    program.value().backward()
    assert program.weight.grad is not None
    program.weight.grad.clamp_(max=5)
    return accumulated(program)


def copied(program: Program) -> Any:
    program.value().backward()
    assert program.weight.grad is not None
    copy, row = program.weight.grad.clone(), program.weight.grad[1]
    return copy * 1, row * 1, *accumulated(program)


def data_replaced(program: Program) -> Any:
    program.value().backward()
    assert program.weight.grad is not None
    program.weight.data = program.weight.grad
    return (program.weight.detach() * 1, program.weight.grad * 1)


def normed(program: Program) -> Any:
    program.value().backward()
    norm = nn.utils.clip_grad_norm_(program.parameters, 1.0)
    return norm.item(), *accumulated(program)


# The programs, and how often sums are computed.
PROGRAMS: dict[Callable[[Program], Any], int] = {
    accumulated: 1,
    twice_in_a_step: 1,
    with_a_penalty: 1,
    read_between: 2,
    set_to_zero: 2,
    changed_between: 2,
    normed: 2,
}


@pytest.mark.parametrize("function", [*PROGRAMS, hooked, kept, copied, data_replaced], ids=lambda f: f.__name__)
def test_sums_are_computed_when_they_are_needed(function: Callable[[Program], Any]) -> None:
    expected = function(Program(None))

    def on_rank(places: Places) -> list[int]:
        program = Program(places)
        compare(places, function(program), expected)
        return program.sums

    first, elsewhere, second = on_ranks(3, on_rank)
    assert first == second
    assert not elsewhere
    if function in PROGRAMS:
        assert len(first) == PROGRAMS[function], "parameters share a sum"


def test_copies_that_differ_do_not_make_sums_differ() -> None:
    """On a GPU, copies of a loss may differ in the last bit. Only the first copy's gradient is added to a sum."""

    def on_rank(places: Places) -> list[Any]:
        program = Program(places)
        factor = places.give(torch.full((), 1.0 + places.rank, dtype=torch.float64), PLACE)
        (program.value() + factor * program.weight.sum()).backward()
        assert program.weight.grad is not None
        total = program.weight.grad * 1
        with places.local():
            return total.tolist() if places.rank in PLACE else []

    first, _, second = on_ranks(3, on_rank)
    assert first == second == [[3.0, 5.0, 7.0], [9.0, 11.0, 13.0]]
