"""Ownership of the folders to which a run writes, so that no two runs write to one folder."""

import contextlib
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from cnnstrategies._lightning_private import choose_next_version, chooses_version
from cnnstrategies.cluster.environment import REPORT_SECONDS
from cnnstrategies.cluster.lease import TOKEN, WAIT, HeldError, Lease, holding, is_unused, newest
from cnnstrategies.cluster.run_identity import launch_of
from cnnstrategies.cluster.run_owner import SILENCE, Observation, Owner, State
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.strategies.protocol import facts_of

REFUSED = 2  # Exit code of a rank whose rank 0 is refused because of another owner.
LOOK = 1.0  # Seconds between two readings of the owner's record by a rank other than rank 0.


@contextlib.contextmanager
def owns_folders(trainer: Trainer, command: str, name: str | None) -> Iterator[None]:
    """Own the folders to which a run writes, inside this context.

    Rank 0, or the process that starts rank 0, is the owner. A rank that a launcher has started ends if another run
    owns the folders.

    Args:
        trainer: Trainer of the run.
        command: The command, such as ``fit``.
        name: Name of the run; None without a name.

    Raises:
        ConfigurationError: Another run owns a folder.
    """
    folders = written_folders(trainer, command == "fit", name)
    launch = launch_of(os.environ)
    inherited = os.environ.get(TOKEN)
    if not trainer.is_global_zero:
        with leaves_to_others(trainer, folders if inherited is None else [], launch):
            yield
        return
    with contextlib.ExitStack() as stack:
        token = os.environ[TOKEN] = inherited or secrets.token_hex(8)
        if inherited is None:
            stack.callback(os.environ.pop, TOKEN)
        unused = [folder for folder in folders if is_unused(folder)]
        _hide_warnings(unused)
        try:
            leases = stack.enter_context(holding(folders, launch, token, _say_that_it_waits))
        except HeldError as held:
            raise ConfigurationError(refusal(held, command, name)) from None
        if command == "fit":
            trainer.callbacks.insert(0, StillOwner(leases, unused))  # type: ignore[attr-defined]
        # Rank 0 chooses the version itself, unless it inherits this process's logger.
        for logger in () if facts_of(trainer.strategy).only_starts_ranks else _loggers_with_folders(trainer):
            if chooses_version(logger):
                stack.enter_context(own_version(logger))
        yield


def written_folders(trainer: Trainer, training: bool, name: str | None) -> list[Path]:
    """Return the existing or new folders to which a run writes, in a fixed order.

    Folders that are URLs are left out, and folders with a number that the logger chooses.

    Args:
        trainer: Trainer of the run.
        training: Whether the run trains, and so saves checkpoints.
        name: Name of the run; None without a name.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
        return []
    loggers = [logger for logger in _loggers_with_folders(trainer) if not chooses_version(logger)]
    # If the user has set the logger's version, all evaluations without a run name write to the same folder. The user
    # has chosen this, so the folder is not owned.
    folders = [logger.log_dir for logger in loggers if training or name is not None]
    for callback in trainer.checkpoint_callbacks if training else ():
        if isinstance(callback, ModelCheckpoint):
            if callback.dirpath is not None:
                folders.append(str(callback.dirpath))
            elif not trainer.loggers:  # Lightning then uses this folder.
                folders.append(os.path.join(trainer.default_root_dir, "checkpoints"))
    return sorted({Path(folder).absolute() for folder in folders if "://" not in str(folder)})


def _loggers_with_folders(trainer: Trainer) -> list[CSVLogger | TensorBoardLogger]:
    """Return the loggers that write to a local folder."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    return [logger for logger in loggers if "://" not in str(logger.save_dir)]


@contextlib.contextmanager
def own_version(logger: CSVLogger | TensorBoardLogger) -> Iterator[None]:
    """Create the folder of a logger's next version, such as ``version_3``. No other run can choose the same number.

    At the end of the context, the folder is removed if it is empty.
    """
    while True:
        folder = Path(logger.log_dir)
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            choose_next_version(logger)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # The folder is not empty.
            folder.rmdir()


