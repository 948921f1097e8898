"""Train in forked processes: under the strategy, on one device, and on one device with errors of rounding."""

import multiprocessing
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.verifying.batches import Precision
from cnnstrategies.verifying.recorder import RunRole

# Pattern for a ConfigurationError in a run's output. The error message ends at an empty line.
REFUSAL = re.compile(r"^cnnstrategies\.[\w.]+\.ConfigurationError: (.*?)(?=\n\n|\Z)", re.M | re.S)
LAST_LINES = 30  # Number of lines of a failed run's output that the error message contains.
NOISE = (1, 2)  # Seeds of the runs on one device with errors of rounding.

Train = Callable[[RunRole], None]


class TrainingError(RuntimeError):
    """Error of a failed run. The error message contains the last lines of the run's output."""


def train_both(
    train: Train, folder: Path, precision: Precision, saves_trace: bool = False, saves_steps: bool = False
) -> tuple[RunRole, RunRole]:
    """Train under the strategy, and then on one device with the same batches.

    Args:
        train: Function that trains the module.
        folder: Folder for the files of the runs.
        precision: Precision of the runs.
        saves_trace: Whether the runs save traces.
        saves_steps: Whether the runs save a checkpoint after each step.

    Returns:
        First the run on one device, and second the run under the strategy.
    """
    tested = RunRole(folder / "tested", None, precision, saves_trace, saves_steps)
    reference = RunRole(folder / "reference", tested.folder, precision, saves_trace, saves_steps)
    for role in (tested, reference):
        train_in_fork(train, role)
    return reference, tested


def train_with_noise(train: Train, folder: Path, tested: RunRole) -> list[RunRole]:
    """Train on one device several times with errors of rounding, to know how large the differences are that they make.

    Args:
        train: Function that trains the module.
        folder: Folder for the files of the runs.
        tested: The run under the strategy, whose batches are used.
    """
    roles = [RunRole(folder / f"noise-{seed}", tested.folder, tested.precision, True, noise=seed) for seed in NOISE]
    for role in roles:
        train_in_fork(train, role)
    return roles


def train_in_fork(train: Train, role: RunRole) -> None:
    """Train in a forked process.

    Raises:
        ConfigurationError: The strategy refuses the module.
        TrainingError: The training fails.
    """
    role.folder.mkdir(parents=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(train, role))
    process.start()
    process.join()
    printed = (role.folder / "printed").read_text(errors="replace")
    if process.exitcode and (refusal := REFUSAL.search(printed)):
        raise ConfigurationError(refusal[1].strip())
    if process.exitcode or not role.notes:
        last = "\n".join(printed.splitlines()[-LAST_LINES:]) or f"exit code {process.exitcode}"
        raise TrainingError(f"the training fails {'on one device' if role.of else 'under the strategy'}:\n{last}")


def _run(train: Train, role: RunRole) -> None:
    """Train in the forked process of a run, and write the output to the file ``printed`` in the run's folder."""
    file = os.open(role.folder / "printed", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        train(role)
    except Exception:
        # In a notebook, `sys.stderr` does not write to file descriptor 2. The traceback must be written to this
        # descriptor, because only the descriptor is redirected to the file.
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
