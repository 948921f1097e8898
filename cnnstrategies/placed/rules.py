"""The table of rules: what the ranks do if an operation's operands are not on all ranks.

`rule_of` looks an operation up by its name, then by the beginning of its name, then by torch's tags. Operations that
are not in the table follow `Rule.COMPUTED`. Two facts come from an operation's schema and not from this table: which
operands the operation writes (`decision.decide` then chooses the place of these operands), and which results are views.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from cnnstrategies._torch_private import has_shape_function, schema_of


class Rule(Enum):
    """Behaviour of the ranks for an operation whose operands are at a place. "Members" are the ranks of the place."""

    COMPUTED = (
        "members run the operation; on other ranks the result is foreign, and writing a foreign tensor does nothing"
    )
    VALUE = "the first member runs the operation, and sends the result, which is not a tensor, to all other ranks"
    SHAPES = "as COMPUTED, and the first member sends the shapes of the results, because they depend on values"
    DRAWS = "as COMPUTED, and other ranks draw the same number of random numbers, and drop them"
    DRAWS_BY_VALUE = (
        "as COMPUTED, and the first member sends its generator's state, because the values decide how much is drawn"
    )
    RESHAPES = "members run the operation; on other ranks the foreign operand gets the new shape and strides"
    ROWS = "the operation runs for each index of its lists at the place of the tensors with this index"
    NORMS = "as ROWS, and all ranks get the results if the lists have tensors of several places"
    COLLECTIVE = "the group has one process, and the members copy the operands to the results"
    PACKED = "as COMPUTED, and all ranks compute the second result, which torch's layers read from memory"
    EVERYWHERE = "all ranks get the operands and run the operation, because all ranks have sparse tensors"
    FINITE = "as ROWS, and all ranks learn whether any rank's gradients have an element that is not finite"


NAMES: Mapping[str, Rule] = {
    # torch has no tags for these operations, or the tags do not say enough.
    "aten::poisson": Rule.DRAWS_BY_VALUE,
    "aten::binomial": Rule.DRAWS_BY_VALUE,
    "aten::_standard_gamma": Rule.DRAWS_BY_VALUE,
    "aten::_sample_dirichlet": Rule.DRAWS_BY_VALUE,
    "aten::_foreach_norm": Rule.NORMS,
    "aten::_amp_foreach_non_finite_check_and_unscale_": Rule.FINITE,
    "torchvision::nms": Rule.SHAPES,
    "aten::_pack_padded_sequence": Rule.PACKED,
    "aten::_embedding_bag": Rule.SHAPES,  # torch computes other shapes for tensors without values.
    "aten::_sparse_coo_tensor_with_dims_and_tensors": Rule.EVERYWHERE,
    "aten::_to_sparse": Rule.EVERYWHERE,
    "aten::sparse_mask": Rule.EVERYWHERE,
    "aten::_embedding_bag_backward": Rule.EVERYWHERE,
}
PREFIXES: Mapping[str, Rule] = {
    "c10d::": Rule.COLLECTIVE,
    "aten::_foreach_": Rule.ROWS,
    "aten::_fused_sgd": Rule.ROWS,
    "aten::_fused_adam": Rule.ROWS,
    "aten::_fused_adagrad": Rule.ROWS,
}
TAGS: Mapping[torch.Tag, Rule] = {
    torch.Tag.data_dependent_output: Rule.VALUE,
    torch.Tag.dynamic_output_shape: Rule.SHAPES,
    torch.Tag.nondeterministic_seeded: Rule.DRAWS,
    torch.Tag.inplace_view: Rule.RESHAPES,
}


def _indexes_by_mask(args: Any, kwargs: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _has_no_output_size(args: Any, kwargs: Any) -> bool:
    return kwargs.get("output_size") is None


def _gives_sparse_gradient(args: Any, kwargs: Any) -> bool:
    return bool(args[9])


# Operations whose shapes depend on values, or whose results are sparse, for some arguments only. Without these
# conditions, each use would need a message.
CONDITIONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "aten::index": _indexes_by_mask,
    "aten::repeat_interleave": _has_no_output_size,
    "aten::_embedding_bag_backward": _gives_sparse_gradient,
}


# Arguments that an operation writes, although its schema does not say so: the running statistics, if the argument with
# the name "training" is true.
STATISTICS = ("running_mean", "running_var")
HIDDEN_WRITES: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": STATISTICS,
    "aten::cudnn_batch_norm": STATISTICS,
    "aten::miopen_batch_norm": STATISTICS,
}


def rule_of(operation: torch._ops.OpOverload) -> Rule:
    """Return an operation's rule."""
    name = schema_of(operation).name
    if name in NAMES:
        return NAMES[name]
    for prefix, rule in PREFIXES.items():
        if name.startswith(prefix):
            return rule
    for tag, rule in TAGS.items():
        if tag in operation.tags:
            return rule
    return Rule.COMPUTED if has_shape_function(operation) else Rule.SHAPES
