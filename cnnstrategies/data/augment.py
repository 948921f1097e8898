"""Random augmentations that draw for each image of a batch.

The transforms of torchvision v2 work on batches too, but draw once per call: every image of a batch would be
shifted alike.
"""

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tvf


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
        padded = tvf.pad(images, [self.pixels])
        top, left = torch.randint(0, 2 * self.pixels + 1, (2, count, 1))
        rows = top + torch.arange(height)
        columns = left + torch.arange(width)
        sample = torch.arange(count)[:, None, None]
        shifted: Tensor = padded[sample, :, rows[:, :, None], columns[:, None, :]]
        return shifted.permute(0, 3, 1, 2).contiguous()


class RandomFlip(nn.Module):
    """Mirrors each image left to right with probability 1/2."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        mirrored = torch.rand(len(images)) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
