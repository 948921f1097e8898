"""A run owns the folders to which it writes, and a second run is refused in one line."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from cnnstrategies import cli
from cnnstrategies.cluster.lease import newest, take
from cnnstrategies.cluster.run_owner import Owner
from cnnstrategies.commands.run import ownership
from cnnstrategies.commands.run.ownership import StillOwner, own_version, owns_folders, written_folders
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.runtime.loggers import KeptCSVLogger
from cnnstrategies.strategies import ParameterServerStrategy
from tests.conftest import ROOT, quiet_trainer

light = pytest.mark.light
RUN = Path("runs/quickstart/digits")


def trainer(*loggers: Logger, dirpath: str | None = None, rank: int = 0, fast_dev_run: bool = False) -> Any:
    """Return the needed part of a trainer."""
    last = ModelCheckpoint(dirpath, filename="last")
    return SimpleNamespace(
        loggers=list(loggers),
        checkpoint_callbacks=[last],
        callbacks=[last],
        fast_dev_run=fast_dev_run,
        default_root_dir="root",
        is_global_zero=rank == 0,
        strategy=None,
    )


@light
def test_a_run_owns_the_folders_to_which_it_writes() -> None:
    named, numbered = KeptCSVLogger("runs", "quickstart", "digits"), CSVLogger("runs", "quickstart")
    fit = {
        "a name": (trainer(named, dirpath="saved"), "digits", [RUN, "saved"]),
        "a version that the user has set": (trainer(TensorBoardLogger("runs", "a", 3)), None, ["runs/a/version_3"]),
        "a version that the logger chooses": (trainer(numbered), None, []),
        "the user's own folder": (trainer(numbered, dirpath="saved"), None, ["saved"]),
        "no logger": (trainer(), None, ["root/checkpoints"]),
        "URLs": (trainer(TensorBoardLogger("memory://a", "b", "c"), dirpath="memory://saved"), "c", []),
        "no files": (trainer(named, dirpath="saved", fast_dev_run=True), "digits", []),
    }
    for name, (made, run, folders) in fit.items():
        assert written_folders(made, True, run) == sorted(Path(folder).absolute() for folder in folders), name
    assert written_folders(trainer(named, dirpath="saved"), False, "digits") == [RUN.absolute()]
    assert written_folders(trainer(dirpath="saved"), False, None) == [], "an evaluation saves no checkpoints"


@light
def test_two_runs_without_a_name_get_two_folders() -> None:
    first, second = (TensorBoardLogger("runs", "quickstart") for _ in range(2))
    assert first.version == second.version == 0, "both choose the same number before either has created the folder"
    with own_version(first), own_version(second):
        assert [first.version, second.version] == [0, 1]
        Path(second.log_dir, "events").touch()
    assert os.listdir("runs/quickstart") == ["version_1"], "a folder without files is removed"


STARTS = [("popen", False, 0), ("popen", True, 1), ("fork", False, 1)]  # Start method, other launcher, next version.


@pytest.mark.parametrize(("start_method", "external", "number"), STARTS)
def test_ranks_that_start_the_program_again_choose_the_next_version(start_method, external, number, monkeypatch):
    """The process that starts them must not take this version. Forked ranks inherit the process's logger."""
    monkeypatch.setattr(LightningEnvironment, "creates_processes_externally", external)
    made = trainer(CSVLogger("runs", "quickstart"), dirpath="saved")
    made.strategy = quiet_trainer(ParameterServerStrategy(start_method=start_method), 2).strategy
    with owns_folders(made, "fit", None):
        assert CSVLogger("runs", "quickstart").version == number


def other_run(folder: Path) -> Owner:
    folder.mkdir(parents=True)
    owner = replace(Owner.of_this_process(folder, "SLURM step 4711.0", "other"), user="ann")
    (folder / ".owner-1.json").write_bytes(owner.content())
    return owner


QUICKSTART = [f"--config={ROOT / 'configs/quickstart.yaml'}", "--trainer.accelerator=cpu", "--trainer.devices=1"]


