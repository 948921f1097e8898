"""Callback that writes the predictions of all ranks to one CSV or json file, or segmentation masks to PNG files."""

import codecs
import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
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
    """Callback that writes the results of ``predict_step``: a CSV file, COCO json for boxes, or PNG files for masks.

    The CSV file has one row for each sample, in the order of the dataset, for any number of processes. The columns
    are ``sample`` (the data module's ``sample_name(index)``, or else the index), ``class`` (the name of the most
    probable class, or else its index), ``probability`` (of this class), and the probability of each class. If
    ``predict_step`` returns ``values``, for example for a regression, the columns are ``sample`` and one column for
    each value.

    Each process writes the masks of its own samples as PNG files, which are named after the samples. The value of a
    pixel is the index of its class, and a palette assigns a colour to each class.

    Boxes are written as COCO json: a list with ``image_id``, ``category_id``, ``bbox`` (x1, y1, width and height in
    pixels of the image file), ``score``, and in addition ``file_name`` and the name of the class in ``category``. The
    numbers are those of the data set's own COCO json, or else the index of the image and the label.

    Args:
        output: Path of the CSV file, by default ``predictions.csv`` in the log directory, or of the json file, by
            default ``predictions.json``. For masks: path of the folder, by default ``predictions`` in the log
            directory.
        images: Folder of the images to predict instead of the data module's images. Images in subfolders at any depth
            are included. The images get the preprocessing of the data module's validation images. The name of a sample
            is the path of its image.

    Raises:
        ConfigurationError: ``predict_step`` did not return a dict with ``index`` (N,) and ``probabilities``
            (N, classes), ``values`` (N, numbers), ``masks`` (N, H, W) or ``detections``; the folder ``images`` has no
            images; or the file cannot be written. If it cannot be written, an earlier file with the same name is kept.
    """

    def __init__(self, output: Path | None = None, images: Path | None = None) -> None:
        self.output = output
        self.images = images
        self._indices: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._folder = Path()
        self._masks: int | None = None  # Number of masks that this process has written; None for a CSV file.
        self._are_values = False
        self._boxes: list[Tensor] | None = None  # See `rows_of`; None if the predictions are not boxes.

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
        if isinstance(outputs, dict) and {"index", "detections"} <= outputs.keys():
            check_indices(outputs["index"])
            rows = rows_of(outputs["index"], outputs["detections"])
            self._boxes = [*(self._boxes or []), rows]
            return
        self._are_values = isinstance(outputs, dict) and "values" in outputs
        kind = "values" if self._are_values else "probabilities"
        if not isinstance(outputs, dict) or not {"index", kind} <= outputs.keys():
            raise ConfigurationError(
                f"{type(pl_module).__name__}.predict_step returned {type(outputs).__name__}: to write predictions.csv, "
                "return a dict with 'index' (N,) and 'probabilities' (N, classes)"
            )
        self._indices.append(outputs["index"].cpu())
        self._probabilities.append(outputs[kind].float().cpu())

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The number of masks that this rank has written may be 0: in a pipeline, some ranks do not get the outputs.
        if self._masks is not None:
            folder = self.output or self._folder / "predictions"
            rank_zero_info(f"This process has written {self._masks} masks to {folder}")
            self._masks = None
            return
        if self._boxes is not None:
            boxes, self._boxes = gather_rows(trainer, torch.cat(self._boxes)), None
            if trainer.is_global_zero:
                path = self.output or self._folder / "predictions.json"
                write_boxes(path, getattr(trainer, "datamodule", None), boxes)
                rank_zero_info(f"Wrote {len(boxes)} predicted boxes to {path}")
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


def rows_of(indices: Tensor, detections: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return one row for each box of a batch (n, 7), float64 on the CPU: index, label, score, x1, y1, x2 and y2."""
    rows = [torch.zeros(0, 7, dtype=torch.float64)]
    for index, detection in zip(indices.tolist(), detections, strict=False):
        boxes = detection["boxes"].double().cpu()
        columns = [torch.full((len(boxes),), float(index)), detection["labels"].cpu(), detection["scores"].cpu()]
        rows.append(torch.cat([*(column.double()[:, None] for column in columns), boxes], 1))
    return torch.cat(rows)


def write_boxes(path: Path, datamodule: Any, rows: Tensor) -> None:
    """Write predicted boxes as COCO json.

    Args:
        path: The file.
        datamodule: The data module. Its methods ``boxes_of_image``, ``category_of``, ``number_of`` and ``sample_name``,
            if they exist, give a box's pixels in the image file, its ``category_id``, ``image_id`` and ``file_name``.
        rows: Rows of :func:`rows_of`, of all ranks.
    """
    names = getattr(datamodule, "class_names", None) or []
    boxes_of_image = getattr(datamodule, "boxes_of_image", lambda index, boxes: boxes)
    category_of = getattr(datamodule, "category_of", lambda label: label)
    number_of = getattr(datamodule, "number_of", lambda index: index)
    sample_name = getattr(datamodule, "sample_name", str)
    entries: list[dict[str, Any]] = []
    for number in sorted(set(rows[:, 0].tolist())):
        index, of_image = int(number), rows[rows[:, 0] == number]
        image = {"image_id": number_of(index), "file_name": sample_name(index)}
        boxes = boxes_of_image(index, of_image[:, 3:]).tolist()
        for (_, label, score, *_), (x1, y1, x2, y2) in zip(of_image.tolist(), boxes, strict=True):
            name = {"category": names[int(label)]} if int(label) < len(names) else {}
            corner_and_size = [round(value, 3) for value in (x1, y1, x2 - x1, y2 - y1)]
            entry = {**image, "category_id": category_of(int(label)), **name, "bbox": corner_and_size}
            entries.append({**entry, "score": round(score, 6)})
    with whole_file(path, "free some space, or set another path with --predictions.output") as file:
        file.write(json.dumps(entries, indent=0).encode())


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
