"""Output of the command line: long texts, and one line for a mistake."""

import io
import os
import re
import sys
from typing import NoReturn

DEBUG = "CNNSTRATEGIES_DEBUG"  # environment variable: tracebacks in place of lines


def fail(message: str) -> NoReturn:
    """Print one line to standard error and exit with code 2, as argparse does."""
    print(f"cnnstrategies: error: {message}", file=sys.stderr)
    sys.exit(2)


def write_anywhere() -> None:
    """Have characters that a terminal's encoding lacks printed as question marks; by default Python raises an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def in_one_line(text: str) -> str:
    """Return a message without its line breaks."""
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
