"""How the command line shows things, and says that something is wrong."""

import io
import os
import re
import sys
from typing import NoReturn

DEBUG = "CNNSTRATEGIES_DEBUG"  # Environment variable: tracebacks in place of lines.


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
