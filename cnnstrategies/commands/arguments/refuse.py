"""Functions for the output of commands: long texts, and error messages in one line."""

import io
import os
import re
import sys
from typing import NoReturn

DEBUG = "CNNSTRATEGIES_DEBUG"  # Name of the environment variable that makes commands show errors with tracebacks.


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message to standard error, and exit with an exit code."""
    print(f"cnnstrategies: error: {message}", file=sys.stderr)
    sys.exit(code)


def write_anywhere() -> None:
    """Make this process print a question mark for each character that the encoding of its output cannot represent.

    Without this setting, ``print`` raises an error for such a character.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def in_one_line(text: str) -> str:
    """Replace each sequence of white space in a text, including line breaks, by a single space."""
    return re.sub(r"\s+", " ", text).strip()


def shows_tracebacks() -> bool:
    """Return whether the user has set ``CNNSTRATEGIES_DEBUG``. Errors are then shown with their tracebacks."""
    return bool(os.environ.get(DEBUG))


def show(text: str) -> None:
    """Print a long text.

    If the program that reads the output ends early, as ``head`` does, ignore the error.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
