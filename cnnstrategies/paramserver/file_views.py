"""Views of the membership in a file, for scripts and tests without a coordinator."""

import json
import os
import time
from pathlib import Path

from cnnstrategies.paramserver.core.view import View


class FileViews:
    """Views in a file that all processes of one machine can read, for scripts and tests without a coordinator.

    Args:
        path: The file; need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._read_at = -1
        self._view = View(-1, (), ())

    def publish(self, view: View) -> None:
        """Replace the view for everyone, atomically."""
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(view.as_dict()))
        scratch.replace(self._path)

    def current(self) -> View:
        """The newest view; number -1 and empty while there is no file."""
        try:
            changed = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._view
        if changed != self._read_at:
            self._view = View.from_dict(json.loads(self._path.read_text()))
            self._read_at = changed
        return self._view

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait for a view with a higher number.

        Raises:
            TimeoutError: None came.
        """
        deadline = time.monotonic() + timeout
        while self.current().number <= number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no view newer than {number} within {timeout} s in {self._path}")
            time.sleep(0.005)
        return self._view

    def fileno(self) -> int | None:
        """None: a file cannot be waited for."""
        return None
