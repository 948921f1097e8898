"""Search a learning rate and train with it, under a strategy; ``python finder_program.py STRATEGY DEVICES FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import torch
from chain_program import Data, Model
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder


class TwinData(Data):
    """Trains with each image twice, one for each rank: a rank's loss, by which the finder goes, is that of both."""

    def __init__(self) -> None:
        super().__init__()
        for values in (self.images, self.targets):
            values[:48] = values[:24].repeat_interleave(2, 0)


class Searching(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def search_and_train(strategy: str, devices: int, folder: Path) -> None:
    seed_everything(1, verbose=False)
    model, finder = Searching(), LearningRateFinder(1e-4, 2.0, num_training_steps=20, early_stop_threshold=None)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=8,
        callbacks=[finder],
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, TwinData())
    assert finder.optimal_lr is not None
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    found = {"found": model.lr, "metrics": metrics, **finder.optimal_lr.results}
    torch.save(found, folder / f"found_by_rank_{trainer.global_rank}.pt")
    trainer.save_checkpoint(folder / "end.ckpt")


if __name__ == "__main__":
    search_and_train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
