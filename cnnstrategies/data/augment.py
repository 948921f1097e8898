"""Random transforms of whole batches.

The random transforms of torchvision v2 also accept batches, but they draw one random number per call, so that all
images of a batch are transformed in the same way. The transforms of this module draw a number for each image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from cnnstrategies.errors import ConfigurationError


def to_normalised(mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Return a transform that converts uint8 images to float32 in [0, 1] and normalises each channel.

    The normalisation subtracts ``mean`` and divides by ``std``. It works in place: for 32 images of 224 x 224 pixels,
    writing the result to new memory takes seven times as long as the arithmetic.
    """
    return nn.Sequential(v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std), inplace=True))


class RandomShift(nn.Module):
    """Transform that shifts each image of a batch at random and fills the border with zeros.

    The result for an image is a random crop of the original size from the padded image (He et al. 2016, section 4.2).
    The transform computes all crops of a batch at once.

    Args:
        pixels: Largest horizontal and vertical shift, in pixels.
    """

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, images: Tensor) -> Tensor:
        """Return the shifted images, (N, C, H, W)."""
        count, _, height, width = images.shape
        top, left = torch.randint(0, 2 * self.pixels + 1, (2, count))
        # `windows` is a view of shape (N, C, vertical shifts, horizontal shifts, H, W), so only the chosen windows are
        # copied.
        windows = tvf.pad(images, [self.pixels]).unfold(2, height, 1).unfold(3, width, 1)
        shifted: Tensor = windows[torch.arange(count), :, top, left]
        return shifted


class RandomFlip(nn.Module):
    """Transform that flips each image of a batch horizontally with probability 1/2."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the images, (N, C, H, W), about half of them flipped."""
        mirrored = torch.rand(len(images)) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


class EachImage(nn.Module):
    """Transform that applies transforms of single images to each image of a batch.

    Args:
        transforms: Transforms of one image, for example from torchvision v2. Random transforms draw new random numbers
            for each image.
    """

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.Sequential(*transforms)

    def forward(self, images: Tensor) -> Tensor:
        """Return the transformed images, (N, C, H, W)."""
        return torch.stack([self.transforms(image) for image in images])


def each_image(transforms: Sequence[nn.Module] | None, image_shape: Sequence[int]) -> list[nn.Module]:
    """Check the user's transforms of single images, and return them as one transform of batches.

    Args:
        transforms: Transforms of one uint8 (C, H, W) image.
        image_shape: (C, H, W).

    Returns:
        A list with the transform of batches; an empty list if the user has given no transforms.

    Raises:
        ConfigurationError: The transforms fail for an image of this shape, or change its shape or dtype.
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
            f"data.init_args.transforms ({names}) fails for a uint8 image of shape {tuple(image_shape)} ({error}): use "
            "transforms that accept such images"
        ) from error
    if result.shape != image.shape or result.dtype != image.dtype:
        raise ConfigurationError(
            f"data.init_args.transforms ({names}) turns a uint8 image of shape {tuple(image_shape)} into "
            f"{result.dtype} {tuple(result.shape[1:])}: use transforms that keep the shape and the dtype, without "
            "normalisation, because the data module normalises the images itself"
        )
    return [batch_transform]
