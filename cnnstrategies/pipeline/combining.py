"""Combine what the microbatches' forwards have stored into what one forward of the whole batch would have stored."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.watched import PLAIN, StoredKey

# How a value of a batch follows from the values of the batch's parts.
#   same: all parts have the batch's value
#   mean: mean of the parts' values, weighted by samples
#   sum: sum of the parts' values
#   rows: the parts' rows, concatenated
RuleKind = Literal["same", "mean", "sum", "rows"]
PIECE = 2**15  # Number of elements that are compared at once. The comparison holds several copies of them.


class CombiningRule(NamedTuple):
    """How a stored value of a batch follows from the values that are stored for parts of the batch.

    Attributes:
        kind: The rule.
        accumulates: Whether a forward adds to the value that it finds. Then a sum is a sum of the additions. None if
            the forward neither adds to the value nor overwrites it.
        is_certain: Whether a value with the rule ``same`` does not depend on the samples, so that it cannot begin to
            differ between the parts.
    """

    kind: RuleKind
    accumulates: bool | None = False
    is_certain: bool = False


class StoredValues(NamedTuple):
    """Values that the forward of a batch or of a microbatch has stored, as a flat list.

    Attributes:
        keys: What has been changed, in the order of the changes.
        trees: For each key, the structure of its value.
        leaves: Tensors and plain values in these structures.
    """

    keys: tuple[StoredKey, ...]
    trees: tuple[TreeSpec, ...]
    leaves: list[Any]

    @classmethod
    def of(cls, stored: Mapping[StoredKey, Any]) -> "StoredValues":
        """Return the stored values of a forward; see `StoredWatch.take`."""
        flat = [tree_flatten(_as_tuples(value)) for value in stored.values()]
        return cls(tuple(stored), tuple(tree for _, tree in flat), [leaf for leaves, _ in flat for leaf in leaves])

    @property
    def names(self) -> list[StoredKey]:
        """The key of each leaf."""
        return [key for key, tree in zip(self.keys, self.trees, strict=True) for _ in range(tree.num_leaves)]

    def check_sendable(self) -> None:
        """Check that other ranks can get the values.

        Raises:
            ConfigurationError: They cannot.
        """
        for key, leaf in zip(self.names, self.leaves, strict=True):
            check_sendable(key, [leaf])

    def has_form_of(self, other: "StoredValues") -> bool:
        """Whether the same things have been stored, possibly with other values."""
        return self.keys == other.keys and self.trees == other.trees

    def first_difference(self, other: "StoredValues") -> str:
        """Return the name of something that has another form in other values, if :meth:`has_form_of` is false."""
        names = {*map(str, self.keys)}
        return min(names ^ {*map(str, other.keys)} or names)

    def by_key(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Return other leaves, in a list for each key."""
        remaining = iter(leaves)
        return [[next(remaining) for _ in range(tree.num_leaves)] for tree in self.trees]

    def leaves_of(self, values: Mapping[StoredKey, Any]) -> list[Any]:
        """Return the leaves of other values for the same keys. A leaf is None if the other value has another form."""
        result: list[Any] = []
        for key, expected in zip(self.keys, self.trees, strict=True):
            leaves, tree = tree_flatten(_as_tuples(values.get(key)))
            result += leaves if tree == expected and key in values else [None] * expected.num_leaves
        return result

    def detached(self) -> "StoredValues":
        """Return values for another rank: a pair of a tensor and whether it requires a gradient for each tensor."""
        pairs = [(leaf.detach(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._replace(leaves=pairs)

    def attached(self, device: torch.device) -> "StoredValues":
        """Return another rank's values from the result of :meth:`detached`."""
        leaves = [
            leaf[0].to(device).requires_grad_(leaf[1]) if isinstance(leaf, tuple) else leaf for leaf in self.leaves
        ]
        return self._replace(leaves=leaves)


NO_VALUES = StoredValues((), (), [])


def check_sendable(key: StoredKey, leaves: Sequence[Any]) -> None:
    """Check that other ranks can get what has been stored.

    Raises:
        ConfigurationError: They cannot.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise ConfigurationError(
                f"the network's forward stores an object of the class {type(leaf).__name__} in {key}, which the ranks "
                "of other stages cannot get: store tensors, numbers or texts, or lists and dictionaries of them"
            )


def _as_tuples(value: Any) -> Any:
    """Return a value in which shapes are tuples, because shapes can only contain numbers."""
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_as_tuples, value))
    return value


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference, relative to the largest element, that rounding may cause between two batches.

    The kernels for a batch may add numbers in another order than those for a part of the batch.
    """
    if dtype in (torch.float64, torch.complex128):
        return 1e-9
    if dtype in (torch.float16, torch.bfloat16):
        return 3e-2
    return 1e-2 if device.type == "cuda" else 1e-4


def is_near(value: Any, other: Any, limit: float) -> bool:
    """Whether two numbers or tensors are equal up to rounding."""
    first, second = torch.as_tensor(value), torch.as_tensor(other)
    if first.shape != second.shape:
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second.to(first.dtype))
    if not first.numel():
        return True
    first, second = first.detach(), second.detach().to(first.dtype)
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    size = max(float(torch.nan_to_num(piece.double(), 0, 0, 0).abs().max()) for piece in _pieces(second))
    return all(
        torch.allclose(piece.double(), other.double(), rtol=0, atol=limit * size, equal_nan=True)
        for piece, other in zip(_pieces(first), _pieces(second), strict=True)
    )


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's elements in pieces, because copies of a whole batch's outputs may not fit into memory."""
    rows = torch.chunk(tensor, -(-tensor.numel() // PIECE)) if tensor.ndim else [tensor]
    for some in rows:
        yield from torch.split(some.reshape(-1), PIECE)


def is_same(value: Any, other: Any) -> bool:
    """Whether two leaves are equal, tensors in each bit."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value is other:
            return True
        if value.shape != other.shape or value.dtype != other.dtype:
            return False
        return torch.equal(value.detach(), other.detach())
    return type(value) is type(other) and (value is other or bool(value == other))


def find_rule(
    whole: Any, parts: Sequence[Any], samples: Sequence[int], before: Any, again: Any, limit: float
) -> CombiningRule | None:
    """Return the rule by which a leaf of a batch follows from the leaves of its parts; None if no rule fits.

    Args:
        whole: What one forward of the batch stores.
        parts: What the forwards of the parts store.
        samples: Number of samples in each part.
        before: Value before the forward; None if there was no value, or one of another kind.
        again: What a second forward of the batch stores after the first one; None if it has stored something else.
        limit: See :func:`tolerance`.
    """
    values = [whole, *parts]
    is_sum = adds(whole, before, again, limit)
    if all(is_same(whole, part) for part in parts):
        return CombiningRule("same", is_sum)
    if not all(is_number(value) for value in values):
        return None
    if all(_shape(value) == _shape(whole) for value in parts):
        if _is_floating(whole) and is_near(whole, combine(CombiningRule("mean"), parts, samples, before), limit):
            return CombiningRule("mean", is_sum)
        if is_sum and is_near(whole, combine(CombiningRule("sum", True), parts, samples, before), limit):
            return CombiningRule("sum", True)
        if is_sum is False and is_near(whole, combine(CombiningRule("sum"), parts, samples, before), limit):
            return CombiningRule("sum")
        return None
    is_split = all(
        isinstance(part, Tensor)
        and part.shape[1:] == whole.shape[1:]
        and len(part) * sum(samples) == len(whole) * count
        for part, count in zip(parts, samples, strict=True)
        if _shape(part) and _shape(whole)
    )
    if is_split and _shape(whole) and is_near(whole, combine(CombiningRule("rows"), parts, samples, before), limit):
        return CombiningRule("rows")
    return None


def combine(rule: CombiningRule, values: Sequence[Any], samples: Sequence[int], before: Any) -> Any:
    """Return the whole batch's value of a leaf, without a gradient.

    Args:
        rule: The rule.
        values: The microbatches' values, in order.
        samples: Number of samples of each microbatch.
        before: Value before the forwards, which sums of additions need.
    """
    values = [value.detach() if isinstance(value, Tensor) else value for value in values]
    if rule.kind == "same" or len(values) == 1:
        return values[0]
    if rule.kind == "rows":
        return torch.cat(values)
    if rule.kind == "mean":
        total = sum(samples)
        return sum(value * (count / total) for value, count in zip(values, samples, strict=True))
    if rule.accumulates:
        before = 0 if before is None else before
        return before + sum(value - before for value in values)
    return sum(values[1:], values[0])


def gradient_of_part(rule: CombiningRule, gradient: Tensor, rows: BatchRows, microbatch: int) -> Tensor | None:
    """Return the gradient of a microbatch's value, from the gradient of the whole batch's value; None if it is zero.

    Args:
        rule: The rule.
        gradient: The gradient of the combined value.
        rows: The rows of the batch that each microbatch contains.
        microbatch: The microbatch.
    """
    match rule.kind:
        case "same":
            return gradient if microbatch == 0 else None
        case "mean":
            return gradient * (rows.sizes[microbatch] / rows.samples)
        case "sum":
            return gradient
        case "rows":
            return rows.of_microbatch(gradient, microbatch)


def is_number(value: Any) -> bool:
    """Whether a leaf is a tensor, or a number but not a truth value."""
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_floating(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else torch.Size(())


def adds(whole: Any, before: Any, again: Any, limit: float) -> bool | None:
    """Whether a forward adds to the value that it finds; None if it neither adds to the value nor overwrites it.

    Args:
        whole: Value after a forward.
        before: Value before the forward; None if there was no value.
        again: Value after a second forward; None if the second forward has stored something else.
        limit: See :func:`tolerance`.
    """
    before = 0 if before is None else before
    if not (is_number(whole) and is_number(before) and is_number(again)):
        return False
    if _shape(whole) != _shape(again) or _shape(before) not in (_shape(whole), torch.Size(())):
        return False
    whole, before, again = (torch.as_tensor(value).detach() for value in (whole, before, again))
    if torch.bool in (whole.dtype, before.dtype, again.dtype) or torch.equal(whole, again):
        return False
    return True if is_near(again - whole, whole - before, limit) else None
