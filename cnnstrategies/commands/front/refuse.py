"""How the command line shows things, and says that something is wrong."""

import io
import os
import re
import resource
import sys
from typing import NoReturn

DEBUG = "CNNSTRATEGIES_DEBUG"  # Environment variable: tracebacks in place of lines.
# What is said, the limit, what it counts, and the letter by which ulimit knows it.
LIMITS = (
    (r"Too many open files", resource.RLIMIT_NOFILE, "open files", "n"),
    (
        r"can't start new thread|^(\[Errno 11\] )?Resource temporarily unavailable",
        resource.RLIMIT_NPROC,
        "threads",
        "u",
    ),
    (
        r"[Cc]an(no|')t allocate memory|could not create a primitive|bad_alloc|failed to map segment",
        resource.RLIMIT_AS,
        "bytes of addresses",
        "v",
    ),
)


def fail(message: str) -> NoReturn:
    """Print one line on standard error and exit with code 2, as argparse does."""
    print(f"cnnstrategies: error: {message}", file=sys.stderr)
    sys.exit(2)


def write_anywhere() -> None:
    """Show a question mark where a terminal's encoding lacks a character; Python would end the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def in_one_line(text: str) -> str:
    """A message without its line breaks."""
    return re.sub(r"\s+", " ", text).strip()


def shows_tracebacks() -> bool:
    """Whether the user wants to see where an error comes from."""
    return bool(os.environ.get(DEBUG))


def show(text: str) -> None:
    """Print a long text; that its reader, such as ``head``, has seen enough is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def scarce(error: BaseException) -> str | None:
    """The line that names the limit; None where the error speaks of none that this process has."""
    said = "Cannot allocate memory" if type(error) is MemoryError else str(error)
    for words, limit, what, letter in LIMITS:
        most, _ = resource.getrlimit(limit)
        if (found := re.search(words, said)) and most != resource.RLIM_INFINITY:
            return (
                f"{found[0]}: this process, or its user, may have {most:,} {what} (ulimit -{letter}): allow more, or "
                "take fewer processes and data workers"
            )
    return None
