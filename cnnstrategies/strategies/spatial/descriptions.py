"""Texts for the start panel, and a line about the first training step: what was sent, and what needed all rows."""

from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from cnnstrategies.spatial import RowsTensor, SpatialParts
from cnnstrategies.spatial.layout import bounds
from cnnstrategies.strategies.spatial.parted_batches import AXIS_NAMES, divided_axis


def describe_parts(parts: int, axis: int | None, image_shape: Sequence[int] | None) -> str:
    """Return a text about the parts of an image, such as "2, of the height (the longest dimension): 512 rows each".

    Args:
        parts: Number of devices in a group.
        axis: The dimension of images that is divided; None for the longest one.
        image_shape: Shape of an image (C, ...); None if it is not known before the first batch.

    Raises:
        ConfigurationError: The images do not have the dimension.
    """
    if image_shape is None:
        return f"{parts}, of the {'longest dimension of each batch' if axis is None else AXIS_NAMES[axis]}"
    chosen = divided_axis((1, *image_shape), axis)
    size = image_shape[chosen]
    text = f"{parts}, of the {AXIS_NAMES[chosen]}{' (the longest dimension)' if axis is None else ''}: "
    if size < 2 * parts:
        return f"{text}with only {size} rows, each device has whole images; use at least {2 * parts} rows"
    counts = sorted({last - first for first, last in bounds(size, parts)})
    return f"{text}{' or '.join(f'{count:,}' for count in counts)} of {size:,} rows each"


def describe_groups(parts: int, replicas: int) -> str:
    """Return a text about the groups of devices.

    Args:
        parts: Number of devices in a group.
        replicas: Number of groups.
    """
    if replicas == 1:
        return f"1, with {parts} devices; rank 0 loads the batches, and sends each device its rows"
    return f"{replicas}, with {parts} devices each; the first device of each group loads the group's batches"


MOST = 5  # Largest number of operations in the line.


def describe_rows(batch: Any) -> str:
    """Return a text about this rank's rows of the first divided tensor of a batch, such as "had 5 of 9 rows (width)".

    The text is empty if no tensor of the batch is divided.
    """
    for tensor in tree_leaves(batch):
        if isinstance(tensor, RowsTensor) and (layout := tensor.row_layout) is not None:
            name = AXIS_NAMES.get(layout.axis - tensor.dim(), f"dimension {layout.axis}")
            return f"had {tensor.rows.shape[layout.axis]:,} of {layout.size:,} rows ({name})"
    return ""


def describe_costs(parts: SpatialParts, sent_before: int, rows: str) -> str:
    """Return a line about the rows that this rank has had, sent and gathered.

    Args:
        parts: The divided tensors of this rank's group, whose list of gathers was empty before the step.
        sent_before: Number of bytes that the rank had sent before the step.
        rows: Result of :func:`describe_rows` for the step's batch.
    """
    sent = (parts.sent_bytes - sent_before) / 1e6
    texts = [rows] * bool(rows) + [f"sent {sent:,.1f} MB of rows to other ranks"]
    text = f"spatial: in the first step, this rank has {', has '.join(texts)}"
    gathers = sorted(parts.gathers.items(), key=lambda item: -item[1].received_bytes)
    if not gathers:
        return f"{text}, and no operation needed all rows"
    listed = [
        f"{operation}{f' at {place}' * bool(place)} ({record.received_bytes / 1e6:,.1f} MB)"
        for (operation, place), record in gathers[:MOST]
    ]
    rest = f", and {len(gathers) - MOST} more" if len(gathers) > MOST else ""
    return f"{text}, and has received all rows for {', '.join(listed)}{rest}"
