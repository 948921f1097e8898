"""Predictions of all ranks in one CSV file, in the order of the dataset."""

import codecs
import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from PIL import Image
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.image_folder import images_of_folder
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import whole_file


class PredictionWriter(Callback):
    """Writes the results of ``predict_step``: probabilities or values as a CSV file, masks as pictures.

    The CSV file has one row for each sample, in the order of the dataset, for any number of processes. Its columns are
    ``sample`` (the data module's ``sample_name(index)``, or the index), ``class`` (the name of the most probable class,
    or its number), ``probability``, and the probability of each class. For ``values`` instead of probabilities, as of a
    regression, the columns are ``sample`` and one column for each value.

    Each process writes the masks of its own samples as PNG files, named after the samples. The value of a pixel is its
    class, and a palette shows the classes as colours.

    Args:
        output: The CSV file, by default ``predictions.csv`` in the log directory. For masks the folder, by default
            ``predictions`` in the log directory.
        images: A folder with other images, at any depth, to predict instead of the data module's images. They are
            prepared like the data module's validation images and named by their paths.

    Raises:
        ConfigurationError: ``predict_step`` did not return a dict with ``index`` (N,) and ``probabilities``
            (N, classes), ``values`` (N, numbers) or ``masks`` (N, H, W); the folder has no images; or the file cannot
            be written, in which case an earlier file is kept.
    """

    def __init__(self, output: Path | None = None, images: Path | None = None) -> None:
        self.output = output
        self.images = images
        self._indices: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._folder = Path()
        self._masks: int | None = None  # number of masks that this process has written; None without masks
        self._are_values = False

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_dir = trainer.log_dir  # A broadcast: every rank asks.
        self._folder = Path(log_dir or trainer.default_root_dir)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict" and self.images is not None:
            datamodule = getattr(trainer, "datamodule", None)
            left_out: Counter[str] = Counter()
            source = images_of_folder(datamodule, self.images, left_out)
            assert isinstance(datamodule, ImageDataModule)
            datamodule.predict_source = source
            datamodule.places, datamodule.left_out = {"predict": str(self.images)}, left_out

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if isinstance(outputs, dict) and {"index", "masks"} <= outputs.keys():
            folder = self.output or self._folder / "predictions"
            write_masks(folder, getattr(trainer, "datamodule", None), outputs["index"].tolist(), outputs["masks"].cpu())
            self._masks = (self._masks or 0) + len(outputs["index"])
            return
        self._are_values = isinstance(outputs, dict) and "values" in outputs
        rows = "values" if self._are_values else "probabilities"
        if not isinstance(outputs, dict) or not {"index", rows} <= outputs.keys():
            raise ConfigurationError(
                f"{type(pl_module).__name__}.predict_step returned {type(outputs).__name__}: predictions.csv needs "
                "a dict with 'index' (N,) and 'probabilities' (N, classes)"
            )
        self._indices.append(outputs["index"].cpu())
        self._probabilities.append(outputs[rows].float().cpu())

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._masks is not None:  # The number is 0 in a pipeline's later stages.
            rank_zero_info(f"{self._masks} masks of this process: {self.output or self._folder / 'predictions'}")
            self._masks = None
            return
        indices, probabilities = (
            gather_rows(trainer, torch.cat(rows)) for rows in (self._indices, self._probabilities)
        )
        self._indices.clear()
        self._probabilities.clear()
        if not trainer.is_global_zero:
            return
        path = self.output or self._folder / "predictions.csv"
        order = indices.argsort()
        self._write(path, trainer, indices[order].tolist(), probabilities[order])
        rank_zero_info(f"{len(indices)} predictions: {path}")

    def _write(self, path: Path, trainer: Trainer, indices: list[int], probabilities: Tensor) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        sample_name = getattr(datamodule, "sample_name", str)
        classes = [str(name) for name in getattr(datamodule, "class_names", range(probabilities.shape[1]))]
        if self._are_values:
            columns = ["sample", *classes]
        else:
            columns = ["sample", "class", "probability", *(f"p({name})" for name in classes)]
        with whole_file(path, "make room there, or give another --predictions.output") as file:
            writer = csv.writer(codecs.getwriter("utf-8")(file))
            writer.writerow(columns)
            for index, row in zip(indices, probabilities.tolist(), strict=True):
                values = [f"{value:.6f}" for value in row]
                best = row.index(max(row))
                first = [] if self._are_values else [classes[best], values[best]]
                writer.writerow([sample_name(index), *first, *values])


def gather_rows(trainer: Trainer, rows: Tensor) -> Tensor:
    """Return the rows (M, ...) of all ranks in rank order, on every rank and on the CPU; a collective.

    Args:
        trainer: The trainer.
        rows: This rank's rows; ranks may have different numbers of rows.
    """
    world = trainer.world_size
    if world == 1:
        return rows
    device = trainer.strategy.root_device

    def gather(values: Tensor) -> Tensor:
        return trainer.strategy.all_gather(values.to(device)).reshape(world, *values.shape).cpu()

    counts = gather(torch.tensor([len(rows)])).flatten().tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([of_rank[:count] for count, of_rank in zip(counts, gather(padded), strict=True)])


def write_masks(folder: Path, datamodule: Any, indices: Sequence[int], masks: Tensor) -> None:
    """Write masks as PNG files whose pixels are classes, shown as colours, named after the samples.

    Args:
        folder: The folder, which is created.
        datamodule: The data module. If it has ``sample_name(index)`` and ``mask_of_image(index, mask)``, which gives a
            mask the size of its image, these are used.
        indices: Index of each sample.
        masks: Classes of the pixels (N, H, W).
    """
    sample_name = getattr(datamodule, "sample_name", str)
    mask_of_image = getattr(datamodule, "mask_of_image", lambda index, mask: mask)
    for index, mask in zip(indices, masks, strict=True):
        path = (folder / sample_name(index)).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(mask_of_image(index, mask).numpy().astype(np.uint8))
        picture.putpalette(palette())
        picture.save(path)


def palette() -> list[int]:
    """Return red, green and blue of 256 classes as in PASCAL VOC: each bit of a class's number is a bit of a colour."""
    colours = np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((np.arange(256) >> (3 * bit + channel)) & 1).astype(np.uint8) << (7 - bit)
    return [int(value) for value in colours.reshape(-1)]