def refusal(held: HeldError, command: str, name: str | None) -> str:
    """Return the error message for a run whose folder belongs to another run.

    Args:
        held: The folder and its owner.
        command: The command, such as ``fit``.
        name: Name of the refused run; None without a name.
    """
    if name is None:
        return f"another run is already running: {held}; {WAIT}, or set another folder with --checkpoint.dirpath"
    if command == "fit":
        return held.refusal(name)
    return (
        f"the run {name} is running: {held}; to evaluate it now, leave out --run_name, and give the path of a "
        "checkpoint as --ckpt_path"
    )


def _hide_warnings(unused: Sequence[Path]) -> None:
    """Hide Lightning's warnings that new folders are not empty, although they contain only the owner's file."""
    for folder in unused:
        name = re.escape(str(folder))
        warnings.filterwarnings("ignore", rf"(Experiment logs|Checkpoint) directory {name} exists and is not empty")


def _say_that_it_waits(owner: Owner) -> None:
    rank_zero_info(f"Waiting up to {SILENCE:g} s, because the run folder belongs to {owner}, which may be dead")


@contextlib.contextmanager
def leaves_to_others(trainer: Trainer, folders: Sequence[Path], launch: str) -> Iterator[None]:
    """End this rank if another launch owns a folder of the run, until this rank is connected to rank 0.

    Rank 0 of this launch is then refused and prints the reason. Without this context, the other ranks would wait for
    rank 0 until their launcher ends them.

    Args:
        trainer: Trainer of the run.
        folders: Folders of the run. Nothing happens on a machine on which a folder does not exist.
        launch: Text that names this process's launch. Nothing happens without a text.
    """
    connected = threading.Event()

    def watch() -> None:
        observations = {folder: Observation() for folder in folders}
        foreign_since: float | None = None
        while not connected.wait(LOOK):
            foreign = any(_is_foreign(folder, launch, observation) for folder, observation in observations.items())
            foreign_since = (foreign_since or time.monotonic()) if foreign else None
            if foreign_since is not None and time.monotonic() - foreign_since > REPORT_SECONDS:
                os._exit(REFUSED)

    if launch and folders:
        trainer.callbacks.insert(0, _Connected(connected))  # type: ignore[attr-defined]
        threading.Thread(target=watch, name="run-owner", daemon=True).start()
    try:
        yield
    finally:
        connected.set()


def _is_foreign(folder: Path, launch: str, observation: Observation) -> bool:
    """Return whether a folder certainly belongs to a living process of another launch."""
    try:
        _, content = newest(folder)
        owner = Owner.read(content)
        if owner is None or owner.launch == launch:
            return False
        return observation.state(content, owner.has_ended(folder.stat().st_ino), time.monotonic()) is State.HELD
    except OSError:
        return False


class _Connected(Callback):
    """Callback that sets an event when the ranks are connected. A spawned rank has no event."""

    def __init__(self, connected: threading.Event | None = None) -> None:
        self._connected = connected

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._connected is not None:
            self._connected.set()


class StillOwner(Callback):
    """Callback that ends the run before it saves a checkpoint in a folder that another run owns now.

    This happens only if the owner could not write heartbeats for a long time, for example because its machine was
    asleep, and a run on another machine has taken it for dead.

    Args:
        leases: Leases of the folders.
        unused: Folders that contained no files before this run.
    """

    def __init__(self, leases: Sequence[Lease], unused: Sequence[Path] = ()) -> None:
        self._leases = leases
        self._unused = unused

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _hide_warnings(self._unused)  # A spawned rank does not inherit the filters of its parent process.

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        lost = [lease for lease in self._leases if trainer.is_global_zero and lease.is_lost()]
        if lost:
            owner = Owner.read(newest(lost[0].folder)[1])
            raise RunEnded(
                f"{lost[0].folder} belongs to {owner or 'another run'}, which took this run for dead, because this run "
                f"had not written a heartbeat for {SILENCE:g} s"
            )
