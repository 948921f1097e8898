"""The progress bar's line fits a terminal of 80 columns."""

import io
import re

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import ProgressBar, SamplesPerSecond
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.networks import SmallCNN


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
