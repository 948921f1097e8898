"""Images that ``cnnstrategies pack`` has put into shards."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.data.augment import each_image, to_normalised
from cnnstrategies.data.decoding import FILL, LEAST_AREA
from cnnstrategies.data.loading import BatchDataset, BatchLoader
from cnnstrategies.data.module import ImageDataModule, split
from cnnstrategies.data.preprocessing import IMAGENET, Preprocessing
from cnnstrategies.data.sampling import OrderedBatches, ShuffledBatches
from cnnstrategies.data.shards.crops import Crop, Sizes, centre_crops, random_crops, whole_images
from cnnstrategies.data.shards.index import Index, read_index
from cnnstrategies.data.shards.jpeg import DecoderName, find_decoder
from cnnstrategies.data.shards.source import Crops, MaskedShardSource, ShardSource
from cnnstrategies.errors import ConfigurationError


class ShardedImageDataModule(ImageDataModule):
    """Images packed into tar files by ``cnnstrategies pack``, on local or shared storage.

    Training images are cropped at random and mirrored; the others are cropped in the centre. Without packed validation
    images, ``val_split`` of the training images; without test images, those of validation; without images for predict,
    those of the test.

    Where masks are packed, each is cropped as its image is, and batches are those of
    :class:`~cnnstrategies.data.SegmentationFolderDataModule`: the others are scaled so that the longer side fits.

    Args:
        root: Folder of the shards and their index.
        image_size: Height and width of the images that the network gets; by default 224. For a network with trained
            weights, the command line takes those sizes that are left out, the interpolation, mean and deviation from
            what the weights were trained with; in Python ``prepare_as`` does.
        resize: Shorter side before the centre crop; by default 8/7 of ``image_size``, for 224 the usual 256.
            With masks there is none.
        decoder: Of JPEG files: ``pillow`` or ``simplejpeg``; ``auto`` is simplejpeg where it is
            installed, else Pillow.
        shuffle_block: Shuffle blocks of so many neighbours, and then the images of each 16 blocks, and read blocks
            ahead: for storage that is slow with single images. By default all images are shuffled.
        normalise_on_device: Bring batches to the device as bytes, a quarter of the size, and normalise them there; by
            default where the accelerator is not the CPU.
        val_split: Share of the training images that is held out for validation where none are packed.
        balanced: Draw as many training images of each class in an epoch, which stays as long as it is: images of rare
            classes come several times, and of frequent ones others in each epoch.
        augment: Crop training images at random and mirror them.
        transforms: Further transforms of training images, one uint8 (C, H, W) at a time, after the others.
        num_workers: Worker processes that load batches, per process; 0 loads in the process itself.
        prefetch: Batches that each worker has ready; a process holds up to ``num_workers * (prefetch + 2)`` batches.
        **options: Those of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: There are no shards, they are not those of the index, or a number is out of its range.
    """

    def __init__(
        self,
        root: Path,
        image_size: int | None = None,
        resize: int | None = None,
        decoder: DecoderName = "auto",
        shuffle_block: int | None = None,
        normalise_on_device: bool | None = None,
        val_split: float = 0.1,
        balanced: bool = False,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        num_workers: int = 4,
        prefetch: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, **options)
        for name, value in (("shuffle_block", shuffle_block), ("prefetch", prefetch)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value}: at least 1 is needed")
        self.root = Path(root)
        self.index: Index = read_index(self.root)
        self.ignore_index = self.index.ignore_index
        if resize is not None and self.ignore_index is not None:
            raise ConfigurationError(
                f"resize={resize}: {self.root} has masks, and there whole images are fitted into image_size: leave "
                "resize out"
            )
        if balanced and (self.ignore_index is not None or shuffle_block is not None):
            other = f"{self.root} has masks" if shuffle_block is None else f"shuffle_block={shuffle_block}"
            raise ConfigurationError(
                f"balanced with {other}: it draws from everywhere, by each image's class; leave it out"
            )
        self.sizes = image_size, resize
        self.transforms = transforms
        find_decoder(decoder)
        self.decoder = decoder
        self.shuffle_block = shuffle_block
        self.normalise_on_device = normalise_on_device
        self.val_split = val_split
        self.prefetch = prefetch
        self.balanced = balanced
        self.augment = augment
        if "train" not in self.index.parts:
            raise ConfigurationError(f"{self.root} has no images for training: pack a source that has")
        self.class_names = self.index.class_names
        self.num_classes = len(self.class_names)
        self._prepare(IMAGENET)

    @override
    def prepare_as(self, trained: Preprocessing) -> None:
        if self.ignore_index is None:
            self._prepare(trained)
        else:  # What is filled up has the colour that is ImageNet's mean.
            super().prepare_as(trained)

    def _prepare(self, trained: Preprocessing) -> None:
        self.preprocessing = trained
        image_size, self.resize = trained.sizes(*self.sizes)
        self.image_shape = (3, image_size, image_size)
        self.share = image_size / self.resize
        self.eval_transform = nn.Sequential(ChannelsFirst(), to_normalised(trained.mean, trained.std))
        self.bytes_transform = nn.Sequential(*each_image(self.transforms, self.image_shape))
        self.train_transform = nn.Sequential(self.bytes_transform, self.eval_transform)

    @override
    def setup(self, stage: str) -> None:
        training = np.arange(len(self.index.parts["train"]))
        if "val" in self.index.parts:
            self.val_source = self._source("val")
        else:
            rest, held_out = split(len(training), self.val_split, self.seed)
            training = rest.numpy()
            self.val_source = self._source("train", held_out.numpy())
        self.train_source = self._source("train", training, self.augment, self.shuffle_block)
        self.test_source = self._source("test") if "test" in self.index.parts else self.val_source
        self.predict_source = self._source("predict") if "predict" in self.index.parts else self.test_source

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Bring a batch to the device, and normalise it there where it comes as bytes."""
        return self.finished(super().transfer_batch_to_device(batch, device, dataloader_idx))

    def finished(self, batch: Any) -> Any:
        """A batch as the network takes it; images that are bytes still are normalised, where they are."""
        images, targets = batch
        if images.dtype == torch.uint8:
            images = self.eval_transform(images)
            if self.trainer is not None:
                # Lightning has done this before, when they were bytes.
                images = self.trainer.precision_plugin.convert_input(images)
        return images, targets

    def _centre(self, widths: Sizes, heights: Sizes) -> list[Crop]:
        return centre_crops(widths, heights, self.share)

    def _source(
        self, name: str, numbers: "np.ndarray[Any, Any] | None" = None, augment: bool = False, block: int | None = None
    ) -> ShardSource:
        part = self.index.parts[name]
        chosen = np.arange(len(part)) if numbers is None else numbers
        assert self.preprocessing is not None
        rest = self.image_shape[1], self.decoder, block, self.preprocessing.interpolation
        if self.ignore_index is None:
            crops: Crops = random_crops if augment else self._centre
            return ShardSource(self.index, part, chosen, crops, *rest)
        crops = partial(random_crops, least_area=LEAST_AREA) if augment else whole_images
        arguments = self.index, part, chosen, crops, *rest
        return MaskedShardSource(*arguments, fill=FILL, ignore_index=self.ignore_index, fits=not augment)

    @override
    def _loader(self, dataset: BatchDataset, sampler: ShuffledBatches | OrderedBatches) -> BatchLoader:
        # Whoever iterates without a trainer gets what the network takes.
        on_device = self.normalise_on_device and self.trainer is not None
        if self.normalise_on_device is None:
            on_device = self.trainer is not None and not isinstance(self.trainer.accelerator, CPUAccelerator)
        if on_device:
            training = dataset.transform is self.train_transform
            dataset.transform = self.bytes_transform if training else nn.Identity()
        return super()._loader(dataset, sampler)


class ChannelsFirst(nn.Module):
    """Lays images out in memory as the other data modules do; cheapest while they are bytes."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same."""
        return images.contiguous()
