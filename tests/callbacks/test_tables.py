"""What a table says can be copied from it, and the progress bar's line fits a terminal of 80 columns."""

import io
import re

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import ProgressBar, SamplesPerSecond, tables
from cnnstrategies.callbacks.tables import Whole, print_table, relative
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.networks import SmallCNN

LONG = Whole("/scratch/a user/" + "experiments/" * 8 + "version_0/checkpoints/best.ckpt")
ROWS = [("val_acc", "0.9 at the end, " + "and so on " * 10), ("checkpoint", LONG), ("curves", Whole("[c] d.png"))]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_path_is_whole_whatever_the_width(monkeypatch, capsys, terminal):
    monkeypatch.setattr(tables, "Console", lambda: Console(width=80, force_terminal=terminal, color_system=None))
    print_table("Training summary", ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert sum(LONG in line for line in lines) == 1
    assert sum("[c] d.png" in line for line in lines) == 1
    if terminal:
        assert f"checkpoint: {LONG}" in lines, "under the table"
        assert max(len(line) for line in lines if LONG not in line) <= 80


@pytest.mark.light
def test_paths_are_relative_to_where_one_is(tmp_path):
    assert relative(str(tmp_path / "runs/best.ckpt")) == "runs/best.ckpt"
    assert relative("s3://bucket/best.ckpt") == "s3://bucket/best.ckpt"
    assert isinstance(relative("/elsewhere/best.ckpt"), Whole)


def test_a_line_has_the_metrics_and_no_version(tmp_path):
    shown = io.StringIO()
    bar = ProgressBar(console_kwargs={"file": shown, "width": 80, "force_terminal": True}, leave=True)
    data = SyntheticDataModule(num_samples=100, num_classes=3, image_size=8, channels=1, batch_size=2)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[bar, SamplesPerSecond()], logger=CSVLogger(tmp_path)
    )
    trainer.fit(ImageClassifier(SmallCNN(3, in_channels=1, widths=[4]), 3), data)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()).replace("\r", "\n").splitlines()
    last = [line for line in lines if line.startswith("Epoch 0/0") and "val_acc" in line][-1]
    assert re.search(r"\b(\d+)/\1 .*it/s .*val_acc: \d\.\d+ train_loss: \d\.\d+", last)
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert not any("v_num" in line or "samples_per_s" in line for line in lines)
