"""`best.ckpt`, the summary and the curves follow what a module logs."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger

from cnnstrategies import ConfigurationError
from cnnstrategies.callbacks import BestCheckpoint, TrainingSummary
from cnnstrategies.callbacks.summary import choose_panels, draw_curves
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.models.metric_names import worth_showing
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner import panels


class Lit(LightningModule):
    """A user's module that logs made-up values after each epoch."""

    def __init__(self, logs: dict[str, list[float]], train_loss: bool = True):
        super().__init__()
        self.net = PlainCNN()
        self.logs = logs
        self.train_loss = train_loss

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.train_loss:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        for name, values in self.logs.items():
            self.log(name, values[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(logs, *callbacks, epochs=3, ckpt_path=None, train_loss=True, **options):
    options = {
        "enable_checkpointing": True,
        "limit_train_batches": 1,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 2,
        **options,
    }
    trainer = quiet_trainer(callbacks=list(callbacks), max_epochs=epochs, **options)
    trainer.fit(Lit(logs, train_loss), DigitsDataModule(), ckpt_path=ckpt_path, weights_only=True)


def saved(name="best"):
    return torch.load(f"saved/{name}.ckpt", weights_only=True)


def test_the_best_checkpoint_is_by_accuracy_or_loss_or_the_last(recwarn):
    for logs, epoch in (
        ({"val_acc": [0.1, 0.9, 0.5], "val_loss": [3.0, 2.0, 1.0]}, 1),
        ({"val_loss": [2.0, 1.0, 3.0]}, 1),
        ({"val/f1": [0.1, 0.9, 0.5]}, 2),
    ):
        fit(logs, BestCheckpoint("saved", enable_version_counter=False))
        assert [path.name for path in Path("saved").iterdir()] == ["best.ckpt"]
        assert saved()["epoch"] == epoch
    assert not [w for w in recwarn if "monitor" in str(w.message)]


def test_the_best_of_a_run_is_known_when_it_is_resumed():
    fit({"val_loss": [1.0, 2.0]}, BestCheckpoint("saved"), BestCheckpoint("saved", "each", None), epochs=2)
    assert saved("each")["epoch"] == 1
    (resumed := BestCheckpoint("saved")).load_state_dict(saved("each")["callbacks"][resumed.state_key])
    assert (resumed.monitor, resumed.mode) == ("val_loss", "min"), "before the first validation"
    fit({"val_loss": [1.0, 2.0, 1.5]}, BestCheckpoint("saved"), ckpt_path="saved/each.ckpt")
    assert saved()["epoch"] == 0, "1.5 is not better than 1.0"


def test_a_monitor_that_is_not_logged_is_named_with_what_is():
    with pytest.raises(
        ConfigurationError, match=r"does not log 'val_accuracy'; did you mean 'val_acc'.* train_loss, val_acc"
    ):
        fit({"val_acc": [0.0]}, BestCheckpoint("saved", monitor="val_accuracy"), epochs=1)
    with pytest.raises(ConfigurationError, match="does not log 'val_acc'; it logs: train_loss"):
        fit({}, BestCheckpoint("saved", monitor="val_acc"), epochs=1, num_sanity_val_steps=0)


@pytest.mark.light
def test_summary_and_curves_take_whatever_was_logged():
    assert worth_showing(["lr-SGD", "samples_per_s", "train_loss_step", "train_loss"]) == ["train_loss"]
    assert worth_showing(["train_loss", "val_f1", "valid/error"]) == ["val_f1", "valid/error"]
    usual = {"train_loss": 2.0, "val_loss": 1.0, "val_acc": 0.5, "val_acc_top5": 0.9, "train_loss_step": 2.0}
    assert choose_panels({0: usual}) == {"Loss": ["train_loss", "val_loss"], "Accuracy": ["val_acc"]}
    other_names = {"train/loss": 2.0, "valid/accuracy": 40.0}
    assert choose_panels({0: other_names}) == {"Loss": ["train/loss"], "Accuracy": ["valid/accuracy"]}
    assert choose_panels({0: {}, 1: {"f1": 0.5, "samples_per_s": 3.0}}) == {"Metrics": ["f1"]}
    assert choose_panels({0: {"samples_per_s": 3.0}}) == {}
    draw_curves({0: other_names, 1: other_names}, Path("own.png"))
    assert Path("own.png").stat().st_size > 5000


def test_the_summary_of_a_module_with_names_of_its_own(capsys):
    options = {"logger": CSVLogger("logs"), "epochs": 2, "train_loss": False}
    fit({"val/error": [0.25, 0.5]}, TrainingSummary(), BestCheckpoint(), **options)
    rows = panels.rows(capsys.readouterr().out, "Training summary")
    assert rows["val/error"] == "0.5000 at the end, best 0.2500 in epoch 0"
    assert Path(rows["curves"]).is_file()
