"""A line about the first training step: what was sent, and which operations needed all rows."""

from cnnstrategies.spatial import SpatialParts

MOST = 5  # Largest number of operations in the line.


def describe_costs(parts: SpatialParts, sent_before: int) -> str:
    """Return a line about the rows that this rank has sent and gathered.

    Args:
        parts: The divided tensors of this rank's group, whose list of gathers was empty before the step.
        sent_before: Number of bytes that the rank had sent before the step.
    """
    sent = (parts.sent_bytes - sent_before) / 1e6
    text = f"spatial: in the first step, this rank has sent {sent:,.1f} MB of rows to other ranks"
    gathers = sorted(parts.gathers.items(), key=lambda item: -item[1].received_bytes)
    if not gathers:
        return f"{text}, and no operation needed all rows"
    listed = [
        f"{operation} at {place} ({record.received_bytes / 1e6:,.1f} MB)"
        for (operation, place), record in gathers[:MOST]
    ]
    rest = f", and {len(gathers) - MOST} more" if len(gathers) > MOST else ""
    return f"{text}, and has received all rows for {', '.join(listed)}{rest}"
