"""A line about the first training step: what was sent, and which operations needed all rows."""

from typing import Any

from torch.utils._pytree import tree_leaves

from cnnstrategies.spatial import RowsTensor, SpatialParts
from cnnstrategies.strategies.spatial.parted_batches import AXIS_NAMES

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
