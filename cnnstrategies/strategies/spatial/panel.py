"""The strategy's rows of the start panel."""

from collections.abc import Sequence

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
