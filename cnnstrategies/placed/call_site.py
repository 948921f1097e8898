"""The user's line of code that the interpreter is running, for messages."""

import contextlib
import inspect
import multiprocessing
import os
import sysconfig
from functools import cache
from types import FrameType

_PACKAGES = [
    os.path.join(sysconfig.get_paths()[kind], package) + os.sep
    for kind in ("purelib", "platlib")
    for package in ("torch", "lightning", "lightning_utilities", "torchmetrics", "pytorch_lightning")
]
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(_HERE)) + os.sep
# Frames of these files are skipped. Operations of torch are reached through different functions on a rank that has a
# tensor and on a rank that does not, so a line of torch would differ between the ranks.
_NEVER = (
    _HERE,
    *(path for path in _PACKAGES if path.endswith(f"{os.sep}torch{os.sep}")),
    contextlib.__file__,  # A context manager of this package may send values when the context ends.
    os.path.join(_OURS, "spatial") + os.sep,
    os.path.dirname(multiprocessing.__file__) + os.sep,  # A forked rank has the frames that have started it.
    "<frozen ",
    "<eval_with_key>",
)
_LIBRARIES = (*_NEVER, *_PACKAGES, _OURS)
# Lightning's functions that call the user's code, and their file. Their callers need not be the same on all ranks.
_RUNS = ("fit", "validate", "test", "predict")
_TRAINER = os.path.join("trainer", "trainer.py")


def call_site() -> str:
    """Return file and line of the innermost frame that belongs to the user's code.

    If all frames belong to libraries, the innermost frame outside torch and this package's folder counts. The code that
    has called ``Trainer.fit`` or a similar function does not count: one rank may run it in another program than the
    others, and it is the same line for all messages of a run.
    """
    frame: FrameType | None = inspect.currentframe()
    library = ""
    while frame is not None:
        name = frame.f_code.co_filename
        is_users, is_library = _kind(name)
        if is_users:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        if not library and is_library:
            library = f"{os.path.basename(name)}:{frame.f_lineno}"
        if library and frame.f_code.co_name in _RUNS and name.endswith(_TRAINER):
            return library
        frame = frame.f_back
    return library or "an unknown line"


@cache
def _kind(name: str) -> tuple[bool, bool]:
    """Return whether a file belongs to the user's code, and whether its frames may be named at all."""
    return not name.startswith(_LIBRARIES), not name.startswith(_NEVER)
