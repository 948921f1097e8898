"""How images are prepared for a network; one that is trained already wants what it was trained on."""

from dataclasses import dataclass

from torchvision.transforms import InterpolationMode

from cnnstrategies.errors import ConfigurationError


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before the network. The defaults are what most networks were trained on ImageNet with.

    Attributes:
        image_size: Height and width of what the network gets.
        resize: Shorter side before that is cut out of the centre.
        interpolation: Of the resizing: ``bilinear`` or ``bicubic``.
        mean: Of each channel, in [0, 1], which becomes 0.
        std: Of each channel, which becomes 1.
    """

    image_size: int = 224
    resize: int = 256
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @property
    def mode(self) -> InterpolationMode:
        """The interpolation, as torchvision has it."""
        return InterpolationMode(self.interpolation)

    def sizes(self, image_size: int | None, resize: int | None) -> tuple[int, int]:
        """The sizes of a configuration; those that it leaves out are these, in proportion."""
        size = self.image_size if image_size is None else image_size
        shorter = -(-size * self.resize // self.image_size) if resize is None else resize
        if not 0 < size <= shorter:
            raise ConfigurationError(f"image_size={size} and resize={shorter}: 0 < image_size <= resize is needed")
        return size, shorter

    def __str__(self) -> str:
        """Interpolation, mean and deviation, for the start panel."""
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.interpolation}, mean {mean}, deviation {std}"


IMAGENET = Preprocessing()
