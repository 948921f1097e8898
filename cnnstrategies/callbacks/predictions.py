"""Callback that writes the predictions of all ranks to one CSV file, or segmentation masks to PNG files."""

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
from cnnstrategies.strategies.protocol import facts_of


class PredictionWriter(Callback):
    """Callback that writes the results of ``predict_step``: probabilities or values to a CSV file, masks to PNG files.

    The CSV file has one row for each sample, in the order of the dataset, for any number of processes. The columns
    are ``sample`` (the data module's ``sample_name(index)``, or else the index), ``class`` (the name of the most
    probable class, or else its index), ``probability`` (of this class), and the probability of each class. If
    ``predict_step`` returns ``values``, for example for a regression, the columns are ``sample`` and one column for
    each value.

    Each process writes the masks of its own samples as PNG files, which are named after the samples. The value of a
    pixel is the index of its class, and a palette assigns a colour to each class.

    Args:
        output: Path of the CSV file, by default ``predictions.csv`` in the log directory. For masks: path of the
            folder, by default ``predictions`` in the log directory.
        images: Folder of the images to predict instead of the data module's images. Images in subfolders at any depth
            are included. The images get the preprocessing of the data module's validation images. The name of a sample
            is the path of its image.

    Raises:
        ConfigurationError: ``predict_step`` did not return a dict with ``index`` (N,) and ``probabilities``
            (N, classes), ``values`` (N, numbers) or ``masks`` (N, H, W); the folder ``images`` has no images; or the
            file cannot be written. If it cannot be written, an earlier file with the same name is kept.
    """

    def __init__(self, output: Path | None = None, images: Path | None = None) -> None:
        self.output = output
        self.images = images
        self._indices: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._folder = Path()
        self._masks: int | None = None  # Number of masks that this process has written; None for a CSV file.
        self._are_values = False

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_dir = trainer.log_dir  # All ranks must read this property, because it runs a broadcast.
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
            check_indices(outputs["index"])
            write_masks(folder, getattr(trainer, "datamodule", None), outputs["index"].tolist(), outputs["masks"].cpu())
            self._masks = (self._masks or 0) + len(outputs["index"])
            return
        self._are_values = isinstance(outputs, dict) and "values" in outputs
        rows = "values" if self._are_values else "probabilities"
        if not isinstance(outputs, dict) or not {"index", rows} <= outputs.keys():
            raise ConfigurationError(
                f"{type(pl_module).__name__}.predict_step returned {type(outputs).__name__}: to write predictions.csv, "
                "return a dict with 'index' (N,) and 'probabilities' (N, classes)"
            )
        self._indices.append(outputs["index"].cpu())
        self._probabilities.append(outputs[rows].float().cpu())

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The number of masks that this rank has written may be 0: in a pipeline, some ranks do not get the outputs.
        if self._masks is not None:
            folder = self.output or self._folder / "predictions"
            rank_zero_info(f"This process has written {self._masks} masks to {folder}")
            self._masks = None
            return
        indices, probabilities = (
            gather_rows(trainer, torch.cat(rows)) for rows in (self._indices, self._probabilities)
        )
        self._indices.clear()
        self._probabilities.clear()
        check_indices(indices)
        if not trainer.is_global_zero:
            return
        path = self.output or self._folder / "predictions.csv"
        order = indices.argsort()
        self._write(path, trainer, indices[order].tolist(), probabilities[order])
        rank_zero_info(f"Wrote {len(indices)} predictions to {path}")

    def _write(self, path: Path, trainer: Trainer, indices: list[int], probabilities: Tensor) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        sample_name = getattr(datamodule, "sample_name", str)
        classes = [str(name) for name in getattr(datamodule, "class_names", range(probabilities.shape[1]))]
        if self._are_values:
            columns = ["sample", *classes]
        else:
            columns = ["sample", "class", "probability", *(f"p({name})" for name in classes)]
        with whole_file(path, "free some space, or set another path with --predictions.output") as file:
            writer = csv.writer(codecs.getwriter("utf-8")(file))
            writer.writerow(columns)
            for index, row in zip(indices, probabilities.tolist(), strict=True):
                values = [f"{value:.6f}" for value in row]
                best = row.index(max(row))
                first = [] if self._are_values else [classes[best], values[best]]
                writer.writerow([sample_name(index), *first, *values])


def check_indices(indices: Tensor) -> None:
    """Refuse equal indices of two samples. They are usually labels, which a loader yields in place of indices."""
    most_frequent = Counter(indices.tolist()).most_common(1)
    if most_frequent and most_frequent[0][1] > 1:
        index, count = most_frequent[0]
        raise ConfigurationError(
            f"{count} predicted samples have the index {index}: let predict_dataloader yield (images, indices), with a "
            "sample's position in the dataset in place of its label"
        )


def gather_rows(trainer: Trainer, rows: Tensor) -> Tensor:
    """Gather the rows of all ranks. All ranks must call this.

    Args:
        trainer: The trainer.
        rows: Rows of this rank (n, ...). Ranks may have different numbers of rows.

    Returns:
        The rows of all ranks (N, ...) in rank order, on the CPU; every rank gets them.
    """
    if trainer.world_size == 1:
        return rows
    device = trainer.strategy.root_device

    def gather(values: Tensor) -> Tensor:
        return facts_of(trainer.strategy).gather_from_ranks(values.to(device)).cpu()

    counts = gather(torch.tensor([len(rows)])).flatten().tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([of_rank[:count] for count, of_rank in zip(counts, gather(padded), strict=True)])


def write_masks(folder: Path, datamodule: Any, indices: Sequence[int], masks: Tensor) -> None:
    """Write masks as PNG files. The pixels are indices of classes, and a palette assigns a colour to each class.

    Args:
        folder: Folder of the files; it is created if it does not exist.
        datamodule: The data module. Its ``sample_name(index)``, if it exists, gives a file its name. Its
            ``mask_of_image(index, mask)``, if it exists, scales a mask to the size of the image.
        indices: Index of each sample.
        masks: Class of each pixel (N, H, W).
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
    """Return PASCAL VOC's palette: 768 numbers, three for each of the classes 0 to 255: red, green and blue.

    The palette distributes the bits of a class's index over the highest bits of the three colours.
    """
    colours = np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= ((np.arange(256) >> (3 * bit + channel)) & 1).astype(np.uint8) << (7 - bit)
    return [int(value) for value in colours.reshape(-1)]
