"""Callback that says how streams are divided among the processes, and how many of their samples were used."""

from collections import Counter
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from cnnstrategies.models.samples import count_samples
from cnnstrategies.strategies.protocol import facts_of


class EvaluatedStreams(NamedTuple):
    """Numbers of samples of the streams of a validation, test or prediction.

    Attributes:
        samples: Number of samples in batches.
        left_out: Number of samples that ``drop_last`` has left out.
        divisions: Texts about the division of the streams.
    """

    samples: int
    left_out: int
    divisions: tuple[str, ...]


class StreamCounts(Callback):
    """Callback that counts the samples of streams over all processes, for the start panel and the summaries.

    A stream is a loader's ``IterableDataset``. For other loaders the callback does nothing. A sample that a process
    repeats, so that all processes have the same number of batches, is not counted again.

    Attributes:
        epochs: For each finished epoch, the number of samples in its batches, and the number of samples at its end that
            ``drop_last`` has left out.
        evaluated: Numbers of the last validation, test or prediction; None if it had no streams.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[int, int]] = {}
        self.evaluated: EvaluatedStreams | None = None
        self._samples = 0  # Samples of the current epoch.
        self._of_loaders: Counter[int] = Counter()  # Samples of the current evaluation by the number of the loader.
        self._text = self._stage = ""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.evaluated, self._stage = None, stage

    # Training

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        describe = getattr(trainer.train_dataloader, "describe_stream", None)
        self._text = "" if describe is None else describe()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._text:
            self._samples += _samples_of(trainer, trainer.train_dataloader, batch, batch_idx)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._text:
            self.epochs[trainer.current_epoch] = _of_all_processes(trainer, trainer.train_dataloader, self._samples)
        self._samples = 0

    # Validation, test and prediction

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loader = _evaluated_loaders(trainer)[dataloader_idx]
        if hasattr(loader, "describe_stream"):
            self._of_loaders[dataloader_idx] += _samples_of(trainer, loader, batch, batch_idx)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the numbers of all loaders and all processes. All processes must call this."""
        loaders = enumerate(_evaluated_loaders(trainer))
        streams = {number: loader for number, loader in loaders if hasattr(loader, "describe_stream")}
        numbers = [_of_all_processes(trainer, loader, self._of_loaders[n]) for n, loader in streams.items()]
        self._of_loaders.clear()
        if streams and not trainer.sanity_checking:
            texts = dict.fromkeys(loader.describe_stream() for loader in streams.values())
            self.evaluated = EvaluatedStreams(
                sum(row[0] for row in numbers), sum(row[1] for row in numbers), tuple(texts)
            )

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    # Texts

    def panel_rows(self) -> list[tuple[str, str]]:
        """Return the start panel's row about the stream's division."""
        return [("stream", self._text)] if self._text else []

    def summary_rows(self) -> list[tuple[str, str]]:
        """Return the summary's rows.

        After training they have the number of samples in each epoch and in the last validation, and otherwise the
        number of samples and the division of the streams.
        """
        evaluated = None if self.evaluated is None else _samples_text(self.evaluated.samples, self.evaluated.left_out)
        if self._stage != "fit":
            texts = [] if self.evaluated is None else self.evaluated.divisions
            return [] if evaluated is None else [("stream", "\n".join([evaluated, *texts]))]
        numbers = list(self.epochs.values())
        if numbers and len(set(numbers)) == 1:
            each = f" in each of {len(numbers)} epochs" if len(numbers) > 1 else ""
            rows = [("stream", f"{_samples_text(*numbers[0])}{each}")]
        else:
            lines = [f"epoch {epoch}: {_samples_text(*entry)}" for epoch, entry in self.epochs.items()]
            rows = [("stream", "\n".join(lines))] if lines else []
        return rows if evaluated is None else [*rows, ("validation stream", evaluated)]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epochs": {epoch: list(numbers) for epoch, numbers in self.epochs.items()}, "samples": self._samples}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = {int(epoch): (samples, rest) for epoch, (samples, rest) in state_dict["epochs"].items()}
        self._samples = state_dict["samples"]


def _evaluated_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the current validation, test or prediction."""
    if trainer.predicting:
        return tree_leaves(trainer.predict_dataloaders)
    return tree_leaves(trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders)


def _samples_of(trainer: Trainer, loader: Any, batch: Any, index: int) -> int:
    """Return the number of samples of a stream's batch that this process counts."""
    if facts_of(trainer.strategy).has_global_batches:
        return count_samples(batch)
    return sum(loader.counts_of(index)) if loader.knows_counts else loader.own_count(index)


def _of_all_processes(trainer: Trainer, loader: Any, samples: int) -> tuple[int, int]:
    """Return the numbers of samples in batches and of samples left out, over all processes."""
    facts = facts_of(trainer.strategy)
    if loader.knows_counts:
        return samples, loader.left_out
    values = torch.tensor([samples, loader.left_out], device=trainer.strategy.root_device)
    rows = facts.gather_from_ranks(values)[:: facts.ranks_per_batch]
    samples = samples if facts.has_global_batches else int(rows[:, 0].sum())
    return samples, int(rows[:, 1].sum())


def _samples_text(samples: int, left_out: int) -> str:
    return f"{samples:,} samples" + (f", {left_out:,} left out by drop_last" if left_out else "")
