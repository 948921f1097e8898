"""After `validate` and `test`: which classes are taken for which, and the worst mistakes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from cnnstrategies.callbacks.confusion import (
    MOST_CLASSES,
    count_pairs,
    draw_confusion,
    intersections_over_unions,
    most_confused,
    write_confusion,
)
from cnnstrategies.callbacks.predictions import gather_rows
from cnnstrategies.callbacks.tables import print_table, relative
from cnnstrategies.callbacks.worst import Mistakes, draw_mistakes, write_mistakes
from cnnstrategies.data.sampling import OrderedBatches
from cnnstrategies.models.tasks import TASKS, Task

LISTED = 5  # Pairs of classes that the table names.
MOST_ROWS = 30  # Classes whose IoU the table names.
STAGES = {TrainerFn.VALIDATING: "val", TrainerFn.TESTING: "test"}


class MistakeReport(Callback):
    """After ``validate`` and ``test`` prints what is confused with what, and draws it.

    For modules whose steps return ``logits`` and ``targets``, as those of this package do. In the log directory:
    ``val_confusion.png`` and ``.csv``, a row for each true class, over all samples of all ranks; and for classifiers
    ``val_mistakes.png`` and ``.csv``, the 25 images with the greatest loss among those that are classified wrongly
    (``test_...`` after ``test``). Of a segmenter, pixels are counted, and each class's intersection over union is
    printed. More than 1000 classes have no matrix. With labels or numbers there are the 25 images in which one of them
    is predicted furthest off. Nothing is written without a logger.

    A strategy whose ranks all get the outputs of the whole batch says so by ``outputs_on_every_rank``.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._classes = 0
        self._mistakes = Mistakes.none()

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
        self._add(trainer, pl_module, outputs, batch_idx, trainer.val_dataloaders)

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._add(trainer, pl_module, outputs, batch_idx, trainer.test_dataloaders)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "val_source")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "test_source")

    def _add(self, trainer: Trainer, module: LightningModule, outputs: Any, batch_idx: int, loader: Any) -> None:
        if trainer.state.fn not in STAGES:
            return
        if not (
            isinstance(outputs, dict) and all(isinstance(outputs.get(one), Tensor) for one in ("logits", "targets"))
        ):
            return
        everywhere = _everywhere(trainer)
        if everywhere and not trainer.is_global_zero:
            return
        logits, targets = outputs["logits"].detach(), outputs["targets"]
        sampler = getattr(loader, "sampler", None)
        indices: Sequence[int] = ()
        if logits.ndim == 2 and isinstance(sampler, OrderedBatches):
            indices = sampler.of_all_ranks(batch_idx) if everywhere else sampler.samples(batch_idx, sampler.rank)
        if (task := _of_values(module)) is not None:
            self._classes = logits.shape[1]
            if indices:
                self._mistakes = self._mistakes.and_those(Mistakes.of_values(indices, task.values(logits), targets))
            return
        targets = targets.argmax(dim=1) if targets.shape == logits.shape else targets
        if targets.is_floating_point() or targets.shape != logits.shape[:1] + logits.shape[2:]:
            return  # A subclass that learns something else than classes.
        self._classes = logits.shape[1]
        if self._classes <= MOST_CLASSES:
            counted = targets.where(targets != getattr(module, "ignore_index", -1), -1)
            counts = count_pairs(logits.argmax(dim=1), counted, self._classes)
            self._counts = counts if self._counts is None else self._counts + counts
        if indices:
            self._mistakes = self._mistakes.and_those(Mistakes.of_batch(indices, logits, targets))

    def _report(self, trainer: Trainer, module: LightningModule, source: str) -> None:
        if trainer.state.fn not in STAGES:
            return
        values = _of_values(module) is not None
        counts, mistakes = self._of_all_ranks(trainer, values)
        self._counts, self._mistakes = None, Mistakes.none()
        log_dir = trainer.log_dir if trainer.loggers else None  # A broadcast: every rank asks.
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        if not trainer.is_global_zero or debugging or self._classes == 0:
            return
        datamodule = getattr(trainer, "datamodule", None)
        names = [str(name) for name in getattr(datamodule, "class_names", [])]
        names = names if len(names) == self._classes else [str(index) for index in range(self._classes)]
        stage = STAGES[trainer.state.fn]
        folder = None if log_dir is None else Path(log_dir)
        rows: list[tuple[str, str]] = []
        if counts is not None:
            rows += _told(counts, names, pixels=isinstance(getattr(datamodule, "ignore_index", None), int))
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                write_confusion(counts, names, folder / f"{stage}_confusion.csv")
                draw_confusion(counts, names, folder / f"{stage}_confusion.png")
                rows.append(("confusion", relative(str(folder / f"{stage}_confusion.png"))))
        images = getattr(datamodule, source, None)
        if len(mistakes.indices) and folder is not None and images is not None:
            folder.mkdir(parents=True, exist_ok=True)
            name_of = getattr(images, "name", str)
            write_mistakes(mistakes, names, name_of, folder / f"{stage}_mistakes.csv", values)
            shown = images.fetch(mistakes.indices.tolist())[0]
            draw_mistakes(mistakes, shown, names, folder / f"{stage}_mistakes.png", values)
            rows.append(("worst mistakes", relative(str(folder / f"{stage}_mistakes.png"))))
        if rows:
            print_table("Mistakes", rows)

    def _of_all_ranks(self, trainer: Trainer, values: bool) -> tuple[Tensor | None, Mistakes]:
        """What all ranks have counted and found; a collective, unless each of them has it all."""
        counts, mistakes = self._counts, self._mistakes
        if trainer.world_size > 1 and not _everywhere(trainer):
            device = trainer.strategy.root_device
            # A rank without a batch does not know how many classes there are.
            self._classes = int(trainer.strategy.reduce(torch.tensor(self._classes, device=device), reduce_op="max"))
            if 0 < self._classes <= MOST_CLASSES and not values:
                own = torch.zeros(self._classes, self._classes, dtype=torch.int64) if counts is None else counts
                counts = trainer.strategy.reduce(own.to(device), reduce_op="sum")
            mistakes = Mistakes(*gather_rows(trainer, mistakes.indices, mistakes.rows)).worst()
        return None if counts is None else counts.cpu(), mistakes


def _of_values(module: LightningModule) -> Task | None:
    """The task of a module that learns labels or numbers, which are not taken for one another."""
    task = getattr(module, "task", None)
    return TASKS[task] if task in ("multilabel", "regression") else None


def _everywhere(trainer: Trainer) -> bool:
    return bool(getattr(trainer.strategy, "outputs_on_every_rank", False))


def _told(counts: Tensor, names: list[str], pixels: bool) -> list[tuple[str, str]]:
    """What a matrix says, in a few words."""
    total, right = int(counts.sum()), int(counts.diagonal().sum())
    what = "pixels" if pixels else "images"
    rows = [("wrong", f"{total - right:,} of {total:,} {what} ({1 - right / max(1, total):.2%})")]
    pairs = [
        f"{names[true]} for {names[taken]}: {often:,}" + (f" ({often / int(counts[true].sum()):.1%})")
        for true, taken, often in most_confused(counts, LISTED)
    ]
    if pairs:
        rows.append(("taken most often", "\n".join(pairs)))
    if pixels and len(names) <= MOST_ROWS:
        unions = intersections_over_unions(counts)
        rows.append(("IoU", "\n".join(f"{name}: {value:.4f}" for name, value in zip(names, unions, strict=True))))
    return rows
