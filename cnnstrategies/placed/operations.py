"""Facts about an operation that do not depend on its operands. They are computed once for each operation."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cnnstrategies._torch_private import has_shape_function, is_composite, schema_of
from cnnstrategies.placed.rules import CONDITIONS, HIDDEN_WRITES, Rule, rule_of

# Python evaluates a > b as b < a if the class of b is a subclass of the class of a, such as `ForeignTensor`. Messages
# must have the same subject on all ranks.
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}


class Operation:
    """Facts about an operation.

    Attributes:
        name: Name for messages: the operation's name without the overload, such as ``add_``.
        rule: The operation's rule in the table.
        written: Positions and names of the arguments that the operation writes.
        writes_first_only: Whether the operation only writes its first argument, without a change of shape and without
            random numbers. The operation then does nothing on a rank where the first argument is foreign.
        resizes: Whether the operation writes arguments such as ``out=``, which it may resize.
        is_plain: Whether the operation follows `Rule.COMPUTED` for all arguments, and writes nothing.
        has_lists: Whether the operation runs for each index of its lists, of which the first argument is one.
        is_view: Whether a result is a view of an argument.
        is_composite: Whether the operation consists of other operations.
        returns: For each result, the index in `written` of the argument that is returned; None for a new tensor.
    """

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = schema_of(func)
        self.name: str = func.overloadpacket.__name__
        if self.name in COMPARISONS:
            self.name = "comparison"
        self._has_shapes = has_shape_function(func)
        self.rule = rule_of(func)
        self._condition = CONDITIONS.get(schema.name)
        arguments = [
            (position, argument)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.written = [(position, argument.name) for position, argument in arguments]
        positions = {argument.name: position for position, argument in enumerate(schema.arguments)}
        self._hidden = [(positions[name], name) for name in HIDDEN_WRITES.get(schema.name, ())]
        self._training = positions.get("training", 0)
        self.resizes = any(argument.kwarg_only for _, argument in arguments)
        self.writes_first_only = [position for position, _ in arguments] == [0] and self.rule is Rule.COMPUTED
        self.is_view = any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        self.is_composite = is_composite(func)
        self.is_plain = (
            self.rule is Rule.COMPUTED
            and self._condition is None
            and not (self.is_composite or self.written or self._hidden)
        )
        self.has_lists = self.rule in (Rule.ROWS, Rule.NORMS, Rule.FINITE) and not self.is_composite
        aliases = [argument.alias_info.before_set for _, argument in arguments]
        self.returns = [
            aliases.index(result.alias_info.before_set)
            if result.alias_info is not None and result.alias_info.is_write
            else None
            for result in schema.returns
        ]

    def rule_for(self, args: Any, kwargs: Any) -> Rule:
        """Return the rule for given arguments."""
        if self._condition is not None and not self._condition(args, kwargs):
            return Rule.COMPUTED
        return self.rule

    def asks_shapes(self, rule: Rule) -> bool:
        """Whether the shapes of the results are sent, because they depend on values or torch cannot compute them."""
        return rule is Rule.SHAPES or not (rule is Rule.COMPUTED or self._has_shapes)

    def hidden_values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the arguments that the operation writes, although its schema does not say so."""
        if not self._hidden or not args[self._training]:
            return []
        return [args[position] for position, _ in self._hidden]

    def written_values(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the arguments that the operation writes: tensors, lists of tensors, or None."""
        return [args[position] if position < len(args) else kwargs.get(name) for position, name in self.written]


operation_of = cache(Operation)


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments, which are tensors or flat lists of tensors."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def with_tensors(function: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return an operation's arguments with ``function(tensor)`` in place of each tensor."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, (list, tuple)):
            return [function(item) if isinstance(item, Tensor) else item for item in value]
        return value

    return [replaced(value) for value in args], {name: replaced(value) for name, value in kwargs.items()}
