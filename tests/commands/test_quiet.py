"""The command line leaves out Lightning's routine messages, and keeps all others."""

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
def terminal(monkeypatch):
    """Return a list that gets the messages that reach the terminal.

    The fixture also removes the loggers' present filters for the test.
    """
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


def test_lightnings_routine_messages_are_left_out_and_others_stay(terminal):
    state = ModelCheckpoint("version_0").state_dict()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        build()
        trainer = of_a_spawned_rank()
        ModelCheckpoint("version_1").load_state_dict(state)
        assert "dirpath has changed" in str(warned.pop().message), "otherwise remove it from WARNINGS"
        warned.clear()
        assert [text.split(":")[0] for text in terminal][:4] == [
            "Seed set to 1",
            "Using bfloat16 Automatic Mixed Precision (AMP)",
            "GPU available",
            "TPU available",
        ], "Lightning prints other messages: change NOISE"
        terminal.clear()
        pickle.loads(trainer)  # Unpickling calls `quieten`.
        build()
        ModelCheckpoint("version_1").load_state_dict(state)
        rank_zero_info("\n----\ndistributed_backend=gloo\nAll distributed processes registered.\n----\n")
        rank_zero_info("`Trainer.fit` stopped: `max_epochs=20` reached.")
        rank_zero_info("Loaded model weights from the checkpoint at best.ckpt")
        assert terminal == []
        assert not any("dirpath" in str(warning.message) for warning in warned)
        rank_zero_info("`Trainer.fit` stopped: No training batches.")
        logging.getLogger(LOGGERS[0]).warning("GPU available: but broken")
        rank_zero_warn("there are few workers")
    assert terminal == ["`Trainer.fit` stopped: No training batches.", "GPU available: but broken"]
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


def test_characters_that_a_terminal_cannot_show_are_question_marks(monkeypatch):
    trainer = of_a_spawned_rank()
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="latin-1"))
    pickle.loads(trainer)
    print("0/23 •", flush=True)
    assert terminal.getvalue().endswith(b"0/23 ?\n")


def test_a_job_of_several_nodes_that_uses_one_is_warned(terminal, monkeypatch, tmp_path):
    quieten()
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert environment_plugins([]) == []
    assert terminal == []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert environment_plugins([]) == []
    assert [text.split(",")[0] for text in terminal] == ["This SLURM job has 2 nodes"]
