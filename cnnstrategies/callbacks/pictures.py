"""Callback that draws pictures of an evaluation: confusion matrix, calibration, worst mistakes and masks."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from PIL import Image
from torch import Tensor
from torchvision.ops import box_iou
from typing_extensions import override

from cnnstrategies.callbacks.picture_counts import WORST, PictureCounts, State, counts_for
from cnnstrategies.callbacks.picture_files import Evaluated, write_pictures
from cnnstrategies.callbacks.tables import relative
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.dealing import turns
from cnnstrategies.shares.samplers import OrderedBatches
from cnnstrategies.strategies.protocol import facts_of

MOST_BOXES = 30  # Largest number of predicted boxes that are kept for an image, the most confident first.
CONFIDENT = 0.5  # Smallest score of a box that counts and is drawn.
OVERLAP = 0.5  # Smallest intersection over union of a box and an object that it has found.


class BoxCounts(PictureCounts):
    """Counts of a detection.

    The size of a mistake is the number of an image's objects without a box, plus the number of its boxes without an
    object of their class. These two numbers are also the numbers of a mistake, and its integers are the index.
    """

    boxes: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        # x1, y1, x2, y2, label and score. Unused rows have the score 0.
        self.add_state("boxes", torch.zeros(WORST, MOST_BOXES, 6))

    @override
    def update(  # type: ignore[override]
        self, detections: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], indices: Tensor
    ) -> None:
        """Count a batch.

        Args:
            detections: ``boxes`` (n, 4), ``labels`` and ``scores`` (n,) of each image.
            targets: ``boxes`` (m, 4) and ``labels`` (m,) of each image, and optionally ``iscrowd`` (m,).
            indices: Index of each image in its data set (N,), or -1 if the indices are not known.
        """
        for detection, target, index in zip(detections, targets, indices, strict=True):
            order = detection["scores"].argsort(descending=True)[:MOST_BOXES]
            boxes, labels, scores = (detection[name][order].float() for name in ("boxes", "labels", "scores"))
            confident = scores >= CONFIDENT
            counted = target.get("iscrowd", torch.zeros_like(target["labels"])) == 0
            overlap = box_iou(target["boxes"].float(), boxes) >= OVERLAP
            fits = overlap & (target["labels"][:, None] == labels) & confident
            missing = (counted & ~fits.any(1)).sum().float()
            wrong = (confident & ~fits.any(0)).sum().float()
            rows = torch.zeros(1, MOST_BOXES, 6, device=boxes.device)
            rows[0, : len(order)] = torch.cat([boxes, labels[:, None], (scores * confident)[:, None]], 1)
            total = missing + wrong
            score = total.masked_fill(total == 0, -torch.inf)
            kept = self._keep_worst(score[None], (missing[None], wrong[None]), (index[None],) * 3)
            self.boxes = torch.cat([self.boxes, rows])[kept]

    @override
    def merged(self, states: State) -> dict[str, Tensor]:
        order = self.order_of_worst(states["worst_values"].flatten(0, 1)[:, 0])
        return super().merged(states) | {"boxes": states["boxes"].flatten(0, 1)[order]}


Split = Literal["val", "test"]


@dataclass
class Kept:
    """The counts of one evaluation, of all ranks.

    Attributes:
        split: Name of the evaluated split.
        epoch: Epoch of the training, or None for an evaluation outside of ``fit``.
        states: The counts by name, on the CPU; see :class:`.PictureCounts`.
    """

    split: Split
    epoch: int | None
    states: dict[str, Tensor]


class Pictures(Callback):
    """Callback that draws what ``validate`` and ``test`` have found, and at the end of ``fit`` the best validation.

    In the folder ``pictures`` of the log directory, and in the logger, it leaves

    - for classes: the confusion matrix, a table with precision and recall of each class, the reliability diagram, and
      the worst mistakes with the images and their file names;
    - for several labels: the same for each label;
    - for a regression: predicted against true values, a table of the errors, and the worst mistakes;
    - for a segmentation: the confusion matrix of the pixels, a table with the intersection over union of each class,
      and true and predicted masks over the worst images;
    - for a detection: the images with the most missing and wrong boxes, with their true and predicted boxes.

    The counts are taken from the outputs of ``validation_step`` and ``test_step``, over all ranks. They are tensors of
    fixed size on the device. The pictures of a ``fit`` show the epoch of the best checkpoint, if this start of the run
    has saved it, and otherwise the last epoch.

    A module of your own has pictures if it has an integer ``num_classes``, and its steps return a mapping with
    ``logits`` (N, num_classes, ...) and ``targets``. Its attribute ``task`` is ``classes`` (the default),
    ``multilabel`` or ``regression``. With an attribute ``ignore_index``, which may be None, it is a segmentation. The
    images of the worst mistakes need a data module of this package. For other modules, and without a logger, nothing is
    drawn. If there are several validation loaders, the pictures show the first one.
    """

    def __init__(self) -> None:
        self.counts: PictureCounts | None = None
        self.files: list[Path] = []
        self._last: Kept | None = None
        self._best: Kept | None = None
        self._best_score: Tensor | None = None

    def summary_rows(self) -> list[tuple[str, str]]:
        """Return the row of the closing summary that names the files, if there are any."""
        return [("pictures", "\n".join(relative(str(file)) for file in self.files))] if self.files else []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.files, self._last, self._best = [], None, None
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        draws = bool(trainer.loggers) and not debugging and stage != "predict"
        image_shape = getattr(getattr(trainer, "datamodule", None), "image_shape", None)
        self.counts = None
        if draws:
            detects = getattr(pl_module, "task", None) == "detection"
            self.counts = BoxCounts(0) if detects else counts_for(pl_module, image_shape)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._best_score = best_score(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._choose(trainer)
        if self.counts is not None:
            self.counts.to(pl_module.device)
            self.counts.reset()

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
        if self.counts is None or trainer.sanity_checking or dataloader_idx:
            return
        if isinstance(self.counts, BoxCounts):
            indices = indices_of(trainer, batch_idx, len(outputs["targets"]), pl_module.device)
            self.counts.update(outputs["detections"], outputs["targets"], indices)
        elif isinstance(outputs, dict) and {"logits", "targets"} <= outputs.keys():
            logits, targets = outputs["logits"].detach(), outputs["targets"]
            indices = indices_of(trainer, batch_idx, len(targets), logits.device)
            self.counts.update(logits, targets, indices)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.counts is None or not self.counts.update_called:
            return
        states = states_of_ranks(trainer, self.counts.compute())
        epoch = trainer.current_epoch if trainer.state.fn == TrainerFn.FITTING else None
        self._last = Kept("test" if trainer.testing else "val", epoch, self.counts.merged(states))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._write(trainer, pl_module, self._last)

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_epoch_end, on_test_end = on_validation_epoch_end, on_validation_end

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._choose(trainer)
        self._write(trainer, pl_module, self._best or self._last)

    def _choose(self, trainer: Trainer) -> None:
        """Keep the counts of the last validation if the checkpoint that was saved after it is the best so far."""
        score = best_score(trainer)
        if self._last is not None and (score is None or self._best_score is None or score != self._best_score):
            self._best = self._last
        self._best_score = score

    def _write(self, trainer: Trainer, module: LightningModule, kept: Kept | None) -> None:
        log_dir = trainer.log_dir if trainer.loggers else None  # All ranks must read it, because it runs a broadcast.
        if kept is None or log_dir is None or not trainer.is_global_zero:
            return
        folder, datamodule = Path(log_dir) / "pictures", getattr(trainer, "datamodule", None)
        evaluated = Evaluated(kept.split, kept.epoch, kept.states, datamodule, getattr(module, "ignore_index", None))
        try:
            self.files = write_pictures(folder, evaluated)
        except (OSError, ConfigurationError) as error:
            rank_zero_warn(f"the pictures in {folder} are not complete: {error}")
        log_pictures(trainer.loggers, self.files, trainer.global_step)


def best_score(trainer: Trainer) -> Tensor | None:
    """Return the best value of the monitored metric so far, or None if no metric is monitored."""
    return getattr(trainer.checkpoint_callback, "best_model_score", None)


def indices_of(trainer: Trainer, batch: int, samples: int, device: torch.device) -> Tensor:
    """Return the index of each sample of an evaluation batch in its data set (N,), or -1 if the loader is not known.

    Args:
        trainer: The trainer.
        batch: Index of the batch.
        samples: Number of samples in the batch.
        device: Device of the result.
    """
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    loader = loaders[0] if isinstance(loaders, (list, tuple)) else loaders
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, OrderedBatches):
        everyone = facts_of(trainer.strategy).has_global_batches
        ranks = range(sampler.num_replicas) if everyone else [sampler.rank]
        parts = [sampler.samples(batch, rank) for rank in ranks]
        places = [place for places in turns([len(part) for part in parts]) for place in places]
        if len(places) == samples:
            # The replicas of a pipeline's first stage take turns. A copy that does not block needs no read.
            indices = torch.empty(samples, dtype=torch.int64)
            indices[places] = torch.tensor([index for part in parts for index in part])
            return indices.to(device, non_blocking=True)
    return torch.full((samples,), -1, device=device)


def states_of_ranks(trainer: Trainer, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return states of all ranks on the CPU, each with the ranks as an additional first dimension.

    Ranks that have a batch together count once. All ranks must call this.

    Args:
        trainer: The trainer.
        states: The states of this rank, by name.
    """
    facts = facts_of(trainer.strategy)
    # Under `spatial` each rank has a part of the masks, and `numpy` returns all rows.
    of_rank = {name: torch.from_numpy(state.cpu().numpy()) for name, state in states.items()}
    if trainer.world_size == 1 or facts.has_global_batches:
        return {name: state[None] for name, state in of_rank.items()}
    # Float64 is exact for the integers, so one message is enough.
    packed = torch.cat([state.flatten().double() for state in of_rank.values()])
    gathered = facts.gather_from_ranks(packed.to(trainer.strategy.root_device)).cpu()[:: facts.ranks_per_batch]
    parts = torch.split(gathered, [state.numel() for state in of_rank.values()], dim=1)
    return {
        name: part.reshape(-1, *state.shape).to(state.dtype)
        for (name, state), part in zip(of_rank.items(), parts, strict=True)
    }


