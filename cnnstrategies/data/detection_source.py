"""Images with boxes for the loaders: decoding, scaling, random transforms, and batches that are lists."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf
from typing_extensions import override

from cnnstrategies.data.boxes import ReadImage
from cnnstrategies.data.decoding import fitted, read_image
from cnnstrategies.data.folders import readable
from cnnstrategies.data.loading import BatchDataset
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.samplers import BatchRequest

Sample = tuple[Tensor, dict[str, Tensor]]
CROWD = 5  # Column of the rows of `targets_of`.


class DetectionDataset(BatchDataset):
    """Dataset that returns batches of images with boxes: a list of images, and a list of mappings or the indices."""

    @override
    def __getitem__(self, request: BatchRequest) -> Any:
        """Return the batch, or the error if a sample cannot be read; see :class:`~.loading.BatchDataset`."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(request.seed)
            try:
                images, targets = self.source.fetch(request.indices)
            except ConfigurationError as error:
                return error
        return images, torch.tensor(request.indices) if self.give_indices else targets


class BoxedImages:
    """Source of images from files, with their boxes. Files are decoded each time their sample is fetched.

    Args:
        root: Directory to which the names of the images are relative.
        images: The images, with their sizes and numbers.
        rows: Boxes of each image, as :func:`~cnnstrategies.data.boxes.targets_of` returns them.
        size: Longer side to which each image is scaled, and height and width of the square to which it is padded; None
            to keep the images' own sizes.
        transform: Random transform of an image and its boxes; None for evaluation.
        bits: Number of bits that images with 16 bits per pixel use; None for 16.
    """

    def __init__(
        self,
        root: Path,
        images: Sequence[ReadImage],
        rows: Sequence[Tensor],
        size: int | None = None,
        transform: Callable[..., Any] | None = None,
        bits: int | None = None,
    ) -> None:
        self.root = root
        self.paths = [image.path for image in images]
        self.numbers = [image.number for image in images]
        self.sizes = torch.tensor([image.size for image in images]).reshape(-1, 2)
        self.rows = torch.cat([*rows, torch.zeros(0, 8, dtype=torch.float64)])
        counts = torch.tensor([0, *map(len, rows)])
        self.starts = counts.cumsum(0)
        self.size, self.transform, self.bits = size, transform, bits

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """Return the path of a sample's image, relative to the root."""
        return readable(self.paths[index].relative_to(self.root).as_posix())

    def number(self, index: int) -> int:
        """Return the number of an image in its annotation file, or its index."""
        number = self.numbers[index]
        return index if number is None else number

    def scale(self, index: int) -> tuple[float, float]:
        """Return the factors by which an image's height and width are scaled."""
        height, width = self.sizes[index].tolist()
        if self.size is None:
            return 1.0, 1.0
        rows, columns = fitted(height, width, self.size)
        return rows / height, columns / width

    def fetch(self, indices: list[int]) -> Any:
        """Return a list of the images at ``indices``, float32 (3, H, W) in [0, 1], and a list of their targets.

        A target has ``boxes`` float32 (n, 4) as x1, y1, x2, y2, ``labels`` int64 (n,), ``iscrowd`` int64 (n,), ``area``
        float32 (n,) and ``image_id``, the sample's index.
        """
        samples = [self._load(index) for index in indices]
        return [image for image, _ in samples], [target for _, target in samples]

    def _load(self, index: int) -> Sample:
        path, (height, width) = self.paths[index], self.sizes[index].tolist()
        image = read_image(path, self.bits, "repair or remove it")
        if tuple(image.shape[1:]) != (height, width):
            raise ConfigurationError(
                f"{path} has {image.shape[2]} x {image.shape[1]} pixels, but its boxes are for {width} x {height}: "
                "correct the size in the annotation file, or save the image without an EXIF orientation"
            )
        rows = self.rows[self.starts[index] : self.starts[index + 1]]
        vertical, horizontal = self.scale(index)
        boxes = (rows[:, :4] * torch.tensor([horizontal, vertical, horizontal, vertical])).float()
        if self.size is not None:
            scaled = fitted(height, width, self.size)
            image = tvf.resize(image, [*scaled], antialias=True)
            image = tvf.pad(image, [0, 0, self.size - scaled[1], self.size - scaled[0]])
        ignored = ((rows[:, CROWD] > 0) | (rows[:, CROWD + 1] > 0)).long()
        target = {
            "boxes": boxes,
            "labels": rows[:, 4].long(),
            "iscrowd": ignored,
            "area": (rows[:, 7] * vertical * horizontal).float(),
            "image_id": torch.tensor(index),
        }
        if self.transform is not None:
            learned = rows[:, CROWD] == 0  # Crowds are not trained, because they surround several objects.
            target = {key: value[learned] if value.ndim else value for key, value in target.items()}
            image, target = transformed(image, target, self.transform)
        return image.float() / 255 if image.dtype == torch.uint8 else image, target


def random_transform(augment: bool, transforms: Sequence[Any] | None) -> Callable[..., Any]:
    """Return the transform of training images with boxes.

    Boxes are clipped to the transformed image, and boxes that have left it are removed.

    Args:
        augment: Whether an image is flipped horizontally with probability 1/2.
        transforms: Further transforms of an image and its boxes, for example of torchvision v2.
    """
    flips = [v2.RandomHorizontalFlip()] if augment else []
    transform: Callable[..., Any] = v2.Compose(
        [*flips, *(transforms or []), v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(labels_getter=_rows)]
    )
    return transform


def transformed(image: Tensor, target: dict[str, Tensor], transform: Callable[..., Any]) -> Sample:
    """Return an image and its target after a transform that moves both.

    Raises:
        ConfigurationError: The transform fails, or does not return an image and its target.
    """
    boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=image.shape[1:])
    try:
        result, moved = transform(tv_tensors.Image(image), {**target, "boxes": boxes})
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"data.init_args.transforms fails for an image of shape {tuple(image.shape)} with {len(boxes)} boxes "
            f"({reason}): use transforms of torchvision v2, which move boxes with their image"
        ) from None
    corners = moved["boxes"].as_subclass(Tensor)
    sides = corners[:, 2:] - corners[:, :2]
    moved = {key: value.as_subclass(Tensor) for key, value in moved.items()}
    return result.as_subclass(Tensor), {**moved, "boxes": corners, "area": sides.prod(1)}


def _rows(inputs: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a target that have a row for each box."""
    target = next(entry for entry in inputs if isinstance(entry, dict))
    return target["labels"], target["iscrowd"], target["area"]
