"""Small networks with the layers of ResNet-18 and of U-Nets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block as in ResNet-18."""

    def __init__(self, width: int, new_width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, new_width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(new_width)
        self.conv2 = nn.Conv2d(new_width, new_width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(new_width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, new_width, 1, stride, bias=False), nn.BatchNorm2d(new_width)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += identity
        return F.relu_(x)


class ResNet(nn.Sequential):
    """The layers of ResNet-18, with one block of each width."""

    def __init__(self, width: int = 6, classes: int = 5) -> None:
        super().__init__(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            Block(width, width, 1),
            *(Block(width * 2**level, width * 2 ** (level + 1), 2) for level in range(3)),
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(1),
            nn.Linear(width * 8, classes),
        )


def two_convolutions(width: int, new_width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, new_width, 3, padding=1), nn.BatchNorm2d(new_width), nn.ReLU(inplace=True),
        nn.Conv2d(new_width, new_width, 3, padding=1), nn.BatchNorm2d(new_width), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net whose way up consists of transposed convolutions, or of interpolation."""

    def __init__(self, mode: str, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList([two_convolutions(3, width), two_convolutions(width, 2 * width)])
        self.bottom = two_convolutions(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList([self._up(mode, 4 * width), self._up(mode, 2 * width)])
        self.end = nn.ModuleList([two_convolutions(4 * width, 2 * width), two_convolutions(2 * width, width)])
        self.scores = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _up(mode: str, width: int) -> nn.Module:
        if mode == "transposed":
            return nn.ConvTranspose2d(width, width // 2, 2, 2)
        corners = {"align_corners": True} if mode == "bilinear" else {}
        return nn.Sequential(nn.Upsample(scale_factor=2, mode=mode, **corners), nn.Conv2d(width, width // 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(x := block(x))
            x = self.pool(x)
        x = self.bottom(x)
        for up, block, skip in zip(self.up, self.end, reversed(skips), strict=True):
            x = up(x)
            rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
            x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
            x = block(torch.cat([skip, x], 1))
        scores: Tensor = self.scores(x)
        return scores
