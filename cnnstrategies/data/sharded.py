"""Data module for images in shards, which are tar files that ``cnnstrategies pack`` writes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.data.augment import each_image, to_normalised
from cnnstrategies.data.loading import BatchDataset, BatchLoader
from cnnstrategies.data.module import ImageDataModule, split
from cnnstrategies.data.preprocessing import IMAGENET, Preprocessing
from cnnstrategies.data.shards.index import Index, read_index
from cnnstrategies.data.shards.jpeg import DecoderName, find_decoder
from cnnstrategies.data.shards.source import Crops, ShardSource, centre_crops, random_crops
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.samplers import OrderedBatches, ShuffledBatches


class ShardedImageDataModule(ImageDataModule):
    """Data module for images in shards (tar files), on local or shared storage. ``cnnstrategies pack`` writes shards.

    Training images get a random crop and a random horizontal flip; all other images get a centre crop. Batches are
    transferred to a GPU as uint8, which takes a quarter of the time of float32, and are normalised on the GPU. If the
    shards contain no validation images, the fraction ``val_split`` of the training images is held out. If they contain
    no test images, the validation images are used for testing. If they contain no images for predict, the test images
    are used.

    Args:
        root: Folder of the shards and their index.
        image_size: Height and width of the images that the network receives; by default 224. If the network has
            pretrained weights, the command line uses the preprocessing that the weights expect: ``image_size``,
            ``resize``, interpolation, mean and standard deviation. Your own ``image_size`` and ``resize`` have
            priority. In Python, call ``prepare_as`` to use this preprocessing.
        resize: Shorter side of an image before the centre crop, in pixels; by default 8/7 of ``image_size``, which is
            256 for 224.
        decoder: Decoder of JPEG files: ``pillow``, ``simplejpeg``, or ``auto``, which is simplejpeg if it is installed
            and otherwise Pillow.
        val_split: Fraction of the training images that is held out if the shards contain no validation images.
        augment: Whether training images get a random crop and a random horizontal flip.
        transforms: Additional transforms of training images, applied after the crop to one uint8 (C, H, W) image at a
            time.
        num_workers: Number of worker processes that load batches for each rank; with 0 the rank loads them itself.
        prefetch: Number of batches that each worker process prefetches. Up to ``num_workers * (prefetch + 1)`` batches
            are in memory for each process.
        **options: Arguments of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: There are no shards, the shards do not match the index, or a number is out of its range.
    """

    def __init__(
        self,
        root: Path,
        image_size: int | None = None,
        resize: int | None = None,
        decoder: DecoderName = "auto",
        val_split: float = 0.1,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        num_workers: int = 4,
        prefetch: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, **options)
        if prefetch < 1:
            raise ConfigurationError(f"prefetch={prefetch}: use at least 1")
        self.root = Path(root)
        self.index: Index = read_index(self.root)
        self.sizes = image_size, resize
        self.transforms = transforms
        find_decoder(decoder)
        self.decoder = decoder
        self.val_split = val_split
        self.prefetch = prefetch
        self.augment = augment
        if "train" not in self.index.parts:
            raise ConfigurationError(
                f"{self.root} has no training images: run cnnstrategies pack with a folder that has training images"
            )
        self.class_names = self.index.class_names
        self.num_classes = len(self.class_names)
        self.prepare_as(IMAGENET)

    @override
    def prepare_as(self, trained: Preprocessing) -> None:
        self.preprocessing = trained
        image_size, self.resize = trained.sizes(*self.sizes)
        self.image_shape = (3, image_size, image_size)
        self.eval_transform = nn.Sequential(ChannelsFirst(), to_normalised(trained.mean, trained.std))
        self.bytes_transform = nn.Sequential(*each_image(self.transforms, self.image_shape))
        self.train_transform = nn.Sequential(self.bytes_transform, self.eval_transform)

    @override
    def setup(self, stage: str) -> None:
        numbers = {name: np.arange(len(part)) for name, part in self.index.parts.items()}
        if "val" not in numbers:
            training, held_out = split(len(numbers["train"]), self.val_split, self.seed)
            numbers |= {"train": training.numpy(), "val": held_out.numpy()}
        self.set_sources({name: self._source(name, chosen) for name, chosen in numbers.items()})

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device. If its images are uint8, normalise them on the device."""
        images, targets = super().transfer_batch_to_device(batch, device, dataloader_idx)
        if images.dtype == torch.uint8:
            assert self.trainer is not None
            # Lightning has converted the batch to the trainer's precision before this method. The conversion leaves
            # uint8 images as they are, so the images are converted again after the normalisation.
            images = self.trainer.precision_plugin.convert_input(self.eval_transform(images))
        return images, targets

    def _source(self, name: str, numbers: "np.ndarray[Any, Any]") -> ShardSource:
        part = self.index.parts[name if name in self.index.parts else "train"]
        assert self.preprocessing is not None
        size = self.image_shape[1]
        crops: Crops = partial(centre_crops, share=size / self.resize)
        if name == "train" and self.augment:
            crops = random_crops
        return ShardSource(self.index, part, numbers, crops, size, self.decoder, self.preprocessing.interpolation)

    @override
    def _loader(self, dataset: BatchDataset, sampler: ShuffledBatches | OrderedBatches) -> BatchLoader:
        # For an accelerator the loader returns uint8 images, and `transfer_batch_to_device` normalises the images. On
        # the CPU the loader normalises them.
        if self.on_accelerator:
            training = dataset.transform is self.train_transform
            dataset.transform = self.bytes_transform if training else nn.Identity()
        return super()._loader(dataset, sampler)


class ChannelsFirst(nn.Module):
    """Transform that converts images to the contiguous memory format (channels first).

    Use this transform before the normalisation, because uint8 images are faster to convert than float32 images.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return the same images, (N, C, H, W), in contiguous memory."""
        return images.contiguous()
