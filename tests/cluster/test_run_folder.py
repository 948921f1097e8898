"""A run with a name has a folder, goes on from its last whole checkpoint, and starts anew when that is asked."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from cnnstrategies.cluster.run_folder import last_checkpoint, place, set_aside, write_record
from cnnstrategies.cluster.run_name import Run
from cnnstrategies.commands.run.start_from import check_fresh, checkpoint_of, is_first
from cnnstrategies.errors import ConfigurationError

HERE = Path("runs/mine/digits/checkpoints")
RUN = Run("digits")
pytestmark = pytest.mark.light


def logger(kind, **arguments):
    return Namespace(class_path=f"lightning.pytorch.loggers.{kind}", init_args=Namespace(**arguments))


def config(*loggers, dirpath=None, fresh=False):
    trainer = Namespace(logger=list(loggers) or False, default_root_dir="root", callbacks=None)
    return Namespace(trainer=trainer, checkpoint=Namespace(dirpath=dirpath), fresh=fresh)


def csv_of(**arguments):
    return logger("CSVLogger", **{"save_dir": "runs", "name": "mine", "version": None, **arguments})


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (config(csv_of()), "runs/mine/digits/checkpoints"),
        (config(csv_of(version=3)), "runs/mine/version_3/checkpoints"),
        (config(csv_of(), dirpath="elsewhere"), "elsewhere"),
        (config(csv_of(save_dir="s3://bucket")), None),
        (config(), "root/digits/checkpoints"),
        (config(logger("MLFlowLogger", run_id=None, run_name=None)), "root/digits/checkpoints"),
    ],
)  # fmt: skip
def test_the_folder_is_that_of_the_name_below_the_first_loggers(given, folder):
    place(given, RUN)
    assert given.checkpoint.dirpath == folder


def test_loggers_with_ids_keep_them_when_started_again():
    write_record(HERE, {"run": "digits", "loggers": {"1": "a1", "2": "b2"}})

    def placed(run=RUN, fresh=False, **given):
        names = {"run_id": None, "run_name": None}
        wandb = logger("WandbLogger", **{"version": None, "name": None, **given})
        made = config(csv_of(), wandb, logger("MLFlowLogger", **names), fresh=fresh)
        place(made, run)
        _, wandb, mlflow = made.trainer.logger
        return wandb.init_args.version, wandb.init_args.name, mlflow.init_args.run_id, mlflow.init_args.run_name

    assert placed() == ("a1", "digits", "b2", "digits")
    assert placed(version="own", name="shown") == ("own", "shown", "b2", "digits")
    assert placed(fresh=True) == (None, "digits", None, "digits")
    assert placed(Run("digits", 1), fresh=True)[0] == "a1"
    assert placed(Run("other")) == (None, "other", None, "other")


def trainer(folder, environment=None):
    """What is asked of one: a real one asks for CUDA, and no other test could fork ranks afterwards."""
    last = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    loggers = [CSVLogger("runs", "mine", "digits")]
    strategy = SimpleNamespace(cluster_environment=environment)
    return SimpleNamespace(
        checkpoint_callbacks=[last], loggers=loggers, callbacks=[last], fast_dev_run=False, strategy=strategy
    )


def write(file, whole=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({}, file)
    if not whole:
        os.truncate(file, 100)


def test_it_goes_on_from_the_last_whole_checkpoint():
    made = trainer(HERE)
    assert last_checkpoint(made, RUN) is None
    write(HERE / "best.ckpt")
    write(HERE / "last.ckpt")
    assert last_checkpoint(made, RUN) == (HERE / "last.ckpt").resolve()
    write(HERE / "last.ckpt", whole=False)
    assert last_checkpoint(made, RUN) == (HERE / "best.ckpt").resolve()
    write(HERE / "best.ckpt", whole=False)
    assert last_checkpoint(made, RUN) is None


def test_another_runs_checkpoint_is_not_gone_on_from():
    """Not even after a crash before the first checkpoint of its own."""
    made = trainer("saved")
    write(Path("saved/last.ckpt"))
    with pytest.raises(
        ConfigurationError, match=r"saved/last.ckpt is not of the run digits.* `fit --fresh` sets it aside"
    ):
        last_checkpoint(made, RUN)
    write_record(Path("saved"), {"run": "digits"})
    assert last_checkpoint(made, RUN) == Path("saved/last.ckpt").resolve()
    with pytest.raises(ConfigurationError, match="is not of the run other"):
        last_checkpoint(made, Run("other"))


@pytest.mark.parametrize("folder", [HERE, Path("saved")])
def test_what_is_set_aside_is_kept_and_not_gone_on_from(folder):
    made = trainer(folder)
    for number in (1, 2):
        write(folder / "last.ckpt")
        write(Path("saved/notes.txt"))
        set_aside(made, RUN)
        assert last_checkpoint(made, RUN) is None
        assert len(list(Path().rglob("*.ckpt"))) == number
    assert Path("saved/notes.txt").exists()


def test_a_fresh_start_is_one_start_and_not_each_restart(monkeypatch):
    last = (HERE / "last.ckpt").resolve()
    for run, fresh, found in (
        (RUN, False, last),
        (RUN, True, None),
        (Run("digits", 1), True, last),
        (Run("digits", None), False, last),
    ):
        write(last)
        assert checkpoint_of(trainer(HERE), None, True, run, fresh) == found
        assert last.exists() == (found is not None)
    assert checkpoint_of(trainer(HERE), None, True, None, False) is None
    # A rank that this one starts as a program, and starts again when there is a newer checkpoint.
    checkpoint_of(trainer("saved"), None, True, RUN, False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    write(Path("saved/last.ckpt"))
    assert checkpoint_of(trainer("saved"), None, True, RUN, False) is None


def test_one_process_sets_aside_what_is_there(monkeypatch):
    """Before any starts: loggers open their files before a callback can do something."""

    assert is_first(trainer(HERE))
    several = trainer(HERE, LightningEnvironment())
    for node, local in (("0", "0"), ("0", "1"), ("1", "0")):
        monkeypatch.setenv("NODE_RANK", node)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert is_first(several) == (node == local == "0")


def test_fresh_is_refused_where_it_would_be_in_vain():
    check_fresh(False, None)
    check_fresh(True, RUN)
    with pytest.raises(ConfigurationError, match="add --run_name"):
        check_fresh(True, None)
    with pytest.raises(ConfigurationError, match="give another name"):
        check_fresh(True, Run("digits", None))
