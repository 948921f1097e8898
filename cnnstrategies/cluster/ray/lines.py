"""What the programs of several nodes print, as one log."""

import sys
from pathlib import Path


class Lines:
    """Prints whole lines, those of other nodes than the first with their node, and keeps them in a file.

    Args:
        path: The file; a run that is started again appends.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._begun: dict[int, str] = {}

    def add(self, node: int, text: str) -> None:
        """Print what a node has said; the beginning of a line waits for its end."""
        *whole, self._begun[node] = (self._begun.get(node, "") + text).split("\n")
        for line in whole:
            self.say(f"[node {node}] {line}" if node else line)

    def flush(self) -> None:
        """Print what has been begun, since nothing follows."""
        for node, rest in list(self._begun.items()):
            if rest:
                self.add(node, "\n")

    def say(self, line: str) -> None:
        """Print a line of the driver's own."""
        print(line, flush=True)
        self._file.write(f"{line}\n")

    def close(self) -> None:
        """Print the rest and close the file."""
        self.flush()
        self._file.close()
        sys.stdout.flush()
