"""Predictions of a module whose steps run on every rank with the whole batch: rank 0 gets them, and only once."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed import Places
from cnnstrategies.strategies.batch_form import put_together, take_apart
from cnnstrategies.strategies.joined_parts import count_samples, first_rows


def predictions_on_rank_zero(places: Places, predictions: Any) -> Any:
    """Return the result of a ``predict_step``, on rank 0 with the values of all tensors. All ranks must call this.

    Lightning's writers write the predictions of all ranks, so other ranks get the result for a batch without samples.
    Code that only some ranks run may read the returned tensors, because the rules for placed tensors do not apply to
    them.

    Args:
        places: The rules of this rank.
        predictions: The result, possibly in nested containers.
    """
    try:
        plain = take_apart(predictions, lambda tensor, _: tensor.detach())
    except ConfigurationError:  # The result contains an object that cannot be sent, such as an image of PIL.
        plain = None
    form = predictions if plain is None else plain
    tensors = [leaf for leaf in tree_leaves(form) if isinstance(leaf, Tensor)]
    copies = places.bring_all(tensors, (0,), "predictions")

    def unmarked(tensor: Tensor) -> Tensor:
        return copies.get(id(tensor), tensor).clone()

    with places.local():
        if places.rank == 0:
            form = tree_map_only(Tensor, unmarked, form)
        else:
            # Items of lists may belong to samples as well.
            form = form if plain is None else first_rows(plain, count_samples(plain), 0)
            form = tree_map_only(Tensor, _without_rows, form)
    return form if plain is None else put_together(form)


def _without_rows(tensor: Tensor) -> Tensor:
    return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
