"""Search for batches whose images are all equal, and for classes that are the same in all batches."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from cnnstrategies._torch_private import class_targets
from cnnstrategies.recording.steps import StepReader

RECORDED = 4  # Number of batches after a check that are looked at.
SMALLEST = 8  # Smallest number of samples in a batch that is looked at.
TARGETS = 256  # Smallest number of equal targets that are named.


class ConstantBatches(StepReader):
    """Flags of the first batches after a check, which stay on their devices until they are read.

    Targets count only if a loss of classes gets them, because many trainings do not use the classes of their data.
    """

    def __init__(self) -> None:
        self._equal: list[Tensor] = []  # Whether all images of a batch are equal.
        self._limits: list[Tensor] = []  # Smallest and largest target of a batch.
        self._targets: Tensor | None = None  # Targets of the current batch.
        self._count = 0  # Number of targets since the start of the run.
        self._classes: set[int] = set()  # Some of these targets.
        self._asks = False  # Whether the next loss shows whether it gets the targets.
        self._is_used = False  # Whether it does.

    @override
    def begin_batch(self, batch: Any, index: int) -> None:
        """Record a batch, if it is one of the first and large enough."""
        self._targets = None
        if len(self._equal) == RECORDED:
            return
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        if not leaves or leaves[0].dim() < 3 or len(leaves[0]) < SMALLEST:
            return
        images, targets = leaves[0], leaves[1] if len(leaves) > 1 else leaves[0]
        self._equal.append((images == images[:1]).all())
        if targets.dtype is torch.int64 and targets.shape[:1] == images.shape[:1]:
            self._targets = targets
            self._limits += [targets.min(), targets.max()]
            self._count += targets.numel()

    @override
    def before_backward(self, loss: Any) -> None:
        """Find out whether a loss of classes gets the batch's targets, if that matters."""
        if self._asks and self._targets is not None:
            self._asks = False
            self._is_used = any(used.data_ptr() == self._targets.data_ptr() for used in class_targets(loss))

    def take(self) -> tuple[bool, int]:
        """Return whether all images are equal in each recorded batch, and the number of targets if all are equal.

        The number is 0 if targets differ, are few, or are not known to be used.
        """
        are_equal = len(self._equal) == RECORDED and bool(torch.stack(self._equal).all())
        if self._limits and len(self._classes) < 2:
            self._classes.update(torch.stack(self._limits).tolist())
        is_single = len(self._classes) == 1 and self._count >= TARGETS
        self._asks = is_single and not self._is_used
        self._equal, self._limits = [], []
        return are_equal, self._count if is_single and self._is_used else 0
