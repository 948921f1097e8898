"""Which tensors of a batch are divided: images, and targets with a value for each pixel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed.runner import CPU
from cnnstrategies.spatial import SpatialParts
from cnnstrategies.strategies.batch_form import put_together, sendable, take_apart

IMAGE = 4, 5  # Numbers of dimensions of a batch of images (N, C, H, W), and of volumes (N, C, D, H, W).
AXIS_NAMES = {-1: "width", -2: "height", -3: "depth"}
# Dtypes of tensors that may be divided.
_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip


class DividedTensor(NamedTuple):
    """Takes the place of a divided tensor in a message.

    Attributes:
        number: Number of the tensor among the divided tensors of the batch.
    """

    number: int


class PartedBatch(NamedTuple):
    """A batch without its divided tensors, which follow in messages of their own.

    Attributes:
        form: The batch as `take_apart` returns it.
        axis: The dimension that is divided, counted from the last one; 0 if no tensor is divided.
        divided: Number of divided tensors.
    """

    form: Any
    axis: int
    divided: int


def check_axis(axis: int | None) -> None:
    """Refuse an axis that images do not have.

    Raises:
        ConfigurationError: The axis is not a negative number of a dimension of images or volumes.
    """
    if axis is not None and axis not in AXIS_NAMES:
        raise ConfigurationError(
            f"axis={axis}: count dimensions of images from the last one: -1 is the width, -2 the height and -3 the "
            "depth of volumes; leave axis out to divide the longest dimension"
        )


def part_batch(batch: Any, axis: int | None) -> tuple[PartedBatch, list[Tensor]]:
    """Take a batch apart, and return its form and its divided tensors.

    Args:
        batch: The batch of a loader.
        axis: The dimension of the images that is divided; None for the longest one.

    Raises:
        ConfigurationError: A value of the batch cannot be sent, or images do not have the axis.
    """
    tensors: list[Tensor] = []

    def noted(tensor: Tensor, path: str) -> Tensor:
        tensors.append(sendable(tensor, path))
        return tensor

    form = take_apart(batch, noted)
    images = [tensor for tensor in tensors if is_image(tensor)]
    if not images:
        return PartedBatch(form, 0, 0), []
    axis = divided_axis(images[0].shape, axis)
    sizes = {size for image in images if len(size := tuple(image.shape[2:])) >= -axis}
    divided: list[Tensor] = []

    def placed(tensor: Tensor, _: str) -> Tensor | DividedTensor:
        if not _has_pixels(tensor, sizes):
            return tensor
        divided.append(tensor)
        return DividedTensor(len(divided) - 1)

    form = take_apart(batch, placed)
    return PartedBatch(form, axis, len(divided)), divided


def join_batch(parts: SpatialParts, parted: PartedBatch, divided: Sequence[Tensor] | None, pins: bool) -> Any:
    """Return the batch, in which this rank has its rows of the divided tensors. All ranks of a group must call this.

    Args:
        parts: The divided tensors of this rank's group.
        parted: The batch without the divided tensors.
        divided: The divided tensors on the rank that has loaded the batch, which is the first one; None elsewhere.
        pins: Whether the batch is in pinned memory.
    """
    wholes: Sequence[Tensor | None] = [None] * parted.divided if divided is None else divided
    rows = [parts.hand_out(whole, parted.axis, 0, CPU, pins) for whole in wholes]
    return put_together(_with_rows(parted.form, rows, pins))


def is_image(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of images or volumes."""
    return tensor.dim() in IMAGE and (tensor.is_floating_point() or tensor.dtype == torch.uint8)


def divided_axis(shape: Sequence[int], axis: int | None) -> int:
    """Return the dimension of images that is divided, counted from the last one.

    Args:
        shape: Shape of the images (N, C, ...).
        axis: The dimension that the user has chosen; None for the longest one, and of equal ones the first.

    Raises:
        ConfigurationError: The images do not have the dimension.
    """
    sizes = list(shape[2:])
    if axis is None:
        return sizes.index(max(sizes)) - len(sizes)
    if -axis > len(sizes):
        raise ConfigurationError(
            f"axis={axis}: images of shape {tuple(shape)} do not have a {AXIS_NAMES[axis]}: use -1 (width) or -2 "
            "(height), or leave axis out to divide the longest dimension"
        )
    return axis


def _has_pixels(tensor: Tensor, sizes: set[tuple[int, ...]]) -> bool:
    """Whether a tensor has a value for each pixel of images of one of these sizes."""
    shape = tuple(tensor.shape)
    return tensor.dtype in _DTYPES and any(len(shape) > len(size) and shape[-len(size) :] == size for size in sizes)


def _with_rows(form: Any, rows: Sequence[Tensor], pins: bool) -> Any:
    """Return a batch that was taken apart, with this rank's rows in place of `DividedTensor`."""
    if isinstance(form, DividedTensor):
        return rows[form.number]
    if isinstance(form, dict):
        return {key: _with_rows(item, rows, pins) for key, item in form.items()}
    if isinstance(form, (list, tuple)):
        items = [_with_rows(item, rows, pins) for item in form]
        return type(form)(*items) if hasattr(form, "_fields") else type(form)(items)
    return form.pin_memory() if pins and isinstance(form, Tensor) else form
