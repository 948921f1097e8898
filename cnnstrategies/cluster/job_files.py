"""Files of a submission in its run folder: the configuration and the script of the job.

Each submission has its own files, which later submissions of the same run do not change. A queued job therefore trains
with the configuration with which it was submitted, although the run's name may be submitted again in the meantime.
"""

import contextlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from cnnstrategies.errors import ConfigurationError

CONFIGURATION, SCRIPT = "config{}.yaml", "job{}.sh"  # The first submission has no number: config.yaml and job.sh.
NUMBERED = re.compile(r"(?:config(?:-(\d+))?\.yaml|job(?:-(\d+))?\.sh)")


class FilesTakenError(ConfigurationError):
    """Error of a submission whose files another submission has created in the meantime. A repetition chooses others."""


@dataclass(frozen=True)
class JobFiles:
    """Paths of a submission's files. The files do not exist before :meth:`write`.

    Attributes:
        folder: The run folder.
        number: Number of this submission among the submissions to the folder. The first submission has the number 1.
        creates_folder: Whether this submission must create the folder, because the folder has a new name.
    """

    folder: Path
    number: int = 1
    creates_folder: bool = False

    @classmethod
    def in_folder(cls, folder: Path) -> "JobFiles":
        """Return the files of the next submission to a run folder that may exist."""
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        matches = [match for name in names if (match := NUMBERED.fullmatch(name)) is not None]
        numbers = [int(match[1] or match[2] or 1) for match in matches]
        return cls(folder, 1 + max(numbers, default=0))

    @classmethod
    def in_new_folder(cls, parent: Path, stem: str) -> "JobFiles":
        """Return the files of a submission to a new folder.

        Args:
            parent: Parent folder.
            stem: Name of the new folder. If the folder exists, a number is added.
        """
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        return cls(parent / next(name for name in names if not (parent / name).exists()), creates_folder=True)

    @property
    def configuration(self) -> Path:
        """Path of the run's configuration."""
        return self._numbered(CONFIGURATION)

    @property
    def script(self) -> Path:
        """Path of the job's script."""
        return self._numbered(SCRIPT)

    def _numbered(self, pattern: str) -> Path:
        return self.folder / pattern.format("" if self.number == 1 else f"-{self.number}")

    def write(self, configuration: str, script: str | None = None) -> None:
        """Create the folder and the files. Existing files are not changed.

        Args:
            configuration: Text of the configuration.
            script: Text of the job's script, if the job has a script.

        Raises:
            FilesTakenError: Another submission has created the folder or a file.
        """
        with contextlib.ExitStack() as created:
            try:
                self.folder.mkdir(parents=True, exist_ok=not self.creates_folder)
                for path, text in ((self.configuration, configuration), (self.script, script)):
                    if text is not None:
                        with path.open("x", encoding="utf-8") as file:
                            created.callback(path.unlink)
                            file.write(text)
            except FileExistsError as error:
                raise FilesTakenError(f"another submission has created {error.filename}: submit again") from error
            created.pop_all()  # Without an error, the files stay.

    def remove(self) -> None:
        """Remove the files, and the folder if it is empty then."""
        self.configuration.unlink(missing_ok=True)
        self.script.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # The folder is not empty.
            self.folder.rmdir()
