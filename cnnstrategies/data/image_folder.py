"""A directory of image files in the layout of ImageNet."""

import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2
from typing_extensions import override

from cnnstrategies.data.loading import Transform
from cnnstrategies.data.module import ImageDataModule, split
from cnnstrategies.errors import ConfigurationError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
# The statistics of ImageNet, which pretrained networks expect.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
OnBroken = Literal["refuse", "skip"]


class ImageFolderDataModule(ImageDataModule):
    """JPEG, PNG and WebP files, one directory per class.

    ::

        root/train/<class>/*.jpg     or, without train/:   root/<class>/*.jpg
        root/val/<class>/*.jpg       without val/, val_split of the training images
        root/test/<class>/*.jpg      without test/, the validation images
        root/predict/**/*.jpg        without predict/, the test images

    Training images are cropped at random and mirrored; the others are resized and cropped in the centre. A file
    that cannot be decoded is met when its turn comes, so that start-up does not read the whole data set. Skipped, it
    is missing from its batch; every other image is still seen once, and every rank has the same number of batches.

    Args:
        root: Directory of the data set.
        image_size: Height and width of the images that the network gets.
        resize: Shorter side before the centre crop.
        on_broken: ``refuse`` stops at a file that cannot be decoded and names it; ``skip`` warns, naming it, and
            leaves it out.
        batch_size: Samples per batch and process.
        val_split: Share of the training images that is held out for validation where there is no ``val``.
        augment: Crop training images at random and mirror them.
        num_workers: Worker processes that load batches, per process; 0 loads in the process itself.
        seed: Seed of the split, the shuffling and the augmentation.
        drop_last: Leave out a last, partial training batch.
        persistent_workers: Keep the workers from epoch to epoch.
        pin_memory: Copy batches to pinned memory first; by default where the accelerator is not the CPU.

    Raises:
        ConfigurationError: The directory does not exist or has no images, or two parts disagree about the classes.
    """

    def __init__(
        self,
        root: Path,
        image_size: int = 224,
        resize: int = 256,
        on_broken: OnBroken = "refuse",
        batch_size: int = 32,
        val_split: float = 0.1,
        augment: bool = True,
        num_workers: int = 4,
        seed: int = 0,
        drop_last: bool = False,
        persistent_workers: bool = True,
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed, drop_last, persistent_workers, pin_memory)
        self.root = Path(root)
        self.on_broken = on_broken
        self.val_split = val_split
        training_root = self.root / "train" if (self.root / "train").is_dir() else self.root
        if not training_root.is_dir():
            raise ConfigurationError(f"no directory {self.root.resolve()}: set data.init_args.root")
        parts = ("train", "val", "test", "predict")
        names = sorted(d.name for d in training_root.iterdir() if d.is_dir() and d.name not in parts)
        if len(names) < 2:
            raise ConfigurationError(
                f"{training_root.resolve()} has {len(names)} class directories: one per class is needed, at least 2"
            )
        self.training_root = training_root
        self.class_names = names
        self.num_classes = len(names)
        self.image_shape = (3, image_size, image_size)
        centre = v2.Compose([v2.Resize(resize), v2.CenterCrop(image_size)])
        crop = v2.Compose([v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()])
        self.sample_transforms: tuple[Transform, Transform] = (crop if augment else centre, centre)
        # Decoding and cropping work on one image at a time; this is faster on the batch.
        self.train_transform = self.eval_transform = v2.Compose(
            [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        )

    @override
    def setup(self, stage: str) -> None:
        train_crop, centre = self.sample_transforms
        paths, targets = self._labelled(self.training_root)
        if (self.root / "val").is_dir():
            self.train_source = FolderSource(paths, targets, train_crop, self.on_broken)
            self.val_source = FolderSource(*self._labelled(self.root / "val"), centre, self.on_broken)
        else:
            training, held_out = (part.tolist() for part in split(len(paths), self.val_split, self.seed))
            self.train_source = FolderSource(*_take(paths, targets, training), train_crop, self.on_broken)
            self.val_source = FolderSource(*_take(paths, targets, held_out), centre, self.on_broken)
        self.test_source = self.val_source
        if (self.root / "test").is_dir():
            self.test_source = FolderSource(*self._labelled(self.root / "test"), centre, self.on_broken)
        self.predict_source = self.test_source
        if (self.root / "predict").is_dir():
            unlabelled = _images(self.root / "predict")
            self.predict_source = FolderSource(unlabelled, [0] * len(unlabelled), centre, self.on_broken)

    @override
    def sample_name(self, index: int) -> str:
        """The file's path from the root."""
        assert isinstance(self.predict_source, FolderSource)
        return str(self.predict_source.paths[index].relative_to(self.root))

    def _labelled(self, directory: Path) -> tuple[list[Path], list[int]]:
        unknown = sorted({d.name for d in directory.iterdir() if d.is_dir()} - set(self.class_names))
        if directory != self.root and unknown:
            raise ConfigurationError(
                f"{directory} has classes that {self.training_root} has not: {', '.join(unknown)}; rename them"
            )
        paths: list[Path] = []
        targets: list[int] = []
        for target, name in enumerate(self.class_names):
            found = _images(directory / name) if (directory / name).is_dir() else []
            paths += found
            targets += [target] * len(found)
        if not paths:
            raise ConfigurationError(f"no images in {directory}: files must end in {', '.join(EXTENSIONS)}")
        return paths, targets


class FolderSource:
    """Images that are decoded from files when they are asked for.

    Args:
        paths: The files.
        targets: Their classes.
        transform: Applied to each decoded image, uint8 (3, H, W); the results must have equal shapes.
        on_broken: What to do with a file that cannot be decoded.
    """

    def __init__(self, paths: list[Path], targets: list[int], transform: Transform, on_broken: OnBroken) -> None:
        self.paths = paths
        self.targets = torch.tensor(targets)
        self.transform = transform
        self.on_broken = on_broken
        self._reported: set[int] = set()

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Decode and transform the images at ``indices``.

        Raises:
            ConfigurationError: A file is broken and ``on_broken`` is ``refuse``, or all files of the batch are.
        """
        images, good = [], []
        for index in indices:
            try:
                image = decode_image(str(self.paths[index]), ImageReadMode.RGB, apply_exif_orientation=True)
            except RuntimeError as error:
                self._report(index, str(error).splitlines()[0])
                continue
            images.append(self.transform(image))
            good.append(index)
        if not good:
            raise ConfigurationError(
                f"no image of this batch can be decoded, the first is {self.paths[indices[0]]}; remove the broken "
                "files or use a larger batch_size"
            )
        return torch.stack(images), self.targets[good], good

    def _report(self, index: int, reason: str) -> None:
        text = f"broken image {self.paths[index]} ({reason})"
        if self.on_broken == "refuse":
            raise ConfigurationError(f"{text}: remove it, or set data.init_args.on_broken=skip") from None
        if index not in self._reported:
            self._reported.add(index)
            warnings.warn(f"left out: {text}", stacklevel=2)


def _images(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.suffix.lower() in EXTENSIONS)


def _take(paths: list[Path], targets: list[int], indices: list[int]) -> tuple[list[Path], list[int]]:
    return [paths[i] for i in indices], [targets[i] for i in indices]
