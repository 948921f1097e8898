"""Kinds of waits for the ranks of the same group under the strategy ``spatial``."""

from types import FrameType

from cnnstrategies.spatial import link
from cnnstrategies.strategies.spatial import loading

SHARE = "share"  # A batch from the rank that loads for a group.
ROWS = "rows"  # Rows of other ranks of a group.
SUMS = "sums"  # Sums over the ranks of a group.


def kind_of_wait(frame: FrameType | None) -> str | None:
    """Return the kind of a wait for ranks that have parts of the same images; None if it is not such a wait.

    Args:
        frame: The innermost frame of the call stack.
    """
    kind = None
    while frame is not None and not frame.f_code.co_filename.endswith("fit_loop.py"):
        if frame.f_code.co_filename == link.__file__:
            kind = ROWS if "exchange" in frame.f_code.co_qualname else SUMS
        elif frame.f_code.co_filename == loading.__file__:
            return SHARE
        frame = frame.f_back
    return kind
