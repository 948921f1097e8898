"""Transforms of whole batches.

The random transforms of torchvision v2 also work on batches, but they draw once per call, so every image of a batch
would be shifted alike. The transforms of this module draw for each image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from cnnstrategies.errors import ConfigurationError


def to_normalised(mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Return a transform from uint8 to float32 in [0, 1], minus ``mean``, divided by ``std``, each per channel.

    The normalisation works in place: for 32 images of 224 x 224 pixels, writing a second batch to memory takes seven
    times as long as the arithmetic.
    """
    return nn.Sequential(v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std), inplace=True))


class RandomShift(nn.Module):
    """Transform that shifts each image by up to ``pixels`` in both directions and fills the border with zeros.

    The result is that of padding by ``pixels`` and cropping at random (He et al. 2016, section 4.2), for all images at
    once.

    Args:
        pixels: Largest shift.
    """

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        count, _, height, width = images.shape
        top, left = torch.randint(0, 2 * self.pixels + 1, (2, count))
        # A view (N, C, vertical shifts, horizontal shifts, H, W): only the chosen windows are copied.
        windows = tvf.pad(images, [self.pixels]).unfold(2, height, 1).unfold(3, width, 1)
        shifted: Tensor = windows[torch.arange(count), :, top, left]
        return shifted


class RandomFlip(nn.Module):
    """Transform that mirrors each image left to right with probability 1/2."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        mirrored = torch.rand(len(images)) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


class EachImage(nn.Module):
    """Transform of a batch that applies transforms to each image, so that random transforms draw for each image.

    Args:
        transforms: Transforms of one image, for example of torchvision v2.
    """

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.Sequential(*transforms)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        return torch.stack([self.transforms(image) for image in images])


def each_image(transforms: Sequence[nn.Module] | None, image_shape: Sequence[int]) -> list[nn.Module]:
    """Return the user's transforms as a list with one transform of batches, or an empty list if there are none.

    Args:
        transforms: Transforms of one image, uint8 (C, H, W).
        image_shape: (C, H, W).

    Raises:
        ConfigurationError: The transforms fail for an image of this shape, or change its shape or type.
    """
    if not transforms:
        return []
    batch_transform = EachImage(transforms)
    names = ", ".join(type(transform).__name__ for transform in transforms)
    image = torch.zeros((1, *image_shape), dtype=torch.uint8)
    try:
        with torch.random.fork_rng(devices=[]):
            result = batch_transform(image)
    except Exception as error:
        raise ConfigurationError(
            f"data.init_args.transforms ({names}) fails for a uint8 image of shape {tuple(image_shape)}: {error}"
        ) from error
    if result.shape != image.shape or result.dtype != image.dtype:
        raise ConfigurationError(
            f"data.init_args.transforms ({names}) turns a uint8 image of shape {tuple(image_shape)} into "
            f"{result.dtype} {tuple(result.shape[1:])}: use transforms that keep the shape and the type; the data "
            "module normalises afterwards"
        )
    return [batch_transform]