def test_the_second_run_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    owner = other_run(RUN)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", *QUICKSTART, "--run_name=digits"])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line == (
        f"cnnstrategies: error: the run digits is already running: {RUN.absolute()} belongs to ann on {owner.host} "
        f"(process {os.getpid()}, SLURM step 4711.0) since {str(owner)[-19:]}; wait until it has ended, or choose "
        "another name, such as --run_name digits-2"
    )
    assert [path.name for path in RUN.iterdir()] == [".owner-1.json"]
    assert "CNNSTRATEGIES_OWNER" not in os.environ


@light
def test_a_refusal_says_how_to_take_another_folder() -> None:
    other_run(Path("saved"))
    with pytest.raises(ConfigurationError, match=r"another run .* set another folder with --checkpoint.dirpath"):
        owns_folders(trainer(dirpath="saved"), "fit", None).__enter__()
    other_run(RUN)
    logged = trainer(KeptCSVLogger("runs", "quickstart", "digits"), dirpath="mine")
    with pytest.raises(ConfigurationError, match=r"digits is running: .*; to evaluate it now, leave out --run_name, "):
        owns_folders(logged, "validate", "digits").__enter__()
    with owns_folders(trainer(CSVLogger("runs", "quickstart"), dirpath="saved"), "validate", None):
        pass


@light
def test_the_folders_are_free_after_an_error() -> None:
    """During the run, processes that the owner starts share its folders."""

    def interrupted() -> None:
        with owns_folders(trainer(dirpath="saved"), "fit", None):
            record = Owner.read(newest(Path("saved"))[1])
            assert record is not None
            assert record.token == os.environ["CNNSTRATEGIES_OWNER"]
            with owns_folders(trainer(dirpath="saved"), "fit", None):
                pass
            assert Owner.read(newest(Path("saved"))[1]) == record
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "CNNSTRATEGIES_OWNER" not in os.environ
    assert take(Path("saved"), "", "other").number == 2


@light
def test_a_run_that_has_lost_its_folder_saves_no_more_checkpoints() -> None:
    made = trainer(dirpath="saved")
    with owns_folders(made, "fit", None):
        (callback,) = (callback for callback in made.callbacks if isinstance(callback, StillOwner))
        callback.on_save_checkpoint(made, None, {})  # type: ignore[arg-type]
        owner = replace(Owner.of_this_process(Path("saved"), "", "other"), host="beta")
        Path("saved/.owner-2.json").write_bytes(owner.content())
        lost = r"saved belongs to .* on beta .*, which took this run for dead"
        with pytest.raises(RunEnded, match=lost):
            callback.on_train_epoch_start(made, None)  # type: ignore[arg-type]
        with pytest.raises(RunEnded, match=lost):
            callback.on_save_checkpoint(made, None, {})  # type: ignore[arg-type]
        callback.on_save_checkpoint(trainer(rank=1), None, {})  # type: ignore[arg-type]
    assert Owner.read(newest(Path("saved"))[1]) == owner


def code_of_rank_1(launch: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of rank 1 of a SLURM step, which looks at the owner's record and never meets rank 0."""
    job, step = launch.split(".")
    variables = {"JOB_ID": job, "STEP_ID": step, "PROCID": "1", "LOCALID": "1", "NTASKS": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    looks = threading.Semaphore(0)

    def counted(folder: Path) -> tuple[int, bytes]:
        looks.release()
        return newest(folder)

    monkeypatch.setattr(ownership, "newest", counted)
    child = os.fork()
    if not child:
        with owns_folders(trainer(dirpath="saved", rank=1), "fit", None):
            for _ in range(5):
                looks.acquire()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@light
def test_the_other_ranks_end_if_rank_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner belongs to SLURM's step 4711.0."""
    other_run(Path("saved"))
    monkeypatch.setattr(ownership, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(ownership, "LOOK", 0.01)
    assert code_of_rank_1("4711.0", monkeypatch) == 0
    assert code_of_rank_1("4711.1", monkeypatch) == 2
