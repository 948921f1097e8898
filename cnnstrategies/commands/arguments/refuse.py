"""Output of the command line: long texts, and error messages of one line."""

import io
import os
import re
import sys
from typing import NoReturn

DEBUG = "CNNSTRATEGIES_DEBUG"  # If this environment variable is set, errors are shown with their tracebacks.


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with code 2, as argparse does."""
    print(f"cnnstrategies: error: {message}", file=sys.stderr)
    sys.exit(2)


def write_anywhere() -> None:
    """Print a question mark for each character that the terminal's encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def in_one_line(text: str) -> str:
    """Return a text in which each line break or run of spaces is a single space."""
    return re.sub(r"\s+", " ", text).strip()


def shows_tracebacks() -> bool:
    """Whether errors are shown with their tracebacks."""
    return bool(os.environ.get(DEBUG))


def show(text: str) -> None:
    """Print a long text. A reader that stops early, such as ``head``, does not cause an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
