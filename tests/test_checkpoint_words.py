"""`--ckpt_path last` and `best` choose the newest checkpoint of the run's name, and the same one on every rank."""

import os
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.commands.arguments.checkpoint_path import check_checkpoint
from cnnstrategies.commands.run.start_from import FOUND, SameCheckpoint, checkpoint_of, find_checkpoint
from cnnstrategies.data import DigitsDataModule
from tests.conftest import PlainCNN, quiet_trainer

RUNS = Path("runs/quickstart")


def write(path, seconds):
    """Write an empty file with this modification time."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
    os.utime(path, (seconds, seconds))


def trainer(*callbacks, logger=False):
    return quiet_trainer(logger=logger, enable_checkpointing=True, callbacks=list(callbacks))


def test_the_newest_checkpoint_is_sought_where_runs_of_this_name_write():
    for version, seconds in (("version_9", 100), ("version_10", 300), ("torchrun_a", 200)):
        for name in ("best", "last"):
            write(f"runs/mine/{version}/checkpoints/{name}.ckpt", seconds)
    write("runs/other/version_0/checkpoints/last.ckpt", 400)
    write("checkpoints/last.ckpt", 400)
    write("saved/last.ckpt", 400)
    named = CSVLogger("runs", "mine")
    message = r"ckpt_path=last: there is no last.ckpt in runs/new/\*/checkpoints; train without ckpt_path first"
    with pytest.raises(ConfigurationError, match=message):
        find_checkpoint("last", trainer(logger=CSVLogger("runs", "new")))
    assert find_checkpoint("last", trainer(logger=named)) == Path("runs/mine/version_10/checkpoints/last.ckpt")
    assert find_checkpoint("best", trainer(logger=named)) == Path("runs/mine/version_10/checkpoints/best.ckpt")
    here = Path.cwd()
    assert find_checkpoint("last", trainer()) == here / "checkpoints/last.ckpt"
    saved = ModelCheckpoint("saved")
    assert find_checkpoint("last", trainer(saved, logger=named)) == here / "saved/last.ckpt"
    with pytest.raises(
        ConfigurationError, match=r"saved/last.ckpt is the newest .* its folder contains no best.ckpt; give"
    ):
        find_checkpoint("best", trainer(saved))
    remote = trainer(ModelCheckpoint("memory://bucket"))
    with pytest.raises(
        ConfigurationError, match="memory://bucket is not on a disk; give the checkpoint's path instead"
    ):
        find_checkpoint("last", remote)


def test_a_rank_that_starts_later_does_not_search_again(monkeypatch):
    write("checkpoints/last.ckpt", 100)
    first = checkpoint_of(trainer(), "last", True, None)
    write("elsewhere/last.ckpt", 200)
    later = trainer(ModelCheckpoint("elsewhere"))
    for rank in ("0", "1"):  # Rank 0 also starts later if a parameter server's supervisor starts it.
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert checkpoint_of(later, "last", True, None) == first == os.environ[FOUND]
    # A process of this run may start another run, which searches for its own checkpoint.
    monkeypatch.delenv("LOCAL_RANK")
    assert checkpoint_of(later, "last", True, None) == str(Path("elsewhere/last.ckpt").resolve())


class OtherOnRank1(SameCheckpoint):
    def setup(self, trainer, pl_module, stage):
        self.path = f"{trainer.global_rank}.ckpt"
        super().setup(trainer, pl_module, stage)


def test_ranks_with_different_checkpoints_do_not_start():
    run = quiet_trainer("ddp_fork", 2, max_epochs=1, callbacks=[OtherOnRank1("")])
    with pytest.raises(Exception, match=r"rank 0 chose 0\.ckpt, but another rank chose another file; give"):
        run.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())


def test_lightnings_special_checkpoint_names_are_accepted():
    Path("hpc_ckpt_1.ckpt").touch()
    for word in ("hpc", "registry", "registry:name:version:1"):
        check_checkpoint(word)
    with pytest.raises(ConfigurationError, match="no checkpoint 'register'"):
        check_checkpoint("register")
