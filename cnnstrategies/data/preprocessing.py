"""Preprocessing of images. A pretrained network needs the preprocessing that was used in its training."""

from dataclasses import dataclass

from torchvision.transforms import InterpolationMode

from cnnstrategies.errors import ConfigurationError


@dataclass(frozen=True)
class Preprocessing:
    """Resizing, cropping and normalisation of images. The defaults are those of most networks pretrained on ImageNet.

    Attributes:
        image_size: Height and width of the images that the network receives, in pixels.
        resize: Shorter side of an image before the centre crop, in pixels.
        interpolation: Interpolation for resizing: ``bilinear`` or ``bicubic``.
        mean: Mean of each channel, for pixel values in [0, 1].
        std: Standard deviation of each channel, for pixel values in [0, 1].
    """

    image_size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @property
    def mode(self) -> InterpolationMode:
        """The interpolation as a value of torchvision's enum ``InterpolationMode``."""
        return InterpolationMode(self.interpolation)

    def sizes(self, image_size: int | None, resize: int | None) -> tuple[int, int]:
        """Return the image size and the shorter side before the crop, with defaults for the sizes that are not set.

        Args:
            image_size: The user's image size. If it is None, the result is this object's ``image_size``.
            resize: The user's shorter side. If it is None, the result is the image size multiplied by this object's
                ratio ``resize / image_size``, rounded up.

        Raises:
            ConfigurationError: The shorter side is smaller than the image size, or a size is not positive.
        """
        size = self.image_size if image_size is None else image_size
        shorter = -(-size * self.resize // self.image_size) if resize is None else resize
        if not 0 < size <= shorter:
            raise ConfigurationError(f"image_size={size} and resize={shorter}: set 0 < image_size <= resize")
        return size, shorter

    def __str__(self) -> str:
        """Return the interpolation, the mean and the standard deviation as a text for the start panel."""
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.interpolation}, mean {mean}, std {std}"


IMAGENET = Preprocessing()
