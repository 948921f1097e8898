"""Where a run can be watched: an address and a file of keys, which lie in the run's folder while it trains."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.security import is_local

NAME = "watch.json"


@dataclass(frozen=True)
class RunAddress:
    """A coordinator, and how to speak with it.

    Attributes:
        coordinator: Its endpoint.
        key_file: The run's keys; None for no encryption.
    """

    coordinator: str
    key_file: str | None = None

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, for its owner alone; one that was there before is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{NAME}-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            scratch.unlink()
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
        scratch.replace(folder / NAME)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove what :meth:`save` wrote, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (folder / NAME).unlink()

    @classmethod
    def find(cls, run: str) -> "RunAddress":
        """The address of a run that was named on a command line.

        Args:
            run: An endpoint, or a run's folder; of one with several versions the one that was begun last.

        Raises:
            ConfigurationError: It is neither, or nothing trains there.
        """
        if "://" in run:
            is_local(run)  # Raises if nothing can listen there.
            return cls(run)
        folder = Path(run)
        if not folder.is_dir():
            raise ConfigurationError(
                f"--run {run}: there is no such folder; name a run's folder, or its address as tcp://HOST:PORT"
            )
        found = [folder / NAME] if (folder / NAME).exists() else list(folder.glob(f"*/{NAME}"))
        if not found:
            raise ConfigurationError(
                f"--run {run}: no {NAME} lies there, so no parameter server trains there now: name the folder of a run "
                "that does, or its address as tcp://HOST:PORT"
            )
        newest = max(found, key=lambda path: path.stat().st_mtime)
        try:
            fields = json.loads(newest.read_text())
            return cls(str(fields["coordinator"]), None if fields["key_file"] is None else str(fields["key_file"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"--run {run}: {newest} holds no address: remove it") from error
