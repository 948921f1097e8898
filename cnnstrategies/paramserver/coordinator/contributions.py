"""The part of a collective's result that is the same for all workers: the contributions, packed into two frames.

The coordinator packs the contributions once, and sends the same two frames to every worker. If several workers have
contributed equal frames, the frame is packed only once. In a barrier, a broadcast, or a comparison of values that
should be equal, the size of a reply therefore does not depend on the number of workers.
"""

import json
from collections.abc import Mapping, Sequence

from cnnstrategies.paramserver.core.node import Buffer, ControlError

MOST_WORKERS = 1 << 16  # largest number of workers in an entry of an index


def pack(contributions: Mapping[int, Sequence[Buffer]]) -> list[Buffer]:
    """Return two frames with the contributions of all workers.

    Args:
        contributions: By worker id, in rising order: the frames that the worker contributed.

    Returns:
        An index and a body. The body contains the distinct frames one after the other. The index is a JSON array of two
        lists. The first list contains the sizes of the distinct frames in bytes. Each entry of the second list stands
        for workers with consecutive ids and equal contributions: it contains the first id, the number of workers, and
        the indices of their frames in the first list.
    """
    numbers: dict[bytes, int] = {}
    entries: list[list[int]] = []
    for worker, frames in contributions.items():
        chosen = [numbers.setdefault(bytes(frame), len(numbers)) for frame in frames]
        if entries and entries[-1][0] + entries[-1][1] == worker and entries[-1][2:] == chosen:
            entries[-1][1] += 1
        else:
            entries.append([worker, 1, *chosen])
    index = json.dumps([list(map(len, numbers)), entries], separators=(",", ":"))
    return [index.encode(), b"".join(numbers)]


def unpack(frames: Sequence[Buffer]) -> dict[int, list[memoryview]]:
    """Return the contributions in a pair of frames that :func:`pack` returned.

    Returns:
        By worker id: the frames that the worker contributed, as views of the body without a copy.

    Raises:
        ControlError: The frames are not an index and a body, or the sizes in the index do not add up to the body's
            size.
    """
    if len(frames) != 2:
        raise ControlError(f"the result of a collective has {len(frames)} frames instead of an index and a body")
    try:
        sizes, entries = json.loads(bytes(frames[0]))
    except (ValueError, TypeError, RecursionError) as error:
        raise ControlError(f"the index in the result of a collective is not valid: {error}") from error
    if not _is_numbers(sizes) or not isinstance(entries, list) or not all(map(_is_numbers, entries)):
        raise ControlError("the index in the result of a collective does not consist of lists of numbers")
    body, position, distinct = memoryview(frames[1]), 0, []
    for size in sizes:
        distinct.append(body[position : position + size])
        position += size
    if position != len(body):
        raise ControlError(f"the sizes in the result of a collective add up to {position} bytes instead of {len(body)}")
    contributions: dict[int, list[memoryview]] = {}
    for entry in entries:
        if len(entry) < 2 or entry[1] > MOST_WORKERS or any(number >= len(distinct) for number in entry[2:]):
            raise ControlError(f"the result of a collective has an invalid entry: {entry[:4]}")
        for worker in range(entry[0], entry[0] + entry[1]):
            contributions[worker] = [distinct[number] for number in entry[2:]]
    return contributions


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
