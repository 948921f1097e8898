"""Preparation of images for a network. A network with trained weights needs the preparation of its training."""

from dataclasses import dataclass

from torchvision.transforms import InterpolationMode

from cnnstrategies.errors import ConfigurationError


@dataclass(frozen=True)
class Preprocessing:
    """Resizing and normalisation of images. The defaults are those of most networks trained on ImageNet.

    Attributes:
        image_size: Height and width of the images that the network receives.
        resize: Shorter side before the centre crop.
        interpolation: Interpolation of the resizing: ``bilinear`` or ``bicubic``.
        mean: Mean of each channel, in [0, 1].
        std: Standard deviation of each channel.
    """

    image_size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @property
    def mode(self) -> InterpolationMode:
        """The interpolation as a value of torchvision's enumeration."""
        return InterpolationMode(self.interpolation)

    def sizes(self, image_size: int | None, resize: int | None) -> tuple[int, int]:
        """Return the image size and the shorter side for a configuration.

        A size that is None is derived: ``image_size`` is this one's, and ``resize`` keeps the proportion.
        """
        size = self.image_size if image_size is None else image_size
        shorter = -(-size * self.resize // self.image_size) if resize is None else resize
        if not 0 < size <= shorter:
            raise ConfigurationError(f"image_size={size} and resize={shorter}: choose 0 < image_size <= resize")
        return size, shorter

    def __str__(self) -> str:
        """Return interpolation, mean and deviation, for the start panel."""
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.interpolation}, mean {mean}, deviation {std}"


IMAGENET = Preprocessing()
