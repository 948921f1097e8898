"""Callback that says how a stream is divided among the processes, and how many of its samples were trained on."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.strategies.protocol import facts_of


class StreamCounts(Callback):
    """Callback that counts a stream's samples in each epoch over all processes, for the start panel and the summary.

    A stream is a loader's ``IterableDataset``. For other loaders the callback does nothing. A sample that a process
    repeats, so that all processes have the same number of batches, is not counted again.

    Attributes:
        epochs: For each finished epoch, the number of samples in its batches, and the number of samples at its end that
            ``drop_last`` has left out.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[int, int]] = {}
        self._samples = 0  # Samples of the current epoch.
        self._text = ""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        describe = getattr(trainer.train_dataloader, "describe_stream", None)
        self._text = "" if describe is None else describe()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._text:
            loader: Any = trainer.train_dataloader
            self._samples += sum(loader.counts_of(batch_idx)) if loader.knows_counts else loader.own_count(batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._text:
            return
        loader: Any = trainer.train_dataloader
        numbers = self._samples, loader.left_out
        if not loader.knows_counts:
            facts = facts_of(trainer.strategy)
            values = torch.tensor(numbers, device=trainer.strategy.root_device)
            samples, left_out = facts.gather_from_ranks(values)[:: facts.ranks_per_batch].sum(0).tolist()
            numbers = samples, left_out
        self.epochs[trainer.current_epoch] = numbers
        self._samples = 0

    def panel_rows(self) -> list[tuple[str, str]]:
        """Return the start panel's row about the stream's division."""
        return [("stream", self._text)] if self._text else []

    def summary_rows(self) -> list[tuple[str, str]]:
        """Return the summary's row with the number of samples in each epoch."""
        if not self.epochs:
            return []
        numbers = list(self.epochs.values())
        if len(set(numbers)) == 1:
            each = f" in each of {len(numbers)} epochs" if len(numbers) > 1 else ""
            return [("stream", f"{_samples_text(*numbers[0])}{each}")]
        return [
            ("stream", "\n".join(f"epoch {epoch}: {_samples_text(*entry)}" for epoch, entry in self.epochs.items()))
        ]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epochs": {epoch: list(numbers) for epoch, numbers in self.epochs.items()}, "samples": self._samples}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = {int(epoch): (samples, rest) for epoch, (samples, rest) in state_dict["epochs"].items()}
        self._samples = state_dict["samples"]


def _samples_text(samples: int, left_out: int) -> str:
    return f"{samples:,} samples" + (f", {left_out:,} left out by drop_last" if left_out else "")
