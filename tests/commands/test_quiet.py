"""What the command line leaves out of Lightning's messages, and what it does not."""

import io
import logging
import pickle
import resource
import sys
import threading
import warnings

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from cnnstrategies.cluster.environment import environment_plugins
from cnnstrategies.commands.run.failures import explain_run_error
from cnnstrategies.commands.run.quiet import LOGGERS, quieten
from cnnstrategies.commands.run.trainer import Trainer


@pytest.fixture
def said(monkeypatch):
    """What reaches the terminal; the filters that the fixture has found are gone in the test's own process."""
    texts = []
    seen = logging.Handler()
    monkeypatch.setattr(seen, "emit", lambda record: texts.append(record.getMessage()))
    for name in ("lightning.pytorch", "lightning.fabric"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [seen])
    for name in LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    return texts


def build():
    seed_everything(1)
    Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, precision="bf16-mixed")


def of_a_spawned_rank() -> bytes:
    return pickle.dumps(Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))


def test_lightnings_talk_is_left_out_and_news_stay(said):
    state = ModelCheckpoint("version_0").state_dict()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        build()
        trainer = of_a_spawned_rank()
        ModelCheckpoint("version_1").load_state_dict(state)
        assert "dirpath has changed" in str(warned.pop().message), "else take it out of WARNINGS"
        warned.clear()
        assert [text.split(":")[0] for text in said][:4] == [
            "Seed set to 1",
            "Using bfloat16 Automatic Mixed Precision (AMP)",
            "GPU available",
            "TPU available",
        ], "Lightning says something else: change NOISE"
        said.clear()
        pickle.loads(trainer)  # There `quieten` is called.
        build()
        ModelCheckpoint("version_1").load_state_dict(state)
        rank_zero_info("\n----\ndistributed_backend=gloo\nAll distributed processes registered.\n----\n")
        rank_zero_info("`Trainer.fit` stopped: `max_epochs=20` reached.")
        rank_zero_info("Loaded model weights from the checkpoint at best.ckpt")
        assert said == []
        assert not any("dirpath" in str(one.message) for one in warned)
        rank_zero_info("`Trainer.fit` stopped: No training batches.")
        logging.getLogger(LOGGERS[0]).warning("GPU available: but broken")
        rank_zero_warn("there are few workers")
    assert said == ["`Trainer.fit` stopped: No training batches.", "GPU available: but broken"]
    assert "few workers" in str(warned[-1].message)


def test_tensorboards_thread_leaves_a_full_disk_to_the_logger(capsys):
    quieten()
    logger = TensorBoardLogger(".")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    for step in range(10):
        logger.log_metrics({"loss": 1.0}, step)
    with pytest.raises(OSError, match="File too large") as full:
        logger.save()
    assert explain_run_error(full.value) == "File too large; free some space, and continue with --ckpt_path=last"
    assert capsys.readouterr().err == ""
    other = threading.Thread(target=lambda: 1 // 0)
    other.start()
    other.join()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_a_terminal_cannot_show_is_a_question_mark(monkeypatch):
    trainer = of_a_spawned_rank()
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="latin-1"))
    pickle.loads(trainer)
    print("0/23 •", flush=True)
    assert terminal.getvalue().endswith(b"0/23 ?\n")


def test_a_job_of_more_nodes_is_told_that_it_uses_one(said, monkeypatch, tmp_path):
    quieten()
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment_plugins([]) == []
    assert said == []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert environment_plugins([]) == []
    assert [text.split(",")[0] for text in said] == ["This SLURM job has 2 nodes"]
