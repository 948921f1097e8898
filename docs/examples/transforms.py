"""Transforms of albumentations and kornia for training images: uint8 (C, H, W) in, uint8 (C, H, W) out."""

import albumentations
import kornia.augmentation
import torch
from torch import Tensor, nn


class Albumentations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = albumentations.Compose(
            [albumentations.RandomBrightnessContrast(p=0.5), albumentations.CoarseDropout(p=0.5)]
        )

    def forward(self, image: Tensor) -> Tensor:
        # torch's random numbers are seeded for each batch; albumentations has random numbers of its own.
        self.transform.set_random_seed(int(torch.randint(2**31, ())))
        pixels = self.transform(image=image.permute(1, 2, 0).contiguous().numpy())["image"]
        return torch.from_numpy(pixels).permute(2, 0, 1)


class Kornia(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = kornia.augmentation.AugmentationSequential(
            kornia.augmentation.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=0.8),
            kornia.augmentation.RandomGaussianBlur((3, 3), (0.1, 2.0)),
        )

    def forward(self, image: Tensor) -> Tensor:
        return (self.transform(image[None] / 255)[0] * 255).round().to(torch.uint8)
