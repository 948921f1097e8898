"""How the losses of torchvision's detectors depend on the images of a batch, and the number by which they divide."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.ssd import SSD

# How a detector's loss divides a sum over the images of a batch.
# "samples": the loss is a mean over the images.
# "own": the loss divides by the number of foreground anchors of the batch, or by 1 if there are none.
# "unknown": the detector is not one of torchvision's.
LossDivisor = Literal["samples", "own", "unknown"]
# These detectors have a class for the background, so no box has the label 0.
WITH_BACKGROUND = (SSD, FasterRCNN, GeneralizedRCNN)


def divisor_of(network: nn.Module) -> LossDivisor:
    """Return how the loss of a detector divides the sum over a batch's images."""
    if isinstance(network, (RetinaNet, GeneralizedRCNN)):
        return "samples"
    return "own" if isinstance(network, (FCOS, SSD)) else "unknown"


def samples_boxes(network: nn.Module) -> bool:
    """Whether the loss of a detector samples boxes at random, as those of Faster R-CNN and Mask R-CNN do."""
    return isinstance(network, GeneralizedRCNN)


@contextmanager
def counts_foreground(network: nn.Module, counted: list[Tensor]) -> Iterator[None]:
    """Return a context in which the foreground anchors of each call of FCOS or SSD are counted.

    Args:
        network: The detector. In the context, its ``compute_loss`` or that of its head is an attribute of the object.
        counted: List to which the number of each call is appended, a scalar.
    """
    holder = network.head if isinstance(network, FCOS) else network if isinstance(network, SSD) else None
    if holder is None:
        yield
        return
    compute: Callable[..., Any] = holder.compute_loss

    def compute_and_count(
        targets: Any, head_outputs: Any, anchors: Any, matched_idxs: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        foreground = [(indices >= 0).sum() for indices in matched_idxs]
        counted.append(sum(foreground[1:], foreground[0]))
        losses: dict[str, Tensor] = compute(targets, head_outputs, anchors, matched_idxs)
        return losses

    holder.compute_loss = compute_and_count
    try:
        yield
    finally:
        del holder.compute_loss