def log_pictures(loggers: Iterable[Logger], files: Sequence[Path], step: int) -> None:
    """Log pictures and tables to TensorBoard, Weights & Biases and MLflow. Other loggers cannot show them.

    Args:
        loggers: The trainer's loggers. Only rank 0 may call this.
        files: PNG and CSV files.
        step: Number of the training step.
    """
    for logger in loggers:
        for file in files:
            name = f"pictures/{file.stem}"
            if isinstance(logger, TensorBoardLogger):
                if file.suffix == ".png":
                    pixels = np.asarray(Image.open(file).convert("RGB"))
                    logger.experiment.add_image(name, pixels, step, dataformats="HWC")
                else:
                    logger.experiment.add_text(name, markdown(read_table(file)), step)
            elif isinstance(logger, WandbLogger):
                if file.suffix == ".png":
                    logger.log_image(name, [str(file)], step)
                else:
                    columns, *rows = read_table(file)
                    logger.log_table(name, columns, rows, step=step)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifact(logger.run_id, str(file), "pictures")


def read_table(file: Path) -> list[list[str]]:
    """Return the rows of a CSV file, beginning with the names of the columns."""
    with open(file, newline="", encoding="utf-8") as text:
        return list(csv.reader(text))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([first, "|" + " --- |" * len(rows[0]), *others])
