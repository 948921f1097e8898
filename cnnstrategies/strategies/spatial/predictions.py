"""Predictions of a group of ranks, which its first rank has with all rows, and the other ranks without samples."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.batch_form import put_together, take_apart
from cnnstrategies.strategies.joined_parts import count_samples, first_rows
from cnnstrategies.strategies.spatial.groups import ImageGroups
from cnnstrategies.strategies.spatial.replicas import whole_tensor


def predictions_of_group(groups: ImageGroups, predictions: Any) -> Any:
    """Return the result of a ``predict_step``, on the first rank of a group with whole maps.

    Lightning's writers write the predictions of all ranks, so other ranks get the result for a batch without samples.
    All ranks of the group must call this.

    Args:
        groups: The groups of ranks.
        predictions: The result, possibly in nested containers.
    """

    def whole(tensor: Tensor) -> Tensor:
        return whole_tensor(tensor.detach(), "predictions")

    try:
        form = take_apart(predictions, lambda tensor, _: whole(tensor))
    except ConfigurationError:  # The result contains an object without a form, such as an image of PIL.
        return tree_map_only(Tensor, whole, predictions)
    if groups.part:
        form = first_rows(form, count_samples(form), 0)
    return put_together(form)
