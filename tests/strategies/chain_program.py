"""Call a Trainer's functions one after another under a strategy, and save the state after each function.

Run ``python chain_program.py STRATEGY OTHER FOLDER``, alone or under torchrun. Strategies are registered names.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from cnnstrategies import ImageClassifier

GLOBAL_BATCH = 16
ADAMW = partial(torch.optim.AdamW, lr=0.01)
DECAY = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)


class Batches(list[list[int]]):
    """A list that allows attributes, which Lightning sets on batch samplers."""


class Data(LightningDataModule):
    """Noisy images that depend on their class. Each rank loads its part of the same global batches."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(80, 1, 6, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(3, (80,), generator=generator)
        self.images += self.targets[:, None, None, None] * 0.5

    def loader(self, start: int, stop: int, targets: torch.Tensor) -> DataLoader[Any]:
        assert self.trainer is not None
        shard = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        rows = range(start, stop)
        batches = [rows[first:][:GLOBAL_BATCH] for first in range(0, len(rows), GLOBAL_BATCH)]
        rank_batches = Batches(list(batch[shard["rank"] :: shard["num_replicas"]]) for batch in batches)
        return DataLoader(TensorDataset(self.images, targets), batch_sampler=rank_batches)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(0, 48, self.targets)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(48, 64, self.targets)

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader(64, 80, self.targets)

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader(48, 80, torch.arange(80))


class Model(ImageClassifier):
    """A classifier in float64, in which the order of summation does not matter; its metrics are in float32."""

    def __init__(self) -> None:
        network = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        )
        super().__init__(network.double(), 3, optimizer=ADAMW, lr_scheduler=DECAY)
        self.example_input_array = torch.zeros(4, 1, 6, 6, dtype=torch.float64)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        images, indices = batch
        return {"index": indices, "logits": self.network(images)}


class Leftovers(Callback):
    """A callback that saves data that only the ranks of a launcher have: predictions, and a checkpoint after fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[int, list[float]] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for metric in filter(lambda module: isinstance(module, Metric), pl_module.modules()):
            shared = [name for name, state in metric.metric_state.items() if state.is_shared()]
            assert not shared, f"{shared} of {type(metric).__name__} are in memory that all ranks share"

    def on_predict_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.rows |= zip(outputs["index"].tolist(), outputs["logits"].tolist(), strict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: Any) -> None:
        torch.save(self.rows, self.folder / f"rows_of_rank_{trainer.global_rank}.pt")

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end_of_{trainer.current_epoch}.ckpt")


class Chain:
    """A run of a Trainer's functions, with notes of the values that a script can see after each function.

    Args:
        strategy: Strategy of the first Trainer.
        other: Strategy of the second Trainer.
        folder: Folder of all files.
        devices: Number of ranks.
        callbacks: Additional callbacks of the first Trainer.
    """

    def __init__(
        self, strategy: Any, other: Any, folder: str | Path, devices: int = 2, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.folder = Path(folder)
        self.strategy, self.other, self.devices, self.callbacks = strategy, other, devices, callbacks
        self.precision = DoublePrecision()  # Both Trainers share it: changes by one strategy must not reach the other.
        self.notes: dict[str, dict[str, Any]] = {}
        seed_everything(1, verbose=False)
        self.model, self.data = Model(), Data()

    def trainer(self, strategy: Any, epochs: int, *callbacks: Callback) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=self.devices,
            strategy=strategy,
            plugins=[self.precision],
            gradient_clip_val=0.3,
            max_epochs=epochs,
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def note(self, function: str, trainer: Trainer) -> None:
        # `train_loss_step` is the loss of a rank's own part of the batch.
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name != "train_loss_step"}
        self.notes[function] = {
            "weights": sum(float(p.detach().abs().sum()) for p in self.model.parameters()),
            "metrics": metrics,
            "global_step": trainer.global_step,
        }
        torch.save(self.notes, self.folder / f"notes_of_rank_{trainer.global_rank}.pt")

    def run(self, short: bool = False) -> None:
        """Run all functions, or, for slow launchers, only the functions that save and restore most."""
        # The best checkpoint is always the first epoch's, so that it differs from the last checkpoint.
        best = ModelCheckpoint(self.folder, "best", monitor="epoch", mode="min", save_last=True)
        trainer = self.trainer(self.strategy, 2, best, Leftovers(self.folder), *self.callbacks)
        if not short:
            trainer.validate(self.model, self.data, verbose=False)
            self.note("validate before fit", trainer)
        trainer.fit(self.model, self.data)
        self.note("fit", trainer)
        if not short:
            trainer.validate(self.model, self.data, verbose=False)
            self.note("validate", trainer)
        trainer.test(self.model, self.data, verbose=False)
        self.note("test", trainer)
        if not short:
            trainer.predict(self.model, self.data, return_predictions=False)
            self.note("predict", trainer)
        trainer.save_checkpoint(self.folder / "after_fit.ckpt")
        self.note("save_checkpoint", trainer)
        start = "after_fit.ckpt" if self.fit_again(trainer) else "last.ckpt"
        if not short:
            # The best checkpoint is the first epoch's.
            trainer.test(self.model, self.data, ckpt_path="best", weights_only=True, verbose=False)
            self.note("test the best", trainer)
            # A new Trainer with a new strategy resumes from the end of the first fit, with the optimizer's state.
            trainer = self.trainer(self.other, 4)
            trainer.fit(self.model, self.data, ckpt_path=self.folder / start, weights_only=True)
            self.note("another strategy", trainer)

    def fit_again(self, trainer: Trainer) -> bool:
        """Fit again, and return whether the launcher allows it.

        Lightning's own launcher does not bring the loops back from the ranks that it has started.
        """
        trainer.fit_loop.max_epochs = 3
        try:
            trainer.fit(self.model, self.data)
        except NotImplementedError as error:
            (self.folder / "refusal.txt").write_text(str(error))
            return False
        self.note("second fit", trainer)
        trainer.save_checkpoint(self.folder / "after_second_fit.ckpt")
        return True


if __name__ == "__main__":
    Chain(*sys.argv[1:]).run(short=sys.argv[1].endswith("_spawn"))
