"""Combine what the microbatches' forwards have stored into what one forward of the whole batch would have stored."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from cnnstrategies.pipeline.stored import StoredKey

# How a value of a batch follows from the values of the batch's parts.
#   same: all parts have the batch's value
#   mean: mean of the parts' values, weighted by samples
#   sum: sum of the parts' values
#   rows: the parts' rows, concatenated
RuleKind = Literal["same", "mean", "sum", "rows"]


class Rule(NamedTuple):
    """How a stored value of a batch follows from the values that are stored for parts of the batch.

    Attributes:
        kind: The rule.
        accumulates: Whether a forward adds to the value that it finds. Then a sum is a sum of the additions.
        is_certain: Whether a value with the rule ``same`` does not depend on the samples, so that it cannot begin to
            differ between the parts.
    """

    kind: RuleKind
    accumulates: bool = False
    is_certain: bool = False


class StoredValues(NamedTuple):
    """What the forward of a batch or of a microbatch has stored, as a flat list.

    Attributes:
        keys: What has been changed, in the order of the changes.
        tree: Structure of the list of the keys' values.
        leaves: Tensors and plain values in this structure.
    """

    keys: tuple[StoredKey, ...]
    tree: TreeSpec
    leaves: list[Any]

    @classmethod
    def of(cls, stored: Mapping[StoredKey, Any]) -> "StoredValues":
        """Return the stored values of a forward; see `StoredWatch.take`."""
        leaves, tree = tree_flatten([_as_tuples(value) for value in stored.values()])
        return cls(tuple(stored), tree, leaves)

    @property
    def names(self) -> list[StoredKey]:
        """The key of each leaf."""
        counts = [child.num_leaves for child in self.tree.children_specs]
        return [key for key, count in zip(self.keys, counts, strict=True) for _ in range(count)]

    def has_form_of(self, other: "StoredValues") -> bool:
        """Whether the same things have been stored, possibly with other values."""
        return self.keys == other.keys and self.tree == other.tree

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

    def items(self, leaves: Sequence[Any]) -> list[tuple[StoredKey, Any]]:
        """Return the keys with values that are built from other leaves."""
        return list(zip(self.keys, tree_unflatten(leaves, self.tree), strict=True))

    def leaves_of(self, values: Mapping[StoredKey, Any]) -> list[Any]:
        """Return the leaves of other values for the same keys. A leaf is None if the other value has another form."""
        result: list[Any] = []
        for key, child in zip(self.keys, self.tree.children_specs, strict=True):
            leaves, tree = tree_flatten(_as_tuples(values.get(key)))
            result += leaves if tree == child and key in values else [None] * child.num_leaves
        return result


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
    first, second = first.double(), second.double()
    size = torch.nan_to_num(second, 0, 0, 0).abs().max()
    return torch.allclose(first, second, rtol=0, atol=limit * float(size), equal_nan=True)


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
) -> Rule | None:
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
    accumulates = _accumulates(whole, before, again, limit)
    if all(is_same(whole, part) for part in parts):
        return Rule("same", accumulates)
    if not all(is_number(value) for value in values):
        return None
    if all(_shape(value) == _shape(whole) for value in parts):
        if _is_floating(whole) and is_near(whole, combine(Rule("mean"), parts, samples, before), limit):
            return Rule("mean", accumulates)
        if accumulates and is_near(whole, combine(Rule("sum", True), parts, samples, before), limit):
            return Rule("sum", True)
        if not accumulates and is_near(whole, combine(Rule("sum"), parts, samples, before), limit):
            return Rule("sum")
        return None
    is_split = all(
        isinstance(part, Tensor)
        and part.shape[1:] == whole.shape[1:]
        and len(part) * sum(samples) == len(whole) * count
        for part, count in zip(parts, samples, strict=True)
        if _shape(part) and _shape(whole)
    )
    if is_split and _shape(whole) and is_near(whole, combine(Rule("rows"), parts, samples, before), limit):
        return Rule("rows")
    return None


def combine(rule: Rule, values: Sequence[Any], samples: Sequence[int], before: Any) -> Any:
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


def gradient_of_part(rule: Rule, gradient: Tensor, sizes: Sequence[int], microbatch: int) -> Tensor | None:
    """Return the gradient of a microbatch's value, from the gradient of the whole batch's value; None if it is zero.

    Args:
        rule: The rule.
        gradient: The gradient of the combined value.
        sizes: Number of samples of each microbatch.
        microbatch: The microbatch.
    """
    match rule.kind:
        case "same":
            return gradient if microbatch == 0 else None
        case "mean":
            return gradient * (sizes[microbatch] / sum(sizes))
        case "sum":
            return gradient
        case "rows":
            per_sample = len(gradient) // sum(sizes)
            start = sum(sizes[:microbatch])
            return gradient[start * per_sample : (start + sizes[microbatch]) * per_sample]


def is_number(value: Any) -> bool:
    """Whether a leaf is a tensor, or a number but not a truth value."""
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_floating(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else torch.Size(())


def _accumulates(whole: Any, before: Any, again: Any, limit: float) -> bool:
    """Whether a second forward adds to a value as much as the first one did."""
    before = 0 if before is None else before
    if not (is_number(whole) and is_number(before) and is_number(again)):
        return False
    if _shape(whole) != _shape(again) or _shape(before) not in (_shape(whole), torch.Size(())):
        return False
    whole, before, again = (torch.as_tensor(value).detach() for value in (whole, before, again))
    if torch.bool in (whole.dtype, before.dtype, again.dtype):
        return False
    return not torch.equal(whole, again) and is_near(again - whole, whole - before, limit)
