"""Search for data sets that change their samples when they are read, and for validation samples that are random."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies.guarding.digests import digests
from cnnstrategies.runtime.seeds import restores_random_numbers

DEEPEST = 4  # Number of data sets inside each other that are looked at, such as a Subset's.


def lines_about_samples(train: Any, validations: Any) -> list[str]:
    """Return lines for the user about a run's samples; there are none if nothing is wrong, or if a read fails.

    Only sample 0 of a data set with indices is read. Random numbers of the run are restored.

    Args:
        train: The training loader.
        validations: The validation loader, a list of loaders, or None.
    """
    lines = []
    if changes_itself(getattr(train, "dataset", None)):
        lines.append("samples: reading sample 0 of the training data changes the stored data: copy before you write")
    loaders = [validations] if hasattr(validations, "dataset") else tree_leaves(validations)
    if any(is_random(getattr(loader, "dataset", None)) for loader in loaders):
        lines.append(
            "samples: sample 0 of the validation data has other values each time: give validations their own transform"
        )
    return lines


def changes_itself(dataset: Any) -> bool:
    """Return whether a second read of sample 0 changes a tensor or an array that the data set holds.

    The first read may fill a cache.
    """
    with suppress(Exception), restores_random_numbers():
        dataset[0]
        before = _held(dataset)
        dataset[0]
        return before != _held(dataset)
    return False


def is_random(dataset: Any) -> bool:
    """Return whether two reads of sample 0 give different values."""
    with suppress(Exception), restores_random_numbers():
        first, second = (digests([*_tensors(dataset[0])]).tolist() for _ in range(2))
        return bool(first != second)
    return False


def _held(dataset: Any) -> list[int]:
    """Return the checksums of the tensors and arrays that a data set holds."""
    result: list[int] = []
    for _ in range(DEEPEST):
        values = [value for value in vars(dataset).values() if isinstance(value, Tensor | np.ndarray | list | tuple)]
        result += digests([*_tensors(values)]).tolist()
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            break
    return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value
