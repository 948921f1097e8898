"""Measurements in pieces of a few minutes at most, kept in a file: a later call goes on where one stopped."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options of every script that measures in pieces."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--only", default="", help="pieces whose names have this in them")
    made.add_argument("--seconds", type=float, default=200, help="after which no further piece is begun")
    made.add_argument("--results", type=Path, help="JSON file that keeps the pieces")
    return made


class Pieces:
    """Results by name.

    Args:
        options: The command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        name = f"cnnstrategies_{Path(sys.argv[0]).stem}.json"
        self.file: Path = options.results or Path(tempfile.gettempdir()) / name
        self.known: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self._only, self._ends = options.only, time.monotonic() + options.seconds

    def measure(self, names: Sequence[str], measure: Callable[[str], Any]) -> bool:
        """Measure those that are not known, as long as there is time.

        Returns:
            Whether all of them are known now.
        """
        for name in names:
            if name in self.known or self._only not in name or time.monotonic() > self._ends:
                continue
            start = time.monotonic()
            self.known[name] = measure(name)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
            self.file.write_text(json.dumps(self.known, indent=1))
        missing = [name for name in names if name not in self.known]
        if missing:
            print(f"{len(missing)} pieces are missing, the next is {missing[0]}")
        return not missing
