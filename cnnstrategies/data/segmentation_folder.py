"""Data module for semantic segmentation: folders of images, and of masks with a class for each pixel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf
from typing_extensions import override

from cnnstrategies.data.augment import each_image, to_normalised
from cnnstrategies.data.decoding import bits_of, fitted, read_image, spaced
from cnnstrategies.data.folder_module import FolderDataModule, no_directory
from cnnstrategies.data.folders import FILES_END_IN, ignored_folders, image_files, part_folders, readable
from cnnstrategies.data.loading import Batch
from cnnstrategies.data.masks import Colour, MaskReader
from cnnstrategies.data.preprocessing import IMAGENET
from cnnstrategies.errors import ConfigurationError

Pair = tuple[Path, Path | None]
FILL = [round(255 * value) for value in IMAGENET.mean]  # Colour of the padding; the normalisation turns it into 0.
LEAST_AREA = 0.25  # Smallest area of a random crop, as a fraction of the image's area.


class SegmentationFolderDataModule(FolderDataModule):
    """Data module for JPEG, PNG, WebP, BMP, TIFF and PNM images, and PNG masks with the same names.

    ::

        root/train/images/*.jpg    root/train/masks/*.png
        root/val/...               without val/, val_split of the training images
        root/test/...              without test/, the validation images
        root/predict/*.jpg         without predict/, the test images

    The folder names ``training``, ``valid``, ``validation``, ``dev`` and ``testing`` are also accepted, in upper or
    lower case. Links are followed. A mask has the class of each pixel as a palette index or as a grey value, of 8 or 16
    bits. In masks with one bit per pixel, and with two classes also in masks that have only the values 0 and 255, these
    are the classes 0 and 1. A training image and its mask get the same random crop and random horizontal flip. All
    other images are scaled so that their longer side is ``image_size``, and padded to a square. The loss and the
    metrics ignore the padding.

    Args:
        root: Directory of the data set.
        num_classes: Number of classes, including the background.
        image_size: Height and width of the images that the network receives, in pixels.
        ignore_index: Value of a mask's pixels that the loss and the metrics ignore.
        class_names: Name of each class, for reports and exports; by default the index of the class.
        augment: Whether training images get a random crop of at least a quarter of their area, and a random horizontal
            flip.
        transforms: Additional transforms of training images, applied after the crop to one uint8 (C, H, W) image at a
            time. They are not applied to masks, so they must not move pixels.
        mask_colours: Colour of each class in masks that are colour images: lists of red, green and blue, each 0 to 255.
            One more colour may follow, which the ignored pixels have.
        **options: Arguments of :class:`~cnnstrategies.data.folder_module.FolderDataModule`: ``val_split``,
            ``num_workers`` and ``bits``, and those of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: The directory does not exist or contains no images, an image has no mask, a mask has values
            or colours that are not classes, or a number is out of its range.
    """

    ignore_index: int

    def __init__(
        self,
        root: Path,
        num_classes: int,
        image_size: int = 512,
        ignore_index: int = 255,
        class_names: list[str] | None = None,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        mask_colours: list[Colour] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        if image_size < 1:
            raise ConfigurationError(f"image_size={image_size}: use at least 1")
        self.folders = part_folders(self.root)
        images = self.folders.get("train", self.root / "train") / "images"
        if not images.is_dir():
            raise no_directory(images)
        self.num_classes = num_classes
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigurationError(
                f"class_names has {len(class_names)} names, and num_classes={num_classes}: set one name for each class"
            )
        self.class_names = class_names or [str(index) for index in range(num_classes)]
        self.ignore_index = ignore_index
        self.masks = MaskReader(num_classes, ignore_index, mask_colours)
        self.masks.look([[mask for _, mask in pairs if mask is not None] for pairs in self.parts().values()])
        self.augment = augment
        self.image_shape = (3, image_size, image_size)
        self.eval_transform = to_normalised(IMAGENET.mean, IMAGENET.std)
        self.train_transform = nn.Sequential(*each_image(transforms, self.image_shape), self.eval_transform)

    @override
    def setup(self, stage: str) -> None:
        parts = {part: (pairs,) for part, pairs in self.parts().items()}
        self.places = {part: str(folder) for part, folder in self.folders.items()}
        self.hold_out(parts)
        self.bits = self.bits or bits_of([path for path, _ in spaced(parts["train"][0])])
        size = self.image_shape[1]
        self.set_sources(
            {
                part: MaskedSource(self.root, pairs, size, self.masks, self.augment and part == "train", self.bits)
                for part, (pairs,) in parts.items()
            }
        )

    @override
    def describe(self, part: str) -> str:
        text = super().describe(part)
        return f"{text}, masks with 255 for class 1" if self.masks.white_is_one and part == "train" else text

    def parts(self) -> dict[str, list[Pair]]:
        """Return the paths of the images and masks of each split that exists, and count ignored files."""
        self.left_out = ignored_folders(self.root, self.folders)
        parts: dict[str, list[Pair]] = {}
        for part, folder in self.folders.items():
            parts[part] = [(path, None) for path in self._images(folder)] if part == "predict" else self._pairs(folder)
        return parts

    def _images(self, folder: Path) -> list[Path]:
        paths = [folder / name for name in image_files(folder, folder, self.left_out)]
        if not paths:
            raise ConfigurationError(f"no images in {folder.resolve()}: {FILES_END_IN}")
        return paths

    def _pairs(self, folder: Path) -> list[Pair]:
        masks = {path.stem: path for path in (folder / "masks").glob("*.png")}
        images: dict[str, Path] = {}
        for image in self._images(folder / "images"):
            if image.stem not in masks:
                raise ConfigurationError(
                    f"{image} has no mask: put {image.stem}.png into {folder / 'masks'}, or remove the image"
                )
            if (other := images.setdefault(image.stem, image)) != image:
                raise ConfigurationError(
                    f"{other} and {image} would have the same mask: rename one of the images, and add a mask with the "
                    "new name"
                )
        self.left_out["masks without an image"] += len(masks) - len(images)
        return [(image, masks[stem]) for stem, image in images.items()]


class MaskedSource:
    """Source of samples from image files and mask files. Files are decoded each time their sample is fetched.

    Args:
        root: Directory of the images, to which their names are relative.
        pairs: A pair for each sample: the path of the image, and the path of the mask. The second path is None if the
            image has no mask.
        size: Height and width of the results, in pixels.
        masks: Reader of the masks.
        augment: Whether the sample gets a random crop and a random horizontal flip. Otherwise the whole image is scaled
            and padded to a square.
        bits: Number of bits that images with 16 bits per pixel use; None for 16.
    """

    def __init__(
        self,
        root: Path,
        pairs: Sequence[Pair],
        size: int,
        masks: MaskReader,
        augment: bool,
        bits: int | None = None,
    ) -> None:
        self.root = root
        self.pairs = list(pairs)
        self.size = size
        self.masks = masks
        self.bits = bits
        crop = v2.RandomResizedCrop(size, scale=(LEAST_AREA, 1.0), antialias=True)
        self.random = v2.Compose([crop, v2.RandomHorizontalFlip()]) if augment else None

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        """Return the path of a sample's image, relative to the root."""
        return readable(self.pairs[index][0].relative_to(self.root).as_posix())

    def image_size(self, index: int) -> tuple[int, int]:
        """Return the height and width of an image, in pixels, after its rotation according to the EXIF orientation."""
        with Image.open(self.pairs[index][0]) as image:
            swapped = image.getexif().get(0x0112, 1) > 4  # EXIF orientations above 4 swap rows and columns.
            return (image.width, image.height) if swapped else (image.height, image.width)

    def fetch(self, indices: list[int]) -> Batch:
        """Return the images at ``indices``, uint8 (n, 3, size, size), and their masks, int64 (n, size, size)."""
        loaded = [self._load(*self.pairs[index]) for index in indices]
        return torch.stack([image for image, _ in loaded]), torch.stack([mask for _, mask in loaded]).long()

    def _load(self, image_path: Path, mask_path: Path | None) -> tuple[Tensor, Tensor]:
        image = read_image(image_path, self.bits, "repair or remove it")
        mask = torch.zeros(image.shape[1:], dtype=torch.uint8) if mask_path is None else self._mask(mask_path, image)
        if self.random is not None:
            pair = self.random(tv_tensors.Image(image), tv_tensors.Mask(mask))
            return pair[0].as_subclass(Tensor), pair[1].as_subclass(Tensor)
        _, height, width = image.shape
        rows, columns = fitted(height, width, self.size)
        image = tvf.resize(image, [rows, columns], antialias=True)
        mask = tvf.resize(mask[None], [rows, columns], tvf.InterpolationMode.NEAREST_EXACT)[0]
        square = torch.tensor(FILL, dtype=torch.uint8)[:, None, None].repeat(1, self.size, self.size)
        square[:, :rows, :columns] = image
        square_mask = torch.full((self.size, self.size), self.masks.ignore_index)
        square_mask[:rows, :columns] = mask
        return square, square_mask

    def _mask(self, path: Path, image: Tensor) -> Tensor:
        """Return the class of each pixel of an image's mask, uint8 or int32 (H, W)."""
        mask = self.masks.read(path)
        size = tuple(image.shape[1:])
        if mask.shape != size:
            raise ConfigurationError(
                f"mask {path} has {tuple(mask.shape)} pixels, but its image has {size}: make the sizes equal"
            )
        return mask
