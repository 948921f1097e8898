"""Weight averaging from the command line, which copies the model with all that it holds."""

from pathlib import Path

import pytest
import torch
from cluster.processes_of import PYTHON, Program

# As a user writes it: a module beside the configuration, which is given factories.
MINE = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn


class Mine(LightningModule):
    def __init__(self, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable, num_classes: int):
        super().__init__()
        self.save_hyperparameters()
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, num_classes))

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def training_step(self, batch, batch_idx):
        return self.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [self.lr_scheduler(optimizer)]
"""
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  strategy: ddp
  precision: 64-true
  max_epochs: 1
  limit_train_batches: 4
  limit_val_batches: 0
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: TensorBoardLogger, init_args: {save_dir: runs}}
  callbacks:
    - {class_path: EMAWeightAveraging, init_args: {decay: 0.8}}
checkpoint: {monitor: null}
model:
  class_path: mine.Mine
  init_args:
    num_classes: 10
    optimizer: {class_path: SGD, init_args: {lr: 0.1}}
    lr_scheduler: {class_path: ExponentialLR, init_args: {gamma: 0.5}}
data: {class_path: DigitsDataModule, init_args: {batch_size: 32, augment: false}}
"""
ONE = ("--trainer.strategy=auto", "--trainer.devices=1", "--data.init_args.batch_size=64")
STAGES = (
    "--trainer.strategy=HybridPipelineStrategy",
    '--trainer.strategy.cuts=["1"]',
    "--trainer.strategy.start_method=fork",
    "--data.init_args.batch_size=64",
)


@pytest.fixture
def train(run_cli, monkeypatch, tmp_path):
    """Trains the user's own module in this folder; gives the checkpoint."""
    Path("mine.py").write_text(MINE)
    Path("mine.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path))

    def train(name, *arguments, programs=False):
        arguments = ("fit", "--config=mine.yaml", *arguments, f"--trainer.logger.init_args.name={name}")
        if programs:
            program = Program([PYTHON, "-m", "cnnstrategies", *arguments], tmp_path / "log")
            assert program.wait() == 0, program.output()
        else:
            code, output = run_cli(*arguments)
            assert code == 0, output
        return torch.load(Path("runs") / name / "version_0/checkpoints/last.ckpt", weights_only=True)

    return train


@pytest.mark.warm
def test_the_average_of_two_processes_is_that_of_one(train):
    """With DDP's ranks started as programs, as they are by default, and with two stages."""
    one = train("one", *ONE)
    average, current = one["state_dict"], one["current_model_state"]
    assert all((average[name] - current[name]).norm() > 1e-3 * current[name].norm() for name in average)
    for two in (train("ddp", programs=True), train("stages", *STAGES)):
        for kind in ("state_dict", "current_model_state", "averaging_state"):
            assert two[kind].keys() == one[kind].keys()
            for name, value in one[kind].items():
                torch.testing.assert_close(two[kind][name], value, rtol=1e-10, atol=1e-14)


def test_an_average_that_cannot_be_sent_to_a_process_is_refused(run_cli, quick):
    """It holds a function inside a function of torch's."""
    average = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.strategy=ddp_spawn"]
    code, output = run_cli("fit", *quick, *average)
    assert code == 2, output
    # Not the last line everywhere: what Python 3.12 has to say of a fork that ends at once comes after it.
    (line,) = (line for line in output.splitlines() if line.startswith("cnnstrategies: error"))
    for word in ("cannot all be pickled", "ema_update", "ddp_fork"):
        assert word in line
