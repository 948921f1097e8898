"""Run an operation with divided tensors: by its rule, or on all ranks with all rows."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cnnstrategies._torch_private import schema_of
from cnnstrategies.placed.call_site import call_site
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.placed.operations import with_tensors
from cnnstrategies.spatial.rows_tensor import Origin, RowsTensor, rows_in
from cnnstrategies.spatial.rules import Rule, rule_of

if TYPE_CHECKING:
    from cnnstrategies.spatial.parts import SpatialParts


class OperationFacts:
    """Facts about an operation that do not depend on its operands.

    Attributes:
        name: Name for messages.
        rule: The operation's rule; None if all ranks run it with all rows.
        written: Positions and names of the arguments that the operation writes.
        is_view: Whether the result is a view of the first argument.
        arguments: Names and defaults of the operation's arguments.
    """

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        self.name: str = func.overloadpacket.__name__
        self.rule: Rule | None = rule_of(func)
        self.written = [
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.is_view = any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        self.names = [argument.name for argument in schema.arguments]
        self.defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def written_values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the arguments that the operation writes: tensors, lists of tensors, or None."""
        return [args[position] if position < len(args) else kwargs.get(name) for position, name in self.written]

    def bound(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return all arguments by name."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}


facts_of: Callable[[Any], OperationFacts] = cache(OperationFacts)


def run(parts: "SpatialParts", func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, of which some operands are divided."""
    facts = facts_of(func)
    parts.operation = facts.name
    operands = list(rows_in(args, kwargs))
    written = list(rows_in(facts.written_values(args, kwargs), {})) if facts.written else []
    viewed, call = (args[0], (func, args[1:], kwargs)) if facts.is_view else (None, None)
    if any(tensor.origin is not None for tensor in operands):
        for tensor in operands:
            refresh(parts, tensor)
        args, kwargs = with_tensors(_without_origin, args, kwargs)
        operands = list(rows_in(args, kwargs))
    result = NotImplemented if operands else func(*args, **kwargs)
    if operands and facts.rule is not None:
        result = facts.rule(parts, func, facts.bound(args, kwargs))
    if result is NotImplemented:
        result = _run_whole(parts, func, facts, operands, args, kwargs)
    else:
        result = _mapped(parts.with_enough_rows, result)
    for tensor in written:
        tensor.memory.writes += 1
        write_through(parts, tensor)
        if result is tensor.rows:
            result = tensor
    if type(viewed) is not RowsTensor:
        return result
    if isinstance(result, Tensor):
        return with_origin(parts, viewed, result, call, 0)
    return [with_origin(parts, viewed, view, call, index) for index, view in enumerate(result)]


def _without_origin(tensor: Tensor) -> Tensor:
    """Return a plain tensor for a copy that all ranks have."""
    return tensor.rows if type(tensor) is RowsTensor and tensor.row_layout is None else tensor


def _run_whole(
    parts: "SpatialParts", func: Any, facts: OperationFacts, operands: list[RowsTensor], args: Any, kwargs: Any
) -> Any:
    """Run an operation on all ranks with all rows."""
    wholes = {id(tensor): parts.gather(tensor, facts.name) for tensor in operands}
    whole_args, whole_kwargs = with_tensors(lambda tensor: wholes.get(id(tensor), tensor), args, kwargs)
    result = func(*whole_args, **whole_kwargs)
    for tensor in rows_in(facts.written_values(args, kwargs), {}):
        if wholes[id(tensor)].shape != tensor.shape:
            raise RefusedError(f"{facts.name} at {call_site()} changes the shape of {tensor!r}: use a new tensor")
        assert tensor.row_layout is not None
        tensor.rows.copy_(parts.take(wholes[id(tensor)], tensor.row_layout))
    originals = {id(wholes[id(tensor)]): tensor for tensor in operands}

    def returned(tensor: Tensor) -> Tensor:
        return originals[id(tensor)] if id(tensor) in originals else _divided_again(parts, operands[0], tensor)

    return _mapped(returned, result)


def _divided_again(parts: "SpatialParts", operand: RowsTensor, whole: Tensor) -> Tensor:
    """Return a result, divided as an operand if it has as many elements there."""
    layout = operand.row_layout
    assert layout is not None
    if whole.dim() != operand.dim() or whole.shape[layout.axis] != operand.shape[layout.axis]:
        return whole
    return RowsTensor.create(parts, parts.take(whole, layout).clone(), layout)


def _mapped(function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Return an operation's results with ``function(tensor)`` in place of each tensor."""
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, (list, tuple)):
        return type(result)(_mapped(function, item) for item in result)
    return result


def with_origin(parts: "SpatialParts", base: RowsTensor, view: Tensor, call: Any, index: int) -> Tensor:
    """Return the result of an operation that returns a view on one device.

    Args:
        parts: The rules of this rank.
        base: The tensor of which the result is a view.
        view: The result.
        call: The operation, its arguments after the first one, and its named arguments.
        index: Index of the result, if the operation returns several.
    """
    if type(view) is RowsTensor and view.memory is base.memory and base.origin is None:
        return view
    rows, layout = (view.rows, view.row_layout) if type(view) is RowsTensor else (view, None)
    return RowsTensor.create(parts, rows, layout, origin=Origin(base, call, index, base.memory.writes))


def refresh(parts: "SpatialParts", tensor: RowsTensor) -> None:
    """Take a copy again if its tensor has been written since."""
    origin = tensor.origin
    if origin is None:
        return
    refresh(parts, origin.base)
    if origin.writes != origin.base.memory.writes:
        view = _replayed(origin, origin.base)
        tensor.rows = view.rows if type(view) is RowsTensor else view
        origin.writes = origin.base.memory.writes
        tensor.memory.writes += 1


def write_through(parts: "SpatialParts", tensor: RowsTensor) -> None:
    """Write the values of a copy to the tensor of which it would be a view."""
    origin = tensor.origin
    if origin is None:
        return
    base = origin.base
    whole = parts.gather(base, "a write across rows")
    _replayed(origin, whole).copy_(parts.gather(tensor, "a write across rows"))
    if base.row_layout is not None:
        base.rows.copy_(parts.take(whole, base.row_layout))
    base.memory.writes += 1
    write_through(parts, base)
    origin.writes = base.memory.writes


def _replayed(origin: Origin, base: Tensor) -> Tensor:
    func, args, kwargs = origin.call
    result = func(base, *args, **kwargs)
    view: Tensor = result[origin.index] if isinstance(result, (list, tuple)) else result
    return view
