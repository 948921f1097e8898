"""What is packed: the encoded images of a folder, or of any of the package's data modules."""

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import cnnstrategies.data
from cnnstrategies.data.decoding import BrokenImageError, check_mask, read_mask
from cnnstrategies.data.folders import part_folders
from cnnstrategies.data.image_folder import ImageFolderDataModule
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.data.segmentation_folder import SegmentationFolderDataModule
from cnnstrategies.errors import ConfigurationError


@dataclass(frozen=True)
class Images:
    """The images of one part.

    Attributes:
        root: From where their names are paths.
        names: What they are called in the source.
        targets: Their classes.
        sizes: Bytes of each, as it is read.
        masks: The file of each one's mask, where images have masks.
        num_classes: Of the masks.
        ignore_index: The value of pixels in masks that count nowhere.
    """

    root: Path
    names: Sequence[str]
    targets: Sequence[int]
    sizes: Sequence[int]
    masks: Sequence[Path | None] = ()
    num_classes: int = 0
    ignore_index: int = 255

    def read(self, number: int) -> bytes:
        """The file of an image."""
        return (self.root / self.names[number]).read_bytes()

    def mask(self, number: int, size: tuple[int, int]) -> Tensor | None:
        """The mask of an image by its height and width; None for one without.

        Raises:
            BrokenImageError: It cannot be decoded.
            ConfigurationError: It does not fit its image or the classes.
        """
        path = self.masks[number] if self.masks else None
        if path is None:
            return None
        try:
            mask = read_mask(path)
        except BrokenImageError as error:
            raise BrokenImageError(f"its mask {path} is broken: {error}") from None
        check_mask(mask, path, size, self.num_classes, self.ignore_index)
        return mask


@dataclass(frozen=True)
class Contents:
    """All that is packed.

    Attributes:
        class_names: Name of each class.
        parts: By name.
        fingerprint: Changes with the images.
        ignore_index: The value of pixels in masks that count nowhere; None where images have classes.
    """

    class_names: list[str]
    parts: dict[str, Images]
    fingerprint: str
    ignore_index: int | None = None


def contents_of(source: str, init_args: Mapping[str, Any]) -> Contents:
    """The images of a source.

    Args:
        source: A folder in the layout of :class:`~cnnstrategies.data.ImageFolderDataModule`, or the name or import path
            of a data module.
        init_args: The data module's arguments.

    Raises:
        ConfigurationError: It is neither, or cannot be made with these arguments.
    """
    if Path(source).is_dir() or "/" in source:
        if init_args:
            raise ConfigurationError(f"init_args are of a data module, and {source} is a folder: leave them out")
        folders = part_folders(Path(source))
        if "train" in folders and (folders["train"] / "masks").is_dir():
            raise ConfigurationError(
                f"{source} has masks, whose number of classes must be known: cnnstrategies pack "
                f"SegmentationFolderDataModule OUT --init_args '{{root: {source}, num_classes: N}}'"
            )
        return _of_folder(ImageFolderDataModule(Path(source)))
    module = _module(source, init_args)
    if isinstance(module, ImageFolderDataModule):
        return _of_folder(module)
    if isinstance(module, SegmentationFolderDataModule):
        return _of_masked(module)
    raise ConfigurationError(f"{source} reads no image files: pack a folder, or a data module that reads one")


def _module(source: str, init_args: Mapping[str, Any]) -> ImageDataModule:
    where, _, name = source.rpartition(".")
    try:
        found = getattr(importlib.import_module(where) if where else cnnstrategies.data, name)
    except (ImportError, AttributeError):
        names = ", ".join(one for one in cnnstrategies.data.__all__ if one != ImageDataModule.__name__)
        raise ConfigurationError(f"no folder {source!r}, and no data module of this name; there are {names}") from None
    if not (isinstance(found, type) and issubclass(found, ImageDataModule)):
        raise ConfigurationError(f"{source} is no ImageDataModule: pack a folder of images, or one that is")
    try:
        return found(**init_args)
    except TypeError as error:
        raise ConfigurationError(f"{source} cannot be made with --init_args {dict(init_args)}: {error}") from None


def _of_folder(module: ImageFolderDataModule) -> Contents:
    if module.task != "classes":
        raise ConfigurationError(
            f"targets for {module.task} cannot be packed: shards hold a class or a mask of each image"
        )
    root = module.root
    parts: dict[str, Images] = {}
    stats: list[Any] = []
    for part, (names, targets) in module.parts().items():
        found = [(root / name).stat() for name in names]
        stats += [[name, one.st_size, one.st_mtime_ns] for name, one in zip(names, found, strict=True)]
        parts[part] = Images(root, names, targets, [one.st_size for one in found])
    return Contents(module.class_names, parts, _hash(stats))


def _of_masked(module: SegmentationFolderDataModule) -> Contents:
    root = module.root
    parts: dict[str, Images] = {}
    stats: list[Any] = [module.class_names, module.ignore_index]
    for part, pairs in module.parts().items():
        names = [image.relative_to(root).as_posix() for image, _ in pairs]
        sizes = []
        for image, mask in pairs:
            found = [path.stat() for path in (image, mask) if path is not None]
            stats += [[str(image.relative_to(root)), *((one.st_size, one.st_mtime_ns) for one in found)]]
            sizes.append(sum(one.st_size for one in found))
        masks = [mask for _, mask in pairs]
        parts[part] = Images(root, names, [0] * len(names), sizes, masks, module.num_classes, module.ignore_index)
    return Contents(module.class_names, parts, _hash(stats), module.ignore_index)


def _hash(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()
