"""Transforms of whole batches.

The random transforms of torchvision v2 work on batches too, but draw once per call: every image of a batch would be
shifted alike. Those here draw for each image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from cnnstrategies.errors import ConfigurationError


def to_normalised(mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Maps uint8 to float32 in [0, 1], minus ``mean``, over ``std``, each per channel.

    In place after the first step: at 32 images of 224 x 224 pixels a second batch in memory costs seven times as much
    as the arithmetic.
    """
    return nn.Sequential(v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std), inplace=True))


class RandomShift(nn.Module):
    """Moves each image by up to ``pixels`` in both directions; what comes in from outside is zero.

    The same as padding by ``pixels`` and cropping at random (He et al. 2016, section 4.2), for all images at once.

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
        # (N, C, rows of places, columns of places, H, W), a view: only the chosen places are copied.
        places = tvf.pad(images, [self.pixels]).unfold(2, height, 1).unfold(3, width, 1)
        shifted: Tensor = places[torch.arange(count), :, top, left]
        return shifted


class RandomFlip(nn.Module):
    """Mirrors each image left to right with probability 1/2."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        mirrored = torch.rand(len(images)) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


class EachImage(nn.Module):
    """Applies transforms of one image to each image of a batch, so that random ones draw for each.

    Args:
        transforms: Those of torchvision v2, for example.
    """

    def __init__(self, transforms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.transforms = nn.Sequential(*transforms)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        return torch.stack([self.transforms(image) for image in images])


def each_image(transforms: Sequence[nn.Module] | None, image_shape: Sequence[int]) -> list[nn.Module]:
    """The user's transforms as one of batches; an empty list where there are none.

    Raises:
        ConfigurationError: They fail for an image of this shape, or make something else of it.
    """
    if not transforms:
        return []
    made = EachImage(transforms)
    names = ", ".join(type(one).__name__ for one in transforms)
    image = torch.zeros((1, *image_shape), dtype=torch.uint8)
    try:
        with torch.random.fork_rng(devices=[]):
            after = made(image)
    except Exception as error:
        raise ConfigurationError(
            f"data.init_args.transforms ({names}) fails for a uint8 image of shape {tuple(image_shape)}: {error}"
        ) from error
    if after.shape != image.shape or after.dtype != image.dtype:
        raise ConfigurationError(
            f"data.init_args.transforms ({names}) makes {after.dtype} {tuple(after.shape[1:])} of a uint8 image of "
            f"shape {tuple(image_shape)}: shape and type must stay, normalising comes after them"
        )
    return [made]
